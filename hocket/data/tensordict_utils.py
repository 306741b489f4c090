"""TensorDicts that hold tensors, jagged tensors, one Python value per row, and values for all rows.

What joining, cutting and metadata mean is decided here and does not change with the version of tensordict: values for
all rows are the first part's, jagged tensors keep the axis along which they are ragged, nothing changes its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from hocket.data.merge import same, union
from hocket.data.rows import Rows, blocks, from_rows, join_rows, mini_batches, ragged_dim, row_index
from hocket.data.wire import Leaves, Packed, freeze, pack, thaw, unpack
from hocket.errors import BatchConflict, BatchLookup

# -- making one


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> TensorDict:
    """A TensorDict of tensors (B, ...), of sequences of B Python values, and of values for all rows.

    Raises BatchConflict when the rows differ in number, a list holds tensors, or a nested tensor is not jagged and
    contiguous. Without tensors and sequences the batch size is [].
    """
    items: dict[str, Any] = {key: _per_row(key, value) for key, value in tensor_dict.items()}
    sizes = {key: value.shape[0] if len(value.shape) else None for key, value in items.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        raise BatchConflict(f"entries of one batch need the same first axis; found rows per entry {sizes}")
    made = TensorDict(items, batch_size=[cast(int, next(iter(sizes.values())))] if sizes else [])
    for key, value in (non_tensor_dict or {}).items():
        if key in items:
            raise BatchConflict(f"{key!r} is given both per row and for all rows; rename one")
        assign_non_tensor_data(made, key, value)
    return made


def _per_row(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested and (value.layout != torch.jagged or not value.values().is_contiguous()):
            raise BatchConflict(
                f"nested tensor {key!r} is not jagged and contiguous; see nested_tensor_from_tensor_list"
            )
        return value
    if isinstance(value, list | tuple | np.ndarray) and not isinstance(value, NonTensorStack):
        if len(value) and isinstance(value[0], Tensor):
            raise BatchConflict(f"{key!r} is a list of tensors; stack them, or see nested_tensor_from_tensor_list")
        return _stack(value)
    return value


def _stack(values: Any) -> NonTensorStack:
    wrapped: list[Any] = [value if isinstance(value, NonTensorData) else NonTensorData(value) for value in values]
    return NonTensorStack.from_list(wrapped)


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set a Python value for all rows, in place."""
    tensor_dict[key] = val if isinstance(val, NonTensorData) else NonTensorData(val)


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set one Python value per row from a list, in place; raises RuntimeError when there are not B of them."""
    tensor_dict[key] = val if isinstance(val, NonTensorStack) else _stack(val)


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """Set lists as one value per row, everything else as values for all rows; in place, returns the TensorDict."""
    for key, value in kwargs.items():
        per_row = isinstance(value, list | NonTensorStack)
        (assign_non_tensor_stack if per_row else assign_non_tensor_data)(tensor_dict, key, value)
    return tensor_dict


def list_of_dict_to_tensordict(list_of_dict: Sequence[Mapping[str, Any]]) -> TensorDict:
    """One row per dict: tensors are stacked, jagged where their shapes differ; everything else is kept as it is."""
    names = list_of_dict[0] if list_of_dict else {}
    columns = {key: [row[key] for row in list_of_dict] for key in names}
    return get_tensordict({key: _column(values) for key, values in columns.items()})


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return values
    same_shape = len({value.shape for value in values}) == 1
    return torch.stack(values) if same_shape else nested_tensor_from_tensor_list(values)


# -- looking into one


def unwrap_non_tensor_data(data: Any) -> Any:
    """The Python value of a NonTensorData, the list of values of a NonTensorStack, anything else as it is."""
    if isinstance(data, NonTensorStack):
        return data.tolist()
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """The Python value, or values per row, of that name; `default` when there is none."""
    return get(data, key, default)


def get(tensor_dict: TensorDict, key: str, default: Any = None) -> Any:
    """The tensor of that name, or the Python value, or the list of values per row; `default` when there is none."""
    return unwrap_non_tensor_data(_raw(tensor_dict)[key]) if key in tensor_dict.keys() else default  # noqa: SIM118


def get_keys(tensor_dict: TensorDict, keys: Sequence[str]) -> TensorDict:
    """A TensorDict of these names only; raises BatchLookup when one is missing."""
    if missing := sorted(set(keys) - set(tensor_dict.keys())):
        raise BatchLookup(f"the batch has no {missing}; it has {sorted(tensor_dict.keys())}")
    held = _raw(tensor_dict)
    return TensorDict({k: held[k] for k in keys}, batch_size=tensor_dict.batch_size, device=tensor_dict.device)


def pop(tensor_dict: TensorDict, key: str, default: Any = None) -> Any:
    """As `get`, and takes the name out."""
    found = get(tensor_dict, key, default)
    if key in tensor_dict.keys():  # noqa: SIM118
        del tensor_dict[key]
    return found


def pop_keys(tensor_dict: TensorDict, keys: Sequence[str]) -> TensorDict:
    """As `get_keys`, and takes the names out."""
    taken = get_keys(tensor_dict, keys)
    for key in keys:
        del tensor_dict[key]
    return taken


def _raw(tensor_dict: TensorDict) -> dict[str, Any]:
    return dict(cast(Any, tensor_dict.items()))


def split_kinds(tensor_dict: TensorDict) -> tuple[dict[str, Any], dict[str, list[Any]], dict[str, Any]]:
    """Tensors, lists of one value per row, and values for all rows, by name."""
    kinds: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {})
    for key, leaf in _raw(tensor_dict).items():
        place = 1 if isinstance(leaf, NonTensorStack) else 2 if isinstance(leaf, NonTensorData) else 0
        kinds[place][key] = unwrap_non_tensor_data(leaf)
    return kinds


def join_kinds(tensors: Mapping[str, Any], stacks: Mapping[str, Any], facts: Mapping[str, Any]) -> TensorDict:
    """The inverse of `split_kinds`; raises BatchConflict when a name stands for several things."""
    names = [*tensors, *stacks, *facts]
    if clash := sorted({name for name in names if names.count(name) > 1}):
        raise BatchConflict(f"{clash} are names of several things of the batch; rename or drop some first")
    return get_tensordict({**tensors, **{key: list(values) for key, values in stacks.items()}}, facts)


# -- rows


def index_select_tensor_dict(batch: TensorDict, indices: Rows) -> TensorDict:
    """The rows of these numbers, or where a mask is true."""
    return Leaves.of(batch).take(row_index(indices, len(batch))).thaw()


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """`chunks` equal blocks of rows; plain tensors are views. Raises BatchConflict when the rows do not divide."""
    return [Leaves.of(td).take(block).thaw() for block in blocks(len(td), chunks)]


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Rows of all parts in order; values for all rows, and a TensorDict without rows, are the first part's."""
    return Leaves.join([Leaves.of(part) for part in data]).thaw()


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Take the names of the second into the first, in place, all or none; returns the first.

    Raises BatchConflict when the rows differ, or a name of both holds different values (NaN equals NaN).
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchConflict(f"cannot join batch sizes {tensor_dict1.batch_size} and {tensor_dict2.batch_size}")
    mine = _raw(tensor_dict1)
    for key, leaf in union(mine, _raw(tensor_dict2)).items():
        if key not in mine:
            tensor_dict1[key] = leaf
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, Any], tensor_dict2: Mapping[str, Any]) -> dict[str, Any]:
    """As `union_tensor_dict`, for dicts of arrays."""
    tensor_dict1.update(union(tensor_dict1, tensor_dict2))
    return tensor_dict1


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Raise BatchConflict, an AssertionError, unless both hold the same names with the same values."""
    first, second = Leaves.of(tensordict1), Leaves.of(tensordict2)
    if first.keys() != second.keys() or first.batch_size != second.batch_size:
        found = [f"{sorted(part)} of batch size {part.batch_size}" for part in (first, second)]
        raise BatchConflict(f"the batches hold {found[0]} and {found[1]}")
    for key in first:
        if type(first[key]) is not type(second[key]) or not same(first[key], second[key]):
            raise BatchConflict(f"the batches differ in {key!r}")


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: dict[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """`epochs` passes in mini-batches; in order, or drawn by `seed` with dataloader_kwargs={"shuffle": True}."""
    numbers = mini_batches(len(tensordict), mini_batch_size, epochs, seed, dataloader_kwargs)
    return (index_select_tensor_dict(tensordict, part) for part in numbers)


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """The batch with as many of its first rows appended, in turn, as make its length a multiple; and their number."""
    rows = len(data)
    pad = -rows % size_divisor
    return (index_select_tensor_dict(data, [i % rows for i in range(rows + pad)]) if pad else data), pad


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """The batch without its last `pad_size` rows."""
    return Leaves.of(data).take(slice(0, len(data) - pad_size)).thaw() if pad_size else data


def contiguous(data: TensorDict) -> TensorDict:
    """A new TensorDict whose tensors are contiguous in memory, those inside Python values too."""
    items = {key: _contiguous(leaf) for key, leaf in _raw(data).items()}
    return TensorDict(items, batch_size=data.batch_size, device=data.device)


def _contiguous(leaf: Any) -> Any:
    if isinstance(leaf, NonTensorStack):
        return _stack([_contiguous(value) for value in leaf.tolist()])
    if isinstance(leaf, NonTensorData):
        return NonTensorData(_contiguous(leaf.data))
    if isinstance(leaf, dict):
        return {key: _contiguous(value) for key, value in cast(dict[Any, Any], leaf).items()}
    return leaf.contiguous() if isinstance(leaf, Tensor | TensorDict) else leaf


# -- nested tensors


def nested_tensor_from_tensor_list(tensors: Sequence[Tensor], ragged_idx: int | None = None) -> Tensor:
    """A jagged tensor of these rows, ragged along axis `ragged_idx` (counted with the row axis).

    None: the axis whose length differs between the rows, the last one when none does.
    """
    if not tensors:
        raise BatchConflict("a nested tensor needs at least one row")
    differ = [i + 1 for i, sizes in enumerate(zip(*(t.shape for t in tensors), strict=False)) if len(set(sizes)) > 1]
    dim = ragged_idx or (differ[0] if differ else tensors[0].dim())
    if len({t.dim() for t in tensors}) > 1 or set(differ) - {dim}:
        raise BatchConflict(f"rows may differ along axis {dim} only; found {sorted({tuple(t.shape) for t in tensors})}")
    return from_rows(tensors, dim)


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of all nested tensors in order, ragged along the same axis."""
    return join_rows(tensors)


def maybe_fix_3d_position_ids(data: TensorDict) -> None:
    """Mend, in place, `position_ids` (B, k, ragged) that forgot on the way that the last axis is the ragged one.

    tensordict's own pickling does that to them; this package's does not.
    """
    found: Any = get(data, "position_ids")
    if isinstance(found, Tensor) and found.is_nested and ragged_dim(found) == 1 and found.dim() == 3:
        values, offsets = cast(Any, found).values(), cast(Any, found).offsets()
        if values.shape[0] != int(offsets[-1]):
            data["position_ids"] = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)


# -- the wire, piece by piece


def serialize_single_tensor(obj: Tensor) -> Packed:
    """(dtype name, shape, bytes as uint8) of a tensor; the bytes are a view of its memory where possible."""
    return pack(obj)


def deserialize_single_tensor(arr: Packed) -> Tensor:
    """The inverse, as a copy."""
    return thaw(unpack(*arr))


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, Any]]:
    """(batch size, device, travelling form of each entry)."""
    items = {key: freeze(leaf) for key, leaf in Leaves.of(batch).items()}
    return tuple(batch.batch_size), None if batch.device is None else "cpu", items


def deserialize_tensordict(arr: tuple[tuple[int, ...], str | None, dict[str, Any]]) -> TensorDict:
    """The inverse, as a copy."""
    size, device, items = arr
    return Leaves(items, size, device).thaw()
