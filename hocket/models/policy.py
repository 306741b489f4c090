"""One forward over right-padded rows -> log-probs of the tokens that are there."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from hocket.data.schema import positions


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    length: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> dict[str, Tensor]:
    """Log-probs that `model` gives each token of `input_ids` (B, T), right padded, `length` (B,) tokens a row.

    Returns `logprobs` (B, T) float32: position t holds log p(token t | tokens before t), after dividing the
    logits by `temperature`; position 0 and padding hold 0. With `entropy`, also the entropy in nats (B, T) of
    the distribution that token t was drawn from.
    """
    logits = cast(Tensor, model(**forward_inputs(model, input_ids, length)).logits)
    scores = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
    real = positions(length, input_ids.shape[1])[:, 1:]
    chosen = scores.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    out = {"logprobs": _shifted(torch.where(real, chosen, 0.0))}
    if entropy:
        out["entropy"] = _shifted(torch.where(real, -(scores.exp() * scores).sum(-1), 0.0))
    return out


def forward_inputs(model: nn.Module, input_ids: Tensor, length: Tensor) -> dict[str, Any]:
    """Keyword arguments of a forward over right-padded rows, with `position_ids` where the model takes them."""
    attention = positions(length, input_ids.shape[1]).long()
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention, "use_cache": False}
    if takes(type(model), "position_ids"):
        inputs["position_ids"] = (attention.cumsum(-1) - 1).clamp(min=0)
    return inputs


@cache
def takes(kind: type[nn.Module], argument: str) -> bool:
    """Whether the model's forward names `argument`: an unknown keyword would vanish in its **kwargs."""
    return argument in inspect.signature(kind.forward).parameters


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, a tied tensor once, under the first of its names."""
    weights: dict[str, Tensor] = {name: p.detach() for name, p in module.named_parameters()}
    saved = module.state_dict()
    weights |= {name: b for name, b in module.named_buffers() if name in saved}
    return weights


def _shifted(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (1, 0))
