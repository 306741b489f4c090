"""What one version of the weights consists of: names, shapes, dtypes, their place in the chunks, a digest."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

Chunk = NDArray[np.uint8]
Key = tuple[str, int]  # sender and version

# A view at an odd offset changes the bits of a matrix product, so that tensors start at multiples of this.
ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: dtype as torch names it, `offset` and `nbytes` in the bytes of all chunks laid end to end."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """One version: who sent it, its tensors, the sizes of its chunks in bytes, xxh3-128 over layout and bytes."""

    sender: str
    version: int
    tensors: tuple[TensorSpec, ...]
    chunks: tuple[int, ...]
    digest: str

    @property
    def key(self) -> Key:
        """Sender and version."""
        return self.sender, self.version


def layout(weights: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Where each tensor goes when all are laid end to end."""
    specs: list[TensorSpec] = []
    end = 0
    for name, tensor in weights.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        end = offset + tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, offset, end - offset))
    return tuple(specs)


def digest(tensors: Sequence[TensorSpec], chunks: Sequence[Chunk]) -> str:
    """Hash of names, shapes, dtypes and bytes."""
    hasher = xxhash.xxh3_128(repr([(t.name, t.shape, t.dtype) for t in tensors]).encode())
    for chunk in chunks:
        hasher.update(cast(Any, chunk))
    return hasher.hexdigest()


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes and bytes, in order of name: equal exactly when two models are bit-equal."""
    hasher = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    return hasher.hexdigest()


def unpack(manifest: Manifest, chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor by name. A tensor inside one chunk is a view of it: copy, never keep or change it."""
    ends = np.cumsum(manifest.chunks)
    for spec in manifest.tensors:
        dtype = getattr(torch, spec.dtype)
        if spec.nbytes == 0:  # torch cannot view no bytes as another dtype
            yield spec.name, torch.empty(spec.shape, dtype=dtype)
            continue
        flat = _slice(chunks, ends, spec.offset, spec.offset + spec.nbytes)
        yield spec.name, flat.view(dtype).reshape(spec.shape)


def _slice(chunks: Sequence[Chunk], ends: NDArray[np.int64], start: int, stop: int) -> Tensor:
    first, last = (int(np.searchsorted(ends, at, "right")) for at in (start, stop - 1))
    parts: list[Chunk] = []
    for i in range(first, last + 1):
        base = int(ends[i]) - len(chunks[i])
        parts.append(chunks[i][max(start - base, 0) : stop - base])
    data = parts[0] if len(parts) == 1 else np.concatenate(parts)
    with warnings.catch_warnings():  # torch warns of read-only memory; nobody writes to it
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)
