"""One library's half of dispatch.py and group_start.py: its own process, its own Ray cluster, its own Python.

usage: python benchmarks/side.py {hocket,verl} FOLDER [echo | bare | plain]       (FOLDER: a short path for Ray's files)

It makes a group of two workers, writes how its start went as one line of JSON, and then answers each line
`[operation, bytes, calls]` on stdin with one line, the seconds of a call. The floor, the same bytes as numpy arrays
sent to plain Ray actors, is measured in the same process and cluster as the library. With `bare` workers, which have no
methods on data, and with `plain` Ray actors the start is all.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ROWS, TENSORS, WORKERS = 16, 4, 2
INLINE = 100 * 1024  # bytes up to which Ray sends an argument with the call
MODULES = {
    "hocket": ("hocket.data.proto", "hocket.single_controller"),
    "verl": (
        "verl.protocol",
        "verl.single_controller.base",
        "verl.single_controller.base.decorator",
        "verl.single_controller.ray",
    ),
}
NAMES = (
    "DataProto",
    "Dispatch",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "Worker",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
)


def library(name: str) -> SimpleNamespace:
    """The names that the two libraries share, wherever each keeps them."""
    modules = [importlib.import_module(module) for module in MODULES[name]]
    return SimpleNamespace(**{n: next(getattr(m, n) for m in modules if hasattr(m, n)) for n in NAMES})


def batch(lib: SimpleNamespace, width: int) -> Any:
    """Random rows, `width` numbers in each tensor."""
    import torch

    return lib.DataProto.from_dict({f"t{i}": torch.rand(ROWS, width) for i in range(TENSORS)})


def touched(data: Any) -> Any:
    """`data` with its first row changed in place, tensor by tensor: what a worker that uses its input pays."""
    for i in range(TENSORS):
        data.batch[f"t{i}"][0] += 1
    return data


def bare_worker(lib: SimpleNamespace) -> type:
    """A worker that only answers."""

    class Bare(lib.Worker):
        @lib.register(dispatch_mode=lib.Dispatch.ONE_TO_ALL)
        def ping(self) -> int:
            return self.rank

        @lib.register(dispatch_mode=lib.Dispatch.ONE_TO_ALL)
        def loaded(self) -> list[str]:
            return [name for name in ("numpy", "torch", "tensordict", "transformers") if name in sys.modules]

    return Bare


def echo_worker(lib: SimpleNamespace) -> type:
    """A worker that gives back what it gets, by every kind of dispatch."""

    class Echo(bare_worker(lib)):
        def __init__(self) -> None:
            super().__init__()
            self._register_dispatch_collect_info(mesh_name="data", dp_rank=self.rank, is_collect=True)

        @lib.register(dispatch_mode=lib.Dispatch.DP_COMPUTE_PROTO)
        def echo(self, data: Any) -> Any:
            return touched(data)

        @lib.register(dispatch_mode=lib.Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def echo_later(self, data: Any) -> Any:
            return touched(data)

        @lib.register(dispatch_mode=lib.make_nd_compute_dataproto_dispatch_fn(mesh_name="data"))
        def echo_nd(self, data: Any) -> Any:
            return touched(data)

        @lib.register(dispatch_mode=lib.Dispatch.ONE_TO_ALL)
        def take(self, data: Any) -> int:
            return len(touched(data))

    return Echo


class Plain:
    """The floor's actor."""

    def ping(self) -> int:
        return 0

    def echo(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return arrays

    def take(self, arrays: dict[str, Any]) -> int:
        return len(arrays)


class Bench:
    """The operations that can be asked for, by name; each is a function that one call of `seconds` times."""

    def __init__(self, lib: SimpleNamespace, group: Any) -> None:
        import ray

        self.lib, self.ray = lib, ray
        self.actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(WORKERS)]
        self.result: Any = None  # kept until the next operation, as a caller would keep it
        self.size = 0
        self.operations: dict[str, Callable[[], Any]] = {
            "dp": lambda: self.opened(group.echo(self.data)),
            "dp later": lambda: self.opened(group.echo_later(self.data).get()),
            "nd": lambda: self.opened(group.echo_nd(self.data)),
            "call": lambda: group.ping(),
            "take": lambda: group.take(self.data),
            "floor dp": self.floor_echo,
            "floor call": lambda: ray.get([actor.ping.remote() for actor in self.actors]),
            "floor take": self.floor_take,
            "chunk": lambda: self.data.chunk(2),
            "concat neighbours": lambda: self.opened(lib.DataProto.concat(self.halves)),
            "concat": lambda: self.opened(lib.DataProto.concat(self.parts)),
            "pickle": lambda: self.opened(pickle.loads(pickle.dumps(self.data, protocol=pickle.HIGHEST_PROTOCOL))),
            "prepare": lambda: None,
            "check": lambda: check(self.data, group),
        }

    def seconds(self, operation: str, size: int, calls: int) -> float:
        """The mean time of `calls` calls on data of `size` bytes."""
        self.prepare(size)
        self.result = None
        begin = time.perf_counter()
        for _ in range(calls):
            self.result = self.operations[operation]()
        return (time.perf_counter() - begin) / calls

    def prepare(self, size: int) -> None:
        """Make the data of that size, and hold no other."""
        if size == self.size:
            return
        self.size = size
        self.data = self.halves = self.parts = self.arrays = None
        self.data = batch(self.lib, max(1, size // (TENSORS * ROWS * 4)))
        self.arrays = {key: tensor.numpy() for key, tensor in self.data.batch.items()}
        self.halves = self.data.chunk(2)
        self.parts = [
            self.lib.DataProto.from_dict({key: t.clone() for key, t in half.batch.items()}) for half in self.halves
        ]

    def opened(self, data: Any) -> Any:
        """`data` once its tensors are really there: a DataProto of hocket copies them when they are first touched."""
        for i in range(TENSORS):
            data.batch[f"t{i}"][0, 0].item()
        return data

    def floor_echo(self) -> dict[str, Any]:
        """What `echo` does, with Ray alone: cut, send, receive, join."""
        import numpy as np

        rows = ROWS // WORKERS
        cut = [{k: a[i * rows : (i + 1) * rows] for k, a in self.arrays.items()} for i in range(WORKERS)]
        parts = self.ray.get([actor.echo.remote(part) for actor, part in zip(self.actors, cut, strict=True)])
        return {key: np.concatenate([part[key] for part in parts]) for key in self.arrays}

    def floor_take(self) -> list[int]:
        """The same arrays to every actor; put once, unless they are so small that Ray sends them along."""
        ref = self.ray.put(self.arrays) if self.size > INLINE else self.arrays
        return self.ray.get([actor.take.remote(ref) for actor in self.actors])


def check(data: Any, group: Any) -> None:
    """Both workers changed their own copy, and the caller's tensors stayed as they were."""
    import torch

    before = {f"t{i}": data.batch[f"t{i}"].clone() for i in range(TENSORS)}
    for result in (group.echo(data), group.echo_later(data).get(), group.echo_nd(data)):
        for key, tensor in before.items():
            changed = tensor.clone()
            changed[:: ROWS // WORKERS] += 1
            if not (torch.equal(result.batch[key], changed) and torch.equal(data.batch[key], tensor)):
                raise SystemExit(f"the echo of {key} is wrong")


def started(lib: SimpleNamespace, kind: str) -> tuple[Any, dict[str, Any]]:
    """A group of two workers, or two plain actors, and the seconds from its creation to its first replies."""
    import ray

    begin = time.perf_counter()
    if kind == "plain":
        actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(WORKERS)]
        ray.get([actor.ping.remote() for actor in actors])
        return actors, {"first reply": time.perf_counter() - begin}
    worker = {"bare": bare_worker, "echo": echo_worker}[kind](lib)
    pool = lib.RayResourcePool(process_on_nodes=[WORKERS], use_gpu=False, max_colocate_count=1)
    group = lib.RayWorkerGroup(resource_pool=pool, ray_cls_with_init=lib.RayClassWithInitArgs(cls=ray.remote(worker)))
    group.ping()
    times: dict[str, Any] = {"first reply": time.perf_counter() - begin, "loaded": group.loaded()[0]}
    if kind == "echo":
        data = batch(lib, 4)
        begin = time.perf_counter()
        group.echo(data)
        times["first echo"] = times["first reply"] + time.perf_counter() - begin
    return group, times


def main(name: str, folder: str, kind: str = "echo") -> None:
    """Start, say how long it took, then answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray and the libraries print is not an answer
    begin = time.perf_counter()
    import ray

    lib = library(name)
    imported = time.perf_counter() - begin
    begin = time.perf_counter()
    ray.init(
        address="local",
        num_cpus=2 * WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=3 * 2**30,
        _temp_dir=folder,
    )
    times = {"import": imported, "init": time.perf_counter() - begin}
    group, more = started(lib, kind)
    print(json.dumps(times | more), file=answers, flush=True)
    if kind != "echo":
        return
    bench = Bench(lib, group)
    for line in sys.stdin:
        print(json.dumps(bench.seconds(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
