"""The base class of everything that lives in a worker process."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import ray

from hocket.errors import GroupError, PlacementError
from hocket.single_controller.decorator import Dispatch, Execute, register
from hocket.single_controller.devices import tidy_visible_devices, visible_devices_keyword

INNER = "DISABLE_WORKER_INIT"  # "1" while workers are made inside another one's process
_REQUIRED = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
_DEFAULTS = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}


class Worker:
    """Knows its rank and the size of its group, from the environment that the group set.

    Without any rank variable it is rank 0 of 1; some but not all of them is a PlacementError. A worker made inside
    another one (DISABLE_WORKER_INIT is set then) reads the same ranks and leaves the set-up of the process alone.
    `cuda_visible_devices` masks the accelerators of the process.
    """

    fused_worker_attr_name = "fused_worker_dict"

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        present = [name for name in _REQUIRED if name in os.environ]
        if present and (missing := sorted(set(_REQUIRED) - set(present))):
            raise PlacementError(f"found {present} in the environment but not {missing}; set all of them or none")
        if cuda_visible_devices is not None:
            os.environ[visible_devices_keyword()] = cuda_visible_devices
        if os.environ.get(INNER) != "1":
            tidy_visible_devices()
        for key in _DEFAULTS if present else ():  # libraries read them too
            os.environ.setdefault(key, _DEFAULTS[key])
        self._rank = self._world_size = self._local_rank = self._local_world_size = 0
        for key in self.env_keys():
            value = os.environ.get(key, _DEFAULTS.get(key))
            setattr(self, f"_{key.lower()}", int(value) if value and key in _DEFAULTS else value)
        self.fused_worker_dict: dict[str, Worker] = {}

    @classmethod
    def env_keys(cls) -> list[str]:
        """The environment variables that are read at the start, each kept as attribute `_<name in lower case>`."""
        return [*_DEFAULTS, "MASTER_ADDR", "MASTER_PORT", visible_devices_keyword()]

    @property
    def rank(self) -> int:
        """Number of this worker in its group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Workers in the group."""
        return self._world_size

    def get_master_addr_port(self) -> tuple[str | None, str | None]:
        """Where the group meets: address and port, or (None, None) for a worker that is a world of its own."""
        return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")

    def get_cuda_visible_devices(self) -> str:
        """The mask of this process's accelerators, or "not set"."""
        return os.environ.get(visible_devices_keyword(), "not set")

    def get_fused_worker_by_name(self, worker_name: str) -> Worker | None:
        """The worker of another role in this process, None when no such role lives here."""
        return getattr(self, self.fused_worker_attr_name, {}).get(worker_name)

    @staticmethod
    def _get_node_ip() -> str:
        if os.environ.get("WG_BACKEND", "ray") != "ray":
            raise PlacementError(f"found WG_BACKEND={os.environ['WG_BACKEND']!r}; the only backend is 'ray'")
        return ray.util.get_node_ip_address().strip("[]")

    @staticmethod
    def _get_free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """Address of this node and a port that is free at this moment."""
        return self._get_node_ip(), str(self._get_free_port())

    def get_availale_master_addr_port(self) -> tuple[str, str]:
        """The old misspelling of `get_available_master_addr_port`."""
        warnings.warn("use get_available_master_addr_port", DeprecationWarning, stacklevel=2)
        return self.get_available_master_addr_port()

    # -- which part of an nd-mesh call is this worker's ---------------------------------------------------------

    def _meshes(self) -> dict[str, dict[str, Any]]:  # made late, for classes that skip __init__
        return self.__dict__.setdefault("_mesh_ranks", {"dispatch_dp_rank": {}, "collect_dp_rank": {}})

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """dp rank, and whether the result is collected, of each mesh; in the form that `set_dispatch_collect` takes."""
        return {kind: dict(known) for kind, known in self._meshes().items()}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Adopt the one mesh of an inner worker under a name of this worker's."""
        for rank, collects in zip(dispatch_dp_rank.values(), collect_dp_rank.values(), strict=True):
            self._register_dispatch_collect_info(mesh_name, rank, collects)

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Say once per mesh which rows this worker gets, and whether it hands back the result of its dp rank."""
        meshes = self._meshes()
        if mesh_name in meshes["dispatch_dp_rank"]:
            raise GroupError(f"mesh {mesh_name!r} is registered already; register each mesh once per worker")
        meshes["dispatch_dp_rank"][mesh_name], meshes["collect_dp_rank"][mesh_name] = dp_rank, is_collect

    def _of_mesh(self, kind: str, mesh_name: str) -> Any:
        known = self._meshes()[kind]
        if mesh_name not in known:
            raise GroupError(
                f"mesh {mesh_name!r} is not registered in {type(self).__name__}, which has {sorted(known)}; "
                "call _register_dispatch_collect_info in its __init__, and call a bound role by its own group"
            )
        return known[mesh_name]

    @register(Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """Data-parallel rank of this worker in the mesh."""
        return self._of_mesh("dispatch_dp_rank", mesh_name)

    @register(Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Whether this worker's result is collected."""
        return self.query_collect_info(mesh_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """`_query_collect_info` inside the process."""
        return self._of_mesh("collect_dp_rank", mesh_name)

    # -- functions of the driver's, run here --------------------------------------------------------------------

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`func(worker, *chunks)` on every worker; the results are joined."""
        return func(self, *args, **kwargs)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`func(*args)` on worker 0; its result."""
        return func(*args, **kwargs)
