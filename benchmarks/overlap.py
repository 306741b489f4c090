"""Do makers and trainers really work at the same time? Stages of known length, on real actors.

usage: python benchmarks/overlap.py [--batches 40]

A maker's generation and a trainer's step are replaced by sleeps; everything between them is hocket's own: credits,
messages, batches, pushes of weights, swaps. The bound is what no program can exceed: M / t_generate or N / t_train.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ray
import torch

from hocket.algorithms.presets import GRPO
from hocket.data.experience import Experience
from hocket.data.proto import DataProto
from hocket.run.cluster import cluster
from hocket.workers import ActorClass, get_actor_from_args, get_strategy_from_args, target_makers, target_trainers
from hocket.workers.detached_trainer import TRAINER_GROUPS
from hocket.workers.experience_maker import ExperienceMaker
from hocket.workers.maker_worker import MAKER_GROUPS
from hocket.workers.ppo_trainer import PPOTrainer

ROWS = 8
CASES = ((1, 1, 0.4, 0.4), (1, 1, 1.0, 0.25), (2, 1, 1.0, 0.25), (4, 1, 1.0, 0.25), (2, 2, 0.5, 0.4))
TINY = {"model_type": "llama", "vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "max_position_embeddings": 64}


class SleepingMaker(ExperienceMaker):
    """Generates what it has made once, for as many seconds as the first item of its loader says."""

    def workingloop(self, dataloader_fn: Any, num_epochs: int = 1, num_steps: int = 0) -> Any:
        """As ever, but with a sleep for generation."""
        seconds, *batches = dataloader_fn()
        unit = self._unit(batches[0], 0)
        unit.meta_info = {"step": 0, "unit": 0}
        made = self.maker.make(unit, at_least=0)

        def make(unit: DataProto, *, at_least: int, stop: Any) -> DataProto:
            self.maker._swap(at_least, stop=stop)  # pyright: ignore[reportPrivateUsage]
            time.sleep(seconds)
            return DataProto.from_dict(made.tensors(), made.non_tensor_batch)

        self.maker.make = make  # type: ignore[method-assign]
        return super().workingloop(lambda: batches, num_epochs, num_steps)


class SleepingTrainer(PPOTrainer):
    """Trains for `actor_lr` seconds, and tells when each step ended."""

    def training_step(self, experience: Experience) -> dict[str, float]:
        """Sleep."""
        time.sleep(self._settings.lr)
        return {"ended": time.time()}

    def _prepare(self, experience: Experience) -> Experience:
        return experience


def rate(makers: int, trainers: int, generate: float, train: float, batches: int) -> float:
    """Batches a second, between the ends of the first and the last of `batches` training steps of each trainer."""
    made = [
        ActorClass(SleepingMaker, MAKER_GROUPS)
        .options(name=f"maker_{i}", num_cpus=0)
        .remote(
            [f"trainer_{j}" for j in target_trainers(i, makers, trainers)],
            lambda: get_strategy_from_args("single"),
            lambda: (get_actor_from_args("llama", config=TINY), None, lambda completion: 0.5, None),
            kl_coef=0.0,
            tokenizer="chars",
            max_new_tokens=4,
        )
        for i in range(makers)
    ]
    trained = [
        ActorClass(SleepingTrainer, TRAINER_GROUPS)
        .options(name=f"trainer_{j}", num_cpus=0)
        .remote(
            [f"maker_{i}" for i in target_makers(j, trainers, makers)],
            lambda: get_strategy_from_args("single"),
            lambda: (get_actor_from_args("llama", config=TINY), None),
            train_batch_size=ROWS,
            algorithm=GRPO(),
            actor_lr=train,
        )
        for j in range(trainers)
    ]
    ray.get([actor.ping.remote() for actor in (*made, *trained)])
    loops = [m.workingloop.remote(lambda: [generate, torch.ones(ROWS, 4).long()], num_steps=10 * batches) for m in made]
    ends = [
        [step["ended"] for step in report.metrics] for report in ray.get([t.fit.remote(batches, 1) for t in trained])
    ]
    ray.get(loops)
    for actor in (*made, *trained):
        ray.kill(actor)
    return sum((len(end) - 1) / (end[-1] - end[0]) for end in ends)


def main(batches: int) -> None:
    """One row of a table per case."""
    print("| makers : trainers | t_generate s | t_train s | bound, batches/s | measured | measured / bound |")
    print("| --- | --- | --- | --- | --- | --- |")
    with cluster(None, [{"CPU": 2.0, "GPU": 0.0}]):
        for makers, trainers, generate, train in CASES:
            bound = min(makers / generate, trainers / train)
            found = rate(makers, trainers, generate, train, batches)
            print(
                f"| {makers} : {trainers} | {generate} | {train} | {bound:.2f} | {found:.2f} | {found / bound:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    main(parser.parse_args().batches)
