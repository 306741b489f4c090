"""A batch as a file that runs nothing when it is read: tensors and plain values only, no pickled classes (B20).

What is not a tensor, a plain number or text becomes a tuple (tag, ...); so every tuple in the file is such a tag.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hocket.data.rows import as_column, from_pieces, pieces
from hocket.data.wire import FrozenTensor, Leaves
from hocket.errors import BatchError

FORMAT = ("hocket batch on disk", 1)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Store a dict of tensors, arrays and plain values, nested as you like.

    Raises BatchError, naming the place, for anything else in it.
    """
    torch.save((*FORMAT, {key: encode(value, key) for key, value in state.items()}), path)


def read(path: Path) -> dict[str, Any]:
    """The dict that `write` stored, on the CPU. Raises BatchError when the file holds anything else; runs no code."""
    try:
        name, version, state = torch.load(path, map_location="cpu", weights_only=True)
        if (name, version) != FORMAT:
            raise BatchError(f"{str(path)!r} holds a batch in the format {(name, version)}, wanted {FORMAT}")
        return {key: decode(value) for key, value in state.items()}
    except (
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        EOFError,
    ) as error:
        raise BatchError(
            f"{str(path)!r} is no batch that this version's save_to_disk wrote; a pickled one is never opened, since "
            "that runs whatever is in it: load it where you trust it, and save it again"
        ) from error


def encode(value: Any, where: str) -> Any:
    """A value as tensors, plain values and tags; BatchError for what has no such form."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor | FrozenTensor):
        return _encode_tensor(value.shared if isinstance(value, FrozenTensor) else value)
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(np.asarray(value), "array" if isinstance(value, np.ndarray) else "number", where)
    if isinstance(value, Leaves):
        device = None if value.device is None else "cpu"
        return "leaves", {key: encode(leaf, f"{where}.{key}") for key, leaf in value.items()}, value.batch_size, device
    if type(value) is dict:
        return "dict", [[encode(one, where) for one in pair] for pair in cast(dict[Any, Any], value).items()]
    if type(value) in (list, tuple, set):
        return type(value).__name__, [encode(one, where) for one in value]
    raise BatchError(
        f"{where} holds a {type(value).__name__}, which cannot be stored; wanted tensors, arrays, text, numbers, and "
        "lists, tuples, sets and dicts of them: convert it, or take it out with `pop` first"
    )


def decode(stored: Any) -> Any:
    """The inverse of `encode`. Raises ValueError for a tag that `encode` does not write."""
    if not isinstance(stored, tuple):
        return stored
    match cast(tuple[Any, ...], stored):
        case ("nested", parts):
            return from_pieces(*parts)
        case ("array", dtype, shape, data):
            return _array(dtype, shape, data)
        case ("number", dtype, shape, data):
            return _array(dtype, shape, data)[()]
        case ("column", shape, values):
            return as_column([decode(one) for one in values]).reshape(shape)
        case ("leaves", items, size, device):
            return Leaves({key: decode(leaf) for key, leaf in items.items()}, size, device)
        case ("dict", pairs):
            return {decode(key): decode(value) for key, value in pairs}
        case ("list" | "tuple" | "set" as kind, values):
            return {"list": list, "tuple": tuple, "set": set}[kind]([decode(one) for one in values])
        case other:
            raise ValueError(f"an unknown tag {other[:1]}")


def _encode_tensor(tensor: Tensor) -> Any:
    if tensor.is_nested:
        return "nested", [one.clone() if isinstance(one, Tensor) else one for one in pieces(tensor.detach())]
    return tensor.detach().clone()  # torch would write the whole memory that a view looks into


def _encode_array(array: Any, tag: str, where: str) -> Any:
    if array.dtype.kind == "O":
        return "column", list(array.shape), [encode(one, where) for one in array.reshape(-1)]
    if array.dtype.kind not in "biufcU":
        raise BatchError(f"{where} holds an array of {array.dtype}, which cannot be stored; make it numbers or text")
    bytes_ = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()) if array.size else None
    return tag, array.dtype.str, list(array.shape), bytes_


def _array(dtype: str, shape: list[int], data: Tensor | None) -> Any:
    if np.dtype(dtype).kind not in "biufcU":
        raise ValueError(f"an array of {dtype}")
    values = np.empty(0, dtype) if data is None else np.frombuffer(data.numpy().tobytes(), dtype)
    return values.reshape(shape).copy()
