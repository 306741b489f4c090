"""Several worker classes bound into one class, so that all of them live in one process."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import ray

from hocket.errors import GroupError
from hocket.single_controller.decorator import MAGIC_ATTR, Dispatch, registered_methods
from hocket.single_controller.host import ROUTE
from hocket.single_controller.ray_class import RayClassWithInitArgs
from hocket.single_controller.worker import Worker


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Bind the classes of `class_dict` (role -> class with its arguments) into one `WorkerDict`, ready for a group.

    A process makes the outer Worker first and then each role in order; it finds them in `worker_dict`. Each registered
    method of a role stands on the class as `<role>_<method>`; `RayWorkerGroup.spawn` gives each role its own view of
    the same processes, in which calls are routed by (role, method).
    """
    return RayClassWithInitArgs(cast(Any, ray.remote)(_bind(class_dict, "WorkerDict")))


def create_colocated_worker_raw_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> type[Worker]:
    """The same as a plain class to derive from: its methods reach the roles as `self.<role>`."""
    return _bind(class_dict, "_".join(["FusedWorker", *class_dict]))


def create_colocated_worker_cls_fused(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """`create_colocated_worker_raw_cls`, ready for a group."""
    bound = RayClassWithInitArgs(cast(Any, ray.remote)(create_colocated_worker_raw_cls(class_dict)))
    bound.fused_worker_used = True
    return bound


def _bind(class_dict: Mapping[str, RayClassWithInitArgs], name: str) -> type[Worker]:
    for role, spec in class_dict.items():
        if not str(role).isidentifier() or not isinstance(cast(object, spec), RayClassWithInitArgs):
            raise GroupError(f"found {role!r}: {spec!r}; give {{'role': RayClassWithInitArgs(cls, its arguments)}}")
    if not class_dict:
        raise GroupError("found no roles to bind; give {'role': RayClassWithInitArgs(cls, its arguments)}")

    class WorkerDict(Worker):
        role_specs: ClassVar[dict[str, RayClassWithInitArgs]] = dict(class_dict)

        def __init__(self) -> None:
            super().__init__()
            with _inside_a_worker():
                self.worker_dict = {role: spec.make() for role, spec in self.role_specs.items()}
            for role, worker in self.worker_dict.items():
                setattr(self, role, worker)
            for worker in (self, *self.worker_dict.values()):  # the roles reach one another by name
                setattr(worker, Worker.fused_worker_attr_name, self.worker_dict)

    WorkerDict.__name__ = WorkerDict.__qualname__ = name
    methods = [(role, method) for role, spec in class_dict.items() for method in registered_methods(spec.plain)]
    names = {route: _flat_name(*route, getattr(class_dict[route[0]].plain, route[1])) for route in methods}
    uses = Counter(names.values())
    for (role, method), flat in names.items():
        if uses[flat] == 1:  # a name that two roles would share belongs to neither
            setattr(WorkerDict, flat, _forward(role, method, getattr(class_dict[role].plain, method)))
    return WorkerDict


def _flat_name(role: str, method: str, function: Any) -> str:
    """`<role>_<method>`; what is called on the handle of a rollout worker keeps its name, as other programs know it."""
    direct = getattr(function, MAGIC_ATTR)["dispatch_mode"] is Dispatch.DIRECT_ROLLOUT_METHOD
    return method if direct and "rollout" in role else f"{role}_{method}"


def _forward(role: str, method: str, function: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], method)(*args, **kwargs)

    async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.worker_dict[role], method)(*args, **kwargs)

    forward: Any = call_async if inspect.iscoroutinefunction(inspect.unwrap(function)) else call
    forward.__doc__, forward.__name__ = function.__doc__, f"{role}_{method}"
    setattr(forward, MAGIC_ATTR, getattr(function, MAGIC_ATTR))
    setattr(forward, ROUTE, (role, method))
    return forward


@contextmanager
def _inside_a_worker() -> Generator[None, None, None]:
    """The set-up of the process is done: Workers that are made now only read their ranks."""
    before = os.environ.get("DISABLE_WORKER_INIT")
    os.environ["DISABLE_WORKER_INIT"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_WORKER_INIT"]
        else:
            os.environ["DISABLE_WORKER_INIT"] = before
