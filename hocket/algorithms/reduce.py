"""Masked reductions whose denominators are arguments.

Axes: B sequences, T token positions. A mask is a bool tensor, true on the tokens that the policy produced.
What lies under a false mask never reaches a result, not even as NaN: it is selected away, never multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor

from hocket.errors import BatchError, ConfigError

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_norm")


@dataclass(frozen=True)
class Counts:
    """What one optimizer step learns from, over all its ranks and micro-batches: the losses' denominators."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, mask: Tensor) -> "Counts":
        """Count the action tokens of `mask` (B,T), and the sequences that have at least one."""
        check_mask(mask)
        return cls(tokens=int(mask.sum()), sequences=int(mask.any(-1).sum()))


def check_mask(mask: Tensor, name: str = "mask") -> None:
    """Raise TypeError unless `mask` is a bool tensor: advantages given as a mask would weigh the tokens."""
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} is a {mask.dtype} tensor, but a mask must be torch.bool; pass e.g. response_mask")


def check_choice(value: str, choices: Sequence[str], *, what: str) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        nearest = get_close_matches(value, choices, n=1, cutoff=0.0)
        raise ConfigError(f"{what} {value!r} is unknown; nearest is {nearest[0]!r}, known are {', '.join(choices)}")


def widen(values: Tensor) -> Tensor:
    """The values in float32, or in their own type if that is wider: bf16 differences have three digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values in float32 or wider, 0 where `mask` is false; no gradient passes there.

    Raises TypeError when the mask is not bool, BatchError when the shapes differ (nothing is broadcast).
    """
    check_mask(mask)
    if values.shape != mask.shape:
        raise BatchError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} must have one shape")
    return torch.where(mask, widen(values), 0.0)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the values where `mask` is true: a scalar."""
    return masked(values, mask).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest of values that are not negative, where `mask` is true: a scalar, 0 when there is none."""
    kept = masked(values, mask)
    return kept.max() if kept.numel() else kept.sum()


def token_mean(values: Tensor, mask: Tensor, *, counts: Counts) -> Tensor:
    """This micro-batch's part of the mean over all action tokens of the step: a scalar, 0 without tokens."""
    return masked_sum(values, mask) / max(counts.tokens, 1)


def aggregate(loss: Tensor, mask: Tensor, *, mode: str, counts: Counts, max_length: int | None = None) -> Tensor:
    """This micro-batch's part of the step's loss; over all micro-batches and ranks the parts add up to it.

    With N_tok and N_seq from `counts`, l the per-token `loss` (B,T), |y| a sequence's own action tokens:

    * `token_mean`: sum l / N_tok (DAPO, arXiv 2503.14476, section 3.3, over the whole batch)
    * `seq_mean_token_mean`: sum over sequences of (sum l / |y|) / N_seq (GRPO, arXiv 2402.03300, eq. 3)
    * `seq_mean_token_sum`: sum l / N_seq
    * `const_norm`: sum l / (N_seq max_length) (Dr. GRPO, arXiv 2503.20783); `max_length` is a setting of the
      run, because the padded width would make the loss depend on the batch's longest answer

    A step without action tokens gives 0 with a gradient of 0. Raises ConfigError for another mode, or for
    `const_norm` without a positive `max_length`.
    """
    check_choice(mode, AGGREGATIONS, what="aggregation")
    if mode == "token_mean":
        return token_mean(loss, mask, counts=counts)
    total = masked(loss, mask)
    if mode == "seq_mean_token_mean":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    if mode == "const_norm":
        if max_length is None or max_length < 1:
            raise ConfigError(f"aggregation const_norm found max_length={max_length}; set it to the longest answer")
        total = total / max_length
    return total.sum() / max(counts.sequences, 1)


def whiten(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over all masked tokens, biased variance; 0 under a false mask, shape kept.

    Give it the whole step's tokens: means over parts of them are other numbers. A constant gives 0.
    """
    # float64: in float32 a constant's mean is off by one bit, which eps would blow up to 1e-3 and more.
    wide = masked(values, mask).double()
    count = mask.sum().clamp(min=1)
    centred = masked(wide - wide.sum() / count, mask)
    scale = (centred.square().sum() / count + eps).sqrt()
    return (centred / scale).to(widen(values).dtype)
