"""The formulas once more, in float64 numpy and plain loops: slow, and independent of the code under test."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Two answers of 4 and 3 tokens; the last position of the second is padding.
ROLLOUT = torch.tensor([[0.50, 0.20, 0.90, 0.10], [0.30, 0.60, 0.05, 1.0]], dtype=torch.float64).log()
PROXIMAL = torch.tensor([[0.55, 0.18, 0.88, 0.20], [0.29, 0.62, 0.02, 1.0]], dtype=torch.float64).log()
NEW = torch.tensor([[0.60, 0.30, 0.89, 0.15], [0.20, 0.64, 0.06, 1.0]], dtype=torch.float64).log()
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
SIGNS = torch.tensor([[1.0] * 4, [-1.0] * 4], dtype=torch.float64)


def clipped(new: float, old: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    ratio = math.exp(min(20.0, max(-20.0, new - old)))
    gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        gain = max(gain, dual * advantage)
    return -gain


def aggregate(loss: Array, mask: NDArray[np.bool_], mode: str, length: int) -> float:
    rows = [row[keep] for row, keep in zip(loss, mask, strict=True) if keep.any()]
    if mode == "token_mean":
        return float(np.concatenate(rows).mean())
    if mode == "seq_mean_token_mean":
        return float(np.mean([row.mean() for row in rows]))
    total = float(np.mean([row.sum() for row in rows]))
    return total / length if mode == "const_norm" else total


def gae(
    rewards: Array, values: Array, mask: NDArray[np.bool_], cut: NDArray[np.bool_], gamma: float, lam: float
) -> Array:
    """Each row's action tokens are cut out first; then the sum over the deltas, as the paper writes it."""
    out = np.zeros_like(values)
    for b in range(len(values)):
        at = np.flatnonzero(mask[b])
        if not len(at):
            continue
        r, v = rewards[b, at], values[b, at]
        after = np.append(v[1:], v[-1] if cut[b] else 0.0)
        delta = r + gamma * after - v
        for t in range(len(at)):
            out[b, at[t]] = sum((gamma * lam) ** k * delta[t + k] for k in range(len(at) - t))
    return out


def group_advantages(scores: Array, groups: NDArray[np.int64], kind: str) -> Array:
    out = np.zeros_like(scores)
    for i in range(len(scores)):
        group = scores[groups == groups[i]]
        if len(group) < 2 or group.max() == group.min():
            continue
        centred = scores[i] - group.mean()
        others = (group.sum() - scores[i]) / (len(group) - 1)
        scaled = centred / (np.std(group, ddof=1) + 1e-6)
        out[i] = {"dr_grpo": centred, "rloo": scores[i] - others, "grpo": scaled}[kind]
    return out


def value_loss(value: float, old: float, target: float, clip: float | None) -> float:
    error = (value - target) ** 2
    if clip is not None:
        error = max(error, (min(max(value, old - clip), old + clip) - target) ** 2)
    return error / 2


def whiten(values: Array, mask: NDArray[np.bool_]) -> Array:
    kept = values[mask]
    return np.where(mask, (values - kept.mean()) / np.sqrt(kept.var() + 1e-8), 0.0)


def corrected(
    kind: str, row: dict[str, list[float]], cap: float, low: float, high: float
) -> tuple[list[float], list[bool]]:
    """Weight and kept for each action token of one answer: `row` has its new, proximal, rollout and advantages."""
    d = [p - r for p, r in zip(row["proximal"], row["rollout"], strict=True)]
    product, geometric = math.exp(sum(d)), math.exp(sum(d) / len(d))
    behind = sum(r - n for r, n in zip(row["rollout"], row["new"], strict=True)) / len(d)
    weights, kept = list[float](), list[bool]()
    for t, advantage in enumerate(row["advantages"]):
        ratio, moved = math.exp(d[t]), math.exp(row["new"][t]) - math.exp(row["rollout"][t])
        weight = {"icepop": ratio, "seq_tis": min(product, cap), "seq_mis": product}.get(kind, min(ratio, cap))
        weights.append(1.0 if kind in ("none", "dppo", "bypass") else weight)
        keep = {
            "icepop": low <= ratio <= high,
            "seq_mis": product <= high,
            "geo_mask": low <= geometric <= high,
            "opsm": not (advantage < 0 and behind > high),
            "dppo": not (advantage > 0 and moved > high) and not (advantage < 0 and moved < -low),
        }
        kept.append(keep.get(kind, True))
    return weights, kept
