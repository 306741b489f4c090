"""The ledger: every sample that was started is in exactly one account."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.errors import HocketError

# Why samples that were started are not trained. The list is closed: another reason is a fault of hocket.
REASONS = ("reward_error", "maker_lost", "rolled_back")
ACCOUNTS = ("trained", "buffered", "in_flight", *REASONS)


class Ledger:
    """Counts samples. `started` adds to what was produced; `move` puts samples from one account into another.

    Its owner holds a lock: the counts are read and changed together with what they count.
    """

    def __init__(self, accounts: Mapping[str, int] | None = None) -> None:
        self.accounts: dict[str, int] = dict.fromkeys(ACCOUNTS, 0)
        for account, samples in (accounts or {}).items():
            self._known(account)
            self.accounts[account] = samples
        self.produced = sum(self.accounts.values())

    def started(self, samples: int) -> None:
        """A maker begins with them."""
        self.produced += samples
        self.accounts["in_flight"] += samples

    def move(self, source: str, target: str, samples: int) -> None:
        """So many samples change their account."""
        self._known(source)
        self._known(target)
        self.accounts[source] -= samples
        self.accounts[target] += samples

    def balance(self) -> dict[str, float]:
        """All accounts as metrics `ledger/<account>`, with `ledger/produced`.

        Raises HocketError when they do not add up: a fault of hocket, never of the user.
        """
        if sum(self.accounts.values()) != self.produced or min(self.accounts.values()) < 0:
            raise HocketError(f"the ledger does not balance: produced {self.produced}, accounts {self.accounts}")
        return {f"ledger/{name}": float(n) for name, n in {"produced": self.produced, **self.accounts}.items()}

    def _known(self, account: str) -> None:
        if account not in self.accounts:
            raise HocketError(f"the ledger has no account {account!r}; it has {', '.join(ACCOUNTS)}")
