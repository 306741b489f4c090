"""A unit whose reward fails is given up by name, the same one in every placement; too many end the run."""

import io

import pytest

from hocket.errors import RewardError
from hocket.run.train import train

PICKY = """
def reward(completion, prompt):
    if "7" in prompt:
        raise ValueError("no sevens")
    return float(len(completion)) / 10
"""


@pytest.fixture
def picky(make_config, tmp_path, ray_address):
    path = tmp_path / "picky.py"
    path.write_text(PICKY)

    def config(placement, failed_units):
        return make_config(
            placement=placement,
            reward=str(path),
            eval={"path": None},
            supervise={"failed_units": failed_units},
            trainer={"max_steps": 3, "minibatches": 1},
            rollout={"prompts_per_unit": 1},
            ray={"address": ray_address},
        )

    return config


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_the_same_units_are_given_up_in_every_placement(picky):
    found = {}
    for placement in ("local", "colocated", "detached(makers=2)"):
        stream = io.StringIO()
        summary = train(picky(placement, 12), stream=stream)
        assert "is given up: " in stream.getvalue()
        assert "no sevens" in stream.getvalue()
        found[placement] = (summary["weights_sha256"], summary["ledger"])
    assert 0 < found["local"][1]["ledger/reward_error"] < 3 * 16
    assert len(set(map(str, found.values()))) == 1, found


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", ["local", "colocated", "detached(makers=2)"])
def test_too_many_end_the_run(picky, placement):
    with pytest.raises(RewardError, match="no sevens"):
        train(picky(placement, 0), stream=io.StringIO())
