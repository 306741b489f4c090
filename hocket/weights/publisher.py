"""The sending end: weights described, and put where makers can fetch them, between two optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from hocket.weights.manifest import Manifest, cut, digest, layout
from hocket.weights.transport import Transport


class Publisher:
    """Sends named weights by a transport, straight from where they lie: there is no copy but the transport's own."""

    def __init__(self, sender: str, *, chunk_bytes: int) -> None:
        self._sender = sender
        self._chunk_bytes = chunk_bytes
        self._hashing = ThreadPoolExecutor(1, "digest")

    def send(
        self, weights: Mapping[str, Tensor], version: int, transport: Transport, *, timeline: int = 0
    ) -> tuple[Manifest, list[Any]]:
        """The manifest of `version`, and the transport's handles of its chunks; then the weights may change again."""
        tensors, chunks = layout(weights), cut(weights, self._chunk_bytes)
        hashed = self._hashing.submit(digest, tensors, chunks)
        transport.clear()  # the last version's chunks, before there are new ones
        handles = transport.send(chunks)
        sizes = tuple(map(len, chunks))
        return Manifest(self._sender, version, tensors, sizes, hashed.result(), timeline), handles
