"""What a rollout engine is: it turns prompts into sampled responses and takes new weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hocket.data.proto import DataProto


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `greedy` takes the most likely token and ignores the other settings but the length."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False


class RolloutEngine(Protocol):
    """An engine serves one weights version at a time and stamps it on every token."""

    version: int

    def generate(self, prompts: DataProto, sampling: Sampling, *, samples: int, seed: int) -> DataProto:
        """PROMPTS of P rows -> ROLLOUTS of P x `samples` rows, in prompt order."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy `weights` into the engine's own parameters; names and shapes must match exactly.

        Raises WeightSyncError otherwise.
        """
        ...
