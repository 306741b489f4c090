"""The sending end: a snapshot between optimizer steps, cut into chunks."""

from __future__ import annotations

from collections.abc import Mapping

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
        tensors = layout(weights)
        data = self._fill(tensors, weights)
        chunks = [data[i : i + self._chunk_bytes] for i in range(0, len(data), self._chunk_bytes)]
        sizes = tuple(len(chunk) for chunk in chunks)
        return Manifest(self._sender, version, tensors, sizes, digest(tensors, chunks)), chunks

    def _fill(self, tensors: tuple[TensorSpec, ...], weights: Mapping[str, Tensor]) -> Chunk:
        size = tensors[-1].offset + tensors[-1].nbytes if tensors else 0
        if self._buffer.numel() != size:
            self._buffer = torch.zeros(size, dtype=torch.uint8)
        for spec in tensors:
            source = weights[spec.name].detach().contiguous().reshape(-1).view(torch.uint8)
            self._buffer[spec.offset : spec.offset + spec.nbytes].copy_(source)
        return np.asarray(self._buffer.numpy())
