"""From scores to advantages. Axes: B sequences, T token positions; masks are bool, true on action tokens."""

import torch
from torch import Tensor

from hocket.algorithms.kl import kl_estimate
from hocket.algorithms.reduce import check_choice, check_mask, masked, widen
from hocket.errors import BatchError

GROUP_KINDS = ("grpo", "dr_grpo", "rloo")


def last_action(mask: Tensor) -> Tensor:
    """True at the last action token of each row (B,T); a row without one is all false."""
    check_mask(mask)
    remaining = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (remaining == 1)


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    mask: Tensor,
    *,
    logprobs: Tensor | None = None,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Rewards per token (B,T): the score (B,) on the row's last action token, minus the KL penalty.

    The penalty is kl_coef (logprobs - reference): k1, in nats. It stands on every action token, so that the
    return of a token includes the KL of later ones (InstructGPT, arXiv 2203.02155, eq. 2, per token).
    A row without action tokens gets nothing.
    Raises BatchError when `kl_coef` is not 0 and `logprobs` or `reference` (B,T) is missing.
    """
    rewards = torch.where(last_action(mask), widen(scores)[:, None], 0.0)
    if kl_coef == 0:
        return rewards
    if logprobs is None or reference is None:
        raise BatchError(f"kl_coef={kl_coef} needs logprobs and reference; give both or set kl_coef=0")
    return rewards - kl_coef * masked(kl_estimate(logprobs, reference, kind="k1"), mask)


@torch.no_grad()
def gae(
    token_rewards: Tensor,
    values: Tensor,
    *,
    mask: Tensor,
    gamma: float,
    lam: float,
    truncated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns, both (B,T), not whitened (GAE, arXiv 1506.02438, eq. 16).

    Time runs over action tokens only: whatever lies between them (tool output, padding) is stepped over.
    `truncated` (B,) bool marks rows cut by the length limit: the state after them is worth the value at
    their last action token, instead of 0 as after EOS. Under a false mask both results are 0.
    """
    rewards, values = masked(token_rewards, mask), masked(values, mask)
    advantage, advantages = torch.zeros_like(values[:, 0]), torch.zeros_like(values)
    following = advantage
    if truncated is not None:
        check_mask(truncated, "truncated")
        following = torch.where(truncated, masked(values, last_action(mask)).sum(-1), 0.0)
    for t in reversed(range(mask.shape[1])):
        action = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = torch.where(action, delta + gamma * lam * advantage, advantage)
        following = torch.where(action, values[:, t], following)
        advantages[:, t] = advantage
    advantages = masked(advantages, mask)
    return advantages, advantages + values


@torch.no_grad()
def group_advantages(scores: Tensor, groups: Tensor, *, kind: str, eps: float = 1e-6) -> Tensor:
    """Advantages (B,) of scores (B,) against the other answers to the same prompt; `groups` (B,) holds ids.

    * `grpo`: (R - mean) / (std + eps), std with n - 1 (DeepSeekMath, arXiv 2402.03300, section 4.1.2)
    * `dr_grpo`: R - mean (arXiv 2503.20783, section 3.2)
    * `rloo`: R - mean of the others = (R - mean) n / (n - 1) (arXiv 2402.14740)

    A group of one, or one whose scores are all equal, has no baseline to learn against: exactly 0.
    Rows may come in any order, but a group must be whole. Raises ConfigError for another kind.
    """
    check_choice(kind, GROUP_KINDS, what="advantage")
    _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    exact = scores.double()
    empty = exact.new_zeros(len(sizes))
    mean = empty.index_add(0, index, exact) / sizes
    centred = exact - mean[index]
    others = (sizes - 1).clamp(min=1)
    if kind == "grpo":
        std = (empty.index_add(0, index, centred.square()) / others).sqrt()
        centred = centred / (std[index] + eps)
    if kind == "rloo":
        centred = centred * (sizes.double() / others)[index]
    # Not std == 0: the mean of equal scores can be off by a bit, and eps would make an advantage of that.
    highest = empty.scatter_reduce(0, index, exact, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, index, exact, "amin", include_self=False)
    return torch.where((highest > lowest)[index], centred, 0.0).to(widen(scores).dtype)


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """One advantage per row (B,) put on each of the row's action tokens (B,T), 0 elsewhere."""
    check_mask(mask)
    return torch.where(mask, widen(advantages)[:, None], 0.0)
