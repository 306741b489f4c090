"""The ledger: every sample that was started is in exactly one account."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from hocket.errors import HocketError

ACCOUNTS = ("trained", "buffered", "in_flight", "failed")


class Ledger:
    """Counts samples. `started` adds to what was produced; everything else moves samples between accounts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.produced = 0
        self.accounts: dict[str, int] = dict.fromkeys(ACCOUNTS, 0)

    def started(self, samples: int) -> None:
        """A maker begins with them."""
        with self._lock:
            self.produced += samples
            self.accounts["in_flight"] += samples

    def made(self, samples: int) -> None:
        """They are experience now and wait for the trainer."""
        self._move("in_flight", "buffered", samples)

    def trained(self, samples: int) -> None:
        """They went into an optimizer step."""
        self._move("buffered", "trained", samples)

    @contextmanager
    def failing(self, samples: int) -> Generator[None, None, None]:
        """In flight while the body runs; an error of it puts them into `failed`."""
        try:
            yield
        except HocketError:
            self._move("in_flight", "failed", samples)
            raise

    def balance(self) -> dict[str, float]:
        """All accounts as metrics `ledger/<account>`, with `ledger/produced`.

        Raises HocketError when they do not add up: a fault of hocket, never of the user.
        """
        with self._lock:
            if sum(self.accounts.values()) != self.produced or min(self.accounts.values()) < 0:
                raise HocketError(f"the ledger does not balance: produced {self.produced}, accounts {self.accounts}")
            return {f"ledger/{name}": float(n) for name, n in {"produced": self.produced, **self.accounts}.items()}

    def _move(self, source: str, target: str, samples: int) -> None:
        with self._lock:
            self.accounts[source] -= samples
            self.accounts[target] += samples
