"""What a rollout engine is: it turns prompts into sampled responses and takes new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hocket.data.proto import DataProto
from hocket.errors import DataError
from hocket.models.pieces import Weight


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `greedy` takes the most likely token and ignores the other settings but the lengths.

    `max_length` bounds the longest prompt of a batch and its answer together.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    max_length: int | None = None

    def room(self, longest_prompt: int) -> int:
        """Tokens that an answer may have. Raises DataError when the prompt leaves none."""
        room = self.max_new_tokens if self.max_length is None else self.max_length - longest_prompt
        if room < 1:
            raise DataError(
                f"a prompt of {longest_prompt} tokens leaves no room for an answer in max_length={self.max_length}; "
                "raise max_length, or set max_new_tokens instead"
            )
        return min(room, self.max_new_tokens)


@dataclass(frozen=True)
class Refresh:
    """A chance to `load` newer weights while a unit is being decoded: `look` is called every `every` decode steps."""

    every: int
    look: Callable[[], None]


class RolloutEngine(Protocol):
    """An engine serves one weights version at a time and stamps it on every token."""

    version: int

    def generate(
        self, prompts: DataProto, sampling: Sampling, *, samples: int, seed: int, refresh: Refresh | None = None
    ) -> DataProto:
        """PROMPTS of P rows -> ROLLOUTS of P x `samples` rows, in prompt order.

        With `refresh` the weights may change on the way. A token's version is that of the weights that computed its
        logits, from a cache that older weights may have filled: its log-prob is that of the distribution that it was
        really drawn from. All rows are decoded together, so that a version begins at one decode step of the unit:
        `swap_points` reads from the tokens which.
        """
        ...

    def load(self, weights: Iterable[tuple[str, Weight]], version: int) -> None:
        """Copy `weights` into the engine's own parameters; names and shapes must match exactly.

        Raises WeightSyncError otherwise.
        """
        ...

    def expects(self) -> Mapping[str, tuple[int, ...]] | None:
        """Shapes of the tensors that `load` wants, by name; None when it takes what comes."""
        ...
