"""What the engine's log-probs differ from the trainer's by, and the weight that corrects for it.

`proximal` are the trainer's log-probs at the start of the step, `rollout` the engine's when it sampled. They
differ when the weights were older (staleness) and when the engine computes otherwise. d = proximal - rollout.
"""

import torch
from torch import Tensor

from hocket.algorithms.kl import LIMIT, log_ratio
from hocket.algorithms.reduce import Counts, check_choice, masked, masked_max, token_mean

CORRECTIONS = ("none", "token_tis")


@torch.no_grad()
def correction_weight(proximal: Tensor, rollout: Tensor, *, mask: Tensor, kind: str, cap: float = 2.0) -> Tensor:
    """Weight of each token's loss (B,T), detached; 0 under a false mask. The denominator stays all tokens.

    * `none`: 1
    * `token_tis`: min(e^d, cap), truncated importance sampling per token (IMPALA, arXiv 1802.01561, eq. 1,
      at the level of tokens); 1 where a d is not finite, see "mismatch/nonfinite"

    Raises ConfigError for another kind.
    """
    check_choice(kind, CORRECTIONS, what="correction")
    d = _difference(proximal, rollout, mask)
    weight = torch.ones_like(d) if kind == "none" else _ratio(d).clamp(max=cap)
    return masked(weight, mask)


@torch.no_grad()
def mismatch(proximal: Tensor, rollout: Tensor, *, mask: Tensor, counts: Counts) -> dict[str, Tensor]:
    """How far engine and trainer are apart: scalars, additive over micro-batches, "/max" by maximum.

    * "mismatch/abs_mean", "mismatch/abs/max": of |d|, nats
    * "mismatch/k1": mean of rollout - proximal = -d; estimates KL(rollout || proximal), so it should be small
      and not negative
    * "mismatch/ratio_mean": mean of e^d; 1 in expectation when both have the same support. Away from 1 with
      equal weights is a fault (temperature, top-p, tokens), not noise
    * "mismatch/nonfinite": share of tokens whose d is NaN or infinite; they count as d = 0 in the others
    """
    raw, d = log_ratio(proximal, rollout), _difference(proximal, rollout, mask)
    return {
        "mismatch/abs_mean": token_mean(d.abs(), mask, counts=counts),
        "mismatch/abs/max": masked_max(d.abs(), mask),
        "mismatch/k1": token_mean(-d, mask, counts=counts),
        "mismatch/ratio_mean": token_mean(_ratio(d), mask, counts=counts),
        "mismatch/nonfinite": token_mean(~raw.isfinite(), mask, counts=counts),
    }


def _difference(proximal: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    d = masked(log_ratio(proximal, rollout), mask)
    return torch.where(d.isfinite(), d, 0.0)


def _ratio(d: Tensor) -> Tensor:
    return d.clamp(-LIMIT, LIMIT).exp()
