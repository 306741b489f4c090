"""How chunks get from the trainer to makers: the sender turns them into handles, the receiver fetches those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hocket.weights.manifest import Chunk


class Transport(Protocol):
    """One way for chunks to travel. Handles are small and picklable where the transport leaves the process."""

    def send(self, chunks: Sequence[Chunk]) -> list[Any]:
        """A handle per chunk, whose bytes are copied here; it stays readable until `clear` or the next send."""
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
        """See Transport. Memory of the last version is used again where it fits: fresh pages cost more than copies."""
        old = InProcess._table
        if [[len(part) for part in chunk.parts] for chunk in old] != [[len(p) for p in c.parts] for c in chunks]:
            old = InProcess._table = tuple(chunk.copy() for chunk in chunks)
        else:
            for mine, new in zip(old, chunks, strict=True):
                for kept, part in zip(mine.parts, new.parts, strict=True):
                    np.copyto(kept, part)
        return list(range(len(chunks)))

    def clear(self) -> None:
        """See Transport: the memory stays, to be used again."""

    def fetch(self, handle: int, timeout: float) -> Chunk:
        """See Transport."""
        return InProcess._table[handle]
