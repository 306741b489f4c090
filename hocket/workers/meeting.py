"""Rank environments: written by hand, or by `env_info`, whose rank 0 chooses the address inside its own actor."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, cast

import ray

from hocket.errors import WorkerDied
from hocket.single_controller.processes import PortHolder
from hocket.waiting import Waiter
from hocket.workers.checks import check_options, whole
from hocket.workers.factories import set_dist_env

AUTO = "auto"


def env_info(world_size: int) -> list[dict[str, str]]:
    """The rank environments of a group of `world_size` actors; where they meet is chosen by the actor of rank 0.

    Raises ConfigError for a size that is not a whole number of 1 or more.
    """
    check_options({"world_size": world_size}, {"world_size": whole(1)})
    group = secrets.token_hex(8)
    return [
        {
            "local_rank": "0",  # Ray shows an actor its own devices only
            "rank": str(rank),
            "world_size": str(world_size),
            "master_port": group,
            "master_addr": AUTO,
        }
        for rank in range(world_size)
    ]


def meet(info: Mapping[str, str], *, namespace: str | None, timeout: float) -> None:
    """Export this actor's rank environment, having learned from rank 0 where the group meets.

    A world of one meets nobody, and needs no environment. Raises WorkerDied when the group does not meet in time.
    """
    if info.get("master_addr") == AUTO:
        if info.get("world_size") == "1":
            return
        info = {**info, **_where(info, namespace=namespace, timeout=timeout)}
    set_dist_env(info)


_KEPT: list[Any] = []  # what must live as long as this process: the board's handle, the port of rank 0


class _Board:
    """Holds the address of a group until its members have it."""

    def __init__(self) -> None:
        self._address: dict[str, str] = {}

    def post(self, address: dict[str, str]) -> None:
        self._address = address

    def read(self) -> dict[str, str]:
        return self._address


def _where(info: Mapping[str, str], *, namespace: str | None, timeout: float) -> dict[str, str]:
    name = f"hocket-meeting-{info['master_port']}"
    board = (
        cast(Any, ray.remote)(num_cpus=0)(_Board).options(name=name, namespace=namespace, get_if_exists=True).remote()
    )
    _KEPT.append(board)
    waiter = Waiter(timeout=timeout)
    if info["rank"] == "0":
        _KEPT.append(holder := PortHolder())
        address = {"master_addr": ray.util.get_node_ip_address(), "master_port": str(holder.port())}
        waiter.get(board.post.remote(address), who="the board where ranks meet", what="take the address of rank 0")
        return address
    end = time.monotonic() + timeout
    while not (address := waiter.get(board.read.remote(), who="the board where ranks meet", what="tell an address")):
        if time.monotonic() > end:
            raise WorkerDied(f"rank 0 of this group did not say where it is within {timeout:.0f} s; start its actor")
        time.sleep(0.1)
    return cast(dict[str, str], address)
