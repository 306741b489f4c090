"""Weights on their way into a model: a tensor, or its bytes in the pieces that they arrived in."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """A tensor whose bytes lie in several places, in order: it is as large as a model's largest, so it stays there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[NDArray[np.uint8], ...]


Weight = Tensor | Pieces


def whole(weight: Weight) -> Tensor:
    """The tensor; one in pieces is put together in memory of its own."""
    if isinstance(weight, Tensor):
        return weight
    return as_tensor(np.concatenate(weight.parts), weight.dtype, weight.shape)


def as_tensor(data: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A view of bytes that may be read-only: never write to it."""
    with warnings.catch_warnings():  # torch warns of read-only memory
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data).view(dtype).reshape(shape)


@torch.no_grad()
def copy_into(own: Tensor, weight: Weight) -> None:
    """Copy the weight into the model's own tensor of that shape, converting it where its dtype is another one.

    In main memory numpy copies the bytes as they are: torch's copy of large tensors takes twice as long there.
    """
    if own.numel() and own.dtype == weight.dtype and _plain(own) and (isinstance(weight, Pieces) or _plain(weight)):
        target, at = _bytes(own), 0
        for part in (_bytes(weight),) if isinstance(weight, Tensor) else weight.parts:
            np.copyto(target[at : at + len(part)], part)
            at += len(part)
    else:
        own.copy_(whole(weight))


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and type(tensor.data) is Tensor and tensor.is_contiguous()


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
