"""Makers and trainer hit at a chosen moment. The numbers are those of CHAOS.md.

Staleness is 0, so the run must end with the weights of the undisturbed one.
"""

import io
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos import Strike, at_work, count, facts, kill, learned, residual, until

from hocket.errors import ConfigError, WorkerDied
from hocket.run.audit import audit
from hocket.run.train import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]
slow = pytest.mark.slow
STEPS = 8
# the sleep makes "while it generates" and "while it is idle" long enough to be hit
REWARD = """
import os, time

def reward(completions, answer):
    time.sleep(0.15)
    {}
    return [len(one) / 10 for one in completions]
"""
SETTINGS = {
    "algo": {"name": "grpo"},
    "trainer": {"max_steps": STEPS, "minibatches": 1},
    "checkpoint": {"every": 2},
    "eval": {"path": None, "prompts": None},
    "supervise": {"heartbeat": 0.2, "backoff": 0.1},
}


@pytest.fixture(scope="session")
def calm():
    """Results of undisturbed local runs by the prompts of a step."""
    return {}


@pytest.fixture
def struck(make_config, ray_address, tmp_path, calm):
    """A run that is struck once, with what must hold in each case checked; gives summary, output and the strike."""

    def run(moment, harm, *, extra="", prompts=4, **sections):
        path = tmp_path / "reward.py"
        path.write_text(REWARD.format(extra))
        settings = {**SETTINGS, "reward": str(path), **sections}
        settings["trainer"] = {**SETTINGS["trainer"], "prompts_per_step": prompts}
        settings.setdefault("placement", "detached(makers=2)")
        config = make_config(ray={"address": ray_address}, **settings)
        if prompts not in calm:
            path.write_text(REWARD.format(""))
            calm[prompts] = train(make_config(**{**settings, "placement": "local"}), stream=io.StringIO())
            path.write_text(REWARD.format(extra))
        strike, stream = Strike(config.run.dir, moment, harm), io.StringIO()
        summary = train(config, stream=stream)
        strike.check()
        for digest in ("weights_sha256", "optimizer_sha256"):
            assert summary[digest] == calm[prompts][digest]
        assert learned(summary["folder"]) == learned(calm[prompts]["folder"])
        assert residual(summary) == 0
        assert audit(Path(summary["folder"])).violations == []
        return summary, stream.getvalue(), strike

    return run


def steps(number):
    return lambda run: count(run, "trained") >= number


def starts(run, role):
    return sum(fact["fact"] == "started" for fact in facts(run, role))


def test_c1_a_maker_killed_while_it_generates(struck):
    found = []

    def moment(run):
        return count(run, "trained") >= 2 and "maker-1" in at_work(run).values()

    def harm(run):
        kill("maker-1")(run)
        began = time.monotonic()
        until(lambda: count(run, "lost", worker="maker-1"), timeout=5, pause=0.01)
        found.append(time.monotonic() - began)

    summary, text, _ = struck(moment, harm)
    assert found[0] < 2, f"its unit went back after {found[0]:.1f} s"
    assert summary["ledger"]["ledger/maker_lost"] > 0
    assert "maker-1 died" in text


@pytest.mark.slow
def test_c2_an_idle_maker_is_replaced_though_nobody_needs_it(struck, tmp_path):
    """One unit per step for two makers: one has nothing to do. The other one is held up until it is there again."""
    hold = tmp_path / "hold"

    def moment(run):
        working = set(at_work(run).values())
        return count(run, "trained") >= 2 and len(working) == 1 and count(run, "leased") == count(run, "made") + 1

    def harm(run):
        (working,) = set(at_work(run).values())
        idle = "maker-1" if working == "maker-0" else "maker-0"
        hold.touch()
        kill(idle)(run)
        until(lambda: starts(run, idle) == 2, timeout=20)
        hold.unlink()

    held = f"while os.path.exists({str(hold)!r}): time.sleep(0.05)"
    summary, _, _ = struck(moment, harm, prompts=2, extra=held)
    assert count(summary["folder"], "lost") <= 1, "at most the unit that it was given before its death was known"


@pytest.mark.parametrize("role", ["maker-0", pytest.param("trainer-0", marks=slow)])
def test_c3_c9_killed_while_weights_travel(struck, role):
    struck(lambda run: count(run, "published") >= 3, kill(role))


@slow
def test_c6_all_makers_at_once(struck):
    summary, text, _ = struck(steps(3), kill("maker-0", "maker-1"))
    assert text.count("a new maker takes its place") == 2
    assert summary["finished"]


@slow
def test_c8_a_trainer_killed_in_its_step(struck):
    def moment(run):
        return count(run, "trained") == 3 and count(run, "made", taken=True) == 8

    summary, text, _ = struck(moment, kill("trainer-0"))
    assert "training goes on from checkpoint step_000002" in text
    assert summary["ledger"]["ledger/rolled_back"] > 0


@pytest.mark.parametrize(
    "stage",
    [
        "step_000004.tmp-*",
        pytest.param("step_000004.tmp-*/state/*", marks=slow),
        pytest.param("step_000004.tmp-*/COMPLETE", marks=slow),
        pytest.param("step_000004", marks=slow),
    ],
)
def test_c10_a_trainer_killed_while_a_checkpoint_is_written(struck, stage):
    """At each stage that can be seen from outside; the simulation kills between any two writes."""
    summary, text, _ = struck(
        lambda run: count(run, "trained") >= 4 and any((Path(run) / "checkpoints").glob(stage)), kill("trainer-0")
    )
    assert "training goes on from checkpoint step_00000" in text
    assert [path.name for path in (Path(summary["folder"]) / "checkpoints").glob("*.tmp*")] == []


@slow
def test_c14_a_reward_that_ends_its_process_once(struck, tmp_path):
    """Another maker, or the next incarnation, makes the unit."""
    flag = tmp_path / "flag"
    once = f"if os.path.exists({str(flag)!r}): os.remove({str(flag)!r}); os._exit(7)"
    summary, _, _ = struck(steps(2), lambda run: flag.touch(), extra=once)
    assert not flag.exists()
    assert summary["ledger"]["ledger/maker_lost"] > 0


@pytest.mark.slow
def test_a_maker_killed_while_it_takes_the_place_of_another(struck):
    """Twice the same role: the second time before it is ready."""

    def harm(run):
        kill("maker-0")(run)
        until(lambda: starts(run, "maker-0") == 2, timeout=30, pause=0.005)
        kill("maker-0")(run)

    summary, text, _ = struck(steps(2), harm, placement="detached(makers=1)")
    assert starts(summary["folder"], "maker-0") == 3
    assert text.count("a new maker takes its place") == 2


@slow
def test_a_trainer_killed_while_it_takes_the_place_of_another(struck):
    def harm(run):
        kill("trainer-0")(run)
        until(lambda: starts(run, "trainer-0") == 2, timeout=30, pause=0.005)
        kill("trainer-0")(run)

    summary, _, _ = struck(steps(3), harm)
    assert starts(summary["folder"], "trainer-0") == 3


@slow
def test_trainer_and_makers_together(struck):
    struck(steps(3), kill("trainer-0", "maker-0", "maker-1"))


@slow
@pytest.mark.parametrize("role", ["maker-0", "trainer-0"])
def test_a_colocated_worker_is_replaced(struck, role):
    """Both roles live in it: whichever history gives its number."""
    _, text, _ = struck(steps(3), kill(role), placement="colocated")
    assert "a new one takes its place" in text


@slow
def test_c5_a_colocated_worker_that_is_stopped(struck, ray_address):
    _, text, _ = struck(
        steps(3),
        kill("maker-0", number=signal.SIGSTOP),
        placement="colocated",
        ray={"address": ray_address, "call_timeout": 6},
    )
    assert "worker-0 did not answer within 6 s" in text


@pytest.mark.slow
def test_c7_a_maker_that_cannot_be_made_again_ends_the_run_with_its_own_words(make_config, ray_address):
    config = make_config(
        **{**SETTINGS, "trainer": {"max_steps": 10_000}},
        placement="detached(makers=1)",
        ray={"address": ray_address},
    )

    def harm(run):
        shutil.rmtree(Path(run) / "init")  # the model that makers start from
        kill("maker-0")(run)

    strike = Strike(config.run.dir, steps(2), harm)
    with pytest.raises(WorkerDied, match=r"maker-0 died while it was to start: .*init"):
        train(config, stream=io.StringIO())
    strike.check()
    assert time.monotonic() - strike.done_at < 25
    assert starts(config.run.dir, "maker-0") == 2, "tried once more, not for ever"


@pytest.mark.slow
def test_c28_a_second_run_in_the_folder_is_refused_and_the_first_unharmed(struck, make_config):
    refusals = []

    def harm(run):
        for section in ({"dir": run}, {"dir": run, "resume": "latest"}):
            began = time.monotonic()
            with pytest.raises(ConfigError) as refusal:
                train(make_config(**SETTINGS, placement="local", run=section), stream=io.StringIO())
            refusals.append((refusal.value.message, time.monotonic() - began))

    struck(steps(1), harm)
    assert "holds an earlier run" in refusals[0][0]
    assert max(seconds for _, seconds in refusals) < 5


@slow
def test_c29_two_runs_on_one_cluster_do_not_touch_each_other(make_config, ray_address, tmp_path):
    """Each with the weights that it has alone; one of them loses a maker meanwhile."""
    names = ("ppo", "grpo")
    settings = {**SETTINGS, "ray": {"address": ray_address}, "placement": "detached(makers=2, cpus_per_worker=0.5)"}
    alone, found = {}, {}
    for name in names:
        one = {**SETTINGS, "algo": {"name": name}, "placement": "local"}
        alone[name] = train(make_config(**one), stream=io.StringIO())["weights_sha256"]
    configs = {name: make_config(**{**settings, "algo": {"name": name}}) for name in names}
    other = subprocess.Popen([sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other.stdin.write(configs["grpo"].model_dump_json())
    other.stdin.close()
    strike = Strike(configs["grpo"].run.dir, steps(2), kill("maker-0"))
    found["ppo"] = train(configs["ppo"], stream=io.StringIO())["weights_sha256"]
    strike.check()
    found["grpo"] = other.stdout.read().split()[-1]
    assert other.wait(60) == 0
    assert found == alone


RUNNER = """
import json, sys
from hocket.read_config import parse_config
from hocket.run.train import train
print(train(parse_config(json.loads(sys.stdin.read())))["weights_sha256"])
"""


@slow
def test_c35_a_slow_maker_holds_back_nobody_beyond_the_bound(make_config, ray_address, tmp_path):
    """One of two makers takes ten times as long: the bound of staleness holds, and little waits for the trainer."""
    path, flag = tmp_path / "reward.py", tmp_path / "slow"
    first = f"""
    global SLOW
    try: SLOW
    except NameError:
        try: os.close(os.open({str(flag)!r}, os.O_CREAT | os.O_EXCL)); SLOW = True
        except FileExistsError: SLOW = False
    time.sleep(1.5 if SLOW else 0)"""
    path.write_text(REWARD.format(first))
    config = make_config(
        **SETTINGS, reward=str(path), placement="detached(makers=2, max_staleness=2)", ray={"address": ray_address}
    )
    summary = train(config, stream=io.StringIO())
    records = learned(summary["folder"])
    assert len(records) == STEPS
    assert max(record["staleness/max"] for record in records) <= 2
    assert audit(Path(summary["folder"])).violations == []
    by = {name: count(summary["folder"], "made", worker=name) for name in ("maker-0", "maker-1")}
    assert max(by.values()) > 2 * min(by.values()) > 0, by
