"""Critic and reward model: a backbone with one score per position (AutoModelForSequenceClassification layout)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hocket.errors import ConfigError
from hocket.models.policy import forward_inputs


def token_scores(model: PreTrainedModel, input_ids: Tensor, length: Tensor) -> Tensor:
    """Score (B, T) float32 that the head gives each position of right-padded `input_ids` (B, T)."""
    backbone = getattr(model, model.base_model_prefix, None)
    head = getattr(model, "score", None)
    if backbone is None or head is None:
        raise ConfigError(
            f"{type(model).__name__} has no backbone with a `score` head; use an architecture whose "
            "AutoModelForSequenceClassification has one (GPT-2, OPT, BLOOM, Llama, Qwen, ...)"
        )
    hidden = backbone(**forward_inputs(backbone, input_ids, length))[0]
    return cast(Tensor, head(hidden).squeeze(-1).float())


def state_values(model: PreTrainedModel, input_ids: Tensor, length: Tensor) -> Tensor:
    """Value (B, T) of the state in which token t was chosen, that is after the tokens before t; 0 at t = 0."""
    return torch.nn.functional.pad(token_scores(model, input_ids, length)[:, :-1], (1, 0))


def sequence_scores(model: PreTrainedModel, input_ids: Tensor, length: Tensor) -> Tensor:
    """Score (B,) float32 at the last real token of each row: what a reward model says of the whole text."""
    return token_scores(model, input_ids, length).gather(1, (length - 1)[:, None]).squeeze(1)
