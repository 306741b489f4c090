"""How a batch travels between processes, and how it lies in memory until somebody looks into it.

A tensor goes as (dtype, shape, bytes), the bytes as a numpy array that pickle protocol 5 hands out of band: Ray
writes them once into its object store, and every reader sees the same read-only memory. What arrives stays *frozen*:
rows can be chosen, parts joined, and all sent on, without copying it. Looking at a tensor *thaws* it: its bytes,
and only its, are copied into memory of the receiver. Nothing writes to frozen bytes.

tensordict takes as long to import as torch, so only who makes a TensorDict loads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn

from hocket.data import nested
from hocket.data.frozen import FrozenObjects, FrozenTensor, kind_of
from hocket.data.nested import FrozenNested
from hocket.data.rows import Index
from hocket.errors import BatchConflict, BatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

WIRE = ("hocket batch", 1)  # what every state begins with: name and version of the format


def check_wire(tag: object) -> None:
    """Raise BatchError unless `tag` is what this version writes."""
    if tag != WIRE:
        raise BatchError(f"a batch came with the wire tag {tag!r}, wanted {WIRE!r}; run one version on both sides")


class Leaves(dict[str, Any]):
    """The tensors of a batch by name, live or frozen, nested batches and Python values among them."""

    def __init__(self, items: Mapping[str, Any], batch_size: Sequence[int], device: object = None) -> None:
        super().__init__(items)
        self.batch_size = tuple(batch_size)
        self.device = cast(torch.device | None, device)

    @staticmethod
    def of(batch: TensorDict | Leaves) -> Leaves:
        """A container of its own that shares the tensors."""
        return Leaves(dict(cast(Any, batch.items())), batch.batch_size, batch.device)

    def __reduce__(self) -> tuple[Any, ...]:
        frozen = {key: freeze(leaf) for key, leaf in self.items()}
        return Leaves, (frozen, self.batch_size, None if self.device is None else "cpu")

    def take(self, index: Index) -> Leaves:
        """The chosen rows: views for a slice, copies for row numbers."""
        rows = len(range(*index.indices(self.batch_size[0]))) if isinstance(index, slice) else len(index)
        return Leaves({k: take(leaf, index) for k, leaf in self.items()}, (rows, *self.batch_size[1:]), self.device)

    def thaw(self) -> TensorDict:
        """As a TensorDict of live tensors."""
        from tensordict import TensorDict

        items = {key: thaw(leaf) for key, leaf in self.items()}
        return TensorDict(items, batch_size=list(self.batch_size), device=self.device)

    @staticmethod
    def join(parts: Sequence[Leaves]) -> Leaves:
        """Rows of all parts in order (without a batch axis: the first part).

        Raises BatchConflict for no parts, and when names, dtypes or shapes of rows differ.
        """
        if not parts:
            raise BatchConflict("cannot join an empty list of batches; give at least one")
        first = parts[0]
        if not first.batch_size:
            return first
        for i, part in enumerate(parts):
            if part.keys() != first.keys():
                raise BatchConflict(f"part {i} holds {sorted(part)}, part 0 holds {sorted(first)}; they must agree")
        items = {key: join(key, [part[key] for part in parts]) for key in first}
        return Leaves(items, (sum(part.batch_size[0] for part in parts), *first.batch_size[1:]), first.device)


def freeze(leaf: Any) -> Any:
    """The travelling form of a leaf; what has none of its own goes by plain pickle."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            return FrozenNested.of(leaf)
        return FrozenTensor.of(leaf) if _is_plain(leaf) else leaf
    if isinstance(leaf, FrozenTensor | FrozenNested):
        return replace(leaf, data=np.ascontiguousarray(leaf.data))
    if _is(leaf, "NonTensorStack"):
        return FrozenObjects(leaf.tolist(), stacked=True)
    if _is(leaf, "NonTensorData"):
        return FrozenObjects([leaf.data], stacked=False)
    return Leaves.of(leaf) if is_tensordict(leaf) else leaf


def thaw(leaf: Any) -> Any:
    """A leaf to look at and to change."""
    if isinstance(leaf, FrozenTensor | FrozenNested):
        return cast(Any, leaf).join([leaf])
    return leaf.thaw() if isinstance(leaf, FrozenObjects | Leaves) else leaf


def plain(leaf: Any) -> Any:
    """What it holds in Python's and torch's own types, to be compared; anything but parts of a batch as it is."""
    leaf = thaw(leaf)
    if _is(leaf, "NonTensorStack"):
        return leaf.tolist()
    return leaf.data if _is(leaf, "NonTensorData") else dict(Leaves.of(leaf)) if is_tensordict(leaf) else leaf


def take(leaf: Any, index: Index) -> Any:
    """The chosen rows of a leaf, in the form that it has."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            return nested.take_rows(leaf, index)
        return leaf[index] if isinstance(index, slice) else leaf.index_select(0, index.to(leaf.device))
    if isinstance(leaf, FrozenTensor | FrozenNested | FrozenObjects | Leaves):
        return leaf.take(index)
    if is_tensordict(leaf):
        return Leaves.of(leaf).take(index)
    return leaf if _is(leaf, "NonTensorData") else leaf[index]


def join(key: str, leaves: Sequence[Any]) -> Any:
    """Rows of all leaves in order. Neighbours in one tensor's memory come back as a view of it, without a copy."""
    first = leaves[0]
    if len(leaves) == 1 or _is(first, "NonTensorData") or (isinstance(first, FrozenObjects) and not first.stacked):
        return first  # a value for all rows: the first part's
    if isinstance(first, Leaves) or is_tensordict(first):
        return Leaves.join([Leaves.of(leaf) for leaf in leaves])
    if isinstance(first, FrozenObjects) or _is(first, "NonTensorStack"):
        return FrozenObjects([value for leaf in leaves for value in freeze(leaf).values], stacked=True)
    if all(isinstance(leaf, FrozenNested) for leaf in leaves):
        return FrozenNested.join(leaves)
    if isinstance(first, FrozenNested) or (isinstance(first, Tensor) and first.is_nested):
        return nested.join_rows([thaw(leaf) for leaf in leaves])
    kinds = {leaf.kind if isinstance(leaf, FrozenTensor) else kind_of(leaf) for leaf in leaves}
    if len(kinds) > 1:
        raise BatchConflict(
            f"the parts hold {key!r} as {sorted(map(str, kinds))} (dtype, shape of a row); they must agree: "
            "pad rows of different length with hocket.data.schema.collate"
        )
    live = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    whole = _rejoin(live) if len(live) == len(leaves) else None
    worth = len(live) < len(leaves) or sum(leaf.nbytes for leaf in live) >= _HUGE_PAGES
    if whole is None and worth and all(_copies_as_bytes(leaf) for leaf in live):
        return FrozenTensor.join([freeze(leaf) for leaf in leaves])
    return torch.cat([thaw(leaf) for leaf in leaves]) if whole is None else whole


_HUGE_PAGES = 4 * 2**20  # bytes from which numpy's memory is quicker to touch first than torch's


def _copies_as_bytes(tensor: Tensor) -> bool:
    return _is_plain(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad


def _is_plain(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return known and not tensor.is_nested and not tensor.is_quantized


def _rejoin(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one view, if they lie side by side in the memory of one tensor, as what `chunk` made of it does."""
    first = parts[0]
    if any(part.requires_grad or part.layout != torch.strided for part in parts):
        return None
    memory, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        where = part.untyped_storage().data_ptr(), part.storage_offset(), part.stride()
        if where != (memory, end, first.stride()):
            return None
        end += len(part) * part.stride(0)
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def register_serializers(register: Callable[..., Any]) -> None:
    """Let a TensorDict that travels on its own take this wire too; `register` is `ray.util.register_serializer`.

    Only the sending process needs it, before it sends. As long as tensordict is not loaded this does nothing: call it
    again then; a second time is harmless. Without it a TensorDict still arrives private, by several copies.
    """
    found = sys.modules.get("tensordict")
    if found is not None:
        register(found.TensorDict, serializer=_pack, deserializer=_unpack)


def _pack(batch: TensorDict) -> tuple[object, Leaves]:
    return WIRE, Leaves.of(batch)


def _unpack(packed: tuple[object, Leaves]) -> TensorDict:
    check_wire(packed[0])
    return packed[1].thaw()


def is_tensordict(value: Any) -> TypeGuard[TensorDict]:
    """Whether it is a TensorDict, of any kind that holds tensors."""
    return _is(value, "TensorDictBase") and not _is(value, "NonTensorStack")


def _is(value: Any, name: str) -> bool:
    """Whether it is of that class of tensordict: when tensordict was never loaded, nothing is."""
    found = sys.modules.get("tensordict")
    return found is not None and isinstance(value, getattr(found, name))
