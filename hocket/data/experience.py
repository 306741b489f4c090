"""Experience as callbacks and `training_step` see it: a DataProto with the names of the older systems as views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from hocket.data.proto import DataProto
from hocket.data.schema import collate, positions
from hocket.errors import BatchConflict


class Experience(DataProto):
    """A batch of the EXPERIENCE schema with read-only views; B rows, T positions, A of them for actions.

    Prompts were padded on the left once, so that all answers began in one column: A was the width behind it. Here
    rows are right padded, answers begin where their prompts end, and the A columns are those from the end of the
    *shortest* prompt on: in a row with a longer prompt they begin with prompt tokens, which `action_mask` leaves out.
    So A depends on the rows that the batch holds, and `sequences[:, -A:]` are the tokens of the A columns as before.
    What stands outside `action_mask` has no meaning, except in `kl`, which is 0 there. A view whose field is not
    there (values before the critic saw the batch, say) is None.
    """

    @classmethod
    def of(cls, data: DataProto) -> Self:
        """The batch as an Experience: the same tensors and columns, in dicts of its own."""
        return cls.from_dict(data.tensors(), data.non_tensor_batch, data.meta_info)

    @property
    def sequences(self) -> Tensor:
        """Prompt and answer tokens (B, T), right padded."""
        return self.tensor("input_ids")

    @property
    def attention_mask(self) -> Tensor:
        """Bool (B, T): true where a row has a token, also one that equals the padding token."""
        return positions(self.tensor("length"), self.sequences.shape[1])

    @property
    def action_mask(self) -> Tensor:
        """Bool (B, A): true at the tokens that the policy produced, end token included."""
        return self._actions(self.tensor("response_mask"))

    @property
    def action_log_probs(self) -> Tensor | None:
        """Log-probs (B, A) of the tokens as they were sampled."""
        return self._view("rollout_logprobs")

    @property
    def values(self) -> Tensor | None:
        """The critic's value (B, A) of the state in which each token was chosen."""
        return self._view("values")

    @property
    def advantages(self) -> Tensor | None:
        """Advantages (B, A)."""
        return self._view("advantages")

    @property
    def kl(self) -> Tensor | None:
        """k1 (B, A): log-prob as sampled minus that of the reference, per token; its mean estimates KL(policy, ref)."""
        if not {"rollout_logprobs", "reference_logprobs"} <= self.leaves().keys():
            return None
        ratio = self.tensor("rollout_logprobs") - self.tensor("reference_logprobs")
        return torch.where(self.action_mask, self._actions(ratio), 0.0)

    @property
    def reward(self) -> Tensor | None:
        """Score (B,) of each row, without any KL penalty."""
        return self.tensor("score") if "score" in self.leaves() else None

    def _view(self, key: str) -> Tensor | None:
        return self._actions(self.tensor(key)) if key in self.leaves() else None

    def _actions(self, tokens: Tensor) -> Tensor:
        return tokens[:, int(self.tensor("prompt_length").min()) if len(self) else 0 :]


def split_experience_batch(experience: DataProto) -> list[Experience]:
    """The rows one by one, as views of one row each, with its entries of the columns and the facts of the batch."""
    return Experience.of(experience).split(1)


def make_experience_batch(items: Sequence[DataProto]) -> Experience:
    """Join rows, the inverse of `split_experience_batch`: padded to the widest; facts stay where all agree.

    Raises BatchConflict without items, and when the items do not hold the same names.
    """
    if not items:
        raise BatchConflict("found no items to make a batch of; give at least one")
    return Experience.of(collate(items))
