"""Loops that live and die together: the first failure stops all of them and is the one that is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


class Stopped(BaseException):
    """Raised inside a loop because another one failed or the user asked to stop; never seen by a user."""


class Supervisor:
    """Runs named loops in threads beside a main one in this thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._failures: list[tuple[str, BaseException]] = []

    def check(self) -> None:
        """Raise Stopped when the loops are to end; every wait asks this several times a second."""
        if self._stop.is_set():
            raise Stopped

    def together(self, loops: Mapping[str, Callable[[], None]], main: Callable[[], None]) -> None:
        """Run all to their end. Raises the first failure, with the name of its loop added to its notes."""
        threads = [
            threading.Thread(target=self._guard, args=(name, loop), name=name, daemon=True)
            for name, loop in loops.items()
        ]
        for thread in threads:
            thread.start()
        self._guard("trainer loop", main)
        for thread in threads:
            self._join(thread)
        if self._failures:
            name, error = self._failures[0]
            error.add_note(f"(raised in the {name})")
            raise error

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
