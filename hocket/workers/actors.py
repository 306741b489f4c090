"""A plain class as a Ray actor class that checks what it is given before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import ray

from hocket.errors import ConfigError, PlacementError
from hocket.workers.naming import own_namespace


class ActorClass:
    """`cls` as a Ray actor class with concurrency groups, each a thread of its own.

    `options` takes Ray's own (name, num_cpus, num_gpus, resources, max_concurrency, ...); `remote` starts an actor.
    Restarts and retries of Ray stay off: they would reset the state and reorder calls. `cls` itself can be
    subclassed and tested without Ray.
    """

    def __init__(
        self, cls: type, groups: Mapping[str, int], options: Mapping[str, Any] | None = None, *, name: str | None = None
    ) -> None:
        self.cls = cls
        self.name = name or cls.__name__
        self.__doc__ = cls.__doc__
        self._groups = dict(groups)
        self._options = dict(options or {})

    def options(self, **options: Any) -> ActorClass:
        """The same class with these options of Ray set."""
        return ActorClass(self.cls, self._groups, self._options | options, name=self.name)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start an actor and return its handle.

        Raises ConfigError for arguments that the class does not take, PlacementError when no node of the cluster
        could ever give what the options ask for.
        """
        signature = inspect.signature(self.cls)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{self.name}: {error}; it takes {', '.join(signature.parameters)}") from error
        check = getattr(self.cls, "check_arguments", None)
        if check is not None:
            check(bound.arguments)
        options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0} | self._options
        if not ray.is_initialized():
            ray.init()
        _demand_place(self.name, options)
        namespace = options.setdefault("namespace", own_namespace())
        if "namespace" in signature.parameters:
            kwargs.setdefault("namespace", namespace)
        with _signatures_kept(self.cls):
            actor = cast(Any, ray.remote)(concurrency_groups=self._groups)(self.cls)
        return actor.options(**{key: value for key, value in options.items() if value is not None}).remote(
            *args, **kwargs
        )


@contextmanager
def _signatures_kept(cls: type) -> Generator[None]:
    """Ray adds a parameter of its own to the signatures of the class that it is given, for everybody to see."""
    functions = [function for _, function in inspect.getmembers(cls, inspect.isfunction)]
    before = [function.__dict__.get("__signature__") for function in functions]
    try:
        yield
    finally:
        for function, signature in zip(functions, before, strict=True):
            function.__dict__.pop("__signature__", None)
            if signature is not None:
                function.__dict__["__signature__"] = signature


def _demand_place(what: str, options: Mapping[str, Any]) -> None:
    asked = {"CPU": options.get("num_cpus") or 0, "GPU": options.get("num_gpus") or 0}
    asked = {kind: n for kind, n in (asked | dict(options.get("resources") or {})).items() if n}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(kind, 0) >= n for kind, n in asked.items()) for node in nodes):
        best = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in asked}
        raise PlacementError(
            f"{what} asks for {asked}, and no node of this cluster has that (most on one node: {best}); ask for less "
            "(num_gpus=0, num_cpus=1 on a machine without GPUs)"
        )
