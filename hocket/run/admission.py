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
        self._coming = next(self._units, None)
        self._waiting: list[DataProto] = []
        self._version = version
        self._max_staleness = max_staleness

    def next(
        self, fits: Callable[[DataProto], bool] = lambda unit: True, *, stop: Callable[[], None] = lambda: None
    ) -> DataProto | None:
        """The next unit that `fits` who asks, once it may start; None when there will be no more of those.

        `stop` may raise to end the wait.
        """
        with self._changed:
            while True:
                while self._coming is not None and self.oldest(self._coming) <= self._version:
                    self._waiting.append(self._coming)
                    self._coming = next(self._units, None)
                    self._changed.notify_all()
                for i, unit in enumerate(self._waiting):
                    if fits(unit):
                        return self._waiting.pop(i)
                if self._coming is None:
                    return None
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
