"""What may be asked of a maker's generation, under the names of transformers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.errors import ConfigError
from hocket.workers.checks import Wanted, check_options, number, optional, whole

GENERATION: dict[str, Any] = {
    "max_new_tokens": 128,
    "max_length": None,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "do_sample": True,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": True,
    "num_beams": 1,
    "early_stopping": True,
}
_FIXED = {"use_cache": True, "num_beams": 1}
_WANTED: dict[str, Wanted] = {
    "max_new_tokens": whole(1),
    "max_length": optional(whole(1)),
    "temperature": number("a number above 0 (do_sample=False is always the likeliest token)", lambda value: value > 0),
    "top_k": optional(whole(0)),
    "top_p": number("a number above 0 and up to 1", lambda value: 0 < value <= 1),
}


def generation_settings(asked: Mapping[str, Any], *, others: Iterable[str]) -> dict[str, Any]:
    """All settings with their defaults; `others` are the names of a maker's further options.

    Raises ConfigError for an unknown name, with the nearest, and for a value that is not supported.
    """
    for name, value in asked.items():
        if name not in GENERATION:
            near = difflib.get_close_matches(name, [*GENERATION, *others], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; those of generation are {', '.join(GENERATION)}"
            raise ConfigError(f"a maker has no option {name!r}{hint}")
        if name in _FIXED and value != _FIXED[name]:
            raise ConfigError(f"{name}={value!r} is not supported; the only value is {_FIXED[name]!r}")
    check_options(asked, _WANTED)
    if asked.get("max_length") is not None:
        asked = {"max_new_tokens": asked["max_length"], **asked}
    return GENERATION | dict(asked)
