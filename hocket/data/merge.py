"""What two batches both have: when it counts as the same, and what becomes of it when they are joined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.data.rows import Facts
from hocket.data.wire import FrozenTensor, is_kind, plain
from hocket.errors import BatchConflict

Seen = frozenset[tuple[int, int]]


def same(a: Any, b: Any, *, rel: float = 0.0, seen: Seen = frozenset()) -> bool:
    """Equal in kind, shape and value, at any depth; NaN equals NaN. Python floats may differ by `rel` of their size."""
    a, b = _opened(a), _opened(b)
    if a is b or (id(a), id(b)) in seen:
        return True
    seen = seen | {(id(a), id(b))}
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensors(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _same_arrays(a, b, rel, seen)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key], rel=rel, seen=seen) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y, rel=rel, seen=seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return (a != a and b != b) or math.isclose(a, b, rel_tol=rel)
    return bool(a == b)


def _opened(leaf: Any) -> Any:
    leaf = plain(leaf)
    if isinstance(leaf, FrozenTensor):
        return leaf.shared
    return leaf.data if is_kind(leaf, "NonTensorData") else leaf


def _same_arrays(a: NDArray[Any], b: NDArray[Any], rel: float, seen: Seen) -> bool:
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return False
    if a.dtype == object:
        return all(same(x, y, rel=rel, seen=seen) for x, y in zip(a.flat, b.flat, strict=True))
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.is_nested != b.is_nested or a.layout != b.layout:
        return False
    if a.is_nested:
        rows, others = a.unbind(0), b.unbind(0)
        return len(rows) == len(others) and all(map(_same_tensors, rows, others))
    b = b.to(a.device)
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def union(left: Mapping[str, Any], right: Mapping[str, Any]) -> Facts:
    """The names of both; raises BatchConflict when a name of both stands for different values."""
    for key in left.keys() & right.keys():
        if not same(left[key], right[key]):
            raise BatchConflict(
                f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object. "
                f"Both batches hold {key!r} with different values; rename or drop one of them"
            )
    return {**left, **right, **left}  # left's names first, and its values


def join_facts(metas: Sequence[Facts]) -> Facts:
    """All facts; equal where several parts have them, except "metrics": dicts of values become one dict of lists."""
    merged: Facts = {}
    metrics: dict[str, list[Any]] = {}
    for key, value in (entry for meta in metas for entry in meta.items()):
        if key == "metrics":
            merged[key] = metrics
            for name, found in (pair for entry in _listed(value) for pair in entry.items()):
                metrics.setdefault(name, []).extend(_listed(found))
        elif not same(merged.setdefault(key, value), value, rel=1e-6):
            raise BatchConflict(f"Conflicting values for meta_info key {key!r}: {merged[key]!r} and {value!r}")
    return merged


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
