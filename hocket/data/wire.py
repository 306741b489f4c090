"""How a batch lies in memory, is cut and joined by its rows, and travels between processes.

A tensor goes as (dtype, shape, bytes), the bytes as a numpy array that pickle protocol 5 hands out of band: Ray
writes them once into its object store, and every reader sees the same read-only memory. What arrives stays *frozen*:
rows are chosen, parts joined, and all sent on, without copying it. Looking at a tensor *thaws* it: its bytes, and only
its, are copied for the receiver. tensordict takes as long to import as torch: only who makes a TensorDict loads it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hocket.data.rows import Index, as_column, from_pieces, join_rows, pieces, take_nested
from hocket.errors import BatchConflict, BatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

WIRE = ("hocket batch", 1)  # what every state begins with: name and version of the format

Packed = tuple[str, tuple[int, ...], NDArray[np.uint8]]


def check_wire(tag: object) -> None:
    """Raise BatchError unless `tag` is what this version writes."""
    if tag != WIRE:
        raise BatchError(f"a batch came with the wire tag {tag!r}, wanted {WIRE!r}; run one version on both sides")


def pack(tensor: Tensor) -> Packed:
    """(dtype name, shape, bytes); the bytes are a view of the tensor's memory where that is plain and on the CPU."""
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # of 0 or 1 elements any stride will do
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy()


def unpack(dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> FrozenTensor:
    """The inverse, in the memory of `data`."""
    place = data.__array_interface__ | {"data": (data.ctypes.data, False)}  # torch warns of what may not be written to
    alias = np.asarray(SimpleNamespace(__array_interface__=place, owner=data))
    return FrozenTensor(torch.from_numpy(alias).view(getattr(torch, dtype)).reshape(shape))


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A tensor, also a nested one, in memory that others may read too: it is never written to."""

    shared: Tensor

    @property
    def nbytes(self) -> int:
        return self.shared.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        if self.shared.is_nested:
            return _unpack_nested, tuple(map(freeze, pieces(self.shared)))
        return unpack, pack(self.shared)


def _unpack_nested(*pieces: Any) -> FrozenTensor:
    return FrozenTensor(from_pieces(*[p.shared if isinstance(p, FrozenTensor) else p for p in pieces]))


class Leaves(dict[str, Any]):
    """What a batch holds by name: tensors, live or frozen, Leaves, NonTensorData, arrays of a Python value per row."""

    def __init__(self, items: Mapping[str, Any], batch_size: Sequence[int], device: object = None) -> None:
        super().__init__(items)
        self.batch_size = tuple(batch_size)
        self.device = cast(torch.device | None, device)

    @staticmethod
    def of(batch: TensorDict | Leaves) -> Leaves:
        """A container of its own that shares the tensors."""
        return Leaves({k: plain(leaf) for k, leaf in cast(Any, batch.items())}, batch.batch_size, batch.device)

    def __reduce__(self) -> tuple[Any, ...]:
        frozen = {key: freeze(leaf) for key, leaf in self.items()}
        return _arrive, (WIRE, frozen, self.batch_size, None if self.device is None else "cpu")

    def take(self, index: Index) -> Leaves:
        """The chosen rows: views for a slice, copies for row numbers."""
        rows = len(range(self.batch_size[0])[index] if isinstance(index, slice) else index)
        return Leaves({k: take(leaf, index) for k, leaf in self.items()}, (rows, *self.batch_size[1:]), self.device)

    def thaw(self) -> TensorDict:
        """As a TensorDict of live tensors."""
        from tensordict import TensorDict

        items = {key: thaw(leaf) for key, leaf in self.items()}
        return TensorDict(items, batch_size=list(self.batch_size), device=self.device)

    @staticmethod
    def join(parts: Sequence[Leaves], what: str = "") -> Leaves:
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
                found = f"{sorted(part)}, part 0 holds {sorted(first)}"
                raise BatchConflict(f"part {i} holds {what}{found}; they must agree")
        items = {key: join(key, [part[key] for part in parts]) for key in first}
        return Leaves(items, (sum(part.batch_size[0] for part in parts), *first.batch_size[1:]), first.device)


def _arrive(tag: object, *state: Any) -> Leaves:
    check_wire(tag)
    return Leaves(*state)


def plain(leaf: Any) -> Any:
    """A leaf of a TensorDict as Leaves hold it; anything else as it is."""
    if is_kind(leaf, "NonTensorStack"):
        return as_column(leaf.tolist())
    return Leaves.of(leaf) if is_kind(leaf, "TensorDictBase") else leaf


def freeze(leaf: Any) -> Any:
    """The travelling form of a leaf; what has none of its own goes by plain pickle."""
    return FrozenTensor(leaf.detach()) if isinstance(leaf, Tensor) and (leaf.is_nested or _has_bytes(leaf)) else leaf


def thaw(leaf: Any) -> Any:
    """A leaf as a TensorDict holds it, to look at and to change."""
    if isinstance(leaf, FrozenTensor):
        return copied([leaf.shared])
    if isinstance(leaf, Leaves):
        return leaf.thaw()
    if isinstance(leaf, np.ndarray):
        from tensordict import NonTensorData, NonTensorStack

        return NonTensorStack.from_list(cast(Any, [NonTensorData(value) for value in private(leaf)]))
    return type(leaf)(private(leaf.data)) if is_kind(leaf, "NonTensorData") else leaf


def take(leaf: Any, index: Index) -> Any:
    """The chosen rows of a leaf; of a frozen one a slice stays frozen, and row numbers make a private copy."""
    if isinstance(leaf, FrozenTensor):
        rows = take(leaf.shared, index)
        return FrozenTensor(rows) if isinstance(index, slice) else rows
    if isinstance(leaf, Leaves):
        return leaf.take(index)
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return take_nested(leaf, index)
    if isinstance(leaf, Tensor) and not isinstance(index, slice):
        return leaf.index_select(0, torch.from_numpy(index).to(leaf.device))
    return leaf if is_kind(leaf, "NonTensorData") else leaf[index]


def join(key: str, leaves: Sequence[Any]) -> Any:
    """Entries of all leaves in order. Neighbours in one tensor's memory come back as a view of it, without a copy."""
    first = leaves[0]
    if len(leaves) == 1 or is_kind(first, "NonTensorData"):
        return first  # a value for all rows: the first part's
    if isinstance(first, Leaves):
        return Leaves.join(leaves)
    if isinstance(first, np.ndarray):
        shapes = [leaf.shape for leaf in leaves]
        if len({shape[1:] for shape in shapes}) > 1:
            raise BatchConflict(f"the parts hold column {key!r} in shapes {shapes}; make them agree")
        return np.concatenate(leaves)
    tensors = [leaf.shared if isinstance(leaf, FrozenTensor) else cast(Tensor, leaf) for leaf in leaves]
    if tensors[0].is_nested:
        return join_rows(tensors)
    kinds = {(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])) for tensor in tensors}
    if len(kinds) > 1:
        raise BatchConflict(
            f"the parts hold {key!r} as {sorted(map(str, kinds))} (dtype, shape of a row); they must agree: "
            "pad rows of different length with hocket.data.schema.collate"
        )
    whole = _rejoin(tensors)
    if whole is None:
        return copied(tensors)
    return FrozenTensor(whole) if isinstance(first, FrozenTensor) else whole


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
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def copied(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts in fresh memory, aligned as torch aligns its own; each byte is copied once."""
    first = parts[0]
    if first.is_nested:
        return join_rows(parts)
    if not all(_has_bytes(part) and part.device.type == "cpu" and not part.requires_grad for part in parts):
        return torch.cat(list(parts))
    shape = (sum(map(len, parts)), *first.shape[1:]) if first.dim() else ()
    room = np.empty(math.prod(shape) * first.element_size() + 64, np.uint8)  # on huge pages: twice as fast as torch's
    start = -room.ctypes.data % 64
    out = torch.from_numpy(room[start : start + room.size - 64]).view(first.dtype).reshape(shape)
    return out.copy_(first) if len(parts) == 1 else torch.cat(list(parts), out=out)


def _has_bytes(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return known and not tensor.is_nested and not tensor.is_quantized


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


def register_serializers(register: Callable[..., Any]) -> None:
    """Let a TensorDict that travels on its own take this wire too; `register` is `ray.util.register_serializer`.

    The sending process needs it, before it sends and once tensordict is loaded; twice is harmless. Without it a
    TensorDict still arrives private, by several copies.
    """
    if found := sys.modules.get("tensordict"):
        register(found.TensorDict, serializer=Leaves.of, deserializer=Leaves.thaw)


def is_tensordict(value: Any) -> TypeGuard[TensorDict]:
    """Whether it is a TensorDict, of any kind that holds tensors."""
    return is_kind(value, "TensorDictBase") and not is_kind(value, "NonTensorStack")


def is_kind(value: Any, name: str) -> bool:
    """Whether it is of that class of tensordict: when tensordict was never loaded, nothing is."""
    found = sys.modules.get("tensordict")
    return found is not None and isinstance(value, getattr(found, name))
