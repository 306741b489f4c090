"""Functions on whole batches: padding, folding the batch axis, collating rows, gathering over ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import distributed

from hocket.data.proto import DataProto, DataProtoItem
from hocket.data.rows import as_column
from hocket.errors import BatchConflict

_LOG = logging.getLogger("hocket")


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch with as many of its first rows appended, in turn, as make its length a multiple; and their number."""
    if size_divisor < 1:
        raise BatchConflict(f"cannot pad to a multiple of {size_divisor}; use at least 1")
    pad = -len(data) % size_divisor
    if not len(data):
        _LOG.warning("a batch without rows cannot be padded to a multiple of %d", size_divisor)
    return (data[np.arange(len(data) + pad) % len(data)] if pad else data), pad


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchConflict(f"cannot take {pad_size} rows of padding from {len(data)} rows")
    return data[: len(data) - pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[b, ...] -> [new, b / new, ...], for tensors and columns alike."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise BatchConflict(f"{len(data)} rows do not fold into {new_batch_size}; use a divisor")
    return _reshape(data, 1, [new_batch_size, len(data) // new_batch_size])


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """[b, n, ...] -> [b * n, ...]: the first `batch_dims` axes of tensors and columns become one."""
    return _reshape(data, batch_dims, [])


def _reshape(data: DataProto, dims: int, first: list[int]) -> DataProto:
    """The first `dims` axes of everything become the axes `first`, or one axis."""
    held = {**data.tensors(), **data.non_tensor_batch}
    made = {k: v.reshape(*(first or [math.prod(v.shape[:dims])]), *v.shape[dims:]) for k, v in held.items()}
    return type(data).from_single_dict(made, data.meta_info)


def collate_fn(data_items: Sequence[DataProtoItem]) -> DataProto:
    """One batch of these rows, with the facts of the first."""
    first = data_items[0]
    names = [] if first.batch is None else list(first.batch.keys())
    tensors = {key: torch.stack([cast(Any, item.batch)[key] for item in data_items]) for key in names}
    columns = {key: as_column([item.non_tensor_batch[key] for item in data_items]) for key in first.non_tensor_batch}
    return DataProto.from_dict(tensors, columns, first.meta_info)


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """One list per name of the first dict; all dicts need to have the same names."""
    names = list_of_dict[0].keys() if list_of_dict else ()
    if wrong := [i for i, row in enumerate(list_of_dict) if row.keys() != names]:
        raise BatchConflict(f"dict {wrong[0]} has the names {sorted(list_of_dict[wrong[0]])}, dict 0 {sorted(names)}")
    return {key: [row[key] for row in list_of_dict] for key in names}


def all_gather_data_proto(data: DataProto, process_group: distributed.ProcessGroup) -> None:
    """Replace the rows by those of all ranks, in rank order, in place; their numbers may differ. Facts stay."""
    device = next((tensor.device for tensor in data.tensors().values()), torch.device("cpu"))
    parts: list[Any] = [None] * process_group.size()
    distributed.all_gather_object(parts, data.select(meta_info_keys=[]), group=process_group)
    joined = DataProto.concat(parts).to(device)
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch
