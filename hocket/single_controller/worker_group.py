"""A group of worker processes that is called like a single worker."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import ray

from hocket.errors import GroupError, WorkerDied
from hocket.single_controller.decorator import registered_methods
from hocket.single_controller.dispatch import Function, GroupMethod, spread
from hocket.single_controller.processes import Handles, Watch, hold_port, launch
from hocket.single_controller.ray_class import RayClassWithInitArgs, use_our_wire
from hocket.single_controller.resource_pool import RayResourcePool
from hocket.waiting import Waiter


class RayWorkerGroup:
    """Starts one process per place in the pool, and has the registered methods of the class as its own.

    Waits for the constructors (unless `wait_ready=False`) for `ray_wait_register_center_timeout` seconds, and raises
    what one of them raises, with rank and node. Every call has a deadline of `call_timeout` seconds;
    `group.method.options(timeout=5)(...)` sets one for a call. With `watch` (True, or a function that is called with
    the error) a dead worker is found within seconds, and reported by the next call or the wait that is going on.
    `worker_env` sets variables, `master_addr` and `master_port` (or a `master_port_range`) where the workers meet,
    `bin_pack=False` lets one node entry of the pool lie on several nodes. Raises GroupError for arguments that
    cannot work, PlacementError when the pool cannot be had.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: float = 300,
        *,
        device_name: str | None = None,
        use_gpu: bool | None = None,
        worker_env: Mapping[str, str] | None = None,
        master_addr: str | None = None,
        master_port: int | str | None = None,
        master_port_range: Sequence[int] | None = None,
        profile_steps: Sequence[int] | None = None,
        worker_nsight_options: Mapping[str, str] | None = None,
        name: str | None = None,
        waiter: Waiter | None = None,
        call_timeout: float = 3600,
        wait_ready: bool = True,
        watch: bool | Callable[[WorkerDied], None] = True,
    ) -> None:
        pool, spec = resource_pool, ray_cls_with_init
        _check_kinds(pool, spec, worker_names)
        self.ray_cls_with_init, self.device_name, self.profile_steps = spec, device_name, profile_steps
        self.name_prefix = secrets.token_hex(3) if name_prefix is None else name_prefix
        self.sub_cls_name = spec.plain.__name__ if spec else "worker"
        self.master_address: str | None = None
        self.master_port: str | None = None
        self._waiter, self._start_timeout = waiter or Waiter(timeout=call_timeout), ray_wait_register_center_timeout
        self._role, self._alone = "", False
        if pool is None:
            self.workers = Handles(worker_handles or map(_by_name, worker_names or ()))
            self.worker_names, places = list(worker_names or ()), [""] * self.world_size
            if not self.workers:
                raise GroupError("found no workers; give a resource_pool, or worker_names or worker_handles")
        else:
            if spec is None:
                raise GroupError("found a pool but no class; give ray_cls_with_init=RayClassWithInitArgs(cls, ...)")
            if use_gpu and pool.use_gpu is False:
                raise GroupError("use_gpu=True on a pool that was made with use_gpu=False; make them agree")
            if detached and not pool.detached:
                raise GroupError("detached=True on a pool that ends with this process; make the pool detached too")
            if bool(master_addr) != bool(master_port):
                raise GroupError("master_addr and master_port go together; give both, or a master_port_range, or none")
            pool.use_gpu = use_gpu if pool.use_gpu is None else pool.use_gpu
            slots = pool.slots("STRICT_PACK" if bin_pack else "PACK", device_name)
            if not master_addr:
                master_addr = slots[0].address
                master_port, self._port_holder = hold_port(slots[0].node_id, master_port_range, self._start_timeout)
            self.master_address, self.master_port = master_addr, str(master_port)
            common = {"MASTER_ADDR": master_addr, "MASTER_PORT": self.master_port, "WG_PREFIX": self.name_prefix}
            actors = launch(spec, pool, common, worker_env or {}, device_name, worker_nsight_options, detached=detached)
            self.workers, self.worker_names = Handles(actors.values()), list(actors)
            places = [f" on node {slot.address}" for slot in slots]
        self._who = [f"rank {rank} of {name or self.sub_cls_name}{place}" for rank, place in enumerate(places)]
        self._who = [name] if name and self.world_size == 1 else self._who
        self._watch = Watch(self.workers, self._who, watch if callable(watch) else None)
        if wait_ready:
            self._wait_until_ready(started=pool is not None)
        if watch:
            self.start_worker_aliveness_check()
        self._bind()

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """A group over actors that live already, from any process; without a class it has `execute_*` alone."""
        named = {"name_prefix": name_prefix, "worker_names": worker_names, "worker_handles": worker_handles}
        return cls(None, ray_cls_with_init, **named, **kwargs)

    def _wait_until_ready(self, *, started: bool) -> None:
        try:
            ours = [rank for rank, handle in enumerate(self.workers) if hasattr(handle, "hocket_ready")]
            refs, who = [self.workers[rank].hocket_ready.remote() for rank in ours], [self._who[rank] for rank in ours]
            found = self._waiter.gather(refs, who=who, what="start", timeout=self._start_timeout) if refs else []
            for host, pid in found:
                self._waiter.watch(host, pid)
        except BaseException:
            for handle in self.workers if started else ():
                ray.kill(handle)
            raise

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Look after the workers from a thread: a death is raised by the next call, or the wait that is going on."""
        self._watch.start(every_n_seconds)

    # -- views --------------------------------------------------------------------------------------------------

    def spawn(self, prefix_set: Collection[str]) -> dict[str, RayWorkerGroup]:
        """A view per role on the same processes, where the role's methods have their own names."""
        roles = self.ray_cls_with_init.roles if self.ray_cls_with_init else {}
        prefix_set = {prefix_set} if isinstance(prefix_set, str) else prefix_set
        if unknown := sorted(set(prefix_set) - set(roles)):
            raise GroupError(f"no role {unknown} is bound in {self.sub_cls_name}; it has {sorted(roles)}")
        return {role: self._view(role) for role in prefix_set}

    def fuse(self, prefix_set: Collection[str]) -> None:
        """Make the views attributes: `group.actor.add(...)`."""
        for role, view in self.spawn(prefix_set).items():
            if not isinstance(vars(self).get(role), RayWorkerGroup):
                self._demand_free(role)
            setattr(self, role, view)

    def _view(self, role: str) -> RayWorkerGroup:
        view = copy.copy(self)
        for name in self.method_names:
            delattr(view, name)
        view._role = role
        view._bind()
        return view

    def _rank_zero(self) -> RayWorkerGroup:
        view = copy.copy(self)
        view.workers, view._who, view._alone = Handles(self.workers[:1]), self._who[:1], True
        view._dispatch_info, view._collect_info = {}, {}
        return view

    def _bind(self) -> None:
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        spec = self.ray_cls_with_init
        methods = registered_methods((spec.roles[self._role] if self._role else spec).plain) if spec else {}
        self.method_names = list(methods)
        for name, noted in methods.items():
            self._demand_free(name)
            # a class of its own per method, so that it has the method's name in traces
            setattr(self, name, type(name, (GroupMethod,), {})(self, name, noted))

    def _demand_free(self, name: str) -> None:
        if hasattr(type(self), name) or name in vars(self):
            raise GroupError(f"the name {name!r} belongs to the group itself; give the method or role another one")

    def __getattr__(self, name: str) -> Any:
        methods = sorted(self.__dict__.get("method_names", ()))
        raise AttributeError(f"this group has no registered method {name!r}; it has {methods}")

    # -- calls --------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Workers in the group."""
        return len(self.workers)

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """The data-parallel rank of each worker in the mesh; asked once."""
        if mesh_name not in self._dispatch_info:
            self._dispatch_info[mesh_name] = [0] if self._alone else self._query_dispatch_info(mesh_name)
        return self._dispatch_info[mesh_name]

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Whether each worker hands back the result of its dp rank; asked once."""
        if mesh_name not in self._collect_info:
            self._collect_info[mesh_name] = [True] if self._alone else self._query_collect_info(mesh_name)
        return self._collect_info[mesh_name]

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method on every worker; references of the results.

        Scatter gives each worker its entry, Broadcast the same to all. Without either: if every argument is a list
        with one entry per worker they are scattered, else all of them go to all workers.
        """
        return self._submit(self._senders(method_name), args, kwargs)

    execute_all = execute_all_async

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`, waited for."""
        return self._gather(self.execute_all_async(method_name, *args, **kwargs), method_name)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method on worker 0; a reference of its result."""
        return self._rank_zero().execute_all_async(method_name, *args, **kwargs)[0]

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`, waited for."""
        return self._rank_zero().execute_all_sync(method_name, *args, **kwargs)[0]

    def _senders(self, method: str, *, sized: bool = False) -> list[Function]:
        """For each worker what sends it a call of the method; `sized` asks for the number of rows beside the rows."""
        name = f"{self._role}.{method}" if self._role else method
        calls = [getattr(handle, name, None) for handle in self.workers]
        if None in calls:
            raise GroupError(f"{self._who[calls.index(None)]} has no method {name!r}; call one that its class has")
        if sized and hasattr(self.workers[0], "hocket_ready"):  # they are no actors that some other code has made
            return [partial(call.options(num_returns=2).remote, hocket_sized=True) for call in cast(Any, calls)]
        return [call.remote for call in cast(Any, calls)]

    def _submit(self, senders: Sequence[Function], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        self._watch.check()
        use_our_wire()
        each = spread(len(senders), args, kwargs, by_list=not self._alone)
        return [send(*mine, **named) for send, (mine, named) in zip(senders, each, strict=True)]

    def _gather(self, refs: Sequence[Any], method: str, timeout: float | None = None) -> list[Any]:
        return self._waiter.gather(refs, who=self._who, what=method, timeout=timeout, check=self._watch.check)


def _check_kinds(pool: object, spec: object, names: object) -> None:
    if pool is not None and not isinstance(pool, RayResourcePool):
        raise GroupError(f"resource_pool is {pool!r}; give RayResourcePool([workers per node, ...])")
    if spec is not None and not isinstance(spec, RayClassWithInitArgs):
        raise GroupError(f"ray_cls_with_init is {spec!r}; give RayClassWithInitArgs(cls, its arguments)")
    if isinstance(names, str):
        raise GroupError(f"worker_names is the string {names!r}; give a list of names")


def _by_name(name: str) -> Any:
    """A handle that counts: the actor lives as long as it does. The one of `ray.get_actor` is a weak one."""
    try:
        make, (state, _, outer) = cast(Any, ray.get_actor(name)).__reduce__()
    except ValueError as error:
        words = f"no actor {name!r} lives in this namespace; look at the other group's worker_names"
        raise GroupError(words) from error
    return make(state, False, outer)
