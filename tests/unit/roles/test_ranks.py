"""Ranks over gloo learn what one rank learns from the same rows, also when one of them has none."""

import copy
import os
import socket

import pytest
import torch
from torch import multiprocessing

from hocket.algorithms.presets import build
from hocket.config import TrainerSection
from hocket.errors import ConfigError, HocketError
from hocket.models.chars import char_tokenizer
from hocket.parallel.strategy import Single, canonical_name, make_strategy
from hocket.roles.trainer import Trainer
from hocket.weights.transport import InProcess


def make(algorithm, policy, critic, strategy, **settings):
    built = build(algorithm, {"kl_coef": 0.1})
    return Trainer(
        copy.deepcopy(policy),
        char_tokenizer(),
        built,
        TrainerSection(**{"lr": 1e-2, "micro_batch_tokens": 40} | settings),
        transport=InProcess(),
        stop_ids=(1,),
        critic=copy.deepcopy(critic) if "critic" in built.needs else None,
        strategy=strategy,
    )


def flat(trainer):
    models = [trainer.policy, *([trainer.critic] if trainer.critic else [])]
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def rank(index, port, world, cases, folder):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(index), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    strategy = make_strategy("ddp", timeout=100)
    told = []
    for case in cases:
        trainer = make(case["algorithm"], case["policy"], case["critic"], strategy, **case["settings"])
        try:
            metrics = [trainer.train(units[index], step=step) for step, units in enumerate(case["steps"])]
            told.append((flat(trainer), metrics))
        except HocketError as error:
            told.append(error.message)
    torch.save(told, folder / str(index))
    strategy.close()


def ranks(world, cases, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(rank, (port, world, cases, folder), nprocs=world)
    return [torch.load(folder / str(i), weights_only=True) for i in range(world)]


@pytest.mark.timeout(120)
def test_two_ranks_learn_what_one_learns(tiny, make_critic, experience, tmp_path):
    """Uneven shares, a rank without a row, two minibatches, two passes, advantages whitened over all rows."""
    policy, critic = tiny(), make_critic()
    first, second = experience([8, 6, 7, 5] * 2, seed=1), experience([9, 4, 6, 5] * 4, seed=2)
    parts = [unit for i, unit in enumerate([first[:4], second[:8], second[8:], first[4:]])]
    for i, unit in enumerate(parts):
        unit.meta_info = {"unit": i}
        unit.non_tensor_batch["uid"][:] = [f"{i}:{uid}" for uid in unit.non_tensor_batch["uid"]]
    steps = [[parts[0::2], parts[1::2]], [[], parts[:2]], [parts[:1], parts[1:]]]
    cases = [
        {"algorithm": name, "policy": policy, "critic": critic, "settings": settings, "steps": steps}
        for name, settings in [("ppo", {"epochs": 2}), ("grpo", {}), ("ppo", {"minibatches": 3})]
    ]
    broken = copy.deepcopy(cases[0])
    broken["steps"][1][1][0].batch["score"][0] = torch.inf
    told = ranks(2, [*cases, broken], tmp_path)
    for i, case in enumerate(cases):
        alone = make(case["algorithm"], policy, critic, Single(), **case["settings"])
        start = flat(alone)
        for step, units in enumerate(steps):
            joined = sorted((unit for share in units for unit in share), key=lambda unit: unit.meta_info["unit"])
            wanted = alone.train(joined, step=step)
            for answers in told:
                found = answers[i][1][step]
                assert found.keys() == wanted.keys()
                assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5), (case["algorithm"], step)
        moved = (flat(alone) - start).norm()
        assert moved > 0
        assert torch.equal(told[0][i][0], told[1][i][0])
        assert (told[0][i][0] - flat(alone)).norm() < 1e-4 * moved
    assert "the policy loss is nan" in told[0][3]
    assert told[0][3] == told[1][3]  # both ranks stop, and say why


def test_a_step_without_experience(make_trainer):
    with pytest.raises(HocketError, match="step 3 has no experience on any rank"):
        make_trainer().train([], step=2)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("ddp", "ddp"), ("naive", "single"), ("colossalai_zero2", "zero2"), ("colossalai_gemini_cpu", "fsdp_cpu")],
)
def test_names(name, ours, monkeypatch):
    assert canonical_name(name) == ours
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(make_strategy(name), Single)  # sharding over one rank is none
    with pytest.raises(ConfigError, match="strategy 'zero4' is unknown"):
        canonical_name("zero4")
    if ours != "ddp":
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=r"over 2 ranks is not there yet; use 'ddp'"):
            make_strategy(name)
