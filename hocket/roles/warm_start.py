"""Supervised steps on the training answers, so that a fresh model has something for RL to improve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hocket.config import WarmStart
from hocket.data.schedule import Prompt, PromptSchedule
from hocket.data.schema import positions
from hocket.errors import DataError
from hocket.models.policy import token_logprobs


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: WarmStart,
    *,
    stop_id: int,
    seed: int,
) -> float:
    """Train `model` in place to say each row's `answer` and then stop; returns the last loss, nats per token.

    Raises DataError when no row has an answer.
    """
    if not any(prompt.row["answer"] for prompt in prompts):
        raise DataError(
            "model.warm_start learns from answers, but the prompt file has none; set data.answer_key, or "
            "model.warm_start.steps=0"
        )
    schedule = PromptSchedule(
        prompts, seed=seed, prompts_per_step=settings.rows, prompts_per_unit=settings.rows, shuffle=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(settings.steps):
        (unit,) = schedule.units(step)
        texts = [str(row["answer"]) for row in unit.non_tensor_batch["row"]]
        answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        ids, prompt_length, length = _append(unit.tensor("input_ids"), unit.tensor("prompt_length"), answers, stop_id)
        mask = positions(length, ids.shape[1]) & ~positions(prompt_length, ids.shape[1])
        logprobs = token_logprobs(model, ids, length)["logprobs"]
        loss = -torch.where(mask, logprobs, 0.0).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _append(
    prompt_ids: Tensor, prompt_length: Tensor, answers: Sequence[Sequence[int]], stop_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompt, answer and stop token of each row, right padded; with lengths before and after."""
    rows = [[*prompt_ids[i, : int(prompt_length[i])].tolist(), *answer, stop_id] for i, answer in enumerate(answers)]
    length = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(length.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids, prompt_length, length
