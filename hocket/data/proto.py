"""DataProto, the one container that travels: tensors, Python columns and run-wide facts of one batch.

`batch` is a TensorDict of tensors that share their first axis B, `non_tensor_batch` holds numpy arrays of
length B (text, identities, rows of a data file), `meta_info` holds facts about the batch as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from hocket.errors import BatchError

Column = NDArray[Any]
WireTensor = tuple[str, tuple[int, ...], NDArray[np.uint8]]


@dataclass
class DataProto:
    """One batch of B rows.

    Raises BatchError when a tensor or column does not have B rows.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Column] = field(default_factory=lambda: cast(dict[str, Column], {}))
    meta_info: dict[str, Any] = field(default_factory=lambda: cast(dict[str, Any], {}))

    def __post_init__(self) -> None:
        size = len(self)
        for key, column in self.non_tensor_batch.items():
            if len(column) != size:
                raise BatchError(f"column {key!r} has {len(column)} rows, the batch has {size}; make them equal")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | Column] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Make a batch from tensors (B, ...), sequences of length B, and facts; the arguments stay untouched."""
        tensors = dict(tensors or {})
        sizes = {key: tensor.shape[0] if tensor.dim() else None for key, tensor in tensors.items()}
        if len(set(sizes.values())) > 1 or None in sizes.values():
            raise BatchError(f"tensors of one batch need the same first axis; found rows per tensor {sizes}")
        rows = next((tensor.shape[0] for tensor in tensors.values()), 0)
        batch = TensorDict(tensors, batch_size=[rows]) if tensors else None
        columns = {key: as_column(values) for key, values in (non_tensors or {}).items()}
        return cls(batch, columns, dict(meta_info or {}))

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, rows: slice | Sequence[int] | Column | Tensor) -> DataProto:
        """The chosen rows: a slice gives views, a list or array of indices (or a bool mask) gives copies."""
        if isinstance(rows, slice):
            index: slice | Tensor = rows
            column_index: Any = rows
        else:
            index = torch.as_tensor(np.asarray(rows) if len(rows) else np.zeros(0, np.int64))
            column_index = index.numpy()
        batch = None if self.batch is None else cast(TensorDict, self.batch[index])
        return DataProto(batch, {k: v[column_index] for k, v in self.non_tensor_batch.items()}, dict(self.meta_info))

    def __iter__(self) -> Iterator[DataProto]:
        return (self[i : i + 1] for i in range(len(self)))

    def tensor(self, key: str) -> Tensor:
        """The tensor of that name; BatchError naming what there is when it is missing."""
        if self.batch is None or key not in self.batch.keys():  # noqa: SIM118  (TensorDict iterates rows)
            raise BatchError(f"the batch has no tensor {key!r}; it has {sorted(self.keys())}")
        return cast(Tensor, self.batch[key])

    def keys(self) -> list[str]:
        """Names of all tensors and columns."""
        return [*(cast(Any, self.batch.keys()) if self.batch is not None else ()), *self.non_tensor_batch]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in a plain dict."""
        return {} if self.batch is None else {key: self.tensor(key) for key in cast(Any, self.batch.keys())}

    def select(self, keys: Sequence[str]) -> DataProto:
        """A new batch that holds only the named tensors and columns."""
        if missing := sorted(set(keys) - set(self.keys())):
            raise BatchError(f"the batch has no {missing}; it has {sorted(self.keys())}")
        tensors = {k: v for k, v in self.tensors().items() if k in keys}
        columns = {k: v for k, v in self.non_tensor_batch.items() if k in keys}
        return DataProto.from_dict(tensors, columns, self.meta_info)

    def union(self, other: DataProto) -> DataProto:
        """A new batch with the names of both; a name in both must hold the same values."""
        if len(self) != len(other):
            raise BatchError(f"cannot join batches of {len(self)} and {len(other)} rows; they need equal rows")
        for key in set(self.keys()) & set(other.keys()):
            if not self._same(other, key):
                raise BatchError(f"both batches hold {key!r} with different values; rename or drop one of them")
        return DataProto.from_dict(
            {**self.tensors(), **other.tensors()},
            {**self.non_tensor_batch, **other.non_tensor_batch},
            {**self.meta_info, **other.meta_info},
        )

    def _same(self, other: DataProto, key: str) -> bool:
        if key in self.non_tensor_batch:
            pairs = zip(self.non_tensor_batch[key], other.non_tensor_batch.get(key, ()), strict=False)
            return key in other.non_tensor_batch and all(np.array_equal(a, b) for a, b in pairs)
        if key in other.non_tensor_batch or self.tensor(key).dtype != other.tensor(key).dtype:
            return False
        return torch.equal(self.tensor(key), other.tensor(key))

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Rows of all parts in order. The parts need the same names, and tensors of the same width
        (`schema.collate` joins rows of different length)."""
        if not parts:
            raise BatchError("cannot join an empty list of batches; give at least one")
        names = sorted(parts[0].keys())
        for i, part in enumerate(parts):
            if sorted(part.keys()) != names:
                raise BatchError(f"part {i} holds {sorted(part.keys())}, part 0 holds {names}; they must agree")
        tensors = {key: _cat(key, [part.tensor(key) for part in parts]) for key in parts[0].tensors()}
        columns = {
            key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in parts[0].non_tensor_batch
        }
        meta: dict[str, Any] = {}
        for part in parts:
            meta |= part.meta_info
        return DataProto.from_dict(tensors, columns, meta)

    def chunk(self, count: int) -> list[DataProto]:
        """`count` equal blocks of rows, as views; BatchError when the rows do not divide."""
        if count < 1 or len(self) % count:
            raise BatchError(f"cannot split {len(self)} rows into {count} equal parts; use a multiple of {count}")
        return self.split(len(self) // count) if len(self) else [self] * count

    def split(self, rows: int) -> list[DataProto]:
        """Blocks of `rows` rows, as views; the last may be shorter."""
        if rows < 1:
            raise BatchError(f"cannot split into blocks of {rows} rows; use at least 1")
        return [self[start : start + rows] for start in range(0, len(self), rows)]

    def repeat(self, times: int) -> DataProto:
        """Each row `times` times, copies beside one another."""
        return self[np.repeat(np.arange(len(self)), times)]

    def to(self, device: str | torch.device) -> DataProto:
        """The same batch with its tensors on `device`."""
        batch = None if self.batch is None else self.batch.to(device)
        return DataProto(batch, self.non_tensor_batch, self.meta_info)

    def __getstate__(self) -> dict[str, Any]:
        wire = {key: tensor_to_wire(tensor) for key, tensor in self.tensors().items()}
        return {"tensors": wire, "rows": len(self), "columns": self.non_tensor_batch, "meta": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {key: tensor_from_wire(wire) for key, wire in state["tensors"].items()}
        self.batch = TensorDict(tensors, batch_size=[state["rows"]]) if tensors else None
        self.non_tensor_batch = {key: np.array(column) for key, column in state["columns"].items()}
        self.meta_info = state["meta"]


def as_column(values: Sequence[Any] | Column) -> Column:
    """A numpy array with one entry per row; lists become object arrays, also when the entries are lists."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # one by one: numpy would make a matrix of equally long lists
        column[i] = value
    return column


def _cat(key: str, parts: Sequence[Tensor]) -> Tensor:
    kinds = {(part.dtype, tuple(part.shape[1:])) for part in parts}
    if len(kinds) > 1:
        raise BatchError(
            f"the parts hold {key!r} as {sorted(map(str, kinds))} (dtype, shape of a row); they must agree: "
            "pad rows of different length with hocket.data.schema.collate"
        )
    return torch.cat(list(parts))


def tensor_to_wire(tensor: Tensor) -> WireTensor:
    """(dtype name, shape, bytes): numpy knows no bfloat16, and pickle 5 sends a numpy buffer without a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy()


def tensor_from_wire(wire: WireTensor) -> Tensor:
    """A private copy: Ray hands out read-only memory that all its readers share."""
    name, shape, data = wire
    tensor = torch.empty(shape, dtype=getattr(torch, name))
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
    return tensor
