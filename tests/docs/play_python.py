"""Plays the `python` and `text` blocks of a page, in order.

usage: python play_python.py < BLOCKS      (a page with Ray, in a process of its own; [[language, place, text]] as JSON)
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import sys
import threading
from typing import Any


class Printed(io.StringIO):
    """What the main thread prints; threads of Ray's report to the screen, when they like."""

    def write(self, text: str) -> int:
        here = threading.current_thread() is threading.main_thread()
        return super().write(text) if here else sys.__stderr__.write(text)


def play_python(place: str, text: str, names: dict[str, Any]) -> None:
    """Run a block in `names`, which the blocks of a page share, and keep what it printed."""
    printed = Printed()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, place, "exec"), names)
    names["__printed__"] = printed.getvalue()


def check_text(place: str, text: str, names: dict[str, Any]) -> None:
    """A `text` block is what the `python` block before it printed; `...` stands for anything."""
    printed, flags = names["__printed__"], doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(text, printed, flags), f"{place} printed\n{printed}"


def main() -> None:
    """Play the blocks of one page."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for language, place, text in json.load(sys.stdin):
        (play_python if language == "python" else check_text)(place, text, names)


if __name__ == "__main__":
    main()
