"""A worker class with its arguments, made into an actor later and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hocket.errors import GroupError
from hocket.single_controller.devices import RESOURCE
from hocket.single_controller.host import ROUTE, host_class, lane

_OURS = {"num_cpus", "num_gpus", "max_concurrency", "concurrency_groups"}  # the pool and the lanes decide these


class ClassWithInitArgs:
    """A class and the arguments to make it with."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs
        self.fused_worker_used = False
        if not isinstance(cast(object, self.plain), type):
            raise GroupError(f"found {cls!r}; give a class, plain or under @ray.remote, and its arguments after it")

    @property
    def plain(self) -> type:
        """The class itself, also where `cls` is Ray's actor class of it."""
        return getattr(self.cls, "__ray_actor_class__", self.cls)

    def make(self) -> Any:
        """The object, in this process."""
        return self.plain(*self.args, **self.kwargs)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, plain or under `@ray.remote`, with its arguments and Ray options.

    `max_concurrency` and `concurrency_groups` among the options state how many calls run at once (`host.lane`).
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options = {k: v for k, v in getattr(cls, "_default_options", {}).items() if v is not None}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set Ray actor options: runtime_env, max_concurrency, ..."""
        self.options |= options

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ask for custom resources per worker; the pool must reserve them (`resources=`)."""
        self.options["resources"] = {**self.options.get("resources", {}), **additional_resource}

    @property
    def roles(self) -> dict[str, RayClassWithInitArgs]:
        """The classes that `create_colocated_worker_cls` bound into this one."""
        return getattr(self.plain, "role_specs", {})

    def lane(self, role: str | None, method: str) -> tuple[str, int] | None:
        """The threads that run a method, see `host.lane`."""
        spec = self if role is None else self.roles[role]
        return lane(spec.plain, method, spec.options, role)

    def actor_class(self) -> Any:
        """The Ray actor class that hosts the worker."""
        own = [(None, name) for name in dir(self.plain) if not hasattr(getattr(self.plain, name), ROUTE)]
        routed = [(role, name) for role, spec in self.roles.items() for name in dir(spec.plain)]
        return host_class(self.plain, dict(filter(None, (self.lane(*route) for route in [*own, *routed]))))

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
        kwargs = dict(self.kwargs)
        if sharing_with is not None:
            node, devices = ray.get([sharing_with.get_node_id.remote(), sharing_with.get_cuda_visible_devices.remote()])
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
            kwargs["cuda_visible_devices"] = devices
        else:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_idx
            )
            kind = RESOURCE.get(device_name, device_name) if use_gpu else None
            if kind == "GPU":
                options["num_gpus"] = num_gpus
            elif kind:
                options["resources"] = {**options.get("resources", {}), kind: num_gpus}
        return (actor_class or self.actor_class()).options(**options).remote(dict(env or {}), *self.args, **kwargs)
