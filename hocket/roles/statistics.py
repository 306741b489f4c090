"""Numbers about a step's batch that people watch, under the names of the metrics page."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.algorithms.mismatch import by_staleness
from hocket.algorithms.presets import Algorithm, ClippedPolicy
from hocket.data.proto import DataProto


def batch_statistics(batch: DataProto, *, version: int) -> dict[str, float]:
    """Reward, length, staleness, group and advantage statistics of a TRAIN_BATCH trained at `version`.

    Each token has a staleness of its own: an answer may hold tokens of several versions.
    """
    score, mask = batch.tensor("score"), batch.tensor("response_mask")
    stale = (version - batch.tensor("version"))[mask].float()
    lengths = mask.sum(-1).float()
    advantages = batch.tensor("advantages")[mask]
    stats = {
        "reward/mean": score.mean(),
        "reward/std": score.std(correction=0),
        "group/zero_std_frac": _constant_groups(score, batch.tensor("group")),
        "len/response_mean": lengths.mean(),
        "len/response_max": lengths.max(),
        "len/truncated_frac": batch.tensor("truncated").float().mean(),
        "staleness/mean": stale.mean(),
        "staleness/max": stale.max(),
        "adv/mean": advantages.mean(),
        "adv/std": advantages.std(correction=0),
        "tokens": batch.tensor("length").sum(),
        "samples": torch.tensor(len(batch)),
    }
    for name, tensor in batch.tensors().items():
        if name.startswith("reward/"):
            stats[f"{name}/mean"] = tensor.mean()
    if "returns" in batch.keys():  # noqa: SIM118  (DataProto iterates rows)
        stats["value/explained_var"] = _explained(batch.tensor("values")[mask], batch.tensor("returns")[mask])
    return {name: float(value) for name, value in stats.items()}


def staleness_statistics(batch: DataProto, *, version: int, algorithm: Algorithm) -> dict[str, float]:
    """Mismatch and correction by staleness of a TRAIN_BATCH trained at `version`, as the step begins; see
    `by_staleness`."""
    tensors = batch.tensors()
    own = isinstance(algorithm, ClippedPolicy)  # an algorithm of a user's may correct in a way of its own
    corrected = algorithm.correct(tensors, new=tensors["proximal_logprobs"]) if own else None
    facts = by_staleness(tensors, stale=version - tensors["version"], corrected=corrected)
    return {name: float(value) for name, value in facts.items()}


def add_up(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Join metrics of micro-batches: names in "/max" by maximum, all others by sum."""
    for name, value in part.items():
        if name.endswith("/max"):
            total[name] = max(total.get(name, value), value)
        else:
            total[name] = total.get(name, 0.0) + value


def _constant_groups(score: Tensor, group: Tensor) -> Tensor:
    """Share of groups of two or more whose scores are all equal: comparing their answers teaches nothing."""
    count = int(group.max()) + 1
    high = torch.full((count,), -torch.inf).scatter_reduce(0, group, score, "amax")
    low = torch.full((count,), torch.inf).scatter_reduce(0, group, score, "amin")
    compared = torch.bincount(group, minlength=count) > 1
    return (high == low)[compared].float().mean() if compared.any() else torch.zeros(())


def _explained(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows only the mean."""
    return 1.0 - (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-8)
