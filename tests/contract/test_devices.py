"""One step of maker and trainer per device; the GPU case is not run on machines without one."""

import pytest

from hocket.read_config import parse_config
from hocket.roles.build import build_maker, build_trainer
from hocket.run.prepare import check_input, prepare
from hocket.weights.transport import InProcess

SETTINGS = {
    "model": {
        "tokenizer": "chars",
        "config": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                   "num_attention_heads": 2, "max_position_embeddings": 64},
    },
    "data": {"path": "recipe:digits_train.csv"},
    "rollout": {"group_size": 2, "max_new_tokens": 4},
    "algo": {"name": "ppo", "kl_coef": 0.1},
    "trainer": {"max_steps": 1, "prompts_per_step": 4, "lr": 1e-3},
    "placement": "local",
}  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def test_one_step(device, tmp_path):
    reward = tmp_path / "distinct.py"
    reward.write_text("def reward(completion):\n    return len(set(completion)) + completion.count('a')\n")
    prepared = prepare(check_input(parse_config({**SETTINGS, "reward": str(reward)})), tmp_path, lambda text: None)
    maker = build_maker(prepared.blueprint, InProcess(), device=device)
    trainer = build_trainer(prepared.blueprint, InProcess(), device=device)
    maker.receive(*trainer.publish(0))
    before = trainer.sha256()
    metrics = trainer.train([maker.make(unit) for unit in prepared.schedule.units(0)], step=0)
    maker.receive(*trainer.publish(1))
    answers = maker.evaluate(prepared.schedule.units(1)[0], at_least=1)
    assert metrics["mismatch/abs_mean"] < (1e-5 if device == "cpu" else 1e-3)
    assert trainer.sha256() != before
    assert len(answers["reward"]) == 4
    assert maker.engine.version == 1
