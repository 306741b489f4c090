"""Starts the actors of a group: one per place in the pool, with its rank in the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hocket.errors import GroupError
from hocket.single_controller.ray_class import RayClassWithInitArgs
from hocket.single_controller.resource_pool import RayResourcePool, Slot


def launch(
    spec: RayClassWithInitArgs,
    pool: RayResourcePool,
    slots: Sequence[Slot],
    *,
    address: tuple[str, str],
    name_prefix: str,
    device_name: str | None,
    worker_env: Mapping[str, str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """An actor per slot, by name, in rank order; they meet at `address`. GroupError when a name is taken."""
    envs = list(_rank_envs(slots, address, name_prefix))
    if clash := sorted(set(worker_env) & set(envs[0])):
        raise GroupError(f"worker_env sets {clash}, which the group sets itself; take them out")
    # ranks are set in the process, which may then be one that Ray has ready; the user's must stand before any import
    threads = {"OMP_NUM_THREADS": f"{pool.cpus_per_worker:g}"} if pool.cpus_per_worker >= 2 else {}
    if variables := {**threads, **worker_env}:
        runtime = {**spec.options.get("runtime_env", {}), **options.get("runtime_env", {})}
        options = {**options, "runtime_env": {**runtime, "env_vars": {**runtime.get("env_vars", {}), **variables}}}
    device, groups = pool.device_resource(device_name), list(dict.fromkeys(slot.group for slot in slots))
    placed = {"use_gpu": device is not None, "device_name": device or "cpu", "actor_class": spec.actor_class()}
    placed["num_gpus"] = pool.gpus_per_worker / pool.max_colocate_count
    actors: dict[str, Any] = {}
    for slot, env in zip(slots, envs, strict=True):
        name = f"{name_prefix}{spec.plain.__name__}_{groups.index(slot.group)}:{slot.bundle_index}"
        try:
            actors[name] = spec(slot.group, slot.bundle_index, **placed, env=env, name=name, **options)
        except ValueError as error:
            raise GroupError(f"{error}; give each group a name_prefix of its own") from error
    return actors


def _rank_envs(slots: Sequence[Slot], address: tuple[str, str], name_prefix: str) -> Iterator[dict[str, str]]:
    nodes = [(slot.group, slot.node_id) for slot in slots]
    local_sizes, seen = Counter(nodes), Counter[Any]()
    for rank, node in enumerate(nodes):
        yield {
            "WORLD_SIZE": str(len(slots)),
            "RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(local_sizes[node]),
            "RAY_LOCAL_WORLD_SIZE": str(local_sizes[node]),
            "LOCAL_RANK": str(seen[node]),
            "MASTER_ADDR": address[0],
            "MASTER_PORT": address[1],
            "WG_PREFIX": name_prefix,
            "WG_BACKEND": "ray",
        }
        seen[node] += 1
