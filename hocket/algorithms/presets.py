"""The algorithms by name: PPO, GRPO, Dr. GRPO. Each is a frozen value that turns a batch into losses.

Batches map names to tensors, as in the schema of `hocket.data`; B sequences, T token positions.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Protocol, get_type_hints

import torch
from torch import Tensor

from hocket.algorithms.advantages import GROUP_KINDS, gae, group_advantages, spread, token_rewards
from hocket.algorithms.correction import CORRECTIONS, Bounds, Corrected, bounds_of, correct
from hocket.algorithms.kl import kl_estimate, kl_loss
from hocket.algorithms.losses import check_dual_clip, ppo_loss, value_loss
from hocket.algorithms.reduce import (
    AGGREGATIONS,
    Counts,
    aggregate,
    check_choice,
    masked,
    masked_max,
    token_mean,
    whiten,
    widen,
)
from hocket.errors import ConfigError

Batch = Mapping[str, Tensor]
Tensors = dict[str, Tensor]


class Algorithm(Protocol):
    """What a trainer asks of an algorithm; write a frozen dataclass with these four to add one."""

    @property
    def needs(self) -> frozenset[str]:
        """The models beside the policy: "critic", "reference", both or none."""
        ...

    @property
    def group_baseline(self) -> bool:
        """Whether advantages are made inside groups, so that a prompt needs several answers."""
        ...

    def credit(self, batch: Batch) -> Tensors:
        """Advantages (B,T), with a critic also token_reward and returns (B,T), for the whole step at once.

        `batch` has response_mask (B,T) bool, score (B,), group (B,) int64, truncated (B,) bool,
        rollout_logprobs and proximal_logprobs (B,T), and as needed reference_logprobs and values (B,T).
        """
        ...

    def loss(self, new: Batch, batch: Batch, counts: Counts) -> tuple[Tensors, Tensors]:
        """Scalar losses ("policy", with a critic "value") and detached metrics of one micro-batch.

        `new` comes from the current weights, with gradient: logprobs (B,T), entropy (B,T) if there is an
        `entropy_coef`, values (B,T) with a critic. `batch` also has what `credit` returned. `counts` are the
        optimizer step's, so losses and metrics add up over micro-batches; names in "/max" join by maximum.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ClippedPolicy:
    """What PPO and GRPO share: k sg[w] PPO(rho = new / proximal), and its metrics.

    Decoupled PPO (arXiv 2110.00641): the clip holds the policy near the step's start, the weight w of a token and
    whether it is kept, k, correct for what sampled: `correction` names how, see `correction.CORRECTIONS`, and None
    leaves a bound at its usual value. `kl_coef` acts where the subclass says.
    """

    kl_coef: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    aggregation: str = "token_mean"
    max_length: int | None = None
    correction: str = "token_tis"
    correction_cap: float | None = None
    correction_low: float | None = None
    correction_high: float | None = None

    def __post_init__(self) -> None:
        check_choice(self.aggregation, AGGREGATIONS, what="aggregation")
        check_dual_clip(self.dual_clip)
        _ = self.bounds

    @property
    def bounds(self) -> Bounds:
        """The bounds of the correction. Raises ConfigError for one that it has no use for."""
        cap, low, high = self.correction_cap, self.correction_low, self.correction_high
        return bounds_of(self.correction, cap=cap, low=low, high=high)

    def correct(self, batch: Batch, *, new: Tensor) -> Corrected:
        """What the correction does to each token, with the current weights' log-probs `new` (B,T)."""
        return correct(self.correction, batch, new=new, bounds=self.bounds)

    def reduce(self, loss: Tensor, mask: Tensor, *, counts: Counts) -> Tensor:
        """`aggregate` as this algorithm is set."""
        return aggregate(loss, mask, mode=self.aggregation, counts=counts, max_length=self.max_length)

    def policy_loss(self, new: Batch, batch: Batch, *, counts: Counts) -> tuple[Tensor, Tensors]:
        """The policy's scalar loss without KL, and the metrics of the policy."""
        mask = batch["response_mask"]
        corrected, (low, high, dual) = self.correct(batch, new=new["logprobs"]), self._clip
        loss, ratio = ppo_loss(
            masked(new["logprobs"], mask),
            corrected.anchor,
            advantages=batch["advantages"],
            clip_low=low,
            clip_high=high,
            dual_clip=dual,
        )
        loss = torch.where(corrected.keep, corrected.weight * loss, 0.0)
        total = self.reduce(loss, mask, counts=counts)
        if self.entropy_coef:
            total = total - self.entropy_coef * self.reduce(new["entropy"], mask, counts=counts)
        return total, self.policy_metrics(new, batch, ratio=ratio, corrected=corrected, counts=counts)

    @property
    def _clip(self) -> tuple[float, float, float | None]:
        if CORRECTIONS[self.correction].clips:
            return self.clip_low, self.clip_high, self.dual_clip
        return math.inf, math.inf, None

    @torch.no_grad()
    def policy_metrics(
        self, new: Batch, batch: Batch, *, ratio: Tensor, corrected: Corrected, counts: Counts
    ) -> Tensors:
        """Means over the step's action tokens; "clip/..." are the shares of tokens that a clip holds still,
        "correction/..." of those that the correction keeps, and of those whose weight is at its cap.

        "kl/proximal" is k3 of KL(proximal || new), the direction whose samples the batch has; "kl/ref"
        is k3 of KL(new || reference), there when a KL coefficient is set.
        """
        mask, advantages, (low, high, dual) = batch["response_mask"], batch["advantages"], self._clip
        tokens: Tensors = {
            "ratio/mean": ratio,
            "correction/kept": corrected.keep,
            "correction/truncated": corrected.truncated,
            "clip/low": (advantages < 0) & (ratio < 1 - low),
            "clip/high": (advantages > 0) & (ratio > 1 + high),
            "kl/proximal": kl_estimate(batch["proximal_logprobs"], new["logprobs"], kind="k3"),
        }
        if dual is not None:
            tokens["clip/dual"] = (advantages < 0) & (ratio > dual)
        if "entropy" in new:
            tokens["entropy"] = new["entropy"]
        if self.kl_coef:
            tokens["kl/ref"] = kl_estimate(new["logprobs"], batch["reference_logprobs"], kind="k3")
        means = {name: token_mean(values, mask, counts=counts) for name, values in tokens.items()}
        return means | {"ratio/max": masked_max(ratio, mask)}


@dataclass(frozen=True, kw_only=True)
class PPO(ClippedPolicy):
    """PPO with a critic (arXiv 1707.06347; for language models InstructGPT, arXiv 2203.02155).

    `kl_coef` is a penalty per token in the reward (k1 against the reference). `value_clip` None turns the
    critic's clip off. gamma = lam = 1 suits one final score. With `bootstrap_truncated` the state after an
    answer that was cut by the length limit is worth the critic's last value; right for a reward that would
    have gone on, wrong for a score of the whole answer, where it makes answers that never end look good.
    `advantage="bandit"` is the older form of ColossalChat: one number per answer, its score minus `kl_coef` times the
    mean k3 over its tokens, against the critic's value of the prompt; gamma, lam and whiten have no part in it.
    """

    advantage: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    value_clip: float | None = 0.2
    bootstrap_truncated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.advantage, ("gae", "bandit"), what="advantage of PPO")

    @property
    def needs(self) -> frozenset[str]:
        """A critic, and a reference when there is a KL penalty."""
        return frozenset({"critic", "reference"} if self.kl_coef else {"critic"})

    @property
    def group_baseline(self) -> bool:
        """False: the critic is the baseline."""
        return False

    def credit(self, batch: Batch) -> Tensors:
        """token_reward, advantages (whitened over the step's tokens) and returns, each (B,T)."""
        mask = batch["response_mask"]
        if self.advantage == "bandit":
            return self._bandit(batch, mask)
        rewards = token_rewards(
            batch["score"],
            mask,
            logprobs=batch["proximal_logprobs"],
            reference=batch["reference_logprobs"] if self.kl_coef else None,
            kl_coef=self.kl_coef,
        )
        advantages, returns = gae(
            rewards,
            batch["values"],
            mask=mask,
            gamma=self.gamma,
            lam=self.lam,
            truncated=batch["truncated"] if self.bootstrap_truncated else None,
        )
        advantages = whiten(advantages, mask) if self.whiten else advantages
        return {"token_reward": rewards, "advantages": advantages, "returns": returns}

    def _bandit(self, batch: Batch, mask: Tensor) -> Tensors:
        reward = widen(batch["score"])
        if self.kl_coef:
            k3 = masked(kl_estimate(batch["proximal_logprobs"], batch["reference_logprobs"], kind="k3"), mask)
            reward = reward - self.kl_coef * k3.sum(-1) / mask.sum(-1).clamp(min=1)
        first = mask.int().argmax(-1, keepdim=True)  # the state after the prompt is that of the first action
        value = batch["values"].gather(1, first).squeeze(1)
        last = torch.zeros_like(batch["values"])
        last[torch.arange(len(mask)), mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)] = 1.0
        return {
            "token_reward": masked(last * reward[:, None], mask),
            "advantages": spread(reward - value, mask),
            "returns": spread(reward, mask),
        }

    def loss(self, new: Batch, batch: Batch, counts: Counts) -> tuple[Tensors, Tensors]:
        """The losses "policy" and "value", and their metrics; see `Algorithm.loss`."""
        policy, metrics = self.policy_loss(new, batch, counts=counts)
        mask = batch["response_mask"]
        values, old = masked(new["values"], mask), batch["values"]
        errors = value_loss(values, old, returns=batch["returns"], clip=self.value_clip)
        value = self.reduce(errors, mask, counts=counts)
        metrics |= {"policy/loss": policy.detach(), "value/loss": value.detach()}
        if self.value_clip is not None:
            moved = (values.detach() - old).abs() > self.value_clip
            metrics["value/clipfrac"] = token_mean(moved, mask, counts=counts)
        return {"policy": policy, "value": value}, metrics


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedPolicy):
    """GRPO (DeepSeekMath, arXiv 2402.03300) with DAPO's clip-higher and token mean (arXiv 2503.14476).

    An answer's advantage is against the other answers to its prompt. `kl_coef` is k2 against the reference in
    the loss: the gradient of the reverse KL per token while the samples are the policy's own (the paper's k3
    has that of the forward KL).
    """

    advantage: str = "grpo"
    clip_high: float = 0.28
    dual_clip: float | None = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.advantage, GROUP_KINDS, what="advantage")

    @property
    def needs(self) -> frozenset[str]:
        """A reference when there is a KL penalty, else nothing beside the policy."""
        return frozenset({"reference"} if self.kl_coef else ())

    @property
    def group_baseline(self) -> bool:
        """True."""
        return True

    def credit(self, batch: Batch) -> Tensors:
        """Advantages (B,T). An answer without action tokens is no member of its group: it taught nothing."""
        mask, scores = batch["response_mask"], widen(batch["score"])
        alive = mask.any(-1)
        rows = torch.zeros_like(scores)
        rows[alive] = group_advantages(scores[alive], batch["group"][alive], kind=self.advantage)
        return {"advantages": spread(rows, mask)}

    def loss(self, new: Batch, batch: Batch, counts: Counts) -> tuple[Tensors, Tensors]:
        """The loss "policy" and its metrics; see `Algorithm.loss`."""
        policy, metrics = self.policy_loss(new, batch, counts=counts)
        if self.kl_coef:
            mask = batch["response_mask"]
            penalty = kl_loss(masked(new["logprobs"], mask), batch["reference_logprobs"])
            policy = policy + self.kl_coef * self.reduce(penalty, mask, counts=counts)
        return {"policy": policy}, metrics | {"policy/loss": policy.detach()}


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """Dr. GRPO (arXiv 2503.20783): no division by the group's std, nor by an answer's own length.

    `max_length` must be set before a loss is asked for: the longest answer that the run allows, in tokens.
    """

    advantage: str = "dr_grpo"
    aggregation: str = "const_norm"


PRESETS: dict[str, type[PPO | GRPO]] = {"ppo": PPO, "grpo": GRPO, "dr_grpo": DrGRPO}


def build(name: str, options: Mapping[str, object]) -> Algorithm:
    """The preset `name` with `options` set; the rest keeps its defaults.

    Raises ConfigError for a name or an option that does not exist, and for a value of the wrong kind.
    """
    check_choice(name, tuple(PRESETS), what="algorithm")
    kinds = get_type_hints(PRESETS[name])
    for option, value in options.items():
        if option not in kinds:
            raise ConfigError(_unknown_option(name, option, list(kinds)))
        if not _fits(value, kinds[option]):
            wanted = getattr(kinds[option], "__name__", kinds[option])
            raise ConfigError(f"algorithm {name}: {option} is {value!r}, but must be of type {wanted}")
    arguments: dict[str, Any] = dict(options)
    return PRESETS[name](**arguments)


def describe_correction(algorithm: Algorithm, *, max_staleness: int) -> str:
    """One sentence for the log: what corrects for samples that are up to `max_staleness` versions old, and why."""
    old = f"samples may be {max_staleness} version{'s' * (max_staleness > 1)} old when they are trained"
    if not isinstance(algorithm, ClippedPolicy):
        why = f"; {old}" if max_staleness else ""
        return f"off-policy correction: up to {type(algorithm).__name__}, hocket adds none{why}"
    kind = algorithm.correction
    if kind == "none" and max_staleness:
        return f"warning: algo.correction=none, but {old}: the loss is biased; use algo.correction=token_tis"
    says = CORRECTIONS[kind].says.format(**asdict(algorithm.bounds))
    why = old if max_staleness else "makers sample with the trainer's own weights, so it should hardly act"
    return f"off-policy correction {kind}: {says}; {why}"


def _unknown_option(name: str, option: str, known: list[str]) -> str:
    nearest = get_close_matches(option, known, n=1, cutoff=0.0)[0]
    options = ", ".join(sorted(known))
    return f"algorithm {name} has no option {option!r}; nearest is {nearest!r}, all are {options}"


def _fits(value: object, kind: Any) -> bool:
    if isinstance(value, bool):  # Python counts it as an int
        return kind is bool
    return isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))
