"""Which prompts belong to which step, decided by the seed and the step alone, never by who is free."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from hocket.data.chat import Tokenizer, render_prompt
from hocket.data.prompts import PromptTable
from hocket.data.proto import DataProto
from hocket.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt: `key` is source:row, `ids` end with the generation prefix, `row` goes to the reward."""

    key: str
    ids: tuple[int, ...]
    row: Mapping[str, object]


def tokenize(
    table: PromptTable, tokenizer: Tokenizer, *, template: str, system: str | None, max_tokens: int | None
) -> tuple[list[Prompt], int]:
    """All prompts of a table as token ids, and how many were left out for being longer than `max_tokens`.

    Raises DataError when none is left.
    """
    prompts = [
        Prompt(
            key=f"{table.source}:{row.row}",
            ids=tuple(render_prompt(row.prompt, tokenizer, template=template, system=system)),
            row=row.reward_columns,
        )
        for row in table.rows
    ]
    kept = [p for p in prompts if max_tokens is None or len(p.ids) <= max_tokens]
    if not kept:
        shortest = min(len(p.ids) for p in prompts)
        raise DataError(
            f"all {len(prompts)} prompts of {table.source} are longer than data.max_prompt_tokens={max_tokens}; "
            f"the shortest has {shortest} tokens"
        )
    return kept, len(prompts) - len(kept)


class PromptSchedule:
    """The endless sequence of prompts, cut into steps and units.

    Epoch e visits every prompt once, in an order that depends on (seed, e); step s takes the next
    `prompts_per_step` of the sequence, so that an epoch may end inside a step. A visit's identity is
    source:row:epoch.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        prompts_per_step: int,
        prompts_per_unit: int,
        shuffle: bool,
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._per_step = prompts_per_step
        self._per_unit = prompts_per_unit
        self._shuffle = shuffle

    @cached_property
    def sha256(self) -> str:
        """Of all prompts in file order: another one means that other data would be trained on."""
        hasher = hashlib.sha256()
        for prompt in self._prompts:
            hasher.update(f"{prompt.key} {prompt.ids}\n".encode())
        return hasher.hexdigest()

    def units(self, step: int) -> list[DataProto]:
        """The units of step `step` (from 0) in prompt order, each a PROMPTS batch that names its step and index."""
        visits = self._visits(step * self._per_step, (step + 1) * self._per_step)
        blocks = [visits[i : i + self._per_unit] for i in range(0, self._per_step, self._per_unit)]
        return [self._unit(block, {"step": step, "unit": i}) for i, block in enumerate(blocks)]

    def _visits(self, first: int, end: int) -> list[tuple[str, Prompt]]:
        """Visits `first` to `end` - 1 of the endless sequence; each epoch's order is drawn once."""
        size = len(self._prompts)
        visits: list[tuple[str, Prompt]] = []
        for epoch in range(first // size, -(-end // size)):
            order = self._order(epoch)[max(first - epoch * size, 0) : end - epoch * size]
            prompts = [self._prompts[i] for i in order.tolist()]
            visits += [(f"{prompt.key}:{epoch}", prompt) for prompt in prompts]
        return visits

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.Generator(np.random.Philox(key=[self._seed, epoch])).permutation(len(self._prompts))

    def _unit(self, visits: Sequence[tuple[str, Prompt]], meta: Mapping[str, object]) -> DataProto:
        lengths = [len(prompt.ids) for _, prompt in visits]
        ids = torch.zeros(len(visits), max(lengths), dtype=torch.int64)
        for i, (_, prompt) in enumerate(visits):
            ids[i, : lengths[i]] = torch.tensor(prompt.ids)
        return DataProto.from_dict(
            {"input_ids": ids, "prompt_length": torch.tensor(lengths)},
            {"uid": [uid for uid, _ in visits], "row": [dict(prompt.row) for _, prompt in visits]},
            meta,
        )
