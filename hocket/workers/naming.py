"""Names of self-driven actors: their own, and how they find others by theirs."""

from __future__ import annotations

import os
from functools import cache

import ray

from hocket.workers.peers import Connect, Peer, RayPeer


def actor_name(kind: str) -> str:
    """The name that this actor was given, or one made of its kind and process."""
    given = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    return given or f"{kind}-{os.getpid()}"


def own_namespace() -> str | None:
    """RAY_NAMESPACE where it is set; None is the namespace of the job."""
    return os.environ.get("RAY_NAMESPACE") or None


def connector(namespace: str | None, timeout: float) -> Connect:
    """Gives the peer of a name, always the same one; a peer is looked up when it is first called."""

    @cache
    def connect(name: str) -> Peer:
        return RayPeer(name, namespace=namespace, timeout=timeout)

    return connect
