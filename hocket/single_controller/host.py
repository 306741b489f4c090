"""The actor of a worker process: it sets the environment, makes the worker, and routes calls by (role, method)."""

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
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar, cast

import ray

from hocket.errors import BatchError

DEFAULT_ASYNC_CALLS = 16
ROUTE = "__hocket_route__"  # on a method that stands for the method of a role: (role, method)


class Host:
    """Holds one worker, which may hold one object per role.

    Calls run in the order of their arrival, one at a time, on the main thread. Methods with a lane of their own (see
    `lane`) run on its threads; the coroutines of one role share an event loop. A constructor that raises is told by
    `ready`, with its traceback, and by every later call.
    """

    worker_class: ClassVar[type]

    def __init__(self, env: Mapping[str, str], *args: Any, **kwargs: Any) -> None:
        os.environ.update(env)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self._loops: dict[str | None, asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        try:
            self._worker = self.worker_class(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  raised again by `ready`, which can say for whom
            self._failure = error

    def hocket_ready(self) -> tuple[str, int]:
        """Host name and process number; raises what the constructor raised."""
        self._check()
        return socket.gethostname(), os.getpid()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def hocket_call(self, role: str | None, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `method` of the worker, or of its object for `role`."""
        self._check()
        target = self._worker if role is None else self._worker.worker_dict[role]
        result = getattr(target, method)(*map(_own, args), **{key: _own(value) for key, value in kwargs.items()})
        result = self._finish(role, result) if inspect.iscoroutine(result) else result
        use_our_wire()
        return result

    def hocket_call_sized(self, role: str | None, method: str, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        """`hocket_call`, and the number of rows as a second, small result."""
        result = self.hocket_call(role, method, *args, **kwargs)
        if not hasattr(result, "__len__"):
            raise BatchError(
                f"{method} returned {type(result).__name__}; its dispatch mode joins rows, so return a DataProto, or "
                "register it with ONE_TO_ALL or DP_COMPUTE_METRIC, which give a list of what the workers return"
            )
        return result, len(result)

    def _finish(self, role: str | None, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if role not in self._loops:
                self._loops[role] = asyncio.new_event_loop()
                threading.Thread(target=self._loops[role].run_forever, name=f"{role} loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loops[role]).result()


def _own(value: Any) -> Any:
    """A numpy array that arrives is read-only memory, which other processes read too; batches see to it themselves."""
    return value.copy() if type(value).__name__ == "ndarray" and not value.flags.writeable else value


def use_our_wire() -> None:
    """Let TensorDicts travel as the tensors of a DataProto do, once there can be one in this process."""
    if "tensordict" in sys.modules:
        from hocket.data.wire import register_serializers  # here: a worker without tensors starts without torch

        register_serializers(ray.util.register_serializer)


def lane(cls: type, method: str, options: Mapping[str, Any], role: str | None) -> tuple[str, int] | None:
    """The threads that run a method, as (name, how many); None for the main thread, where calls keep their order.

    `options` are the Ray options of the class: `concurrency_groups` with `ray.method`, and `max_concurrency`, which
    bounds the calls of async methods (16 if not given) or, in a class without them, of all methods.
    """
    function = getattr(cls, method, None)
    groups, limit = options.get("concurrency_groups") or {}, options.get("max_concurrency")
    group = getattr(function, "__ray_concurrency_group__", None)
    if group in groups:
        return f"{role or ''}.{group}", groups[group]
    if _is_async(function):
        return f"{role or ''}.async", limit or DEFAULT_ASYNC_CALLS
    if limit and limit > 1 and not _has_async(cls):
        return f"{role or ''}.threads", limit
    return None


@functools.cache
def _has_async(cls: type) -> bool:
    return any(_is_async(getattr(cls, name, None)) for name in dir(cls))


def _is_async(function: Any) -> bool:
    return inspect.isfunction(function) and inspect.iscoroutinefunction(inspect.unwrap(function))


def host_class(cls: type, lanes: Mapping[str, int]) -> Any:
    """The Ray actor class for processes that hold a `cls`; its public methods can be called on the handle too."""
    names = [name for name in dir(cls) if not name.startswith("__") and inspect.isfunction(getattr(cls, name))]
    members: dict[str, Any] = {name: _forward(name, getattr(cls, name)) for name in names}
    members |= {"worker_class": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    made = type(cls.__name__, (Host,), members)
    remote = cast(Any, ray.remote)
    return remote(concurrency_groups=dict(lanes))(made) if lanes else remote(made)


def _forward(name: str, function: Any) -> Any:
    role, method = getattr(function, ROUTE, (None, name))

    def call(self: Host, *args: Any, **kwargs: Any) -> Any:
        return self.hocket_call(role, method, *args, **kwargs)

    functools.update_wrapper(call, function)
    for name in ("__wrapped__", "__ray_concurrency_group__"):  # Ray would see an async method, a group not declared
        call.__dict__.pop(name, None)
    return call
