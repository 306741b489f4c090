"""A learned reward: a sequence-classification model with one label, which reads text or the very token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hocket.data.proto import DataProto
from hocket.models.load import ModelSpec, load_scalar_model, load_tokenizer
from hocket.models.policy import frozen
from hocket.models.scalar import sequence_scores
from hocket.rewards.adapters import Row, Scores


class ModelReward:
    """Scores with a reward model and its own tokenizer; a drop-in for `Reward`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str) -> None:
        self.name = name
        self._model = model
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: str) -> ModelReward:
        """From a folder with a trained head; DataError when it has none."""
        model = load_scalar_model(ModelSpec(name=folder), fresh_head=False)
        return cls(model, load_tokenizer(None, model=folder), name=folder)

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row], uids: Sequence[str]
    ) -> Scores:
        """Score B completions with the head's value at the last token."""
        turns = [row.get("prompt", prompt) for row, prompt in zip(rows, prompts, strict=True)]
        texts = [self._ids(*both) for both in zip(turns, prompts, completions, strict=True)]
        length = torch.tensor([len(ids) for ids in texts])
        batch = torch.zeros(len(texts), int(length.max()), dtype=torch.int64)
        for i, ids in enumerate(texts):
            batch[i, : len(ids)] = torch.tensor(ids)
        scores: Tensor = sequence_scores(self._model, batch, length)
        return Scores(scores.tolist(), {})

    def _ids(self, asked: Any, prompt: str, completion: str) -> list[int]:
        if not self._tokenizer.chat_template:
            return self._tokenizer.encode(prompt + completion)
        before = asked if isinstance(asked, list) else [{"role": "user", "content": prompt}]
        turns = [*before, {"role": "assistant", "content": completion}]
        return cast(list[int], cast(Any, self._tokenizer).apply_chat_template(turns, return_dict=False))


class TokenReward:
    """Scores with a reward model that shares the policy's vocabulary: it reads the token ids as they were sampled."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = frozen(model)

    @torch.no_grad()
    def __call__(self, rollouts: DataProto) -> Scores:
        """The head's value at the last token of each of B rows."""
        ids, length = rollouts.tensor("input_ids"), rollouts.tensor("length")
        device = self._model.device
        return Scores(sequence_scores(self._model, ids.to(device), length.to(device)).tolist(), {})
