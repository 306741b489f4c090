"""Looks after the workers of a group, without Ray's dashboard."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError

from hocket.errors import WorkerDied
from hocket.waiting import reason_of_death


class Handles(list[Any]):
    """Actor handles; the actors live as long as somebody keeps this list."""


class Watch:
    """Looks after the workers of a group from a thread, without Ray's dashboard.

    Each worker has one small call outstanding: a busy worker answers it between two others, a dead one at once.
    `dead` maps ranks to the errors; `on_death`, if given, is called with each.
    """

    def __init__(self, handles: Handles, who: Sequence[str], on_death: Callable[[WorkerDied], None] | None) -> None:
        self.dead: dict[int, WorkerDied] = {}
        self._handles, self._who, self._on_death = weakref.ref(handles), list(who), on_death
        self._asked: set[int] = set()

    def start(self, every: float) -> None:
        """Look every so many seconds, until the group or Ray is gone."""
        session = ray.get_runtime_context().get_worker_id()
        threading.Thread(target=self._loop, args=(every, session), name="hocket watch", daemon=True).start()

    def check(self) -> None:
        """Raise WorkerDied when a worker is dead."""
        for error in self.dead.values():
            raise WorkerDied(error.message)

    def _loop(self, every: float, session: str) -> None:
        while ray.is_initialized() and ray.get_runtime_context().get_worker_id() == session and self._ask():
            time.sleep(every)

    def _ask(self) -> bool:
        handles = self._handles()
        for rank, handle in enumerate(handles or ()):
            if rank not in self._asked and rank not in self.dead:
                self._asked.add(rank)
                future = handle.__ray_ready__.remote().future()
                future.add_done_callback(partial(self._answered, rank))
        return handles is not None

    def _answered(self, rank: int, done: Future[Any]) -> None:
        error = done.exception()
        self._asked.discard(rank)
        if isinstance(error, RayActorError) and self._handles() is not None:
            self.dead[rank] = WorkerDied(f"{self._who[rank]} died: {reason_of_death(error)}")
            if self._on_death:
                self._on_death(self.dead[rank])
