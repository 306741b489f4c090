"""Makers and trainers over tiny models, and experience made by hand."""

import copy
from collections.abc import Callable

import pytest

from hocket.algorithms.presets import build
from hocket.config import TrainerSection
from hocket.data.proto import DataProto
from hocket.data.schedule import Prompt, PromptSchedule
from hocket.rewards.adapters import Reward
from hocket.roles.maker import Maker
from hocket.roles.trainer import Trainer
from hocket.rollout.engine import Sampling
from hocket.rollout.native import NativeEngine
from hocket.weights.transport import InProcess

STOP = tuple(range(1, 12))  # many end tokens: answers of a random model get different lengths


def odd(completion, answer):
    """A score that differs between answers, and a metric."""
    return {"score": sum(map(ord, completion)) % 7 / 7, "long": len(completion) > 3}


@pytest.fixture
def prompts(tokenizer) -> list[Prompt]:
    texts = ["1+2=", "3+45=", "60+7=", "8+9="]
    answers = ["3", "48", "67", "17"]
    return [
        Prompt(f"sums.csv:{i}", tuple(tokenizer.encode(text)), {"prompt": text, "answer": answers[i]})
        for i, text in enumerate(texts)
    ]


@pytest.fixture
def units(prompts) -> Callable[..., list[DataProto]]:
    def units(step: int = 0, *, per_unit: int = 2) -> list[DataProto]:
        plan = PromptSchedule(prompts, seed=0, prompts_per_step=4, prompts_per_unit=per_unit, shuffle=True)
        return plan.units(step)

    return units


@pytest.fixture
def make_trainer(tiny, tokenizer, make_critic) -> Callable[..., Trainer]:
    def trainer(algorithm="grpo", *, policy=None, options=None, temperature=1.0, **settings) -> Trainer:
        options = dict(options or {}) | ({"max_length": 8} if algorithm == "dr_grpo" else {})
        built = build(algorithm, options)
        return Trainer(
            policy or tiny(),
            tokenizer,
            built,
            TrainerSection(**{"lr": 1e-3, "prompts_per_step": 4, "micro_batch_tokens": 100} | settings),
            transport=InProcess(),
            stop_ids=STOP,
            critic=make_critic() if "critic" in built.needs else None,
            temperature=temperature,
            chunk_bytes=1000,
        )

    return trainer


@pytest.fixture
def make_maker(tiny, tokenizer) -> Callable[..., Maker]:
    def maker(
        *, policy=None, reference=None, temperature=1.0, top_p=1.0, group_size=4, reward=odd, stop_ids=STOP, **more
    ) -> Maker:
        return Maker(
            NativeEngine(copy.deepcopy(policy) if policy else tiny(), stop_ids=stop_ids, pad_id=0),
            tokenizer,
            Reward(reward),
            sampling=Sampling(8, temperature=temperature, top_p=top_p),
            group_size=group_size,
            seed=0,
            transport=InProcess(),
            reference=reference,
            **more,
        )

    return maker
