"""What comes out of a user's loader: batches for ever or for so many passes, and token ids without their padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.errors import DataError


def batches(loader_fn: Callable[..., Any], place: tuple[int, int], *, num_epochs: int, num_steps: int) -> Iterator[Any]:
    """`num_steps` batches, beginning again when the loader is through, or (`num_steps=0`) `num_epochs` passes.

    `loader_fn` is called with `place`, the rank and the number of ranks, when it takes two arguments. Raises DataError
    for a loader without a batch.
    """
    takes = [p for p in inspect.signature(loader_fn).parameters.values() if p.default is p.empty]
    loader = loader_fn(*place) if len(takes) == 2 else loader_fn()
    step = epoch = 0
    while step < num_steps if num_steps else epoch < num_epochs:
        before = step
        for batch in loader:
            if num_steps and step == num_steps:
                return
            yield batch
            step += 1
        if step == before:
            raise DataError("the loader gave no batch; it must be an iterable that can be gone through again")
        epoch += 1


def token_ids(batch: Any) -> tuple[Tensor, Tensor]:
    """The ids (B, P) of a batch and, bool (B, P), where there is a token: everywhere without an `attention_mask`."""
    ids = batch["input_ids"] if isinstance(batch, Mapping) else batch
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not len(ids):
        raise DataError(
            f"the loader gave {type(batch).__name__} {getattr(ids, 'shape', '')}; wanted token ids (B, P), a dict "
            "with input_ids (B, P) and attention_mask, or a DataProto of PROMPTS"
        )
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def right_padded(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that are there, in their order, at the left of each row; ids (B, P) int64 and lengths (B,)."""
    order = torch.argsort((~mask).int(), dim=1, stable=True)
    return torch.where(mask, ids, 0).gather(1, order).long(), mask.sum(1)
