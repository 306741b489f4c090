"""Rows: what may stand between the brackets of a batch, columns with an entry per row, mini-batches, nested tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from hocket.errors import BatchConflict, BatchLookup

if TYPE_CHECKING:
    from tensordict import TensorDict

Column = NDArray[Any]
Facts = dict[str, Any]
Rows = slice | Sequence[int] | Sequence[bool] | NDArray[Any] | Tensor
Index = slice | NDArray[np.int64]  # a slice that steps forward, or row numbers from 0


@dataclass
class DataProtoItem:
    """One row: a TensorDict without a batch axis, one value per column, and the facts of its batch (shared)."""

    batch: TensorDict | None
    non_tensor_batch: Facts
    meta_info: Facts


def row_index(rows: Rows, length: int) -> Index:
    """Row numbers or a slice for one of `length` rows; raises BatchLookup, an IndexError, when a row is not there."""
    if isinstance(rows, slice):
        return rows if (rows.step or 1) > 0 else np.arange(*rows.indices(length))
    if not isinstance(rows, list | np.ndarray | Tensor | range):
        raise TypeError(f"rows are chosen by an int, slice, list, array or tensor, not by a {type(rows).__name__}")
    found = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows)
    found = found if found.size else found.astype(np.int64)  # an empty list says nothing of its kind
    if found.ndim != 1 or found.dtype.kind not in "iub" or (found.dtype == bool and len(found) != length):
        raise BatchLookup(f"cannot choose among {length} rows by {found.dtype} of shape {found.shape}")
    index = np.flatnonzero(found) if found.dtype == bool else found.astype(np.int64)
    if len(index) and not -length <= index.min() <= index.max() < length:
        raise BatchLookup(f"there are {length} rows; asked for rows {index.min()} to {index.max()}")
    return index % max(length, 1)


def blocks(rows: int, count: int, *, uneven: bool = False) -> list[slice]:
    """`count` blocks of `rows` rows, equal or, with `uneven`, of sizes that differ by one at most."""
    if count < 1:
        raise BatchConflict(f"cannot split rows into {count} parts; use at least 1")
    if rows % count and not uneven:
        raise BatchConflict(f"cannot split {rows} rows into {count} equal parts; use a multiple of {count}")
    size, longer = divmod(rows, count)
    return [slice(a, b) for a, b in pairwise(i * size + min(i, longer) for i in range(count + 1))]


def as_column(values: Sequence[Any] | Column) -> Column:
    """A numpy array with one entry per row; lists become object arrays, also when the entries are lists."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # one by one: numpy would make a matrix of equally long lists
        column[i] = value
    return column


def mini_batches(rows: int, size: int, epochs: int, seed: int | None, options: Facts | None) -> Iterator[list[int]]:
    """Row numbers of every mini-batch; BatchConflict when rows do not divide. `options` are for torch's DataLoader."""
    if size < 1 or rows % size:
        raise BatchConflict(f"{rows} rows do not divide into mini-batches of {size}")
    noise = None if seed is None else torch.Generator().manual_seed(seed)
    loader = DataLoader(cast(Any, range(rows)), size, collate_fn=list, generator=noise, **(options or {}))
    return (part for _ in range(epochs) for part in loader)


# -- nested (ragged) tensors: torch cannot cut or join them without losing where they are ragged


def ragged_dim(nested: Tensor) -> int:
    """The one axis of a jagged tensor whose length differs from row to row; 0 for the strided layout."""
    return cast(int, cast(Any, nested)._ragged_idx) if nested.layout == torch.jagged else 0


def pieces(nested: Any) -> tuple[Any, ...]:
    """What `from_pieces` makes it of again: its values, and how they lie."""
    if nested.layout == torch.jagged:
        return nested.values(), nested.offsets(), nested.lengths(), ragged_dim(nested)
    nested = nested.contiguous()
    sizes, strides = nested._nested_tensor_size(), nested._nested_tensor_strides()
    return nested.values(), sizes, strides, nested._nested_tensor_storage_offsets()


def from_pieces(values: Tensor, sizes: Tensor, other: Any, last: Any) -> Tensor:
    """The inverse of `pieces`, in the memory of `values`."""
    if isinstance(last, Tensor):
        return cast(Any, torch)._nested_view_from_buffer(values, sizes, other, last)
    return torch.nested.nested_tensor_from_jagged(values, sizes, other, jagged_dim=last)


def from_rows(rows: Sequence[Tensor], dim: int) -> Tensor:
    """A nested tensor of at least one row: jagged along axis `dim` (counted with the row axis), strided when 0."""
    if not dim:
        return torch.nested.as_nested_tensor(list(rows))
    return _jagged(rows, torch.tensor([row.shape[dim - 1] for row in rows], device=rows[0].device), dim)


def _jagged(values: Sequence[Tensor], sizes: Tensor, dim: int) -> Tensor:
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(values), dim=dim - 1), offsets, jagged_dim=dim)


def take_nested(nested: Tensor, index: Index) -> Tensor:
    """The chosen rows, ragged along the same axis; a slice of a jagged tensor without steps is a view of it."""
    chosen, dim = np.arange(nested.size(0))[index], ragged_dim(nested)
    if not len(chosen):  # torch has no strided one without rows
        values = torch.empty([0] * max(nested.dim() - 1, 1), dtype=nested.dtype, device=nested.device)
        return from_pieces(values, torch.zeros(1, dtype=torch.int64, device=nested.device), None, dim or 1)
    if dim and isinstance(index, slice) and index.step in (None, 1):
        values, offsets, lengths, _ = pieces(nested)
        start, stop = int(chosen[0]), int(chosen[-1]) + 1
        first, last = int(offsets[start]), int(offsets[stop])
        values = values.narrow(dim - 1, first, last - first).contiguous()
        lengths = None if lengths is None else lengths[start:stop]
        return from_pieces(values, offsets[start : stop + 1] - first, lengths, dim)
    rows = nested.unbind(0)
    return from_rows([rows[i] for i in chosen], dim)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts in order; raises BatchConflict when they are not ragged along the same axis."""
    full = [part for part in parts if part.size(0)]
    kinds = {(part.dtype, part.dim(), ragged_dim(part)) for part in full}
    if len(kinds) > 1:
        found = sorted(map(str, kinds))
        raise BatchConflict(f"nested tensors differ in (dtype, axes, ragged axis) {found}; make them agree")
    if not full:
        return parts[0]
    dim, whole = ragged_dim(full[0]), [pieces(part) for part in full]
    if not dim or any(lengths is not None for _, _, lengths, _ in whole):
        return from_rows([row for part in full for row in part.unbind(0)], dim)
    values = [held.narrow(dim - 1, int(ends[0]), int(ends[-1] - ends[0])) for held, ends, _, _ in whole]
    return _jagged(values, torch.cat([ends.diff() for _, ends, _, _ in whole]), dim)
