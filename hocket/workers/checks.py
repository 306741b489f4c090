"""What the options of makers and trainers, and the counts of their loops, may be: one table for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

from hocket.errors import ConfigError

Wanted = tuple[str, Callable[[Any], bool]]  # in words, and as a test


def check_options(options: Mapping[str, Any], table: Mapping[str, Wanted]) -> None:
    """Raise ConfigError with all of `options` that are not what the table wants; names it does not know may be any."""
    faults = [
        f"found {name}={options[name]!r}; wanted {words}"
        for name, (words, fits) in table.items()
        if name in options and not fits(options[name])
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def whole(least: int) -> Wanted:
    """A whole number of at least so much."""
    return f"a whole number of {least} or more", lambda value: _is(value, Integral) and value >= least


def number(words: str, fits: Callable[[float], bool]) -> Wanted:
    """A finite number that fits."""
    return words, lambda value: _is(value, Real) and math.isfinite(value) and fits(float(value))


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # Python counts it as an int


def optional(wanted: Wanted) -> Wanted:
    """Or None."""
    words, fits = wanted
    return f"{words}, or None", lambda value: value is None or fits(value)


def choice(known: Sequence[str]) -> Wanted:
    """One of these texts."""
    return " or ".join(map(repr, known)), lambda value: value in known


def instances(kind: type) -> Wanted:
    """A list of objects of this class."""
    return (
        f"a list of {kind.__name__} objects",
        lambda value: isinstance(value, Sequence) and all(isinstance(one, kind) for one in cast(Sequence[Any], value)),
    )


def names(*, least: int) -> Wanted:
    """A list of so many names or more."""
    return (
        f"a list of {least} or more names of actors",
        lambda value: instances(str)[1](value) and not isinstance(value, str) and len(value) >= least,
    )


def _is_algorithm(value: Any) -> bool:
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("needs", "group_baseline", "credit", "loss")
    )


def _is_place(value: Any) -> bool:
    """Whether it is one rank's environment; see `set_dist_env` for the rest."""
    if not isinstance(value, Mapping):
        return False
    place = cast(Mapping[Any, Any], value)
    rank, world = place.get("rank", "0"), place.get("world_size", "1")
    return all(isinstance(one, str) and one.isdecimal() for one in (rank, world)) and int(rank) < int(world)


POSITIVE = number("a number above 0", lambda value: value > 0)
NOT_NEGATIVE = number("a number of 0 or more", lambda value: value >= 0)
FUNCTION: Wanted = "a function", callable
SHARE = number("a number from 0 up to, and without, 1", lambda value: 0 <= value < 1)
ALGORITHM: Wanted = (
    "an object, not its name or class: give GRPO() or PPO() from hocket.algorithms.presets",
    _is_algorithm,
)
PLACE: Wanted = "one of the dicts that env_info(n) returns: text for 'rank', below that for 'world_size'", _is_place
SEED: Wanted = "a whole number from 0 to 4294967295", lambda value: whole(0)[1](value) and value < 1 << 32

SHARED: dict[str, Wanted] = {"seed": SEED, "timeout": POSITIVE, "join_timeout": NOT_NEGATIVE}
ROLE: dict[str, Wanted] = {
    "strategy_fn": FUNCTION,
    "model_fn": FUNCTION,
    "env_info": optional(PLACE),
    "update_lora_weights": ("False: it is not there yet in the detached flow", lambda value: not value),
    "algorithm": optional(ALGORITHM),
    "threads": whole(1),
}
