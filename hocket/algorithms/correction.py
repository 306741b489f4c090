"""What the engine's log-probs differ from the trainer's by, and the corrections for it by name.

`proximal` are the trainer's log-probs at the start of the step, `rollout` the engine's when it sampled. They
differ when the weights were older (staleness) and when the engine computes otherwise. d = proximal - rollout.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hocket.algorithms.kl import LIMIT, log_ratio
from hocket.algorithms.reduce import check_choice, check_mask, masked, widen
from hocket.errors import ConfigError


@dataclass(frozen=True)
class Bounds:
    """`cap` is the largest weight; what is outside `low` .. `high` is dropped. None: there is no such bound."""

    cap: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, eq=False)
class Policies:
    """One token's log-probs (B,T) under the policies that meet in a step, detached, and 0 under a false mask.

    Where d is not finite, `rollout` is `proximal`: such a token counts as d = 0, see "mismatch/nonfinite".
    """

    new: Tensor
    proximal: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, batch: Mapping[str, Tensor], *, new: Tensor) -> "Policies":
        """From a TRAIN_BATCH and the current weights' log-probs (B,T)."""
        mask = batch["response_mask"]
        new, proximal, rollout, advantages = (
            masked(t, mask) for t in (new, batch["proximal_logprobs"], batch["rollout_logprobs"], batch["advantages"])
        )
        rollout = torch.where(log_ratio(proximal, rollout).isfinite(), rollout, proximal)
        return cls(new, proximal, rollout, advantages, mask)

    @property
    def d(self) -> Tensor:
        """proximal - rollout of each token (B,T), in nats."""
        return difference(self.proximal, self.rollout, mask=self.mask)

    @property
    def ratio(self) -> Tensor:
        """e^d of each token (B,T)."""
        return exponent(self.d)

    @property
    def row_ratio(self) -> Tensor:
        """e^(sum d) of each answer (B,1)."""
        return exponent(self.d.sum(-1, keepdim=True))

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean over each answer's action tokens (B,1)."""
        return masked(values, self.mask).sum(-1, keepdim=True) / self.mask.sum(-1, keepdim=True).clamp(min=1)


Weighed = tuple[Tensor, Tensor]  # weight and keep, each (B,T) or (B,1)


def _none(policies: Policies, bounds: Bounds) -> Weighed:
    return torch.ones_like(policies.proximal), policies.mask


def _token_tis(policies: Policies, bounds: Bounds) -> Weighed:
    return policies.ratio.clamp(max=bounds.cap), policies.mask


def _icepop(policies: Policies, bounds: Bounds) -> Weighed:
    return policies.ratio, _inside(policies.ratio, bounds)


def _seq_tis(policies: Policies, bounds: Bounds) -> Weighed:
    return policies.row_ratio.clamp(max=bounds.cap), policies.mask


def _seq_mis(policies: Policies, bounds: Bounds) -> Weighed:
    return policies.row_ratio, _inside(policies.row_ratio, bounds)


def _geo_mask(policies: Policies, bounds: Bounds) -> Weighed:
    mean = exponent(policies.row_mean(policies.d))
    return policies.ratio.clamp(max=bounds.cap), _inside(mean, bounds)


def _opsm(policies: Policies, bounds: Bounds) -> Weighed:
    behind = policies.row_mean(log_ratio(policies.rollout, policies.new))
    return policies.ratio.clamp(max=bounds.cap), (policies.advantages >= 0) | _inside(behind, bounds)


def _dppo(policies: Policies, bounds: Bounds) -> Weighed:
    moved, up = policies.new.exp() - policies.rollout.exp(), policies.advantages > 0
    low, high = -(bounds.low or 0.0), bounds.high or 0.0
    return torch.ones_like(moved), torch.where(up, moved <= high, (moved >= low) | (policies.advantages == 0))


def _inside(values: Tensor, bounds: Bounds) -> Tensor:
    above = values >= bounds.low if bounds.low is not None else torch.ones_like(values, dtype=torch.bool)
    return above & (values <= bounds.high) if bounds.high is not None else above


@dataclass(frozen=True)
class Correction:
    """A correction: its function, its usual bounds, and in a few words what it does (with the bounds put in).

    `on_rollout`: the surrogate's ratio is new / rollout, which needs no other weight. `clips`: PPO's clip is on.
    """

    weigh: Callable[[Policies, Bounds], Weighed]
    bounds: Bounds
    says: str
    on_rollout: bool = False
    clips: bool = True


CORRECTIONS: dict[str, Correction] = {
    "none": Correction(_none, Bounds(), "nothing is corrected"),
    "token_tis": Correction(_token_tis, Bounds(cap=2.0), "a token weighs e^d, at most {cap:g}"),
    "icepop": Correction(
        _icepop, Bounds(low=0.5, high=5.0), "a token weighs e^d, and is dropped outside {low:g} .. {high:g}"
    ),
    "seq_tis": Correction(_seq_tis, Bounds(cap=5.0), "all tokens of an answer weigh e^(sum d), at most {cap:g}"),
    "seq_mis": Correction(
        _seq_mis, Bounds(high=3.0), "all tokens of an answer weigh e^(sum d), which is dropped above {high:g}"
    ),
    "geo_mask": Correction(
        _geo_mask,
        Bounds(cap=2.0, low=0.99, high=1.01),
        "a token weighs e^d, at most {cap:g}, and an answer is dropped with e^(mean d) outside {low:g} .. {high:g}",
    ),
    "opsm": Correction(
        _opsm,
        Bounds(cap=2.0, high=0.5),
        "a token weighs e^d, at most {cap:g}, and a bad answer that the policy left by more than {high:g} nats "
        "a token is dropped",
    ),
    "dppo": Correction(
        _dppo,
        Bounds(low=0.2, high=0.2),
        "the ratio is to the makers' policy, without clip, and a token is dropped whose probability rose by more than "
        "{high:g} though good, or fell by more than {low:g} though bad",
        on_rollout=True,
        clips=False,
    ),
    "bypass": Correction(_none, Bounds(), "the clipped ratio is to the makers' policy", on_rollout=True),
}
"""What a correction weighs a token by (w), and which tokens it keeps (k); the loss is k sg[w] PPO(rho), rho = new /
proximal unless said otherwise, over all tokens, dropped ones too. Sums and means of d are over an answer.

| name | w | kept | rho, source |
|---|---|---|---|
| `none` | 1 | all | |
| `token_tis` | min(e^d, cap) | all | IMPALA, arXiv 1802.01561, eq. 1, at the level of tokens |
| `icepop` | e^d | low <= e^d <= high | arXiv 2510.18855 |
| `seq_tis` | min(e^(sum d), cap) | all | its variance grows with the length |
| `seq_mis` | e^(sum d) | e^(sum d) <= high | long answers are dropped more |
| `geo_mask` | min(e^d, cap) | low <= e^(mean d) <= high, answers | widen it with the staleness |
| `opsm` | min(e^d, cap) | unless A < 0 and mean(rollout - new) > high, answers | DeepSeek-V3.2, arXiv 2512.02556 |
| `dppo` | 1 | unless A > 0 and e^new - e^rollout > high, or A < 0 and < -low | new / rollout, without clip |
| `bypass` | 1 | all | new / rollout; a weight on top would count it twice |
"""


@dataclass(frozen=True, eq=False)
class Corrected:
    """What becomes of a batch's tokens, each (B,T) and detached; `weight` is 0 and the others false under a false mask.

    `anchor`: log-probs that the surrogate's ratio is to. `keep`: tokens that are learnt from. `truncated`: kept ones
    whose weight is at the cap.
    """

    anchor: Tensor
    weight: Tensor
    keep: Tensor
    truncated: Tensor


def bounds_of(kind: str, *, cap: float | None = None, low: float | None = None, high: float | None = None) -> Bounds:
    """The bounds of a correction, its usual ones where None is given.

    Raises ConfigError for an unknown `kind`, a bound that it has no use for, and a window that is empty.
    """
    check_choice(kind, tuple(CORRECTIONS), what="correction")
    usual, given = asdict(CORRECTIONS[kind].bounds), {"cap": cap, "low": low, "high": high}
    own = [f"correction_{name}" for name, value in usual.items() if value is not None]
    for name, value in given.items():
        if value is not None and usual[name] is None:
            twice = ": its ratio is the importance weight already, and a second one would count it twice"
            raise ConfigError(
                f"correction {kind} has no correction_{name}{twice if CORRECTIONS[kind].on_rollout else ''}; "
                f"leave it out (it has {', '.join(own) or 'no bounds'})"
            )
    bounds = Bounds(**{name: usual[name] if value is None else value for name, value in given.items()})
    if kind in ("icepop", "geo_mask") and not (bounds.low or 0.0) < (bounds.high or 0.0):
        raise ConfigError(
            f"correction {kind} keeps nothing: correction_low={bounds.low} must be below correction_high={bounds.high}"
        )
    return bounds


@torch.no_grad()
def correct(kind: str, batch: Mapping[str, Tensor], *, new: Tensor, bounds: Bounds) -> Corrected:
    """Weigh and select the tokens of a TRAIN_BATCH; `new` (B,T) are the current weights' log-probs.

    See `CORRECTIONS` for the kinds, and `bounds_of` for `bounds`. Raises ConfigError for another kind.
    """
    check_choice(kind, tuple(CORRECTIONS), what="correction")
    check_mask(batch["response_mask"])
    policies, correction = Policies.of(batch, new=new), CORRECTIONS[kind]
    weight, keep = correction.weigh(policies, bounds)
    weight, keep = masked(weight.expand_as(policies.mask), policies.mask), policies.mask & keep
    truncated = keep & (weight >= bounds.cap) if bounds.cap is not None else torch.zeros_like(keep)
    return Corrected(policies.rollout if correction.on_rollout else policies.proximal, weight, keep, truncated)


def difference(proximal: Tensor, rollout: Tensor, *, mask: Tensor) -> Tensor:
    """d (B,T) in nats, 0 where it is not finite and under a false mask."""
    d = masked(log_ratio(proximal, rollout), mask)
    return torch.where(d.isfinite(), d, 0.0)


def exponent(d: Tensor) -> Tensor:
    """e^d, of a d that is held within +-20."""
    return widen(d).clamp(-LIMIT, LIMIT).exp()
