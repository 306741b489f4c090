"""A hang is never silent: the deadline names who was to do what, and the stacks are in the log."""

import io
from pathlib import Path

import pytest

from hocket.errors import WorkerDied
from hocket.run.train import train

HANGS = """
import time

def reward(completion, answer):
    time.sleep(600)
"""


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("placement", "who"), [("detached(makers=1)", "maker-0"), ("colocated", "worker-0")])
def test_a_reward_that_never_returns_ends_the_run_at_the_deadline(make_config, ray_address, tmp_path, placement, who):
    path = tmp_path / "hangs.py"
    path.write_text(HANGS)
    config = make_config(
        placement=placement,
        reward=str(path),
        eval={"path": None, "prompts": None},
        ray={"address": ray_address, "call_timeout": 4},
    )
    with pytest.raises(WorkerDied, match=rf"{who} did not answer within 4 s while it was to"):
        train(config, stream=io.StringIO())
    log = (Path(config.run.dir) / "logs" / "latest" / f"{who}.log").read_text()
    assert "line 5 in reward" in log
