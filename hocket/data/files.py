"""A batch on disk: tensors as safetensors, the rest as JSON. Never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from hocket.data.proto import DataProto
from hocket.errors import DataError


def write_batch(stem: Path, batch: DataProto) -> None:
    """Write `stem`.safetensors and `stem`.json. Raises DataError for a column or meta_info that JSON cannot hold."""
    columns = {name: column.tolist() for name, column in batch.non_tensor_batch.items()}
    try:
        text = json.dumps({"columns": columns, "meta_info": batch.meta_info}, default=_plain)
    except TypeError as error:
        raise DataError(
            f"a batch cannot be written to {str(stem)!r}: {error}; keep plain values in its rows"
        ) from error
    save_file({name: tensor.contiguous() for name, tensor in batch.tensors().items()}, stem.with_suffix(".safetensors"))
    stem.with_suffix(".json").write_text(text)


def read_batch(stem: Path) -> DataProto:
    """What `write_batch` wrote."""
    rest = json.loads(stem.with_suffix(".json").read_text())
    return DataProto.from_dict(load_file(stem.with_suffix(".safetensors")), rest["columns"], rest["meta_info"])


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")
