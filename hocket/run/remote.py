"""A single actor, called by name with a deadline."""

from __future__ import annotations

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
