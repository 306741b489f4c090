"""Estimates of the KL divergence from sampled tokens (J. Schulman, "Approximating KL", 2020)."""

import torch
from torch import Tensor

from hocket.algorithms.reduce import check_choice, widen
from hocket.errors import ConfigError

LIMIT = 20.0
"""Largest |log ratio| that is exponentiated: e^20 is 4.9e8, far from overflow, and far beyond any clip."""

KL_KINDS = ("k1", "k2", "k3")


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Difference of two log-probs, in float32 or wider."""
    return widen(numerator) - widen(denominator)


def kl_estimate(logprobs: Tensor, reference: Tensor, *, kind: str) -> Tensor:
    """KL(policy || reference) per token, same shape as `logprobs`; d = logprobs - reference, in nats.

    Each has mean KL under the policy's own samples (k2 nearly), but as a *loss* they have other gradients:

    | kind | value | as a loss, on-policy, its gradient is |
    |---|---|---|
    | k1 | d | zero on average, only noise (detached in the *reward*: exactly that of KL(pi, ref)) |
    | k2 | d^2 / 2 | exactly that of KL(pi, ref), the reverse KL |
    | k3 | e^-d - 1 + d, never negative | exactly that of KL(ref, pi), the forward KL |

    So: log k3; learn from k2 in the loss (`kl_loss`) or from k1 in the reward (`advantages.token_rewards`).
    With samples of another policy none of the gradients holds without an importance ratio. k3 is cut off at
    d = -20, where its gradient would be -5e8. Raises ConfigError for another kind.
    """
    check_choice(kind, KL_KINDS, what="KL estimate")
    d = log_ratio(logprobs, reference)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(min=-LIMIT)
    return torch.expm1(-d) + d  # expm1: at d = 1e-4, e^-d - 1 + d has no correct digit in float32


def kl_loss(logprobs: Tensor, reference: Tensor, *, kind: str = "k2") -> Tensor:
    """A KL penalty per token that may be minimised: k2 (reverse KL) or k3 (forward KL), see `kl_estimate`.

    Raises ConfigError for k1, whose gradient is zero on average.
    """
    if kind == "k1":
        raise ConfigError("k1 as a loss has gradient zero on average; use k2 in the loss, or k1 in the reward")
    return kl_estimate(logprobs, reference, kind=kind)
