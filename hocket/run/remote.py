"""Actors called by name with a deadline: a single one, and the ranks of a group as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.waiting import Waiter


class Remote:
    """`call` waits for the answer, `send` does not; both say who was to do what when it goes wrong."""

    def __init__(self, actor: Any, *, name: str, waiter: Waiter) -> None:
        self.name = name
        self._actor = actor
        self._waiter = waiter

    def send(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The reference (or references) of the answer."""
        return getattr(self._actor, method).remote(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The answer."""
        return self.get(self.send(method, *args, **kwargs), what=method)

    def get(self, ref: Any, *, what: str, timeout: float | None = None) -> Any:
        """The answer behind a reference that `send` gave."""
        return self._waiter.get(ref, who=self.name, what=what, timeout=timeout)


class Ranks:
    """The ranks of a data-parallel trainer. What all of them do is called on all, the rest on rank 0, the leader."""

    def __init__(self, ranks: Sequence[Remote], *, waiter: Waiter) -> None:
        self.ranks = list(ranks)
        self._waiter = waiter

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The leader's answer."""
        return self.ranks[0].call(method, *args, **kwargs)

    def train(self, units: Sequence[Any], *, step: int) -> dict[str, float]:
        """One step on all units, of which rank r gets every one whose number is r modulo the ranks."""
        size = len(self.ranks)
        refs = [rank.send("train", list(units[i::size]), step=step) for i, rank in enumerate(self.ranks)]
        return self._waiter.gather(refs, who=[rank.name for rank in self.ranks], what="train")[0]
