"""How chunks get from the trainer to makers: the sender turns them into handles, the receiver fetches those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hocket.weights.manifest import Chunk


class Transport(Protocol):
    """One way for chunks to travel. Handles are small and picklable where the transport leaves the process."""

    def send(self, chunks: Sequence[Chunk]) -> list[Any]:
        """A handle per chunk; what it stands for stays readable until the next send."""
        ...

    def clear(self) -> None:
        """Let go of what the last send made available."""
        ...

    def fetch(self, handle: Any, timeout: float) -> Chunk:
        """The bytes behind a handle, for reading only."""
        ...


class InProcess:
    """Maker and trainer share a process (local, colocated): the handle is a number in this process's table."""

    _table: tuple[Chunk, ...] = ()

    def send(self, chunks: Sequence[Chunk]) -> list[int]:
        """See Transport."""
        InProcess._table = tuple(chunks)
        return list(range(len(chunks)))

    def clear(self) -> None:
        """See Transport."""
        InProcess._table = ()

    def fetch(self, handle: int, timeout: float) -> Chunk:
        """See Transport."""
        return InProcess._table[handle]
