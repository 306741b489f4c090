"""From settings to roles: both start from the same folder, with what the algorithm needs and no more."""

import pickle

import pytest

from hocket.algorithms.presets import build
from hocket.models.load import save_hf
from hocket.models.policy import named_weights
from hocket.read_config import parse_config
from hocket.rewards.adapters import load_reward
from hocket.roles.build import Blueprint, build_maker, build_trainer
from hocket.weights.manifest import weights_sha256
from hocket.weights.transport import InProcess


@pytest.fixture
def blueprint(tiny, tokenizer, tmp_path):
    save_hf(tmp_path / "start", tiny(), tokenizer, (1,))

    def blueprint(algorithm="grpo", options=None):
        settings = {
            "model": {"name": str(tmp_path / "start")},
            "data": {"path": "prompts.csv"},
            "reward": "exact",
            "placement": "local",
            "rollout": {"group_size": 3, "max_new_tokens": 6, "temperature": 0.7},
            "trainer": {"lr": 0.002, "prompts_per_step": 4},
        }
        return Blueprint(
            config=parse_config(settings),
            model=str(tmp_path / "start"),
            algorithm=build(algorithm, options or {}),
            reward=load_reward("exact"),
            stop_ids=(1,),
        )

    return blueprint


@pytest.mark.parametrize(
    ("algorithm", "options", "critic", "reference"),
    [
        ("grpo", {}, False, False),
        ("grpo", {"kl_coef": 0.1}, False, True),
        ("ppo", {}, True, False),
        ("ppo", {"kl_coef": 0.1}, True, True),
    ],
)
def test_roles_hold_what_the_algorithm_needs(blueprint, units, algorithm, options, critic, reference):
    plan = pickle.loads(pickle.dumps(blueprint(algorithm, options)))
    maker, trainer = build_maker(plan, InProcess(), index=2), build_trainer(plan, InProcess())
    assert weights_sha256(named_weights(maker.engine.model)) == trainer.sha256()
    assert maker.engine.model is not trainer.policy
    assert (trainer.critic is not None) == critic
    assert maker.tracer.role == "maker-2"
    made = [maker.make(unit) for unit in units()]
    assert len(made[0]) == 6
    assert ("reference_logprobs" in made[0].keys()) == reference  # noqa: SIM118
    metrics = trainer.train(made, step=0)
    assert metrics["mismatch/abs_mean"] < 1e-5  # one temperature on both sides
    assert metrics["lr"] == 0.002
    if critic:
        assert metrics["lr/value"] == pytest.approx(0.01)  # 5 x lr
