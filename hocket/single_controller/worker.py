"""The base class of everything that lives in a worker process."""

from __future__ import annotations

import os
import socket

from hocket.errors import PlacementError
from hocket.single_controller.decorator import Dispatch, register

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Worker:
    """Knows its rank and the size of its group, from the environment that the group set.

    With none of the rank variables set it is rank 0 of 1; some but not all of them is a PlacementError.
    """

    def __init__(self) -> None:
        present = [name for name in RANK_VARIABLES if name in os.environ]
        if present and len(present) < len(RANK_VARIABLES):
            missing = sorted(set(RANK_VARIABLES) - set(present))
            raise PlacementError(f"found {present} in the environment but not {missing}; set all of them or none")
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))

    @register(Dispatch.RANK_ZERO)
    def where(self) -> tuple[str, int]:
        """Host name and process number."""
        return socket.gethostname(), os.getpid()

    @property
    def rank(self) -> int:
        """Number of this worker in its group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Workers in the group."""
        return self._world_size
