"""A hang is never silent: the deadline names who was at what and for how long, and the stacks are in the log."""

import io
import signal
import time
from pathlib import Path

import pytest
from chaos import Strike, count, kill

from hocket.errors import WorkerDied
from hocket.run.train import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
HANGS = """
import time

def reward(completion, answer):
    time.sleep(600)
"""
NO_EVAL = {"path": None, "prompts": None}
NOBODY = {"maker_restarts": 0, "trainer_restarts": 0, "heartbeat": 0.2}


def log(config, who):
    return (Path(config.run.dir) / "logs" / "latest" / f"{who}.log").read_text()


@pytest.mark.parametrize(
    ("placement", "who", "limits", "words"),
    [
        pytest.param(
            "detached(makers=1)",
            "maker-0",
            {"call_timeout": 4},
            "did not answer within 4 s while it was to make unit 0",
            marks=pytest.mark.slow,
        ),
        ("colocated", "worker-0", {"call_timeout": 4}, "did not answer within 4 s while it was to"),
        (
            "detached(makers=1)",
            "maker-0",
            {"deadlines": {"reward": 2}},
            r"made no progress for \d+ s while it was to reward \(limit 2 s: .*; its stacks are in its log",
        ),
    ],
)
def test_a_reward_that_never_returns_ends_the_run_at_the_deadline(
    make_config, ray_address, tmp_path, placement, who, limits, words
):
    path = tmp_path / "hangs.py"
    path.write_text(HANGS)
    timeout = {name: limits[name] for name in limits.keys() & {"call_timeout"}}
    config = make_config(
        placement=placement,
        reward=str(path),
        eval=NO_EVAL,
        ray={"address": ray_address, **timeout},
        supervise=NOBODY | {name: limits[name] for name in limits.keys() - timeout.keys()},
    )
    with pytest.raises(WorkerDied, match=f"{who} {words}"):
        train(config, stream=io.StringIO())
    assert "line 5 in reward" in log(config, who)


@pytest.mark.parametrize(
    ("placement", "role", "who", "others"),
    [
        ("detached(makers=2)", "maker-1", "maker-1", ["maker-0", "trainer-0"]),
        pytest.param("detached(makers=2)", "trainer-0", "trainer-0", ["maker-0", "maker-1"], marks=pytest.mark.slow),
        pytest.param("detached(makers=1, trainers=2)", "trainer-1", "trainer-", ["maker-0"], marks=pytest.mark.slow),
        pytest.param("colocated", "maker-0", "worker-0", [], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_process_that_is_stopped_ends_the_run_at_the_deadline(make_config, ray_address, placement, role, who, others):
    """SIGSTOP, and no replacement allowed. A stopped process cannot write its stacks; all the others do."""
    config = make_config(
        placement=placement,
        eval=NO_EVAL,
        trainer={"max_steps": 100_000},
        ray={"address": ray_address, "call_timeout": 6},
        supervise=NOBODY | {"stall_timeout": 3},
    )
    strike = Strike(config.run.dir, lambda run: count(run, "trained") >= 2, kill(role, number=signal.SIGSTOP))
    with pytest.raises(
        WorkerDied, match=rf"{who}.* (made no progress for|did not answer within) \d+ s while it was to"
    ):
        train(config, stream=io.StringIO())
    strike.check()
    assert time.monotonic() - strike.done_at < 6 + 20
    for other in others:
        assert "most recent call first" in log(config, other), other
