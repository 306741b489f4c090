"""Where the workers of a group live: processes per node, reserved from Ray as placement groups."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from hocket.errors import GroupError, PlacementError
from hocket.single_controller.devices import RESOURCE


class Slot(NamedTuple):
    """The place of one worker: a bundle of a placement group, and the node that it lies on."""

    group: Any
    bundle_index: int
    node_id: str
    address: str


class ResourcePool:
    """Processes per node: `[2, 1]` is two on one node and one on another."""

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        counts: Any = process_on_nodes or []
        if not isinstance(counts, Sequence) or not all(type(count) is int for count in cast(Sequence[Any], counts)):
            raise GroupError(f"process_on_nodes is {counts!r}; give whole numbers, one per node, as [2] or [2, 1]")
        self.store = list(cast(Sequence[int], counts))
        self.max_colocate_count, self.n_gpus_per_node = max_colocate_count, n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Append a node with so many processes."""
        self.store.append(process_count)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return sum(self.store)

    def __call__(self) -> list[int]:
        return self.store

    def local_world_size_list(self) -> list[int]:
        """For each process, how many there are on its node: `[2, 1]` gives `[2, 2, 1]`."""
        return [count for count in self.store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each process, its number on its node: `[2, 1]` gives `[0, 1, 0]`."""
        return [rank for count in self.store for rank in range(count)]


@dataclass(eq=False)
class RayResourcePool(ResourcePool, AbstractContextManager[Any]):
    """One bundle per worker, of `cpus_per_worker` CPUs and, with GPUs, `gpus_per_worker` of them.

    Several groups may live on one pool: the bundle reserves, the workers in it ask for no CPU of their own and for
    1/`max_colocate_count` of its GPUs. `use_gpu=None` takes GPUs if the cluster has some. `accelerator_type` and
    `resources` are custom resources of the nodes wanted. `ready_timeout` (seconds) bounds the wait for places that
    others hold. As a context manager, or by `close`, the pool gives its places back.
    """

    process_on_nodes: InitVar[Sequence[int] | None] = None
    use_gpu: bool | None = None
    name_prefix: str | None = None
    max_colocate_count: int = 10
    detached: bool = False
    accelerator_type: str | None = None
    _: KW_ONLY
    cpus_per_worker: float = 1
    gpus_per_worker: float = 1
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    ready_timeout: float = 60

    def __post_init__(self, process_on_nodes: Sequence[int] | None) -> None:
        super().__init__(process_on_nodes, self.max_colocate_count)
        if min(self.cpus_per_worker, self.gpus_per_worker, *self.resources.values()) < 0:
            raise GroupError("found less than nothing to reserve for a worker; give amounts of 0 or more")
        self.name_prefix = secrets.token_hex(3) if self.name_prefix is None else self.name_prefix
        self.resources = dict(self.resources or {})
        self._slots: list[Slot] | None = None

    def device_resource(self, device_name: str | None = None) -> str | None:
        """What Ray calls the accelerator of a worker; None for CPU workers. A device given by name decides."""
        if self.use_gpu is False or device_name == "cpu":
            return None
        kind = RESOURCE.get(device_name or "cuda", device_name)
        if self.use_gpu is None and not ray.cluster_resources().get(kind or "", 0):
            _say_cpu_only()
            return None
        return kind

    def bundle(self, device_name: str | None = None) -> dict[str, float]:
        """What is reserved for one worker."""
        wanted = {"CPU": self.cpus_per_worker, self.device_resource(device_name): self.gpus_per_worker}
        wanted |= {self.accelerator_type: 1e-4, **self.resources}
        return {kind: amount for kind, amount in wanted.items() if kind and amount}

    def slots(self, strategy: str = "STRICT_PACK", device_name: str | None = None) -> list[Slot]:
        """One place per worker, in rank order, which a restart keeps; reserved at the first call.

        Raises PlacementError at once when the cluster can never give it, after `ready_timeout` s when it did not.
        """
        if self._slots is None:
            if min(self.store, default=0) < 1:
                raise GroupError(f"pool {self.store} has a node without workers; give at least one for each entry")
            bundle, nodes = self.bundle(device_name), [node["Resources"] for node in ray.nodes() if node["Alive"]]
            rooms = [int(min((node.get(k, 0) / v for k, v in bundle.items()), default=1e9) + 1e-6) for node in nodes]
            if not _fits(self.store, rooms, strategy):
                raise PlacementError(
                    f"{self._asks(bundle)}, which can never be given: its {len(nodes)} nodes have room for {rooms} "
                    f"workers and the strategy is {strategy}. Ask for fewer workers, lower cpus_per_worker, or set "
                    "use_gpu=False"
                )
            self._slots = _in_order(self._reserve(bundle, strategy))
        return self._slots

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str | None = None
    ) -> list[Any]:
        """The placement groups behind the slots, one per node entry, in rank order."""
        return list(dict.fromkeys(slot.group for slot in self.slots(strategy, device_name)))

    def close(self) -> None:
        """Give the places back; workers that still live on them end."""
        for group in self.get_placement_groups() if self._slots else ():
            remove_placement_group(group)
        self._slots = None

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _reserve(self, bundle: dict[str, float], strategy: str) -> list[Any]:
        """A placement group per node entry, once Ray has given all of them."""
        name = f"{self.name_prefix}hocket_group_{'_'.join(map(str, self.store))}"
        lifetime = "detached" if self.detached else None
        groups = [
            placement_group([bundle] * count, strategy=strategy, name=f"{name}:{i}", lifetime=lifetime)
            for i, count in enumerate(self.store)
        ]
        deadline, missing = time.monotonic() + self.ready_timeout, groups
        try:
            while missing and time.monotonic() < deadline:  # second by second, so that Ctrl-C gets through
                missing = [group for group in missing if not group.wait(1)]
        finally:
            for group in groups if missing else ():
                remove_placement_group(group)
        if missing:
            raise PlacementError(
                f"{self._asks(bundle)}; waited {self.ready_timeout:g} s for others to give their places back. "
                "Close the pools that are done with, put the group on one of them, or ask for less"
            )
        return groups

    def _asks(self, bundle: Mapping[str, float]) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        parts = [
            f"{amount * self.world_size:g} {kind} ({total.get(kind, 0):g} in all, {free.get(kind, 0):g} free)"
            for kind, amount in bundle.items()
        ]
        return f"pool {self.store} asks the cluster for {', '.join(parts)}"


class SubRayResourcePool(RayResourcePool):
    """A window onto the places of other pools: `subgroup_world_size` of them from `start_bundle_index` on."""

    def __init__(
        self,
        placement_groups: Sequence[Any] | None = None,
        start_bundle_index: int = 0,
        subgroup_world_size: int = 0,
        *,
        slots: Sequence[Slot] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        every = list(slots) if slots is not None else _in_order(placement_groups or [])
        self._slots = every[start_bundle_index : start_bundle_index + subgroup_world_size]

    @property
    def world_size(self) -> int:
        """Places in the window."""
        return len(self._slots or [])

    def close(self) -> None:
        """Nothing: the pool that the window looks onto gives the places back."""


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Windows of `split_size` places each, or of the listed sizes; GroupError when they do not add up."""
    world = resource_pool.world_size
    sizes = [split_size] * (world // max(split_size, 1)) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != world or min(sizes, default=0) < 1:
        raise GroupError(f"cannot split a pool of {world} places into {split_size}; the sizes must add up to {world}")
    slots, name = resource_pool.slots(), f"{resource_pool.name_prefix}_split_"
    parts = [slots[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    return [_window(resource_pool, part, name_prefix=f"{name}{i}") for i, part in enumerate(parts)]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """One pool over the places of both, those of the first before; GroupError when the two ask for different things."""
    of_its_own = {"store", "name_prefix", "n_gpus_per_node", "_slots"}
    if differing := sorted(key for key in {*vars(rp1)} - of_its_own if vars(rp1)[key] != vars(rp2)[key]):
        raise GroupError(f"cannot merge pools that differ in {differing}; make them with equal settings")
    name = f"{rp1.name_prefix}_{rp2.name_prefix}"
    return _window(rp1, [*rp1.slots(), *rp2.slots()], store=[*rp1.store, *rp2.store], name_prefix=name)


def _window(pool: RayResourcePool, slots: Sequence[Slot], **changes: Any) -> SubRayResourcePool:
    """A window onto these slots that has the settings of the pool, and `changes`."""
    window = SubRayResourcePool()
    vars(window).update({**vars(pool), "store": list(pool.store), **changes, "_slots": list(slots)})
    return window


@cache
def _say_cpu_only() -> None:
    logging.getLogger("hocket").warning("the cluster has no accelerators: pools made without use_gpu get CPU workers")


def _fits(entries: Sequence[int], rooms: Sequence[int], strategy: str) -> bool:
    """Whether nodes with so much room each (in bundles) can hold the entries."""
    largest = sorted(entries, reverse=True)
    if strategy == "STRICT_PACK":  # each entry whole on one node
        return sum(entries) <= sum(rooms) and _pack(tuple(largest), tuple(sorted(rooms)))
    if strategy == "STRICT_SPREAD":  # no two bundles of an entry on one node: the Gale-Ryser condition
        return all(sum(largest[:k]) <= sum(min(room, k) for room in rooms) for k in range(1, len(largest) + 1))
    return sum(entries) <= sum(rooms)


@cache
def _pack(entries: tuple[int, ...], rooms: tuple[int, ...]) -> bool:
    if not entries:
        return True
    return any(
        _pack(entries[1:], tuple(sorted([*rooms[:i], room - entries[0], *rooms[i + 1 :]])))
        for i, room in enumerate(rooms)
        if room >= entries[0] and room not in rooms[:i]  # of nodes with equal room one try is enough
    )


def _in_order(groups: Sequence[Any]) -> list[Slot]:
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def by_address(slot: Slot) -> tuple[int, str, int]:
        return int(ipaddress.ip_address(slot.address)), slot.node_id, slot.bundle_index

    def slots(group: Any) -> list[Slot]:
        nodes = cast(Any, placement_group_table(group))["bundles_to_node_id"]
        return sorted((Slot(group, i, node, addresses[node]) for i, node in nodes.items()), key=by_address)

    # groups of one size change places among themselves only: the layout that was asked for stays
    asked = [slots(group) for group in groups]
    ordered = sorted(asked, key=lambda one: by_address(one[0])[:2])
    return [slot for one in asked for slot in ordered.pop(next(i for i, o in enumerate(ordered) if len(o) == len(one)))]
