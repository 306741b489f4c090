"""Actors called by name with a deadline: a single one, and the ranks of a group as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from hocket.waiting import Waiter, reason_of_death


class Remote:
    """`call` waits for the answer, `send` does not; both say who was to do what when it goes wrong."""

    def __init__(self, actor: Any, *, name: str, waiter: Waiter) -> None:
        self.name = name
        self._actor = actor
        self._waiter = waiter
        self._asked: Any = None

    @property
    def parts(self) -> list[Remote]:
        """The actors that live and die together: this one."""
        return [self]

    def send(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The reference (or references) of the answer."""
        return getattr(self._actor, method).remote(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The answer."""
        return self.get(self.send(method, *args, **kwargs), what=method)

    def get(
        self, ref: Any, *, what: str, timeout: float | None = None, check: Callable[[], None] = lambda: None
    ) -> Any:
        """The answer behind a reference that `send` gave; `check` is asked meanwhile, and may raise."""
        return self._waiter.gather([ref], who=[self.name], what=what, timeout=timeout, check=check)[0]

    def look(self) -> tuple[list[str] | None, str | None]:
        """What it is at, None while it has not said since the last look; and why it is gone, None while it is not.

        Returns at once: a question is out all the time, which fails as soon as Ray knows that the actor is gone.
        """
        if self._asked is None:
            self._asked = self.send("progress")
        if not ray.wait([self._asked], timeout=0)[0]:
            return None, None
        try:
            asked, self._asked = self._asked, None
            return ray.get(asked), None
        except RayError as error:
            return None, reason_of_death(error)

    def done(self, ref: Any, timeout: float = 0) -> bool:
        """Whether the answer, or an error, is there within `timeout` seconds."""
        return bool(ray.wait([ref], timeout=timeout)[0])

    def show_stacks(self) -> None:
        """Have its stacks, and everybody's, written into their logs, where they run on this machine."""
        self._waiter.show_stacks()

    def kill(self) -> None:
        """End its process, also one that is stopped or dead already."""
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)


class Ranks:
    """The ranks of a data-parallel trainer. What all of them do is called on all, the rest on rank 0, the leader."""

    def __init__(self, ranks: Sequence[Remote], *, waiter: Waiter) -> None:
        self.parts = list(ranks)
        self._waiter = waiter

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The leader's answer."""
        return self.parts[0].call(method, *args, **kwargs)

    def train(self, units: Sequence[Any], *, step: int) -> dict[str, float]:
        """One step on all units, of which rank r gets every one whose number is r modulo the ranks."""
        size = len(self.parts)
        refs = [rank.send("train", list(units[i::size]), step=step) for i, rank in enumerate(self.parts)]
        return self._waiter.gather(refs, who=[rank.name for rank in self.parts], what="train")[0]

    def restore(self, folder: str) -> None:
        """See Trainer.restore, on every rank."""
        refs = [rank.send("restore", folder) for rank in self.parts]
        self._waiter.gather(refs, who=[rank.name for rank in self.parts], what="restore")

    def snapshot(self) -> None:
        """See Trainer.snapshot."""
        self.call("snapshot")

    def save(self, folder: str, names: Sequence[str] = (), units: Sequence[Any] = ()) -> dict[str, str]:
        """See Trainer.save."""
        return self.call("save", folder, list(names), list(units))

    def kill(self) -> None:
        """End all of them: the survivors of a group that lost one wait for it."""
        for rank in self.parts:
            rank.kill()
