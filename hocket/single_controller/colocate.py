"""Several worker classes bound into one class, so that all of them live in one process."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import ray

from hocket.errors import GroupError
from hocket.single_controller.decorator import Dispatch, registered_methods
from hocket.single_controller.ray_class import ROUTE, RayClassWithInitArgs
from hocket.single_controller.worker import INNER, Worker


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Bind the classes of `class_dict` (role -> class with its arguments) into one `WorkerDict`, ready for a group.

    A process makes the outer Worker first and then each role in order, in `worker_dict`. Each registered method of a
    role stands on the class as `<role>_<method>`; `RayWorkerGroup.spawn` gives each role a view of its own.
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
            before = os.environ.get(INNER)
            os.environ[INNER] = "1"  # the set-up of the process is done: the roles only read their ranks
            try:
                made = {role: spec.plain(*spec.args, **spec.kwargs) for role, spec in self.role_specs.items()}
            finally:
                del os.environ[INNER]
                os.environ.update({INNER: before} if before else {})
            self.worker_dict = made
            vars(self).update(made)
            for worker in (self, *made.values()):  # the roles reach one another by name
                setattr(worker, Worker.fused_worker_attr_name, made)

    WorkerDict.__name__ = WorkerDict.__qualname__ = name
    named: dict[str, list[Any]] = defaultdict(list)
    for role, spec in class_dict.items():
        for method, noted in registered_methods(spec.plain).items():
            # what is called on the handle of a rollout worker keeps its name, as other programs know it
            direct = noted["dispatch_mode"] is Dispatch.DIRECT_ROLLOUT_METHOD and "rollout" in role
            named[method if direct else f"{role}_{method}"].append(_forward(role, method, getattr(spec.plain, method)))
    for flat, forwards in named.items():
        if len(forwards) == 1:  # a name that two roles would share belongs to neither
            setattr(WorkerDict, flat, forwards[0])
    return WorkerDict


def _forward(role: str, method: str, function: Any) -> Any:
    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], method)(*args, **kwargs)

    forward.__name__ = f"{role}_{method}"
    setattr(forward, ROUTE, (role, method))
    return forward
