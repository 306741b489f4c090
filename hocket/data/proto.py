"""DataProto, the one container that travels: tensors, Python columns and run-wide facts of one batch.

`batch` is a TensorDict of tensors that share their first axis B, `non_tensor_batch` holds numpy arrays of
length B (text, identities, rows of a data file), `meta_info` holds facts about the batch as a whole.

A batch that came from another process is private to the receiver and opened lazily (`hocket.data.wire`): its tensors
are copied out of shared memory when they are first looked at. Until then a slice of it is not a view: it becomes a
copy of its own rows when it is looked at.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.data.frozen import index_array, private
from hocket.data.merge import join_columns, join_facts, union
from hocket.data.rows import Column, DataProtoItem, Facts, Index, Rows, as_column, blocks, mini_batches, row_index
from hocket.data.wire import WIRE, Leaves, check_wire, thaw
from hocket.errors import BatchConflict, BatchLookup

if TYPE_CHECKING:
    from tensordict import TensorDict

Columns = Mapping[str, Column]
Keys = Collection[str] | None

_OPENING = threading.RLock()  # two threads that look into one batch must not each make a copy of it


class _Switch(type):
    _on = False

    @property
    def auto_padding(cls) -> bool:
        """Whether dispatch pads every batch to a multiple of the number of workers (or env HOCKET_AUTO_PADDING=1)."""
        return cls._on or os.environ.get("HOCKET_AUTO_PADDING", "").upper() in ("1", "TRUE")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if type(cast(object, enabled)) is not bool:
            raise TypeError(f"auto_padding is True or False, not {enabled!r}")
        cls._on = enabled


class DataProtoConfig(metaclass=_Switch):
    """Settings of all batches of this process; the key names the fact that switches padding on for one batch."""

    auto_padding_key = "_hocket_auto_padding"


class DataProto:
    """One batch of B rows. It shares the tensors and arrays that it is given, and has dicts of its own.

    What changes a batch in place (pop, rename, union, reorder, padding, to) gives it a new TensorDict: ask for `batch`
    again afterwards. Raises BatchConflict when a tensor or column does not have B rows.
    """

    def __init__(
        self, batch: TensorDict | None = None, non_tensor_batch: Columns | None = None, meta_info: Facts | None = None
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
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch from tensors (B, ...), sequences of length B, and facts; the arguments stay untouched."""
        kinds = {key: type(value).__name__ for key, value in (tensors or {}).items() if not torch.is_tensor(value)}
        if kinds or (tensors or {}).keys() & (non_tensors or {}).keys():
            raise BatchConflict(
                f"found {kinds or 'a name twice'}; give tensors as `tensors`, the rest as `non_tensors`, no name twice"
            )
        sizes = {key: tensor.size(0) if tensor.dim() else None for key, tensor in (tensors or {}).items()}
        if len(set(sizes.values())) > 1 or None in sizes.values():
            raise BatchConflict(f"tensors of one batch need the same first axis; found rows per tensor {sizes}")
        if num_batch_dims != 1:
            raise BatchConflict(f"a batch has one batch axis, not {num_batch_dims}; see fold_batch_dim")
        made = cls(meta_info=dict(meta_info or {}))
        made.meta_info |= {DataProtoConfig.auto_padding_key: True} if auto_padding else {}
        made._batch = Leaves(tensors, [cast(int, next(iter(sizes.values())))]) if tensors else None
        made.non_tensor_batch = {key: as_column(values) for key, values in (non_tensors or {}).items()}
        made.check_consistency()
        return made

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | Column], meta_info: Facts | None = None, auto_padding: bool = False
    ) -> Self:
        """Make a batch from one dict of tensors and numpy arrays; BatchConflict for anything else in it."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        columns = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        if other := sorted(data.keys() - tensors.keys() - columns.keys()):
            raise BatchConflict(f"from_single_dict takes tensors and numpy arrays, {other} are neither; see from_dict")
        return cls.from_dict(tensors, columns, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: Facts | None = None, num_batch_dims: int = 1) -> Self:
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
        if isinstance(self._batch, Leaves):
            with _OPENING:
                self._batch = self._batch.thaw() if isinstance(self._batch, Leaves) else self._batch
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
        if key not in self.leaves():
            raise BatchLookup(f"the batch has no tensor {key!r}; it has {sorted(self.keys())}")
        with _OPENING:
            if isinstance(self._batch, Leaves):
                self._batch[key] = thaw(self._batch[key])
            return cast(Facts, self._batch)[key]

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
        if not isinstance(rows, int | np.integer):
            return self._take(row_index(rows, len(self)))
        i = int(cast(Tensor, row_index([int(rows)], len(self))))
        batch = None if self.batch is None else self.batch[i]
        return DataProtoItem(batch, {key: column[i] for key, column in self.non_tensor_batch.items()}, self.meta_info)

    def _take(self, index: Index) -> Self:
        self.check_consistency()  # columns that were set directly may have another number of rows
        columns = {key: column[index_array(index)] for key, column in self.non_tensor_batch.items()}
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
        """`chunks` blocks of rows as views, each with facts of its own.

        Raises BatchConflict when the rows do not divide, unless padding is enabled: then sizes differ by one at most.
        """
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
        leaves, first = Leaves.join([part.leaves() for part in data]), data[0]
        for part in data:
            part.check_consistency()
        columns = join_columns([part.non_tensor_batch for part in data])
        if len({part._batch is None for part in data}) > 1:
            raise BatchConflict("some parts have a batch of tensors and others have none; give all of them one")
        return first._like(leaves, columns, join_facts([part.meta_info for part in data]))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """All rows `repeat_times` times: copies of a row side by side, or whole batches one after another."""
        rows = torch.arange(len(self))
        return self._take(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | NDArray[Any] | Tensor) -> Self:
        """Row i `repeat_times[i]` times, which may be 0."""
        times = torch.as_tensor(repeat_times)
        if times.shape != (len(self),) or bool((times < 0).any()):
            raise BatchConflict(f"wanted a number >= 0 for each of {len(self)} rows, found {times.tolist()}")
        return self._take(torch.arange(len(self)).repeat_interleave(times.long().cpu()))

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
        return mini_batches(len(self), mini_batch_size, self.select_idxs, epochs, seed, dataloader_kwargs)

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
        """A batch of only these tensors (shared), columns and facts; None means all of that kind.

        Raises BatchLookup for an unknown tensor; other unknown names are passed over. `deepcopy` copies columns and
        facts, not tensors.
        """
        leaves = self.leaves()
        if missing := sorted(set(batch_keys or ()) - leaves.keys()):
            raise BatchLookup(f"the batch has no {missing}; it has {sorted(self.keys())}")
        chosen = Leaves(_only(leaves, batch_keys), leaves.batch_size, leaves.device)
        rest = _only(self.non_tensor_batch, non_tensor_batch_keys), _only(self.meta_info, meta_info_keys)
        return self._like(chosen, *(copy.deepcopy(rest) if deepcopy else rest))

    def pop(self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None) -> Self:
        """Move these tensors, columns and facts out into a batch of their own; BatchLookup when one is missing."""
        asked = [set(keys or ()) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        there = [set(kind) for kind in (self.leaves(), self.non_tensor_batch, self.meta_info)]
        for kind, keys, names in zip(("tensors", "columns", "facts"), asked, there, strict=True):
            if missing := sorted(keys - names):
                raise BatchLookup(f"the batch has no {missing} among its {kind} {sorted(map(str, names))}")
        left = [names - keys for keys, names in zip(asked, there, strict=True)]
        moved, kept = (self.select(names[0], names[1], names[2]) for names in (asked, left))
        self._become(kept)
        if not batch_keys:
            moved._batch = None
        return moved

    def rename(self, old_keys: str | Keys = None, new_keys: str | Keys = None) -> Self:
        """Give tensors other names, in place."""
        old, new = ([keys] if isinstance(keys, str) else list(cast(Any, keys)) for keys in (old_keys, new_keys))
        self.select(old)  # they are all there
        leaves = self.leaves()
        names = [dict(zip(old, new, strict=False)).get(key, key) for key in leaves]
        if len(old) != len(new) or len(set(names)) < len(names):
            raise BatchConflict(f"cannot rename {old} to {new} among {sorted(leaves)}; each once")
        self._batch = Leaves(dict(zip(names, leaves.values(), strict=True)), leaves.batch_size, leaves.device)
        return self

    def union(self, other: DataProto) -> Self:
        """Take in the names of `other`, in place, all or none.

        Raises BatchConflict when a name of both holds different values (NaN equals NaN), or the rows differ in number.
        """
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
            leaves = {key: thaw(leaf).to(device) for key, leaf in self._batch.items()}
            self._batch = Leaves(leaves, self._batch.batch_size, torch.device(device))
        return self

    def __getstate__(self) -> Facts:
        """The state that travels; `hocket.data.wire` says how."""
        return self.__dict__ | {"wire": WIRE, "_batch": None if self._batch is None else self.leaves()}

    def __setstate__(self, state: Facts) -> None:
        check_wire(state.get("wire"))
        own = {key: private(value) for key, value in state.items() if key not in ("wire", "_batch")}
        self.__dict__.update(own, _batch=state["_batch"])

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch to a file, for `load_from_disk`."""
        Path(filepath).write_bytes(pickle.dumps(self, protocol=5))

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read what `save_to_disk` wrote. It is a pickle: load only files that you trust."""
        return pickle.loads(Path(filepath).read_bytes())

    def print_size(self, prefix: str = "") -> None:
        """Print how much memory tensors and columns take."""
        kinds: tuple[Facts, Facts] = (self.leaves(), self.non_tensor_batch)
        sizes = (sum(getattr(value, "nbytes", 0) for value in kind.values()) / 2**30 for kind in kinds)
        print(prefix, "tensors: {:.3f} GiB, columns: {:.3f} GiB".format(*sizes))  # noqa: T201  (its name says so)

    def get_data_info(self) -> str:
        """Names, dtypes and shapes of what it holds, as text."""
        held = {**self.tensors(), **self.non_tensor_batch}
        shapes = {k: "nested" if getattr(v, "is_nested", False) else tuple(v.shape) for k, v in held.items()}
        lines = [f"{key}: {getattr(value, 'dtype', 'TensorDict')} {shapes[key]}" for key, value in held.items()]
        lines += [f"{key}: {type(value).__name__}" for key, value in self.meta_info.items()]
        return "\n".join([f"{len(self)} rows", *lines])


def _only(there: Mapping[str, Any], keys: Keys) -> Facts:
    return {key: value for key, value in there.items() if keys is None or key in keys}
