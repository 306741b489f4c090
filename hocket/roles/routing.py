"""Which trainer each sample of a maker goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hocket.errors import ConfigError

ROUTES = ("round_robin", "groups", "least_loaded")


class Router:
    """Deals the samples of one maker to its trainers.

    "round_robin" deals sample by sample, "groups" prompt by prompt, so that a group stays together; both go on where
    the last batch stopped. "least_loaded" gives a whole batch to the trainer that has the fewest of this maker's
    samples waiting.
    """

    def __init__(self, targets: Sequence[str], *, route: str) -> None:
        if route not in ROUTES:
            raise ConfigError(f"route={route!r} is unknown; known are {', '.join(ROUTES)}")
        self.targets = list(targets)
        self.route = route
        self._next = 0

    def deal(self, prompts: int, group: int, *, load: Mapping[str, int] | None = None) -> list[str]:
        """The trainer of each of `prompts` x `group` samples; nothing moves on until `done` says how many went out."""
        if self.route == "least_loaded":
            waiting = load or {}
            best = min(self.targets, key=lambda name: (waiting.get(name, 0), self.targets.index(name)))
            return [best] * (prompts * group)
        step = group if self.route == "groups" else 1
        return [self.targets[(self._next + i // step) % len(self.targets)] for i in range(prompts * group)]

    def done(self, samples: int, group: int) -> None:
        """So many samples went where `deal` said."""
        step = group if self.route == "groups" else 1
        self._next = (self._next + samples // step) % len(self.targets)

    def drop(self, target: str) -> None:
        """A trainer takes no more: its turn goes to the next one."""
        at = self.targets.index(target)
        del self.targets[at]
        self._next = (self._next - (at < self._next)) % max(1, len(self.targets))
