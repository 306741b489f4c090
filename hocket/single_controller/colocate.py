"""Several worker classes bound into one class, so that all of them live in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.single_controller.decorator import MAGIC_ATTR, registered_methods
from hocket.single_controller.worker import Worker
from hocket.single_controller.worker_group import RayClassWithInitArgs


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Bind the classes of `class_dict` (role -> class with its arguments) into one `WorkerDict`.

    Each registered method of a role is there as `<role>_<method>`; `RayWorkerGroup.spawn` gives each role its
    own view of the same processes.
    """

    class WorkerDict(Worker):
        def __init__(self) -> None:
            super().__init__()
            self.worker_dict = {role: spec.make() for role, spec in class_dict.items()}

    for role, spec in class_dict.items():
        for name, info in registered_methods(spec.cls).items():
            forward = _forward(role, name)
            setattr(forward, MAGIC_ATTR, info)
            setattr(WorkerDict, f"{role}_{name}", forward)
    WorkerDict.__qualname__ = "WorkerDict"
    return RayClassWithInitArgs(WorkerDict)


def _forward(role: str, name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    return call
