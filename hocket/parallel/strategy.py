"""How the ranks of one data-parallel trainer group work together: what a strategy is, and which there are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from hocket.errors import ConfigError

# The names of the published walk-through, and ours.
OLD_NAMES = {
    "naive": "single",
    "colossalai_zero2": "zero2",
    "colossalai_zero2_cpu": "zero2_cpu",
    "colossalai_gemini": "fsdp",
    "colossalai_gemini_cpu": "fsdp_cpu",
}
NAMES = ("single", "ddp", "zero2", "zero2_cpu", "fsdp", "fsdp_cpu", "tp")
# A maker with one of these is one replica spread over its ranks; with any other, every rank is a whole maker.
SHARDING_MAKERS = ("fsdp", "fsdp_cpu", "tp")


class Strategy(Protocol):
    """The ranks of one trainer group. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0; the leader, which publishes and saves, is 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank."""
        ...

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the ranks; a missing one counts as zero.

        A sum and not a mean, because losses are divided by counts over all ranks.
        """
        ...

    def close(self) -> None:
        """Leave the group; the strategy is not used again."""
        ...


class Single:
    """A world of one rank."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """See Strategy."""
        return [value]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See Strategy."""

    def close(self) -> None:
        """See Strategy."""


def canonical_name(name: str) -> str:
    """Our name of a strategy, for ours and for the old ones. Raises ConfigError for an unknown one."""
    known = OLD_NAMES.get(name, name)
    if known not in NAMES:
        raise ConfigError(f"strategy {name!r} is unknown; known are {', '.join(NAMES)}, and the old {list(OLD_NAMES)}")
    return known


def make_strategy(name: str, *, timeout: float = 3600.0) -> Strategy:
    """The strategy of this process, whose rank and group the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    Sharding over one rank is none, so that every name gives `single` in a world of one. `timeout` is how many
    seconds a rank waits for the others. Raises ConfigError for a name that is not there yet.
    """
    name = canonical_name(name)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Single()
    if name != "ddp":
        raise ConfigError(
            f"strategy {name!r} over {world_size} ranks is not there yet; use 'ddp', or a world of one rank, where "
            "every strategy is 'single'"
        )
    from hocket.parallel.ddp import DDP

    return DDP(timeout=timeout)
