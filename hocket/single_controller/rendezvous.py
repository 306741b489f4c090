"""Where the workers of a group meet: an address and a port on the node of rank 0, held until rank 0 binds it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hocket.errors import PlacementError


class PortHolder:
    """Holds a free port of this node.

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
