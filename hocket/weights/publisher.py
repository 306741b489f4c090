"""The sending end: a snapshot between optimizer steps, cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from hocket.weights.manifest import Chunk, Manifest, TensorSpec, digest, layout


class Publisher:
    """Copies named weights into one kept buffer and describes it; the buffer holds until the next snapshot."""

    def __init__(self, sender: str, *, chunk_bytes: int) -> None:
        self._sender = sender
        self._chunk_bytes = chunk_bytes
        self._buffer = torch.zeros(0, dtype=torch.uint8)

    def snapshot(self, weights: Mapping[str, Tensor], version: int) -> tuple[Manifest, list[Chunk]]:
        """The manifest of `version` and its chunks, views of the kept buffer of at most `chunk_bytes` each."""
        return self.copy(weights, version)()

    def copy(self, weights: Mapping[str, Tensor], version: int) -> Callable[[], tuple[Manifest, list[Chunk]]]:
        """Copy the weights as they are now; what is returned gives the snapshot, and may be called while they change.

        It must have been called before the next copy, which reuses the buffer.
        """
        tensors = layout(weights)
        data = self._fill(tensors, weights)

        def describe() -> tuple[Manifest, list[Chunk]]:
            chunks = [data[i : i + self._chunk_bytes] for i in range(0, len(data), self._chunk_bytes)]
            sizes = tuple(len(chunk) for chunk in chunks)
            return Manifest(self._sender, version, tensors, sizes, digest(tensors, chunks)), chunks

        return describe

    def _fill(self, tensors: tuple[TensorSpec, ...], weights: Mapping[str, Tensor]) -> Chunk:
        size = tensors[-1].offset + tensors[-1].nbytes if tensors else 0
        if self._buffer.numel() != size:
            self._buffer = torch.zeros(size, dtype=torch.uint8)
        for spec in tensors:
            source = weights[spec.name].detach().contiguous().reshape(-1).view(torch.uint8)
            self._buffer[spec.offset : spec.offset + spec.nbytes].copy_(source)
        return np.asarray(self._buffer.numpy())
