"""Experience between makers and trainer: units arrive in any order and leave as whole steps in prompt order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hocket.errors import WorkerDied


class ExperienceBuffer:
    """Holds experience (or references to it) by step and unit. Bounded by admission, not by itself."""

    def __init__(self, *, units_per_step: int, timeout: float) -> None:
        self._changed = threading.Condition()
        self._units: dict[int, dict[int, Any]] = {}
        self._per_step = units_per_step
        self._timeout = timeout

    def put(self, step: int, unit: int, experience: Any) -> None:
        """Add one unit; the same unit again replaces itself."""
        with self._changed:
            self._units.setdefault(step, {})[unit] = experience
            self._changed.notify_all()

    def take(self, step: int, *, stop: Callable[[], None] = lambda: None) -> list[Any]:
        """All units of `step` in prompt order, waiting until they are there; `stop` may raise to end the wait.

        Raises WorkerDied when they do not come in time.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while len(self._units.get(step, ())) < self._per_step:
                stop()
                if time.monotonic() > deadline:
                    missing = sorted(set(range(self._per_step)) - set(self._units.get(step, ())))
                    raise WorkerDied(
                        f"waited {self._timeout:.0f} s for units {missing} of step {step + 1}; no maker delivered them"
                    )
                self._changed.wait(0.2)
            units = self._units.pop(step)
        return [units[i] for i in range(self._per_step)]

    @property
    def depth(self) -> int:
        """Units that wait for the trainer."""
        with self._changed:
            return sum(map(len, self._units.values()))
