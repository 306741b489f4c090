"""How makers and trainers that drive themselves find and call each other."""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from hocket.errors import WorkerDied
from hocket.waiting import Waiter, reason_of_death

_LOG = logging.getLogger("hocket")


class Peer(Protocol):
    """Another maker or trainer, by name."""

    name: str

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What its method returns. Raises what it raised, and WorkerDied when it is gone or silent too long."""
        ...

    def lost(self) -> str | None:
        """Why it is gone, None while nothing says so. Returns at once."""
        ...


Connect = Callable[[str], Peer]


class LocalPeer:
    """An object of this process: for tests, and for a loop without Ray."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self._target = target

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See Peer."""
        return getattr(self._target, method)(*args, **kwargs)

    def lost(self) -> str | None:
        """See Peer."""
        return None


class RayPeer:
    """A named actor, looked up when it is first called: it may be created after this one.

    `join_timeout` bounds the wait for it to appear, once for all calls, `timeout` each call, in seconds.
    """

    def __init__(self, name: str, *, namespace: str | None, timeout: float, join_timeout: float) -> None:
        self.name = name
        self._namespace = namespace
        self._join_timeout = min(join_timeout, timeout)
        self._late: float | None = None  # when it must have appeared, from the first call on
        self._waiter = Waiter(timeout=timeout, say=_LOG.info)
        self._lock = threading.Lock()
        self._actor: Any = None
        self._ping: Any = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See Peer."""
        ref = getattr(self._found(), method).remote(*args, **kwargs)
        return self._waiter.get(ref, who=self.name, what=method)

    def lost(self) -> str | None:
        """See Peer: an unanswered ping is out all the time, which fails as soon as Ray knows that the actor is gone."""
        with self._lock:
            if self._actor is None:
                return None
            if self._ping is None:
                self._ping = self._actor.ping.remote()
            if ray.wait([self._ping], timeout=0)[0]:
                try:
                    ray.get(self._ping)
                except RayError as error:
                    return reason_of_death(error)
                self._ping = None
        return None

    def _found(self) -> Any:
        with self._lock:
            self._late = self._late or time.monotonic() + self._join_timeout
            while self._actor is None:
                try:
                    self._actor = ray.get_actor(self.name, namespace=self._namespace)
                except ValueError:
                    if time.monotonic() > self._late:
                        near = _near(self.name, ray.util.list_named_actors(all_namespaces=False))
                        place = f"in namespace {self._namespace!r}" if self._namespace else "in this job's namespace"
                        raise WorkerDied(
                            f"no actor named {self.name!r} appeared {place} within {self._join_timeout:.0f} s{near}; "
                            "create it, or mend the name in the list that names it"
                        ) from None
                    time.sleep(0.1)
            return self._actor


def _near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (there is {close[0]!r})" if close else ""
