"""Nested (ragged) tensors by their rows. torch cannot cut or join them without losing where they are ragged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.data.frozen import Bytes, FrozenTensor, dtype_name, dtype_of, index_array, private_bytes
from hocket.data.rows import Index
from hocket.errors import BatchConflict


def ragged_dim(nested: Tensor) -> int:
    """The one axis of a jagged tensor whose length differs from row to row; 0 for the strided layout."""
    return cast(int, cast(Any, nested)._ragged_idx) if nested.layout == torch.jagged else 0


def from_rows(rows: Sequence[Tensor], dim: int) -> Tensor:
    """A nested tensor of at least one row: jagged along axis `dim` (counted with the row axis), strided when 0."""
    if not dim:
        return torch.nested.as_nested_tensor(list(rows))
    sizes = [row.shape[dim - 1] for row in rows]
    offsets = torch.tensor([0, *accumulate(sizes)], device=rows[0].device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(rows), dim=dim - 1), offsets, jagged_dim=dim)


def no_rows(dtype: torch.dtype, dims: int, *, dim: int, device: torch.device | None = None) -> Tensor:
    """A nested tensor without rows; always jagged, because torch has no strided one."""
    values = torch.empty([0] * max(dims - 1, 1), dtype=dtype, device=device)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0], device=device), jagged_dim=dim or 1)


def take_rows(nested: Tensor, index: Index) -> Tensor:
    """The chosen rows, ragged along the same axis; a slice of a jagged tensor with adjoining rows is a view of it."""
    if isinstance(index, slice):
        start, stop, step = index.indices(nested.size(0))
        if step == 1 and start < stop and nested.layout == torch.jagged and cast(Any, nested).lengths() is None:
            return _narrow(nested, start, stop)
        chosen = list(range(start, stop, step))
    else:
        chosen = cast(list[int], index.tolist())
    if not chosen:
        return no_rows(nested.dtype, nested.dim(), dim=ragged_dim(nested), device=nested.device)
    rows = nested.unbind(0)
    return from_rows([rows[i] for i in chosen], ragged_dim(nested))


def _narrow(nested: Tensor, start: int, stop: int) -> Tensor:
    dim, offsets = ragged_dim(nested), cast(Tensor, cast(Any, nested).offsets())
    first, last = int(offsets[start]), int(offsets[stop])
    values = nested.values().narrow(dim - 1, first, last - first).contiguous()
    return torch.nested.nested_tensor_from_jagged(values, offsets[start : stop + 1] - first, jagged_dim=dim)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts in order; raises BatchConflict when they are not ragged along the same axis."""
    _agree([(part.dtype, part.dim(), ragged_dim(part)) for part in parts if part.size(0)])
    rows = [row for part in parts for row in part.unbind(0)]
    full = [part for part in parts if part.size(0)]
    return from_rows(rows, ragged_dim(full[0])) if full else parts[0]


def _agree(kinds: Sequence[tuple[object, ...]]) -> None:
    if len(set(kinds)) > 1:
        found = sorted(map(str, set(kinds)))
        raise BatchConflict(f"nested tensors differ in (dtype, axes, ragged axis) {found}; make them agree")


@dataclass(frozen=True, slots=True)
class FrozenNested:
    """A nested tensor as the bytes of its rows, one after another; `shapes` is int64 (rows, axes of a row)."""

    dtype: str
    ragged: int
    shapes: NDArray[np.int64]
    data: Bytes

    @staticmethod
    def of(tensor: Tensor) -> FrozenNested:
        """A view of the tensor's own memory, where that holds its rows without gaps."""
        tensor, dim = tensor.detach(), ragged_dim(tensor)
        rows = tensor.unbind(0)
        shapes = np.array([row.shape for row in rows], np.int64).reshape(len(rows), tensor.dim() - 1)
        whole = tensor.values() if dim == 1 else None
        if whole is None or whole.numel() != shapes.prod(1).sum():
            whole = torch.cat([row.reshape(-1) for row in rows]) if rows else torch.empty(0, dtype=tensor.dtype)
        return FrozenNested(dtype_name(tensor.dtype), dim, shapes, FrozenTensor.of(whole.reshape(-1)).data.reshape(-1))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def take(self, index: Index) -> FrozenNested:
        chosen = np.arange(len(self.shapes))[index_array(index)]
        sizes = self.shapes.prod(1) * dtype_of(self.dtype).itemsize
        ends = np.cumsum(sizes)
        spans = [(ends[i] - sizes[i], ends[i]) for i in chosen]
        if spans and isinstance(index, slice) and index.step in (None, 1):
            spans = [(spans[0][0], spans[-1][1])]  # a view
        pieces = [self.data[start:end] for start, end in spans or [(0, 0)]]
        data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return replace(self, shapes=self.shapes[chosen], data=data)

    @staticmethod
    def join(parts: Sequence[FrozenNested]) -> Tensor:
        """Rows of all parts, as `join_rows`. Each byte is copied once if axis 1 is the ragged one."""
        _agree([(part.dtype, part.shapes.shape[1] + 1, part.ragged) for part in parts if len(part.shapes)])
        dim = next((part.ragged for part in parts if len(part.shapes)), parts[0].ragged)
        shapes = np.concatenate([part.shapes for part in parts])
        flat = private_bytes([part.data for part in parts]).view(dtype_of(parts[0].dtype))
        if not len(shapes):
            return no_rows(flat.dtype, shapes.shape[1] + 1, dim=dim)
        if dim == 1:
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(shapes[:, 0])]))
            values = flat.reshape(int(offsets[-1]), *shapes[0, 1:].tolist())
            return torch.nested.nested_tensor_from_jagged(values, offsets)
        rows = zip(flat.split(shapes.prod(1).tolist()), shapes.tolist(), strict=True)
        return from_rows([row.reshape(shape) for row, shape in rows], dim)
