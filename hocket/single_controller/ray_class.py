"""A worker class with its arguments, and the actor that such a class is made in, later and elsewhere."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hocket.errors import BatchError, GroupError
from hocket.single_controller.devices import RESOURCE

DEFAULT_ASYNC_CALLS = 16
ROUTE = "__hocket_route__"  # on a method that stands for the method of a role: (role, method)
_OURS = {"num_cpus", "num_gpus", "max_concurrency", "concurrency_groups"}  # the pool and the lanes decide these


class RayClassWithInitArgs:
    """A worker class, plain or under `@ray.remote`, with its arguments and Ray options.

    `max_concurrency` and `concurrency_groups` among the options state how many calls run at once (see `lane`). `plain`
    is the class itself, `roles` the classes that `create_colocated_worker_cls` bound into it.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs, self.fused_worker_used = cls, args, kwargs, False
        self.plain: Any = getattr(cls, "__ray_actor_class__", cls)
        if not isinstance(self.plain, type):
            raise GroupError(f"found {cls!r}; give a class, plain or under @ray.remote, and its arguments after it")
        self.roles: dict[str, RayClassWithInitArgs] = getattr(self.plain, "role_specs", {})
        self.options = {k: v for k, v in getattr(cls, "_default_options", {}).items() if v is not None}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set Ray actor options: runtime_env, max_concurrency, ..."""
        self.options |= options

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ask for custom resources per worker; the pool must reserve them (`resources=`)."""
        self.options["resources"] = {**self.options.get("resources", {}), **additional_resource}

    def methods(self) -> Iterator[tuple[str, Any]]:
        """Name and function of every method but `__these__`, class and static methods included."""
        for name in dir(self.plain):
            function = getattr(self.plain, name)
            if inspect.isroutine(function) and not name.startswith("__"):
                yield name, function

    def lane(self, method: str, role: str | None = None) -> tuple[str, int] | None:
        """The threads that run a method, as (name, how many); None for the main thread, where calls keep their order.

        Methods under `ray.method` run on those of their concurrency group. `max_concurrency` bounds the calls of async
        methods (16 if not given) or, in a class without them, of all methods.
        """
        function = getattr(self.plain, method)
        groups, limit = self.options.get("concurrency_groups") or {}, self.options.get("max_concurrency")
        group = getattr(function, "__ray_concurrency_group__", None)
        if group in groups:
            return f"{role or ''}.{group}", groups[group]
        if _is_async(function):
            return f"{role or ''}.async", limit or DEFAULT_ASYNC_CALLS
        if limit and limit > 1 and not any(_is_async(other) for _, other in self.methods()):
            return f"{role or ''}.threads", limit
        return None

    def actor_class(self) -> Any:
        """The Ray actor class that hosts the worker; it has the methods of role `r` as `r.<method>`."""
        members: dict[str, Any] = {"hocket_class": self.plain, "__module__": self.plain.__module__}
        lanes: dict[str, int] = {}
        for role, spec in [(None, self), *self.roles.items()]:
            for name, function in spec.methods():
                owner, method = getattr(function, ROUTE, (None, name)) if role is None else (role, name)
                lane = (self.roles[owner] if owner else self).lane(method, owner)
                lanes |= [lane] if lane else []
                members[f"{role}.{name}" if role else name] = forward(function, owner, method, lane and lane[0])
        made, remote = type(self.plain.__name__, (Host,), members), cast(Any, ray.remote)
        return remote(concurrency_groups=lanes)(made) if lanes else remote(made)

    def __call__(
        self,
        placement_group: Any,
        placement_group_bundle_idx: int,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: Any = None,
        device_name: str = "cuda",
        *,
        env: Mapping[str, str] | None = None,
        actor_class: Any = None,
        **more: Any,
    ) -> Any:
        """An actor in the bundle, or on the node and with the visible devices of the actor `sharing_with`."""
        options: dict[str, Any] = {k: v for k, v in self.options.items() if k not in _OURS} | {"num_cpus": 0, **more}
        kwargs, kind = dict(self.kwargs), RESOURCE.get(device_name, device_name) if use_gpu else None
        if sharing_with is not None:
            node, devices = ray.get([sharing_with.get_node_id.remote(), sharing_with.get_cuda_visible_devices.remote()])
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
            kwargs["cuda_visible_devices"] = devices
        else:
            place = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_idx)
            options["scheduling_strategy"] = place
            if kind == "GPU":
                options["num_gpus"] = num_gpus
            elif kind:
                options["resources"] = {**options.get("resources", {}), kind: num_gpus}
        return (actor_class or self.actor_class()).options(**options).remote(dict(env or {}), *self.args, **kwargs)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


ClassWithInitArgs = RayClassWithInitArgs  # veRL has a class for each


class Host:
    """Holds one worker, which may hold one object per role.

    Calls run in the order of their arrival, one at a time, on the main thread. Methods with a lane of their own (see
    `RayClassWithInitArgs.lane`) run on its threads; the coroutines of one role share an event loop. A constructor that
    raises is told by `hocket_ready`, with its traceback, and by every later call.
    """

    hocket_class: ClassVar[type]

    def __init__(self, env: Mapping[str, str], *args: Any, **kwargs: Any) -> None:
        os.environ.update(env)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self.hocket_loops: dict[str | None, asyncio.AbstractEventLoop] = {}
        self.hocket_lock = threading.Lock()
        self.hocket_failure: Exception | None = None
        try:
            self.hocket_worker = self.hocket_class(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  raised again by `hocket_ready`, which can say for whom
            self.hocket_failure = error

    def hocket_ready(self) -> tuple[str, int]:
        """Host name and process number; raises what the constructor raised."""
        if self.hocket_failure is not None:
            raise self.hocket_failure
        return socket.gethostname(), os.getpid()

    def hocket_loop(self, role: str | None) -> asyncio.AbstractEventLoop:
        """The event loop of a role, on a thread of its own."""
        with self.hocket_lock:
            if role not in self.hocket_loops:
                self.hocket_loops[role] = asyncio.new_event_loop()
                threading.Thread(target=self.hocket_loops[role].run_forever, name=f"{role} loop", daemon=True).start()
        return self.hocket_loops[role]


def forward(function: Any, role: str | None, method: str, lane: str | None) -> Any:
    """The host's method for a `method` of the worker or of its object for `role`; it runs on the threads of `lane`.

    With `hocket_sized` it gives the number of rows as a second, small result.
    """

    def call(self: Host, *args: Any, hocket_sized: bool = False, **kwargs: Any) -> Any:
        self.hocket_ready()
        target = self.hocket_worker if role is None else self.hocket_worker.worker_dict[role]
        result = getattr(target, method)(*map(_own, args), **{key: _own(value) for key, value in kwargs.items()})
        if inspect.iscoroutine(result):
            result = asyncio.run_coroutine_threadsafe(result, self.hocket_loop(role)).result()
        use_our_wire()
        if not hocket_sized:
            return result
        if not hasattr(result, "__len__"):
            raise BatchError(
                f"{method} returned {type(result).__name__}; its dispatch mode joins rows, so return a DataProto, or "
                "register it with ONE_TO_ALL or DP_COMPUTE_METRIC, which give a list of what the workers return"
            )
        return result, len(result)

    functools.update_wrapper(call, function)
    del call.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]  where Ray would see an async method
    vars(call).pop("__ray_concurrency_group__", None)
    vars(call).update({"__ray_concurrency_group__": lane} if lane else {})
    return call


def _own(value: Any) -> Any:
    """A numpy array that arrives is read-only memory, which other processes read too; batches see to it themselves."""
    return value.copy() if type(value).__name__ == "ndarray" and not value.flags.writeable else value


def use_our_wire() -> None:
    """Let TensorDicts travel as the tensors of a DataProto do, once there can be one in this process."""
    if "tensordict" in sys.modules:
        from hocket.data.wire import register_serializers  # here: a worker without tensors starts without torch

        register_serializers(ray.util.register_serializer)
