"""Names of self-driven actors: their own, and how they find others by theirs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import cache

import ray

from hocket.workers.peers import Connect, Peer, RayPeer


def actor_name(kind: str) -> str:
    """The name that this actor was given, or one made of its kind and process."""
    given = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    return given or f"{kind}-{os.getpid()}"


def speak() -> None:
    """Let an actor's notices reach its output, which Ray shows to the program; other libraries stay as they are."""
    log = logging.getLogger("hocket")
    if ray.is_initialized() and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(min(log.level or logging.INFO, logging.INFO))


class Patience:
    """Says what a wait is for when it takes long, and again each time that it has taken twice as long."""

    def __init__(self, first: float = 20.0) -> None:
        self._began, self._next = time.monotonic(), first

    def tell(self, what: Callable[[], str]) -> None:
        """Asked while waiting."""
        if (waited := time.monotonic() - self._began) > self._next:
            self._next *= 2
            logging.getLogger("hocket").warning("%s (%.0f s so far)", what(), waited)


def own_namespace() -> str | None:
    """RAY_NAMESPACE where it is set; None is the namespace of the job."""
    return os.environ.get("RAY_NAMESPACE") or None


def connector(namespace: str | None, timeout: float, *, join_timeout: float) -> Connect:
    """Gives the peer of a name, always the same one; a peer is looked up when it is first called."""

    @cache
    def connect(name: str) -> Peer:
        return RayPeer(name, namespace=namespace, timeout=timeout, join_timeout=join_timeout)

    return connect
