"""Loops that live and die together, and how often what died may be replaced."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from hocket.config import SuperviseSection
from hocket.errors import HocketError

_LONGEST_PAUSE = 30.0


class Stopped(BaseException):
    """Raised inside a loop because another one failed or the user asked to stop; never seen by a user."""


class Restarts:
    """A budget: at most `limit` replacements of one kind of worker in `window` seconds, further and further apart."""

    def __init__(
        self, what: str, *, limit: int, window: float, backoff: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._limit, self._window, self._backoff, self._clock = what, limit, window, backoff, clock
        self._lock = threading.Lock()
        self._times: deque[float] = deque()
        self.count = 0

    @staticmethod
    def of(settings: SuperviseSection, what: str) -> Restarts:
        """The budget of makers or trainers."""
        limit = settings.maker_restarts if what == "maker" else settings.trainer_restarts
        return Restarts(what, limit=limit, window=settings.window, backoff=settings.backoff)

    def spend(self, error: HocketError) -> float:
        """Seconds to wait before the replacement. Raises `error`, with the reason added, when none is left."""
        with self._lock:
            now = self._clock()
            while self._times and self._times[0] <= now - self._window:
                self._times.popleft()
            if len(self._times) >= self._limit:
                if self._limit:
                    error.add_note(
                        f"(not replaced: {self._limit} {self._what}s were within {self._window:g} s, which is "
                        f"supervise.{self._what}_restarts)"
                    )
                raise error
            self._times.append(now)
            self.count += 1
            return min(_LONGEST_PAUSE, self._backoff * 2.0 ** min(len(self._times) - 1, 60))


class Supervisor:
    """Runs named loops in threads beside a main one in this thread: the first failure stops all, and is raised."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._failures: list[tuple[str, BaseException]] = []
        self._threads: list[threading.Thread] = []

    def check(self) -> None:
        """Raise Stopped when the loops are to end; every wait asks this several times a second."""
        if self._stop.is_set():
            raise Stopped

    def spawn(self, name: str, loop: Callable[[], None]) -> None:
        """Run one more loop, from now on."""
        thread = threading.Thread(target=self._guard, args=(name, loop), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def beside(self, name: str, loop: Callable[[], None]) -> None:
        """Run a loop that nobody waits for: it goes on until `end`."""
        threading.Thread(target=self._guard, args=(name, loop), name=name, daemon=True).start()

    def end(self) -> None:
        """Have every loop end at its next `check`."""
        self._stop.set()

    def together(self, loops: Mapping[str, Callable[[], None]], main: Callable[[], None]) -> None:
        """Run all to their end. Raises the first failure, with the name of its loop added to its notes."""
        for name, loop in loops.items():
            self.spawn(name, loop)
        self._guard("trainer loop", main)
        for thread in self._threads:
            self._join(thread)
        if self._failures:
            name, error = self._failures[0]
            error.add_note(f"(raised in the {name})")
            raise error

    def pause(self, seconds: float) -> None:
        """Sleep, unless the loops are to end."""
        self._stop.wait(seconds)
        self.check()

    def _join(self, thread: threading.Thread) -> None:
        """Wait for a loop as long as it takes; after a failure, only as long as it needs to notice."""
        while thread.is_alive() and not self._stop.is_set():
            thread.join(0.2)
        thread.join(10)

    def _guard(self, name: str, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  raised again, in the main thread, by `together`
            self._failures.append((name, error))
            self._stop.set()
