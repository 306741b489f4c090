"""What arrived and nobody looked at yet: tensors and values in memory that others read too, and how to copy it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.data.rows import Index

Bytes = NDArray[np.uint8]


def private_bytes(parts: Sequence[Bytes]) -> Tensor:
    """The bytes of all parts, copied once into fresh memory: a flat uint8 tensor, aligned as torch aligns its own.

    numpy asks the system for huge pages and torch does not: the first touch is more than twice as fast.
    """
    room = np.empty(sum(part.size for part in parts) + 64, np.uint8)
    start = -room.ctypes.data % 64
    out = room[start : start + room.size - 64]
    np.concatenate(parts, out=out.reshape(sum(len(part) for part in parts), *parts[0].shape[1:]))
    return torch.from_numpy(out)


def private(value: Any, seen: set[int] | None = None) -> Any:
    """`value`, with arrays of its own where they were read-only, inside lists, tuples and dicts too."""
    seen = set() if seen is None else seen
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value if value.flags.writeable else value.copy()
    if type(cast(object, value)) is tuple:
        return tuple(private(item, seen) for item in value)
    if isinstance(value, dict | list | np.ndarray) and id(cast(object, value)) not in seen:
        box = cast(Any, value)
        seen.add(id(box))
        places: Any = list(box) if isinstance(box, dict) else range(len(box))
        for place in np.ndindex(box.shape) if isinstance(box, np.ndarray) else places:
            box[place] = private(box[place], seen)
    return cast(Any, value)


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A tensor as bytes: `data` is uint8 (rows, bytes of a row)."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    @staticmethod
    def of(tensor: Tensor) -> FrozenTensor:
        """A view of the tensor's own memory, where that is plain and on the CPU."""
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # of 0 or 1 elements any stride will do
        shape = tuple(tensor.shape)
        row = math.prod(shape[1:]) * tensor.element_size()
        return FrozenTensor(dtype_name(tensor.dtype), shape, flat.numpy().reshape(shape[0] if shape else 1, row))

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """As `kind_of` the tensor."""
        return self.dtype, self.shape[1:]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def take(self, index: Index) -> FrozenTensor:
        data = self.data[index_array(index)]
        return replace(self, data=data, shape=(len(data), *self.shape[1:]))

    @staticmethod
    def join(parts: Sequence[FrozenTensor]) -> Tensor:
        """Rows of all parts, each byte copied once."""
        first = parts[0]
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:]) if first.shape else ()
        return private_bytes([part.data for part in parts]).view(dtype_of(first.dtype)).reshape(shape)


@dataclass(frozen=True, slots=True)
class FrozenObjects:
    """Python values of a TensorDict: one per row (`stacked`), or one for all rows."""

    values: list[Any]
    stacked: bool

    def take(self, index: Index) -> FrozenObjects:
        if not self.stacked:
            return self
        return replace(self, values=[self.values[i] for i in np.arange(len(self.values))[index_array(index)]])

    def thaw(self) -> Any:
        from tensordict import NonTensorData, NonTensorStack

        values = [NonTensorData(private(value)) for value in self.values]
        return NonTensorStack.from_list(cast(Any, values)) if self.stacked else values[0]


def index_array(index: Index) -> Any:
    """The same index, for numpy."""
    return index if isinstance(index, slice) else index.numpy()


def kind_of(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """(dtype name, shape of a row): what tensors must agree in to be joined."""
    return dtype_name(tensor.dtype), tuple(tensor.shape[1:])


def dtype_name(dtype: torch.dtype) -> str:
    """As it travels: "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    return cast(torch.dtype, getattr(torch, name))
