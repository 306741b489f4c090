"""A group of worker processes that is called like a single worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from hocket.data.proto import DataProto
from hocket.errors import BatchError, PlacementError
from hocket.single_controller.decorator import Dispatch, Registered, registered_methods
from hocket.single_controller.future import DataProtoFuture, materialize
from hocket.single_controller.waiting import Waiter


class RayClassWithInitArgs:
    """A worker class and the arguments to make it with, later and elsewhere."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        # a class under @ray.remote keeps the plain one; only plain classes can be bound together
        metadata = getattr(cls, "__ray_metadata__", None)
        self.cls: type = metadata.modified_class if metadata is not None else cls
        self.args = args
        self.kwargs = kwargs

    def make(self) -> Any:
        """The object, in this process."""
        return self.cls(*self.args, **self.kwargs)


@dataclass(frozen=True)
class RayResourcePool:
    """Processes per node, and what Ray reserves for each of them."""

    process_on_nodes: Sequence[int]
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return sum(self.process_on_nodes)


class RayWorkerGroup:
    """Starts one process per place in the pool and binds the registered methods of the class to itself.

    Raises what a constructor raises, at construction.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        waiter: Waiter | None = None,
        name: str = "worker",
        start_timeout: float = 300,
    ) -> None:
        if len(resource_pool.process_on_nodes) != 1:
            raise PlacementError(
                f"pool {list(resource_pool.process_on_nodes)} spans nodes; this version places a group on one node"
            )
        self._name = name
        self._waiter = waiter or Waiter(timeout=3600)
        self._cls = ray_cls_with_init.cls
        self.workers = [
            _actor(ray_cls_with_init, resource_pool, rank, address)
            for address in [(socket.gethostbyname(socket.gethostname()), _free_port())]
            for rank in range(resource_pool.world_size)
        ]
        for worker in self.workers:
            self._wait(worker.__ray_ready__.remote(), what="start", timeout=start_timeout)
        self._bind({method: method for method in registered_methods(self._cls)})

    @property
    def world_size(self) -> int:
        """Processes in the group."""
        return len(self.workers)

    def spawn(self, prefix_set: set[str]) -> dict[str, RayWorkerGroup]:
        """A view per role on the same processes, where the role's methods have their own names."""
        return {role: self._view(role) for role in prefix_set}

    def _view(self, role: str) -> RayWorkerGroup:
        prefix = f"{role}_"
        names = {m.removeprefix(prefix): m for m in registered_methods(self._cls) if m.startswith(prefix)}
        if not names:
            raise PlacementError(f"no role {role!r} is bound in {self._cls.__name__}")
        view = object.__new__(RayWorkerGroup)
        view.__dict__.update({k: v for k, v in self.__dict__.items() if not isinstance(v, _GroupMethod)})
        view._bind(names)
        return view

    def _bind(self, names: Mapping[str, str]) -> None:
        methods = registered_methods(self._cls)
        for name, actor_method in names.items():
            setattr(self, name, _GroupMethod(self, actor_method, methods[actor_method]))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"group {self.__dict__.get('_name', '?')!r} has no registered method {name!r}")

    def _wait(self, ref: Any, *, what: str, timeout: float | None = None) -> Any:
        return self._waiter.get(ref, who=self._name, what=what, timeout=timeout)


@dataclass(frozen=True)
class _GroupMethod:
    """One registered method, bound to a group: split, call, wait, join."""

    group: RayWorkerGroup
    name: str
    info: Registered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refs = [
            getattr(worker, self.name).remote(*a, **k)
            for worker, (a, k) in zip(self._targets(), self._split(args, kwargs), strict=True)
        ]
        if not self.info.blocking:
            return DataProtoFuture(refs)
        results = [self.group._wait(ref, what=self.name) for ref in refs]  # pyright: ignore[reportPrivateUsage]
        match self.info.dispatch_mode:
            case Dispatch.RANK_ZERO:
                return results[0]
            case Dispatch.DP_COMPUTE_PROTO:
                return DataProto.concat(results)
            case Dispatch.ONE_TO_ALL:
                return results

    def _targets(self) -> list[Any]:
        workers = self.group.workers
        return workers[:1] if self.info.dispatch_mode is Dispatch.RANK_ZERO else workers

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        count = len(self._targets())
        if self.info.dispatch_mode is not Dispatch.DP_COMPUTE_PROTO:
            return [(args, kwargs)] * count
        positional = [self._chunks(value, count) for value in args]
        named = {key: self._chunks(value, count) for key, value in kwargs.items()}
        return [
            (tuple(chunks[i] for chunks in positional), {key: chunks[i] for key, chunks in named.items()})
            for i in range(count)
        ]

    def _chunks(self, value: Any, count: int) -> list[DataProto]:
        data = materialize(value)
        if not isinstance(data, DataProto):
            raise BatchError(f"{self.name} splits DataProto over its workers; found {type(value).__name__}")
        return data.chunk(count)


def _actor(spec: RayClassWithInitArgs, pool: RayResourcePool, rank: int, address: tuple[str, int]) -> Any:
    env = {
        **pool.env,
        "RANK": str(rank),
        "WORLD_SIZE": str(pool.world_size),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }
    options = {"num_cpus": pool.cpus_per_worker, "num_gpus": pool.gpus_per_worker, "max_restarts": 0}
    actor = cast(Any, ray.remote(spec.cls)).options(runtime_env={"env_vars": env}, **options)
    return actor.remote(*spec.args, **spec.kwargs)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
