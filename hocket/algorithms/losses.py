"""Losses per token, to be minimised. None of them reduces: `reduce.aggregate` does, with the step's counts.

They know no mask. Select what carries a gradient with `reduce.masked` first: a NaN under a false mask would
reach it through the backward pass (0 x NaN), even when `aggregate` selects the loss itself away.
"""

import torch
from torch import Tensor

from hocket.algorithms.kl import LIMIT, log_ratio
from hocket.algorithms.reduce import widen
from hocket.errors import ConfigError


def check_dual_clip(dual_clip: float | None) -> None:
    """Raise ConfigError for a bound of 1 or less, which would hold still every bad token, on-policy too."""
    if dual_clip is not None and dual_clip <= 1:
        raise ConfigError(f"dual_clip is {dual_clip}, but it must be above 1; 3.0 is usual, null is off")


def ppo_loss(
    logprobs: Tensor,
    proximal: Tensor,
    *,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate (B,T), and the detached ratio rho = exp(logprobs - proximal) (B,T).

    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A): PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO,
    arXiv 2503.14476, eq. 10. `dual_clip` c holds the loss of a bad token whose ratio exploded at -c A, with
    gradient 0 (dual-clip PPO, arXiv 1912.09729). Raises ConfigError for a `dual_clip` of 1 or less.
    """
    check_dual_clip(dual_clip)
    ratio = log_ratio(logprobs, proximal).clamp(-LIMIT, LIMIT).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain, ratio.detach()


def value_loss(values: Tensor, old_values: Tensor, *, returns: Tensor, clip: float | None = None) -> Tensor:
    """Half squared error of the critic (B,T); with `clip`, the worse of it and that of the clipped value.

    The clipped value moves at most `clip` from `old_values`, the critic's values at the start of the step
    (Huang et al., "The 37 implementation details of PPO", 2022, detail 9).
    """
    values, old_values = widen(values), widen(old_values)
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last axis, in float32 or wider; -inf logits count as 0."""
    logprobs = torch.log_softmax(widen(logits), dim=-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
