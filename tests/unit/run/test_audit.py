"""The auditor reads what each process wrote, and finds each kind of wrong by itself."""

import json

import pytest

from hocket.run.audit import audit

SAMPLES = 4


def leased(step, unit, timeline=0):
    return {"fact": "leased", "unit": [step, unit], "worker": "maker-0", "samples": SAMPLES, "timeline": timeline}


def made(step, unit, *, taken=True):
    return {"fact": "made", "unit": [step, unit], "taken": taken}


def lost(step, unit):
    return {"fact": "lost", "unit": [step, unit]}


def dropped(step, unit):
    return {"fact": "dropped", "unit": [step, unit], "why": "reward_error"}


def trained(step, samples=2 * SAMPLES):
    return {"fact": "trained", "step": step, "samples": samples}


def published(version, timeline=0):
    return {"fact": "published", "version": version, "timeline": timeline}


def rewound(step, timeline):
    return {"fact": "rewound", "step": step, "timeline": timeline}


def resumed(step, waiting=(), fork_of=None, **accounts):
    return {"fact": "resumed", "step": step, "accounts": accounts, "waiting": list(waiting), "fork_of": fork_of}


def whole(step, timeline=0):
    """What the driver notes of a step of two units."""
    units = [leased(step, 0, timeline), leased(step, 1, timeline), made(step, 1), made(step, 0)]
    return [*units, trained(step), published(step + 1, timeline)]


def learns(step, *units):
    """What a trainer notes of it."""
    return {"fact": "trained", "step": step, "units": [[step, unit] for unit in units or (0, 1)]}


STARTED = {"fact": "started", "pid": 1}
MAKER = [STARTED, *(made(step, unit) for step in range(4) for unit in range(2))]
TRAINER = [STARTED, learns(0), learns(1)]
UNDISTURBED = [published(0), *whole(0), *whole(1)]


def restored(step):
    return {"fact": "restored", "folder": f"step_{step:06d}"}


def violations(folder, driver, *, maker=MAKER, trainer=TRAINER, steps=2, torn="", **accounts):
    """What is found in a folder with these histories and a summary with these accounts."""
    histories = {"driver": driver, "maker-0": maker, "trainer-0": trainer}
    (folder / "history").mkdir()
    for role, facts in histories.items():
        lines = "".join(json.dumps(fact) + "\n" for fact in facts)
        (folder / "history" / f"{role}.jsonl").write_text(lines + torn)
    accounts = {"trained": steps * 2 * SAMPLES} | accounts
    accounts = {"produced": sum(accounts.values())} | accounts
    ledger = {f"ledger/{name}": float(n) for name, n in accounts.items()}
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "ledger": ledger}))
    return audit(folder).violations


# --- good ones ------------------------------------------------------------------------------------------------------


def test_an_undisturbed_run(tmp_path):
    assert violations(tmp_path, UNDISTURBED) == []
    found = audit(tmp_path)
    assert found.lineage == [0, 1]
    assert +found.accounts == {"produced": 16, "trained": 16}


def test_a_torn_last_line_is_nobody_s_fault(tmp_path):
    assert violations(tmp_path, UNDISTURBED, torn='{"fact": "lea') == []


def test_a_lost_maker_a_failed_reward_and_what_comes_too_late(tmp_path):
    driver = [published(0), leased(0, 0), lost(0, 0), leased(0, 0), leased(0, 1), dropped(0, 1), made(0, 0)]
    driver += [made(0, 0, taken=False), trained(0, SAMPLES), leased(1, 0), leased(1, 1), made(1, 0)]
    trainer = [STARTED, learns(0, 0)]
    accounts = {"trained": 4, "maker_lost": 4, "reward_error": 4, "in_flight": 4, "buffered": 4}
    assert violations(tmp_path, driver, trainer=trainer, steps=1, **accounts) == []


def test_experience_that_lay_on_a_lost_machine(tmp_path):
    driver = [leased(0, 0), leased(0, 1), made(0, 0), made(0, 1), {"fact": "again", "step": 0}, *whole(0)]
    assert violations(tmp_path, driver, trainer=[STARTED, learns(0)], steps=1, maker_lost=8) == []


def test_a_trainer_that_went_back_to_a_checkpoint(tmp_path):
    driver = [
        published(0),
        *whole(0),
        *whole(1),
        leased(2, 0),
        leased(2, 1),
        made(2, 1),
        rewound(1, 1),
        published(1, 1),
    ]
    trainer = [STARTED, learns(0), learns(1), STARTED, restored(1), learns(1)]
    assert violations(tmp_path, [*driver, *whole(1, 1)], trainer=trainer, rolled_back=16) == []
    assert audit(tmp_path).lineage == [0, 1]


def test_a_trainer_that_went_back_to_the_start(tmp_path):
    trainer = [STARTED, learns(0), STARTED, learns(0)]
    driver = [*whole(0), rewound(0, 1), *whole(0, 1)]
    assert violations(tmp_path, driver, trainer=trainer, steps=1, rolled_back=8) == []


def test_a_driver_that_died_and_was_resumed(tmp_path):
    driver = [published(0), *whole(0), leased(1, 0), made(1, 0), leased(1, 1)]
    books = resumed(1, waiting=[[1, 0, SAMPLES]], trained=8, buffered=4, rolled_back=4)
    driver += [books, published(1, 1), leased(1, 1, 1), made(1, 1), trained(1)]
    trainer = [STARTED, learns(0), STARTED, restored(1), learns(1)]
    assert violations(tmp_path, driver, trainer=trainer, rolled_back=4) == []


def test_a_fork_begins_with_the_books_of_the_other_run(tmp_path):
    books = resumed(1, fork_of="other/step_000001", trained=8, rolled_back=4)
    trainer = [STARTED, restored(1), learns(1)]
    assert violations(tmp_path, [books, published(1, 1), *whole(1, 1)], trainer=trainer, rolled_back=4) == []
    assert audit(tmp_path).lineage == [1]


def test_a_colocated_run_whose_makers_write_nothing(tmp_path):
    assert violations(tmp_path, UNDISTURBED, maker=[STARTED]) == []


# --- bad ones -------------------------------------------------------------------------------------------------------

BAD = {
    "counted one more": ({"trained": 20}, "the ledger has 20 trained, the histories have 16"),
    "counted as lost": ({"maker_lost": 4}, "the ledger has 4 maker_lost, the histories have 0"),
    "produced something else": ({"produced": 20}, "the ledger has 20 produced, the histories have 16"),
    "does not add up": ({"produced": 20}, "the ledger does not add up: 4 samples are missing"),
    "other steps": ({"steps": 3, "trained": 16}, "3 steps in the summary, 2 in the trainer"),
    "a unit twice": (
        {"trainer": [STARTED, learns(0, 0, 1, 1), learns(1)]},
        "units [(0, 1)] are trained more than once",
    ),
    "a step twice": (
        {"trainer": [STARTED, learns(0), learns(0), learns(1)]},
        "the steps of trainer-0 are [0, 0, 1], and should be 3 in order from one of [0]",
    ),
    "a step left out": (
        {"trainer": [STARTED, learns(0), learns(2)]},
        "the steps of trainer-0 are [0, 2], and should be 2 in order from one of [0]",
    ),
    "started again without its checkpoint": (
        {"trainer": [STARTED, learns(0), STARTED, learns(1)]},
        "the steps of trainer-0 are [1], and should be 1 in order from one of [0]",
    ),
    "a checkpoint of steps that it had not": (
        {"trainer": [STARTED, restored(1), learns(1)]},
        "the steps of trainer-0 are [1], and should be 1 in order from one of [0]",
    ),
    "nobody made it": ({"maker": MAKER[:-6]}, "units [(1, 0), (1, 1)] were trained, and nobody made them"),
}


@pytest.mark.parametrize("what", BAD)
def test_other_counters_or_histories(tmp_path, what):
    changed, words = BAD[what]
    assert words in violations(tmp_path, UNDISTURBED, **changed)


BAD_DRIVER = {
    "leased twice": ([leased(0, 0), leased(0, 0)], "unit (0, 0) was leased twice at once"),
    "made without a lease": ([made(2, 0)], "unit (2, 0) was made, and not leased"),
    "made twice": ([leased(2, 0), made(2, 0), made(2, 0)], "unit (2, 0) was made, and not leased"),
    "lost without a lease": ([lost(2, 0)], "unit (2, 0) was lost, and not leased"),
    "dropped without a lease": ([dropped(2, 0)], "unit (2, 0) was dropped, and not leased"),
    "late by an old timeline": ([leased(2, 0), rewound(1, 1), made(2, 0)], "unit (2, 0) was made, and not leased"),
    "other samples": ([leased(2, 0), made(2, 0), trained(2)], "step 2 counted 8 samples, its units have 4"),
    "an older version": ([published(3), published(2)], "version (0, 2) was published after (0, 3)"),
    "the same version": ([published(3), published(3)], "version (0, 3) was published after (0, 3)"),
    "an older timeline": ([published(1, 1), published(3)], "version (0, 3) was published after (1, 1)"),
    "resumed with more trained": ([resumed(1, trained=99)], "resumed with 99 trained, the histories have 8"),
    "resumed with fewer": ([resumed(1, trained=8)], "resumed with 8 produced, the histories have 16"),
    "resumed with what did not wait": (
        [resumed(1, trained=8, buffered=8)],
        "resumed with 8 buffered, the histories have 0",
    ),
}


@pytest.mark.parametrize("what", BAD_DRIVER)
def test_what_a_driver_must_not_do(tmp_path, what):
    more, words = BAD_DRIVER[what]
    assert words in violations(tmp_path, [*UNDISTURBED, *more])
