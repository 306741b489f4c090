"""Drawing tokens: one uniform number per row and position, turned into a token by the inverse CDF.

The number depends only on (run seed, prompt uid, sample index, position), so a sample is the same whoever
makes it, in whatever order.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.errors import HocketError
from hocket.rollout.engine import Sampling

_BLOCK = 256
_TOP_P_CANDIDATES = 1024


def uniforms(seed: int, uid: str, sample: int, count: int) -> NDArray[np.float64]:
    """The first `count` numbers in [0, 1) of the noise stream of one sample; entry i belongs to position i.

    Philox4x64-10 (Salmon et al. 2011, counter-based), keyed by a hash of seed, uid and sample.
    """
    key = hashlib.blake2b(f"{seed}\0{uid}\0{sample}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64))).random(count)


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Choose a token per row of `logits` (R, V) with `uniform` (R,) float64.

    Returns token ids (R,) and their log-probs (R,) float32 under the distribution that was drawn from: after
    temperature, and renormalised over the kept tokens when top-k or top-p is on. Raises HocketError when a
    logit is NaN or infinite.
    """
    kept = logits.float() if sampling.greedy else _keep(logits.float() / sampling.temperature, sampling)
    scores = torch.log_softmax(kept, -1)
    if bool(scores[:, 0].isnan().any()):  # one bad logit makes its whole row NaN
        raise HocketError(
            f"{int(scores[:, 0].isnan().sum())} of {len(scores)} rows have logits that are not finite: the weights "
            "hold NaN or infinity; lower trainer.lr, or look at the gradient norms of the last steps"
        )
    tokens = scores.argmax(-1) if sampling.greedy else inverse_cdf(scores.exp(), uniform)
    return tokens, scores.gather(-1, tokens[:, None]).squeeze(-1)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token (R,) at which the cumulative sum of `probs` (R, V) passes `uniform` (R,) float64 of the total.

    Sums in float64 over blocks first: a float32 sum over a large vocabulary misplaces draws. A token of
    probability zero is never chosen.
    """
    rows, vocabulary = probs.shape
    blocks = torch.nn.functional.pad(probs, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = ends[:, -1]
    # below the total, as u is at most 1 - 2^-53: float64 rounds that product down, never up to the total
    target = (uniform * total)[:, None]
    block = torch.searchsorted(ends, target, right=True)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1)
    inside = torch.searchsorted(chosen.double().cumsum(-1), target - before, right=True)
    last = _BLOCK - 1 - (chosen > 0).flip(-1).int().argmax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(inside, last)).squeeze(1)


def _keep(logits: Tensor, sampling: Sampling) -> Tensor:
    """Set what top-k and top-p exclude to minus infinity."""
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = torch.where(logits < threshold, -torch.inf, logits)
    if sampling.top_p < 1.0:
        logits = torch.where(logits < _nucleus_threshold(logits, sampling.top_p), -torch.inf, logits)
    return logits


def _nucleus_threshold(logits: Tensor, top_p: float) -> Tensor:
    """The smallest logit (R, 1) of the smallest set of likely tokens that holds `top_p` of the probability.

    Looks at the likeliest tokens first: a full sort of a large vocabulary costs more than the forward saves.
    """
    probs = torch.softmax(logits, -1)
    top = probs.topk(min(_TOP_P_CANDIDATES, probs.shape[-1]), -1).values
    if bool((top.sum(-1) < top_p).any()):
        top = probs.sort(-1, descending=True).values
    before = top.double().cumsum(-1) - top
    last = (before < top_p).sum(-1, keepdim=True) - 1
    smallest = top.gather(-1, last.clamp(min=0))
    return torch.where(probs >= smallest, logits, torch.inf).amin(-1, keepdim=True)
