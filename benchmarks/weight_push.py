"""How long new weights take from a trainer to its makers, and how much memory: SmolLM2-135M's shapes, 538 MB.

usage: python benchmarks/weight_push.py [--repeats 7]

The floor, in the same run: `ray.put` of the same bytes, and in each maker `ray.get` and one copy into memory that it
keeps. Ours does the same through the trainer's own push, with a digest on both sides, and swaps. Memory is what all
processes and the object store hold more than before, at the most, while a push is going on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray
import torch

from hocket.algorithms.presets import GRPO
from hocket.run.cluster import cluster
from hocket.workers import ActorClass, get_actor_from_args, get_strategy_from_args
from hocket.workers.detached_trainer import TRAINER_GROUPS
from hocket.workers.experience_maker import ExperienceMaker
from hocket.workers.maker_worker import MAKER_GROUPS
from hocket.workers.ppo_trainer import PPOTrainer

PAUSE = 2.0  # seconds, as between two training steps: Ray gives memory back once a second, and fresh pages cost
WARM = 6  # pushes until the store's pages are there
SMOL = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
SMOL |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}


class Pusher(PPOTrainer):
    """A trainer that only sends."""

    def push(self) -> tuple[float, float]:
        """Send a new version; seconds until every maker has it, and seconds that training would have stood still."""
        self.version += 1
        began = time.perf_counter()
        self._update_remote_makers()
        stopped = time.perf_counter() - began
        self._courier.flush(600)
        return time.perf_counter() - began, stopped


class Taker(ExperienceMaker):
    """A maker that only takes."""

    def swap(self) -> float:
        """Seconds that generation stands still for the new weights."""
        torch.set_num_threads(1)
        began = time.perf_counter()
        self.maker._swap(0)  # pyright: ignore[reportPrivateUsage]
        return time.perf_counter() - began


@ray.remote
class Plain:
    """The floor: a copy into a buffer of its own."""

    def __init__(self, size: int) -> None:
        self._kept = np.zeros(size, np.uint8)

    def take(self, handles: list[Any]) -> None:
        """Fetch and copy."""
        np.copyto(self._kept, ray.get(handles[0]))


def floor(data: Any, takers: list[Any]) -> float:
    """Seconds for the same bytes by plain Ray."""
    began = time.perf_counter()
    handle = ray.put(data)
    ray.get([taker.take.remote([handle]) for taker in takers])
    return time.perf_counter() - began


class Memory:
    """The most that the processes held more than at the start, and the shared memory more than when it was `empty`."""

    def __init__(self, pids: list[int], empty: int) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._start = self._now() - psutil.virtual_memory().shared + empty
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, self._now() - self._start)

    def _now(self) -> int:
        anonymous = sum(one.memory_info().rss - one.memory_info().shared for one in self._processes)
        return anonymous + psutil.virtual_memory().shared


def measure(makers: int, repeats: int) -> str:
    """One row of the table."""
    options = {"num_cpus": 0}
    strategy: Callable[[], Any] = lambda: get_strategy_from_args("single")  # noqa: E731
    takers = [
        ActorClass(Taker, MAKER_GROUPS)
        .options(name=f"maker_{i}", **options)
        .remote(
            ["pusher"],
            strategy,
            lambda: (get_actor_from_args("llama", config=SMOL), None, lambda completion: 0.0, None),
            kl_coef=0.0,
            tokenizer="chars",
        )
        for i in range(makers)
    ]
    pusher = (
        ActorClass(Pusher, TRAINER_GROUPS)
        .options(name="pusher", **options)
        .remote(
            [f"maker_{i}" for i in range(makers)],
            strategy,
            lambda: (get_actor_from_args("llama", config=SMOL), None),
            algorithm=GRPO(),
        )
    )
    ray.get([actor.ping.remote() for actor in (*takers, pusher)])
    empty = psutil.virtual_memory().shared
    ray.get(pusher.sync_models_to_remote_makers.remote())
    time.sleep(PAUSE)
    pids = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in (*takers, pusher)])
    ours, stopped, floors = [], [], []
    with Memory(pids, empty) as watch:
        for _ in range(WARM + repeats):
            time.sleep(PAUSE)
            seconds, still = ray.get(pusher.push.remote())
            swaps = ray.get([taker.swap.remote() for taker in takers])
            ours.append(seconds + max(swaps))
            stopped.append(still + max(swaps))
    for actor in (*takers, pusher):
        ray.kill(actor)
    size = sum(p.nbytes for p in get_actor_from_args("llama", config=SMOL).parameters())
    data = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    plain = [Plain.options(num_cpus=0).remote(size) for _ in takers]
    for _ in range(WARM + repeats):
        time.sleep(PAUSE)
        floors.append(floor(data, plain))
    ours, stopped, floors = ours[WARM:], stopped[WARM:], floors[WARM:]
    seconds, least = statistics.median(ours), statistics.median(floors)
    return (
        f"| {makers} | {least:.3f} | {seconds:.3f} | {size * makers / seconds / 1e6:.0f} | {seconds / least:.2f} | "
        f"{statistics.median(stopped):.3f} | {watch.most / size:.2f} |"
    )


def main(repeats: int) -> None:
    """The table."""
    print("| makers | floor s | push + swap s | MB/s in all | push / floor | stand-still s | extra memory / model |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for makers in (1, 2, 4):
        with cluster(None, [{"CPU": 2.0, "GPU": 0.0}]):
            print(measure(makers, repeats), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    main(parser.parse_args().repeats)
