"""What one version of the weights consists of: names, shapes, dtypes, their place in the chunks, a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from hocket.models.pieces import Pieces, Weight, as_tensor

Age = tuple[int, int]  # timeline and version
Key = tuple[str, int, int]  # sender, timeline, version
_HASHING = ThreadPoolExecutor(2, "digest")  # one thread reads memory at half the speed that it has


@dataclass(frozen=True)
class Chunk:
    """Consecutive bytes of a version: one piece for each tensor that has bytes in it, of at most `len` in all."""

    parts: tuple[NDArray[np.uint8], ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def copy(self) -> Chunk:
        """The same bytes in memory of their own."""
        return Chunk(tuple(part.copy() for part in self.parts))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: dtype as torch names it, `offset` and `nbytes` in the bytes of all tensors laid end to end."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """One version: who sent it, its tensors, the sizes of its chunks in bytes, a digest (xxh3-128).

    A trainer that went back to a checkpoint counts versions in a new `timeline`; those of an older one are older.
    """

    sender: str
    version: int
    tensors: tuple[TensorSpec, ...]
    chunks: tuple[int, ...]
    digest: str
    timeline: int = 0

    @property
    def key(self) -> Key:
        """Sender, timeline and version."""
        return self.sender, self.timeline, self.version

    @property
    def age(self) -> Age:
        """Timeline and version: the newer one is greater."""
        return self.timeline, self.version


def layout(weights: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Where each tensor goes when all are laid end to end."""
    specs: list[TensorSpec] = []
    end = 0
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        specs.append(TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), end, size))
        end += size
    return tuple(specs)


def places(tensors: Sequence[TensorSpec], size: int) -> list[list[tuple[int, slice]]]:
    """The parts of each chunk of `size` bytes, the last maybe shorter: a tensor's number, and which of its bytes."""
    chunks: list[list[tuple[int, slice]]] = []
    for number, spec in enumerate(tensors):
        at = spec.offset
        while at < spec.offset + spec.nbytes:
            stop = min(spec.offset + spec.nbytes, (at // size + 1) * size)
            chunks += [[] for _ in range(at // size + 1 - len(chunks))]
            chunks[-1].append((number, slice(at - spec.offset, stop - spec.offset)))
            at = stop
    return chunks


def cut(weights: Mapping[str, Tensor], size: int) -> list[Chunk]:
    """Chunks of `size` bytes, whose parts are views of the weights where those lie in main memory: send or copy them
    before the weights change."""
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in weights.values()]
    return [Chunk(tuple(flat[i][part] for i, part in parts)) for parts in places(layout(weights), size)]


def digest(tensors: Sequence[TensorSpec], chunks: Sequence[Chunk]) -> str:
    """Hash of names, shapes, dtypes, and the hash of each chunk's bytes."""
    hasher = xxhash.xxh3_128(repr([(t.name, t.shape, t.dtype) for t in tensors]).encode())
    for hashed in _HASHING.map(_hash, chunks):
        hasher.update(hashed)
    return hasher.hexdigest()


def _hash(chunk: Chunk) -> bytes:
    hasher = xxhash.xxh3_128()
    for part in chunk.parts:
        hasher.update(cast(Any, part))  # which lets other threads run meanwhile
    return hasher.digest()


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes and bytes, in order of name: equal exactly when two models are bit-equal."""
    hasher = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    return hasher.hexdigest()


def unpack(manifest: Manifest, chunks: Sequence[Chunk]) -> Iterator[tuple[str, Weight]]:
    """Each tensor by name, as a view of its chunk, or of pieces of several: copy, never keep or change it."""
    parts: dict[int, list[NDArray[np.uint8]]] = {}
    for chunk, inside in zip(chunks, places(manifest.tensors, max(manifest.chunks, default=1)), strict=True):
        for (number, _), part in zip(inside, chunk.parts, strict=True):
            parts.setdefault(number, []).append(part)
    for number, spec in enumerate(manifest.tensors):
        dtype = getattr(torch, spec.dtype)
        pieces = parts.get(number)
        if pieces is None:  # torch cannot view no bytes as another dtype
            yield spec.name, torch.empty(spec.shape, dtype=dtype)
        elif len(pieces) == 1:
            yield spec.name, as_tensor(pieces[0], dtype, spec.shape)
        else:
            yield spec.name, Pieces(spec.shape, dtype, tuple(pieces))
