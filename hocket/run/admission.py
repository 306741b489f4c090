"""Who may start which unit: the one place that bounds staleness, before work is done instead of after."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from hocket.data.proto import DataProto


class Admission:
    """Hands out the units of all steps in order; a unit of step k may start when k - version <= max_staleness.

    So no sample is ever older than `max_staleness` versions when it is trained, and nothing is thrown away.
    """

    def __init__(
        self, units: Callable[[int], list[DataProto]], *, steps: Iterable[int], max_staleness: int, version: int = 0
    ) -> None:
        self._changed = threading.Condition()
        self._units: Iterator[DataProto] = (unit for step in steps for unit in units(step))
        self._waiting: DataProto | None = None
        self._version = version
        self._max_staleness = max_staleness

    def next(self, *, stop: Callable[[], None] = lambda: None) -> DataProto | None:
        """The next unit, once it may start; None when all have been handed out. `stop` may raise to end the wait."""
        with self._changed:
            while True:
                if self._waiting is None:
                    self._waiting = next(self._units, None)
                unit = self._waiting
                if unit is None or self.oldest(unit) <= self._version:
                    self._waiting = None
                    return unit
                stop()
                self._changed.wait(0.2)

    def advance(self, version: int) -> None:
        """All makers hold `version`, or will before their next unit."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def oldest(self, unit: DataProto) -> int:
        """The oldest weights version that `unit` may be made with."""
        return max(0, int(unit.meta_info["step"]) - self._max_staleness)
