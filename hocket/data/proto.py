"""DataProto, the one container that travels: tensors, Python columns and run-wide facts of one batch.

A batch that came from another process is private to the receiver and opened lazily (`hocket.data.wire`): its tensors
are copied out of shared memory when they are first looked at. Until then a slice of it is not a view: it becomes a
copy of its own rows when it is looked at.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.data import disk
from hocket.data.merge import join_facts, union
from hocket.data.rows import Column, DataProtoItem, Facts, Rows, as_column, blocks, mini_batches, row_index
from hocket.data.wire import WIRE, Leaves, check_wire, private, thaw
from hocket.errors import BatchConflict, BatchLookup

if TYPE_CHECKING:
    from tensordict import TensorDict

Columns = Mapping[str, Column] | None
Meta = Mapping[str, Any] | None
Keys = Collection[str] | None

_OPENING = threading.RLock()  # two threads that look into one batch must not each make a copy of it


class _Config:
    """Settings of all batches of this process; the key names the fact that switches padding on for one batch."""

    auto_padding_key = "_hocket_auto_padding"
    _on = False

    @property
    def auto_padding(self) -> bool:
        """Whether dispatch pads every batch to a multiple of the number of workers (or env HOCKET_AUTO_PADDING=1)."""
        return self._on or os.environ.get("HOCKET_AUTO_PADDING", "").upper() in ("1", "TRUE")

    @auto_padding.setter
    def auto_padding(self, enabled: bool) -> None:
        if type(cast(object, enabled)) is not bool:
            raise TypeError(f"auto_padding is True or False, not {enabled!r}")
        self._on = enabled


DataProtoConfig = _Config()


class DataProto:
    """One batch of B rows: `batch`, a TensorDict of tensors (B, ...), `non_tensor_batch`, numpy arrays of length B
    (text, identities), and `meta_info`, facts about all rows. It shares what it is given, and has dicts of its own.

    What changes a batch in place (pop, rename, union, reorder, padding, to) gives it a new TensorDict: ask for `batch`
    again afterwards. Raises BatchConflict when a tensor or column does not have B rows.
    """

    def __init__(
        self, batch: TensorDict | None = None, non_tensor_batch: Columns = None, meta_info: Meta = None
    ) -> None:
        self._batch: TensorDict | Leaves | None = batch
        self.non_tensor_batch = dict(non_tensor_batch or {})
        self.meta_info = dict(meta_info or {})
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | Column] | None = None,
        meta_info: Meta = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch from tensors (B, ...), sequences of length B, and facts; the arguments stay untouched."""
        tensors, columns = tensors or {}, {key: as_column(values) for key, values in (non_tensors or {}).items()}
        kinds = {key: type(value).__name__ for key, value in tensors.items() if not torch.is_tensor(value)}
        if kinds or tensors.keys() & columns.keys():
            raise BatchConflict(
                f"found {kinds or 'a name twice'}; give tensors as `tensors`, the rest as `non_tensors`, no name twice"
            )
        sizes = {key: tensor.size(0) if tensor.dim() else None for key, tensor in tensors.items()}
        if len(set(sizes.values())) > 1 or None in sizes.values():
            raise BatchConflict(f"tensors of one batch need the same first axis; found rows per tensor {sizes}")
        if num_batch_dims != 1:
            raise BatchConflict(f"a batch has one batch axis, not {num_batch_dims}; see fold_batch_dim")
        leaves = Leaves(tensors, [cast(int, next(iter(sizes.values())))]) if tensors else None
        padding = {DataProtoConfig.auto_padding_key: True} if auto_padding else {}
        return cls(cast(Any, leaves), columns, {**(meta_info or {}), **padding})

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | Column], meta_info: Meta = None, auto_padding: bool = False
    ) -> Self:
        """Make a batch from one dict of tensors and numpy arrays; BatchConflict for anything else in it."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        columns = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        if other := sorted(data.keys() - tensors.keys() - columns.keys()):
            raise BatchConflict(f"from_single_dict takes tensors and numpy arrays, {other} are neither; see from_dict")
        return cls.from_dict(tensors, columns, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: Meta = None, num_batch_dims: int = 1) -> Self:
        """The inverse of `to_tensordict`: stacks of Python values become columns, single ones facts."""
        from hocket.data.tensordict_utils import split_kinds

        tensors, columns, facts = split_kinds(tensor_dict)
        return cls.from_dict(tensors, columns, {**facts, **(meta_info or {})}, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict of everything: columns as stacks of Python values, facts as single ones."""
        from hocket.data.tensordict_utils import join_kinds

        return join_kinds(self.tensors(), self.non_tensor_batch, self.meta_info)

    # -- what it holds

    @property
    def batch(self) -> TensorDict | None:
        """The tensors. Of a batch that arrived from another process they are copied here, once."""
        with _OPENING:
            if isinstance(self._batch, Leaves):
                self._batch = self._batch.thaw()
            return self._batch

    @batch.setter
    def batch(self, batch: TensorDict | None) -> None:
        self._batch = batch

    def check_consistency(self) -> None:
        """Raise BatchConflict unless all tensors and columns have the same number of rows."""
        if self._batch is not None and len(self._batch.batch_size) != 1:
            raise BatchConflict(f"a batch has one batch axis, found batch size {tuple(self._batch.batch_size)}")
        size = len(self)
        for key, column in self.non_tensor_batch.items():
            if not isinstance(cast(object, column), np.ndarray):
                raise BatchConflict(f"column {key!r} is a {type(column).__name__}, not a numpy array; see from_dict")
            if len(column) != size:
                raise BatchConflict(f"column {key!r} has {len(column)} rows, the batch has {size}; make them equal")

    def __len__(self) -> int:
        if self._batch is not None:
            return self._batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows of {self.keys()}, meta_info {list(self.meta_info)})"

    def keys(self) -> list[str]:
        """Names of all tensors and columns."""
        return [*self.leaves(), *self.non_tensor_batch]

    def tensor(self, key: str) -> Tensor:
        """The tensor of that name; BatchLookup naming what there is when it is missing."""
        with _OPENING:
            held = cast(Facts, {} if self._batch is None else self._batch)
            if key not in held.keys():  # noqa: SIM118  (a TensorDict refuses to be asked directly)
                raise BatchLookup(f"the batch has no tensor {key!r}; it has {sorted(self.keys())}")
            if isinstance(held, Leaves):
                held[key] = thaw(held[key])
            return held[key]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in a plain dict."""
        return {key: self.tensor(key) for key in self.leaves()}

    def leaves(self) -> Leaves:
        """The tensors as they are, in a container of their own; empty when there is no batch."""
        return Leaves({}, [len(self)]) if self._batch is None else Leaves.of(self._batch)

    def _like(self, leaves: Facts, columns: Facts, meta: Facts) -> Self:
        """A batch of the same class, and with what a subclass added, that holds these instead."""
        made = object.__new__(type(self))
        batch = leaves if self._batch is not None or leaves else None
        made.__dict__ = self.__dict__ | {"_batch": batch, "non_tensor_batch": columns, "meta_info": meta}
        return made

    def _become(self, other: Self) -> Self:
        self.__dict__.update(other.__dict__)
        return self

    # -- rows

    @overload
    def __getitem__(self, rows: int | np.integer[Any]) -> DataProtoItem: ...
    @overload
    def __getitem__(self, rows: Rows) -> Self: ...
    def __getitem__(self, rows: int | np.integer[Any] | Rows) -> DataProtoItem | Self:
        """An int gives a DataProtoItem; a slice a batch of views; row numbers or a mask a copy."""
        self.check_consistency()  # columns that were set directly may have another number of rows
        one = isinstance(rows, int | np.integer)
        index: Any = row_index([int(rows)] if one else rows, len(self))
        index = index[0] if one else index
        columns = {key: column[index] for key, column in self.non_tensor_batch.items()}
        if one:
            return DataProtoItem(None if self.batch is None else self.batch[int(index)], columns, self.meta_info)
        return self._like(self.leaves().take(index), columns, dict(self.meta_info))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """The rows from `start` to `end`, as views."""
        return self[slice(start, end, step)]

    def select_idxs(self, idxs: Rows) -> Self:
        """The rows of these numbers, or where this mask is true, as a copy."""
        return self[idxs]

    def reorder(self, indices: Tensor) -> None:
        """Put the rows into this order, in place."""
        if sorted(torch.as_tensor(indices).tolist()) != list(range(len(self))):
            raise BatchConflict(f"an order of {len(self)} rows names each of them once; select_idxs chooses rows")
        self._become(self[indices])

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` blocks of rows as views, equal (else BatchConflict), or one row longer where padding is enabled."""
        return [self[block] for block in blocks(len(self), chunks, uneven=self.is_padding_enabled())]

    def split(self, split_size: int) -> list[Self]:
        """Blocks of `split_size` rows as views; the last may be shorter."""
        if split_size < 1:
            raise BatchConflict(f"cannot split into blocks of {split_size} rows; use at least 1")
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Rows of all parts in order, as the class of the first; facts are merged, "metrics" become lists.

        Parts that lie side by side in one tensor's memory (what `chunk` gave) come back as a view of it, uncopied.
        Raises BatchConflict when names, dtypes, widths or facts of the parts disagree (`schema.collate` pads widths).
        """
        if isinstance(cast(object, data), DataProto):
            raise BatchConflict("found one batch; give a list of batches to join")
        leaves = Leaves.join([part.leaves() for part in data])
        for part in data:
            part.check_consistency()
        if len({part._batch is None for part in data}) > 1:
            raise BatchConflict("some parts have a batch of tensors and others have none; give all of them one")
        columns = Leaves.join([Leaves(part.non_tensor_batch, [len(part)]) for part in data], "columns ")
        return data[0]._like(leaves, dict(columns), join_facts([part.meta_info for part in data]))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """All rows `repeat_times` times: copies of a row side by side, or whole batches one after another."""
        rows = np.arange(len(self))
        return self[rows.repeat(repeat_times) if interleave else np.tile(rows, repeat_times)]

    def sample_level_repeat(self, repeat_times: Sequence[int] | NDArray[Any] | Tensor) -> Self:
        """Row i `repeat_times[i]` times, which may be 0."""
        times = torch.as_tensor(repeat_times).long().cpu()
        if times.shape != (len(self),) or bool((times < 0).any()):
            raise BatchConflict(f"wanted a number >= 0 for each of {len(self)} rows, found {times.tolist()}")
        return self[np.arange(len(self)).repeat(times.numpy())]

    def unfold_column_chunks(self, n_split: int, split_keys: Keys = None) -> Self:
        """Cut the second axis of `split_keys` into `n_split` parts that become rows; the other rows are repeated."""
        rows, held = self.repeat(n_split), {**self.tensors(), **self.non_tensor_batch}
        for key in [key for key in split_keys or () if key in held]:
            value = held[key] if held[key].ndim > 1 else np.array(held[key].tolist(), object)  # rows of lists
            if value.ndim < 2 or value.shape[1] % n_split:
                raise BatchConflict(f"axis 1 of {key!r} {tuple(value.shape)} cannot be cut into {n_split} parts")
            place = cast(Facts, rows._batch if isinstance(value, Tensor) else rows.non_tensor_batch)
            place[key] = value.reshape(len(rows), value.shape[1] // n_split, *value.shape[2:])
        return rows

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Facts | None = None
    ) -> Iterator[Self]:
        """`epochs` passes in mini-batches; in order, or drawn by `seed` with dataloader_kwargs={"shuffle": True}."""
        return map(self.select_idxs, mini_batches(len(self), mini_batch_size, epochs, seed, dataloader_kwargs))

    def is_padding_enabled(self) -> bool:
        """Whether dispatch may pad this batch."""
        return DataProtoConfig.auto_padding or bool(self.meta_info.get(DataProtoConfig.auto_padding_key))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the last row, or of the first for "first", in place."""
        if padding_size < 0 or padding_candidate not in ("", "first", "last"):
            raise BatchConflict(f"found {padding_size} rows of {padding_candidate!r}; give 0 or more of first or last")
        rows = [*range(len(self)), *[0 if padding_candidate == "first" else len(self) - 1] * padding_size]
        self._become(self[rows])

    # -- names

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> Self:
        """A batch of only these tensors (shared), columns and facts (copied with `deepcopy`); None means all of a kind.

        Raises BatchLookup for an unknown tensor; other unknown names are passed over.
        """
        leaves = self.leaves()
        if missing := sorted(set(batch_keys or ()) - leaves.keys()):
            raise BatchLookup(f"the batch has no {missing}; it has {sorted(self.keys())}")
        chosen = Leaves(_only(leaves, batch_keys), leaves.batch_size, leaves.device)
        rest = _only(self.non_tensor_batch, non_tensor_batch_keys), _only(self.meta_info, meta_info_keys)
        return self._like(chosen, *(copy.deepcopy(rest) if deepcopy else rest))

    def pop(self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None) -> Self:
        """Move these tensors, columns and facts out into a batch of their own; BatchLookup when one is missing."""
        asked = set(batch_keys or ()), set(non_tensor_batch_keys or ()), set(meta_info_keys or ())
        there = self.leaves().keys(), self.non_tensor_batch.keys(), self.meta_info.keys()
        for kind, keys, names in zip(("tensors", "columns", "facts"), asked, there, strict=True):
            if missing := sorted(keys - names):
                raise BatchLookup(f"the batch has no {missing} among its {kind} {sorted(map(str, names))}")
        moved = self.select(*asked)
        moved._batch = moved._batch if batch_keys else None
        self._become(self.select(there[0] - asked[0], there[1] - asked[1], there[2] - asked[2]))
        return moved

    def rename(self, old_keys: str | Keys = None, new_keys: str | Keys = None) -> Self:
        """Give tensors other names, in place."""
        old, new = ([keys] if isinstance(keys, str) else list(cast(Any, keys)) for keys in (old_keys, new_keys))
        self.select(old)  # they are all there
        leaves, names = self.leaves(), dict(zip(old, new, strict=False))
        renamed = {names.get(key, key): leaf for key, leaf in leaves.items()}
        if len(old) != len(new) or len(renamed) < len(leaves):
            raise BatchConflict(f"cannot rename {old} to {new} among {sorted(leaves)}; each once")
        self._batch = Leaves(renamed, leaves.batch_size, leaves.device)
        return self

    def union(self, other: DataProto) -> Self:
        """Take in the names of `other`, in place; BatchConflict, and nothing done, when rows or values differ."""
        sizes = {len(data) for data in (self, other) if data._batch is not None or data.non_tensor_batch}
        if len(sizes) > 1:
            raise BatchConflict(f"cannot join batches of {len(self)} and {len(other)} rows; they need equal rows")
        joined = Leaves(union(self.leaves(), other.leaves()), list(sizes) or [0], self.leaves().device)
        columns = union(self.non_tensor_batch, other.non_tensor_batch)
        if clash := sorted(joined.keys() & columns.keys()):
            raise BatchConflict(f"{clash}: a tensor in one batch, a column in the other; rename one")
        return self._become(self._like(joined, columns, union(self.meta_info, other.meta_info)))

    # -- elsewhere

    def to(self, device: str | torch.device) -> Self:
        """Move the tensors to `device`, in place."""
        if self._batch is not None:
            leaves = {key: thaw(leaf).to(device) for key, leaf in self.leaves().items()}
            self._batch = Leaves(leaves, self._batch.batch_size, torch.device(device))
        return self

    def __getstate__(self) -> Facts:
        """The state that travels; `hocket.data.wire` says how."""
        return self.__dict__ | {"wire": WIRE, "_batch": None if self._batch is None else self.leaves()}

    def __setstate__(self, state: Facts) -> None:
        check_wire(state.get("wire"))
        self.__dict__.update(private({key: value for key, value in state.items() if key != "wire"}))

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch to a file, for `load_from_disk`; BatchError when it holds objects of other classes."""
        leaves = None if self._batch is None else self.leaves()
        disk.write(Path(filepath), {"batch": leaves, "columns": self.non_tensor_batch, "facts": self.meta_info})

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read what `save_to_disk` wrote, on the CPU. No code in the file runs: anything else is a BatchError."""
        state = disk.read(Path(filepath))
        return DataProto(state["batch"], state["columns"], state["facts"])

    def print_size(self, prefix: str = "") -> None:
        """Print how much memory tensors and columns take."""
        kinds: tuple[Facts, Facts] = (self.leaves(), self.non_tensor_batch)
        sizes = (sum(getattr(value, "nbytes", 0) for value in kind.values()) / 2**30 for kind in kinds)
        print(prefix, "tensors: {:.3f} GiB, columns: {:.3f} GiB".format(*sizes))  # noqa: T201  (its name says so)

    def get_data_info(self) -> str:
        """Names, dtypes and shapes of what it holds, as text."""
        lines = [f"{len(self)} rows"]
        for key, value in [*self.tensors().items(), *self.non_tensor_batch.items()]:
            shape = "nested" if getattr(value, "is_nested", False) else tuple(getattr(value, "shape", ()))
            lines.append(f"{key}: {getattr(value, 'dtype', type(value).__name__)} {shape}")
        return "\n".join(lines + [f"{key}: {type(value).__name__}" for key, value in self.meta_info.items()])


def _only(there: Mapping[str, Any], keys: Keys) -> Facts:
    return {key: value for key, value in there.items() if keys is None or key in keys}
