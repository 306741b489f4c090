"""How far the engine's policy and the trainer's are apart, over a step and by the staleness of its tokens."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.algorithms.correction import Corrected, difference, exponent
from hocket.algorithms.kl import kl_estimate, log_ratio
from hocket.algorithms.reduce import Counts, masked, masked_max, token_mean, widen

OLDEST = 8
"""Tokens so many versions old, or older, are counted together, as "8+"."""


@torch.no_grad()
def mismatch(proximal: Tensor, rollout: Tensor, *, mask: Tensor, counts: Counts) -> dict[str, Tensor]:
    """How far engine and trainer are apart: scalars, additive over micro-batches, "/max" by maximum.

    * "mismatch/abs_mean", "mismatch/abs/max": of |d|, nats
    * "mismatch/k1": mean of rollout - proximal = -d; estimates KL(rollout || proximal), so it should be small
      and not negative
    * "mismatch/k3": mean of e^d - 1 - d, which estimates the same with less noise, and is never negative
    * "mismatch/ratio_mean": mean of e^d; 1 in expectation when both have the same support. Away from 1 with
      equal weights is a fault (temperature, top-p, tokens), not noise
    * "mismatch/nonfinite": share of tokens whose d is NaN or infinite; they count as d = 0 in the others
    """
    raw, d = log_ratio(proximal, rollout), difference(proximal, rollout, mask=mask)
    return {
        "mismatch/abs_mean": token_mean(d.abs(), mask, counts=counts),
        "mismatch/abs/max": masked_max(d.abs(), mask),
        "mismatch/k1": token_mean(-d, mask, counts=counts),
        "mismatch/k3": token_mean(_k3(d), mask, counts=counts),
        "mismatch/ratio_mean": token_mean(exponent(d), mask, counts=counts),
        "mismatch/nonfinite": token_mean(~raw.isfinite(), mask, counts=counts),
    }


@torch.no_grad()
def by_staleness(
    batch: Mapping[str, Tensor], *, stale: Tensor, corrected: Corrected | None = None
) -> dict[str, Tensor]:
    """The same for tokens of one staleness each: `stale` (B,T) versions. Of a whole step: these do not add up.

    For each staleness K that occurs, under the names ".../K":

    * "staleness/tokens": the share of the step's tokens, so all of them add up to 1
    * "mismatch/k1", "mismatch/k3", "mismatch/ratio_mean", and "mismatch/ratio_error", the standard error of the latter
    * with `corrected`, what the correction does to them: the shares "correction/kept" and "correction/truncated", and
      "correction/ess", the effective sample size (sum w)^2 / (N sum w^2), w = 0 where dropped

    Beside those "mismatch/prob_p99", over all tokens: the 99th percentile of |e^proximal - e^rollout|.
    """
    mask, proximal, rollout = batch["response_mask"], batch["proximal_logprobs"], batch["rollout_logprobs"]
    d = difference(proximal, rollout, mask=mask)
    stale, facts = stale.clamp(max=OLDEST), dict[str, Tensor]()
    for age in stale[mask].unique().tolist():
        here = mask & (stale == age)
        found = {"staleness/tokens": here.sum() / mask.sum(), **_apart(d[here])}
        if corrected is not None:
            found |= _effect(corrected, here)
        facts |= {f"{name}/{age}{'+' if age == OLDEST else ''}": value for name, value in found.items()}
    return facts | {"mismatch/prob_p99": _p99((masked(proximal, mask).exp() - masked(rollout, mask).exp())[mask])}


def _apart(d: Tensor) -> dict[str, Tensor]:
    ratio = exponent(d)
    error = ratio.std() / math.sqrt(len(d)) if len(d) > 1 else torch.tensor(math.nan)
    return {
        "mismatch/k1": -d.mean(),
        "mismatch/k3": _k3(d).mean(),
        "mismatch/ratio_mean": ratio.mean(),
        "mismatch/ratio_error": error,
    }


def _effect(corrected: Corrected, here: Tensor) -> dict[str, Tensor]:
    weight = masked(corrected.weight, corrected.keep)[here]
    square = len(weight) * weight.square().sum()
    return {
        "correction/kept": widen(corrected.keep[here]).mean(),
        "correction/truncated": widen(corrected.truncated[here]).mean(),
        "correction/ess": weight.sum().square() / square if square > 0 else square,
    }


def _k3(d: Tensor) -> Tensor:
    return kl_estimate(-d, torch.zeros_like(d), kind="k3")


def _p99(values: Tensor) -> Tensor:
    finite = values[values.isfinite()].abs()
    return finite.kthvalue(math.ceil(0.99 * len(finite))).values if len(finite) else torch.zeros(())
