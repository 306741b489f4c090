"""The processes of a group: started one per place in the pool, given a port to meet at, and looked after."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hocket.errors import GroupError, PlacementError, WorkerDied
from hocket.single_controller.ray_class import RayClassWithInitArgs
from hocket.single_controller.resource_pool import RayResourcePool
from hocket.waiting import reason_of_death


def launch(
    spec: RayClassWithInitArgs,
    pool: RayResourcePool,
    common: Mapping[str, str],
    worker_env: Mapping[str, str],
    device_name: str | None,
    nsight: Mapping[str, str] | None,
    *,
    detached: bool,
) -> dict[str, Any]:
    """An actor per slot of the pool, by name, in rank order, with `common` and its ranks in its environment."""
    slots = pool.slots()
    nodes, groups = [(slot.group, slot.node_id) for slot in slots], pool.get_placement_groups()
    # ranks are set in the process, which may then be one that Ray has ready; the user's must stand before any import
    threads = {"OMP_NUM_THREADS": f"{pool.cpus_per_worker:g}"} if pool.cpus_per_worker >= 2 else {}
    runtime = {**spec.options.get("runtime_env", {}), **({"nsight": dict(nsight)} if nsight else {})}
    if variables := {**runtime.get("env_vars", {}), **threads, **worker_env}:
        runtime["env_vars"] = variables
    device = pool.device_resource(device_name)
    options: dict[str, Any] = {"runtime_env": runtime or None, **({"lifetime": "detached"} if detached else {})}
    options |= {"use_gpu": device is not None, "device_name": device or "cpu", "actor_class": spec.actor_class()}
    options["num_gpus"] = pool.gpus_per_worker / pool.max_colocate_count
    actors: dict[str, Any] = {}
    for rank, (slot, node) in enumerate(zip(slots, nodes, strict=True)):
        ranks = {"RANK": rank, "WORLD_SIZE": len(slots), "LOCAL_RANK": nodes[:rank].count(node)}
        ranks |= dict.fromkeys(("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE"), nodes.count(node))
        env = {**{key: str(number) for key, number in ranks.items()}, **common, "WG_BACKEND": "ray"}
        if clash := sorted(set(worker_env) & set(env)):
            raise GroupError(f"worker_env sets {clash}, which the group sets itself; take them out")
        name = f"{common['WG_PREFIX']}{spec.plain.__name__}_{groups.index(slot.group)}:{slot.bundle_index}"
        try:
            actors[name] = spec(slot.group, slot.bundle_index, env=env, name=name, **options)
        except ValueError as error:
            raise GroupError(f"{error}; give each group a name_prefix of its own") from error
    return actors


class PortHolder:
    """Holds a free port of this node; PlacementError when the range, last one excluded, has none.

    The socket is bound, and marked reusable only afterwards: nobody else is given the port, while a server that sets
    SO_REUSEADDR, as torch's store does, can listen on it.
    """

    def __init__(self, port_range: Sequence[int] | None = None) -> None:
        for port in range(*port_range) if port_range else (0,):
            self._socket = socket.socket()
            try:
                self._socket.bind(("", port))
            except OSError:
                self._socket.close()
                continue
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return
        raise PlacementError(f"no port in {list(port_range or ())} (last one excluded) is free; give a wider range")

    def port(self) -> int:
        """The port."""
        return int(self._socket.getsockname()[1])


def hold_port(node_id: str, port_range: Sequence[int] | None, timeout: float) -> tuple[int, Any]:
    """A free port on the node, and what holds it as long as it is kept."""
    if node_id == ray.get_runtime_context().get_node_id():
        holder = PortHolder(port_range)
        return holder.port(), holder
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = cast(Any, ray.remote)(num_cpus=0)(PortHolder).options(scheduling_strategy=there).remote(port_range)
    try:
        return cast(int, ray.get(actor.port.remote(), timeout=timeout)), actor
    except RayError as error:
        raise PlacementError(f"no port could be held on node {node_id}: {str(error).splitlines()[-1]}") from error


class Handles(list[Any]):
    """Actor handles; the actors live as long as somebody keeps this list."""


class Watch:
    """Looks after the workers of a group from a thread, until the group or Ray is gone.

    Each worker has one small call outstanding: a busy worker answers it between two others, a dead one at once.
    `dead` maps ranks to the errors; `on_death`, if given, is called with each.
    """

    def __init__(self, handles: Handles, who: Sequence[str], on_death: Callable[[WorkerDied], None] | None) -> None:
        self.dead: dict[int, WorkerDied] = {}
        self._handles, self._who, self._on_death = weakref.ref(handles), list(who), on_death
        self._asked: set[int] = set()

    def start(self, every: float) -> None:
        """Look every so many seconds."""
        session = ray.get_runtime_context().get_worker_id()
        threading.Thread(target=self._loop, args=(every, session), name="hocket watch", daemon=True).start()

    def check(self) -> None:
        """Raise WorkerDied when a worker is dead."""
        for error in self.dead.values():
            raise WorkerDied(error.message)

    def _loop(self, every: float, session: str) -> None:
        context = ray.get_runtime_context
        while ray.is_initialized() and context().get_worker_id() == session and (handles := self._handles()):
            for rank in set(range(len(handles))) - self._asked - set(self.dead):
                self._asked.add(rank)
                handles[rank].__ray_ready__.remote().future().add_done_callback(partial(self._answered, rank))
            del handles  # which keep the actors alive
            time.sleep(every)

    def _answered(self, rank: int, done: Future[Any]) -> None:
        error = done.exception()
        self._asked.discard(rank)
        if isinstance(error, RayActorError) and self._handles():
            self.dead[rank] = WorkerDied(f"{self._who[rank]} died: {reason_of_death(error)}")
            if self._on_death:
                self._on_death(self.dead[rank])
