"""Whole pipelines of self-driven makers and trainers in one process: threads instead of actors, no Ray."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from hocket.workers import (
    ExperienceMaker,
    PPOTrainer,
    get_strategy_from_args,
    target_makers,
    target_trainers,
)
from hocket.workers.peers import LocalPeer


class Direct:
    """Chunks are copied once and handed over as they are."""

    def send(self, chunks):
        return [chunk.copy() for chunk in chunks]

    def clear(self):
        pass

    def fetch(self, handle, timeout):
        return handle


@dataclass
class Pipeline:
    """Named makers and trainers that call each other directly."""

    parts: dict = field(default_factory=dict)

    def connect(self, name):
        while name not in self.parts:  # as an actor that is not there yet
            time.sleep(0.001)
        return LocalPeer(name, self.parts[name])

    def run(self, jobs, timeout=60):
        """The results of functions that run at the same time, in order; the first failure is raised."""
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(job) for job in jobs]
            return [one.result(timeout) for one in running]


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.fixture
def loader():
    """A loader of token ids in batches of these sizes."""
    return lambda *sizes: lambda: [torch.randint(3, 90, (size, 4)) for size in sizes]


def odd(completion, **_):
    return sum(map(ord, completion)) % 7 / 7


@pytest.fixture
def make_maker(tiny, tokenizer, pipeline):
    def maker(name, trainers, *, policy=None, reward=odd, model_fn=None, **options):
        actor = copy.deepcopy(policy) if policy is not None else tiny()
        made = ExperienceMaker(
            trainers,
            lambda: get_strategy_from_args("single"),
            model_fn or (lambda: (actor, None, reward, copy.deepcopy(actor))),
            **{"max_new_tokens": 4, "tokenizer": tokenizer, "name": name, "timeout": 20, "connect": pipeline.connect}
            | {"transport": Direct()}
            | options,
        )
        pipeline.parts[name] = made
        return made

    return maker


@pytest.fixture
def make_trainer(tiny, make_critic, pipeline):
    def trainer(name, makers, *, policy=None, critic=True, kind=PPOTrainer, **options):
        actor = copy.deepcopy(policy) if policy is not None else tiny()
        made = kind(
            makers,
            lambda: get_strategy_from_args("single"),
            lambda: (actor, make_critic() if critic else None),
            **{"name": name, "actor_lr": 1e-3, "timeout": 20, "connect": pipeline.connect, "transport": Direct()}
            | options,
        )
        pipeline.parts[name] = made
        return made

    return trainer


@pytest.fixture
def topology(make_maker, make_trainer):
    """M makers and N trainers by the rule of the walk-through."""

    def build(makers, trainers, *, maker=None, trainer=None):
        sources = {i: j for j in range(trainers) for i in target_makers(j, trainers, makers)}
        made = [
            make_maker(
                f"maker_{i}",
                [f"trainer_{j}" for j in target_trainers(i, makers, trainers)],
                sync_models_from_trainers=i in sources,
                **maker or {},
            )
            for i in range(makers)
        ]
        learned = [
            make_trainer(f"trainer_{j}", [f"maker_{i}" for i in target_makers(j, trainers, makers)], **trainer or {})
            for j in range(trainers)
        ]
        return made, learned

    return build
