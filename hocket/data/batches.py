"""Cuts, joins and weighs batches of any type for dispatch: DataProto, TensorDict, and what registers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hocket.data.proto import DataProto
from hocket.data.wire import FrozenTensor, Leaves, is_tensordict, plain
from hocket.errors import BatchConflict

_SMALL = 64  # what an object without a size of its own is taken to weigh


class _Type(NamedTuple):
    chunk: Callable[[Any, int], Sequence[Any]]
    concat: Callable[[Sequence[Any]], Any]


_TYPES: dict[type, _Type] = {DataProto: _Type(DataProto.chunk, DataProto.concat)}


def register_batch_type(cls: type, *, chunk: Callable[[Any, int], Any], concat: Callable[[Any], Any]) -> None:
    """Let dispatch cut values of `cls` and its subclasses by `chunk(value, n)`, and join n >= 1 by `concat(parts)`."""
    _TYPES[cls] = _Type(chunk, concat)


def is_batch(value: object) -> bool:
    """Whether `chunk` and `concat` know its type."""
    return is_tensordict(value) or any(cls in _TYPES for cls in type(value).__mro__)


def _type(value: object) -> _Type:
    if found := [_TYPES[cls] for cls in type(value).__mro__ if cls in _TYPES]:
        return found[0]
    if is_tensordict(value):
        from hocket.data.tensordict_utils import chunk_tensordict, concat_tensordict

        return _Type(chunk_tensordict, concat_tensordict)
    name = type(value).__name__
    raise BatchConflict(f"a {name} is no batch; pass a DataProto or TensorDict, or see register_batch_type")


def chunk(value: Any, n: int) -> list[Any]:
    """`n` parts of a batch, in order; raises BatchConflict when it is no batch or does not divide."""
    parts = list(_type(value).chunk(value, n))
    if len(parts) != n:
        raise BatchConflict(f"{type(value).__name__} was cut into {len(parts)} parts, wanted {n}; mend its chunk")
    return parts


def concat(parts: Sequence[Any]) -> Any:
    """One batch of the parts' rows, in order; raises BatchConflict when there are none, or they do not fit together."""
    if len({_type(part) for part in parts}) != 1:
        found = sorted({type(part).__name__ for part in parts})
        raise BatchConflict(f"cannot join parts of types {found}; give at least one, and all of one type of batch")
    return _type(parts[0]).concat(parts)


def rows(batch: Any, start: int, stop: int) -> Any:
    """The rows from `start` to before `stop`, as views; of a registered type, `batch[start:stop]`."""
    return Leaves.of(batch).take(slice(start, stop)).thaw() if is_tensordict(batch) else batch[start:stop]


def nbytes(value: Any, *, depth: int = 6) -> int:
    """About how many bytes a value takes on the wire, without opening or pickling it.

    Of a long list, tuple, dict or object column 64 entries are weighed, and `depth` levels of nesting.
    """
    if isinstance(value, Tensor | FrozenTensor) or (isinstance(value, np.ndarray) and value.dtype != object):
        return value.nbytes
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    held = [value.leaves(), value.non_tensor_batch, value.meta_info] if isinstance(value, DataProto) else plain(value)
    if not depth or not isinstance(held, Mapping | list | tuple | np.ndarray):
        return _SMALL
    entries = list(held.values() if isinstance(held, Mapping) else held)
    weighed = [nbytes(entry, depth=depth - 1) for entry in entries[:: max(len(entries) // 64, 1)]]
    return _SMALL + sum(weighed) * len(entries) // max(len(weighed), 1)
