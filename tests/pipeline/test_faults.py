"""Runs whose processes are killed or stopped end with the weights of a run that nobody disturbed."""

import io
import signal
import time
from pathlib import Path

import psutil
import pytest
from chaos import Chaos, Fault, facts, learned, residual, schedule, until

from hocket.errors import WorkerDied
from hocket.run.audit import audit
from hocket.run.train import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
STEPS = 10
SETTINGS = {
    "trainer": {"max_steps": STEPS},
    "checkpoint": {"every": 3},
    "eval": {"path": None, "prompts": None},
    "supervise": {"heartbeat": 0.2, "backoff": 0.1},
}
ROLES = ["maker-0", "maker-1", "trainer-0"]


@pytest.fixture(scope="session")
def undisturbed():
    """Results of local runs by algorithm."""
    return {}


@pytest.fixture
def disturbed(make_config, ray_address, undisturbed):
    """Runs with faults; checks what must hold in each case, and gives summary, output and what was done."""

    def run(faults, *, algo="ppo", **sections):
        settings = {**SETTINGS, **sections, "algo": {"name": algo}}
        if algo not in undisturbed:
            undisturbed[algo] = train(make_config(**SETTINGS, algo={"name": algo}, placement="local"))
        settings.setdefault("placement", "detached(makers=2)")
        config = make_config(ray={"address": ray_address}, **settings)
        chaos, stream = Chaos(config.run.dir, faults), io.StringIO()
        chaos.start()
        summary = train(config, stream=stream)
        wanted = undisturbed[algo]
        assert summary["weights_sha256"] == wanted["weights_sha256"]
        assert summary["optimizer_sha256"] == wanted["optimizer_sha256"]
        assert learned(summary["folder"]) == learned(wanted["folder"])
        assert residual(summary) == 0
        assert summary["ledger"]["ledger/trained"] == STEPS * 16
        assert audit(Path(summary["folder"])).violations == []
        return summary, stream.getvalue(), chaos

    return run


@pytest.mark.parametrize(
    ("seed", "algo"),
    [
        (seed, algo) if seed < 5 else pytest.param(seed, algo, marks=pytest.mark.slow)
        for seed in range(200)
        for algo in [("ppo", "grpo")[seed % 2]]
    ],
)
def test_the_same_weights_whatever_is_killed(disturbed, seed, algo):
    _, text, chaos = disturbed(schedule(seed, ROLES, steps=STEPS), algo=algo)
    assert chaos.done, "nothing was killed"
    assert text.count("takes its place") >= 1


def test_a_killed_trainer_goes_back_to_its_checkpoint_and_says_what_that_cost(disturbed):
    summary, text, _ = disturbed([Fault(5, 0.0, "trainer-0")])
    assert "trainer-0 died" in text
    assert "training goes on from checkpoint step_00000" in text
    assert summary["ledger"]["ledger/rolled_back"] > 0
    assert [fact["fact"] for fact in facts(summary["folder"], "trainer-0")].count("restored") == 1


@pytest.mark.slow
def test_a_killed_trainer_without_a_checkpoint_begins_again(disturbed):
    _, text, _ = disturbed([Fault(4, 0.0, "trainer-0")], checkpoint={"every": None})
    assert "training goes on from the start; " in text


@pytest.mark.slow
def test_all_makers_at_once(disturbed):
    summary, _, chaos = disturbed([Fault(4, 0.0, "maker-0"), Fault(4, 0.0, "maker-1")])
    assert len(chaos.done) == 2
    assert summary["ledger"]["ledger/maker_lost"] > 0


@pytest.mark.parametrize("role", ["maker-0", pytest.param("trainer-0", marks=pytest.mark.slow)])
def test_a_stopped_process_is_found_by_its_deadline_and_can_do_no_harm_later(disturbed, role):
    """SIGSTOP: Ray notices nothing. The process comes back when others have its place, and is gone or refused."""
    faults = [Fault(4, 0.0, role, signal.SIGSTOP)]
    _, text, chaos = disturbed(faults, supervise={"heartbeat": 0.2, "backoff": 0.1, "stall_timeout": 3})
    assert f"{role} made no progress for " in text
    assert "(limit 3 s: supervise.stall_timeout, or supervise.deadlines." in text
    for pid in chaos.pids:  # Ray needs some seconds to end a stopped process
        until(lambda pid=pid: not psutil.pid_exists(pid), timeout=20)


def test_a_budget_that_is_spent_ends_the_run_with_the_cause(make_config, ray_address):
    settings = {**SETTINGS, "supervise": {"maker_restarts": 0}, "trainer": {"max_steps": 1000}}
    config = make_config(placement="detached(makers=1)", ray={"address": ray_address}, **settings)
    Chaos(config.run.dir, [Fault(2, 0.0, "maker-0")]).start()
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"maker-0 died"):
        train(config, stream=io.StringIO())
    assert time.monotonic() - began < 60


def test_a_maker_that_always_dies_ends_the_run_naming_its_prompt(make_config, ray_address, tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text("import os\n\ndef reward(completion):\n    os._exit(7)\n")
    config = make_config(
        **{**SETTINGS, "supervise": {"backoff": 0.1, "unit_attempts": 2}},
        placement="detached(makers=1)",
        ray={"address": ray_address},
        reward=str(path),
    )
    with pytest.raises(WorkerDied, match=r"2 makers were lost while they made unit 0 of step 1, whose first prompt is"):
        train(config, stream=io.StringIO())


@pytest.mark.slow
def test_one_of_two_trainer_ranks(make_config, ray_address):
    """The group is ended and started again as a whole; the survivor does not hang."""
    settings = {**SETTINGS, "placement": "detached(makers=1, trainers=2)"}
    calm = train(make_config(ray={"address": ray_address}, **settings), stream=io.StringIO())
    config = make_config(ray={"address": ray_address}, **settings)
    chaos = Chaos(config.run.dir, [Fault(5, 0.05, "trainer-1")])
    chaos.start()
    summary = train(config, stream=io.StringIO())
    assert chaos.done
    assert summary["weights_sha256"] == calm["weights_sha256"]
    assert audit(Path(summary["folder"])).violations == []
