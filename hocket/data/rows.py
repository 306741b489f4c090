"""Choosing rows: what may stand between the brackets of a batch, columns with one entry per row, mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
Index = slice | Tensor  # a slice that steps forward, or row numbers from 0: int64 on the CPU
Batch = TypeVar("Batch")

_NONE = np.zeros(0, np.int64)


@dataclass
class DataProtoItem:
    """One row: a TensorDict without a batch axis, one value per column, and the facts of its batch (shared)."""

    batch: TensorDict | None
    non_tensor_batch: Facts
    meta_info: Facts


def row_index(rows: Rows, length: int) -> Index:
    """Row numbers or a slice for one of `length` rows; raises BatchLookup, an IndexError, when a row is not there."""
    if isinstance(rows, slice):
        return rows if (rows.step or 1) > 0 else torch.tensor(range(*rows.indices(length)), dtype=torch.int64)
    if not isinstance(rows, list | np.ndarray | Tensor | range):
        raise TypeError(f"rows are chosen by an int, slice, list, array or tensor, not by a {type(rows).__name__}")
    found = rows.cpu() if isinstance(rows, Tensor) else torch.tensor(np.asarray(rows if len(rows) else _NONE))
    if found.dim() != 1 or found.is_floating_point() or (found.dtype == torch.bool and len(found) != length):
        raise BatchLookup(f"cannot choose among {length} rows by {found.dtype} of shape {tuple(found.shape)}")
    index = found.nonzero()[:, 0] if found.dtype == torch.bool else found.long()
    if len(index) and not -length <= int(index.min()) <= int(index.max()) < length:
        raise BatchLookup(f"there are {length} rows; asked for rows {int(index.min())} to {int(index.max())}")
    return torch.where(index < 0, index + length, index)


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


def mini_batches(
    rows: int,
    size: int,
    choose: Callable[[list[int]], Batch],
    epochs: int,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Batch]:
    """`epochs` passes over all rows, `size` at a time: in order, or drawn by `seed` with options={"shuffle": True}.

    `options` go to torch's DataLoader. Raises BatchConflict when the rows do not divide.
    """
    if size < 1 or rows % size:
        raise BatchConflict(f"{rows} rows do not divide into mini-batches of {size}")
    noise = None if seed is None else torch.Generator().manual_seed(seed)
    numbers = cast(Any, range(rows))
    loader = DataLoader(numbers, size, collate_fn=cast(Any, choose), generator=noise, **(options or {}))
    return (part for _ in range(epochs) for part in loader)
