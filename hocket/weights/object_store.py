"""Chunks through Ray's object store: each is put once and shared by all makers of a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from hocket.errors import WeightsGone, WeightSyncError
from hocket.weights.manifest import Chunk


class ObjectStore:
    """See Transport. The store holds a chunk as long as somebody holds its handle: the sender keeps the last."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def send(self, chunks: Sequence[Chunk]) -> list[Any]:
        """See Transport."""
        self._kept = [ray.put(chunk) for chunk in chunks]
        return self._kept

    def clear(self) -> None:
        """See Transport. Makers that hold chunks keep them; one that joins late gets the next version."""
        self._kept = []

    def fetch(self, handle: Any, timeout: float) -> Chunk:
        """See Transport. Raises WeightSyncError when the sender is gone or the fetch takes too long."""
        try:
            return cast(Chunk, ray.get(handle, timeout=timeout))
        except GetTimeoutError as error:
            raise WeightSyncError(f"a chunk of weights did not arrive within {timeout:.0f} s") from error
        except ObjectLostError as error:
            raise WeightsGone(f"a chunk of weights is gone because its sender ended: {error}") from error
