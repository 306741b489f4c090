"""The units of a run on their way from prompt to optimizer step: who may make which, and what became of it.

One lock guards all of it, so that what a checkpoint writes down belongs together. Nothing in here waits for a process.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.data.proto import DataProto
from hocket.errors import HocketError, WorkerDied
from hocket.run.ledger import REASONS, Ledger

Key = tuple[int, int]  # step and index of a unit
_SLICE = 0.2


@dataclass(frozen=True, eq=False)
class Lease:
    """The right to make one unit, with weights version `at_least` or newer, in one `timeline`."""

    unit: DataProto
    samples: int
    at_least: int
    timeline: int
    worker: str

    @property
    def key(self) -> Key:
        """Step and index of the unit."""
        return unit_key(self.unit)


@dataclass(frozen=True)
class Books:
    """The flow right after a step was trained: what a checkpoint writes down beside the weights."""

    step: int
    timeline: int
    accounts: Mapping[str, int]
    balance: Mapping[str, float]
    buffered: Mapping[Key, tuple[Any, int]] = field(default_factory=dict[Key, tuple[Any, int]])
    dropped: tuple[Key, ...] = ()


class Flow:
    """Hands out units in prompt order, takes experience in any order, gives it out as whole steps in prompt order.

    A unit of step k may start when k - version <= `max_staleness`: so no sample is older when it is trained, and
    nothing is thrown away. A lease whose maker died goes back, and is given out again under the same key. `rewind`
    begins a new `timeline`: the trainer is back at an earlier step, and whatever was leased before is refused.

    `units` gives the units of a step; `samples` is how many samples one becomes. Of all steps together, `may_drop`
    units may fail for good; a unit that was lost `attempts` times ends the run. `note` is told every fact, in order.
    """

    def __init__(
        self,
        units: Callable[[int], list[DataProto]],
        *,
        steps: int,
        samples: Callable[[DataProto], int],
        max_staleness: int = 0,
        attempts: int = 3,
        may_drop: int = 0,
        books: Books | None = None,
        note: Callable[..., None] | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._leasable = threading.Condition(self._lock)
        self._arrived = threading.Condition(self._lock)
        self._units, self._samples, self._steps = units, samples, steps
        self._max_staleness, self._attempts, self._may_drop = max_staleness, attempts, may_drop
        self._note = note or _nothing
        start = books or Books(0, 0, {}, {})
        self.ledger = Ledger(start.accounts)
        self.step = self.version = start.step
        self.timeline = start.timeline
        self._drawn = start.step  # units of all earlier steps have been drawn
        self._waiting: list[tuple[Key, DataProto]] = []
        self._leased: dict[Key, Lease] = {}
        self._buffered: dict[Key, tuple[Any, int]] = dict(start.buffered)
        self._dropped: set[Key] = set(start.dropped)
        self._sizes: dict[int, int] = {}  # units of each open step
        self._lost: Counter[Key] = Counter()
        self._closed = False

    # --- makers -------------------------------------------------------------------------------------------------

    def offer(self, worker: str, fits: Callable[[DataProto], bool] = lambda unit: True) -> Lease | None:
        """The first unit that may start now and that `fits`; None when there is none at the moment."""
        with self._lock:
            self._draw()
            for i, (key, unit) in enumerate(self._waiting):
                if fits(unit) and not self._closed:
                    del self._waiting[i]
                    oldest = max(0, key[0] - self._max_staleness)
                    lease = Lease(unit, self._samples(unit), oldest, self.timeline, worker)
                    self._leased[key] = lease
                    self.ledger.started(lease.samples)
                    self._note("leased", unit=key, worker=worker, samples=lease.samples, timeline=self.timeline)
                    return lease
            return None

    def offer_step(self, worker: str) -> list[Lease]:
        """All units of the step that is next, to one worker, which makes them in turn."""
        with self._lock:
            leases: list[Lease] = []
            while (lease := self.offer(worker)) is not None:
                leases.append(lease)
            return leases

    def next(
        self,
        worker: str,
        *,
        fits: Callable[[DataProto], bool] = lambda unit: True,
        stop: Callable[[], None] = lambda: None,
    ) -> Lease | None:
        """`offer`, once there is a unit; None when the flow is closed. `stop` may raise to end the wait."""
        with self._leasable:
            while (lease := self.offer(worker, fits)) is None:
                if self._closed:
                    return None
                stop()
                self._leasable.wait(_SLICE)
            return lease

    def made(self, lease: Lease, experience: Any, samples: int, **about: Any) -> bool:
        """The experience of a leased unit. False, and it is not taken, when the lease is no longer the current one."""
        with self._lock:
            taken = self._ends(lease)
            self._note("made", unit=lease.key, worker=lease.worker, timeline=lease.timeline, taken=taken, **about)
            if not taken:
                return False
            self._buffered[lease.key] = (experience, samples)
            self.ledger.move("in_flight", "buffered", lease.samples)
            self._arrived.notify_all()
            return True

    def lost(self, lease: Lease, why: str) -> None:
        """The maker of a leased unit is gone: the unit goes back. Raises WorkerDied when that happens too often."""
        with self._lock:
            if not self._ends(lease):
                return
            self.ledger.move("in_flight", "maker_lost", lease.samples)
            self._note("lost", unit=lease.key, worker=lease.worker)
            self._lost[lease.key] += 1
            if (times := self._lost[lease.key]) >= self._attempts:
                raise WorkerDied(
                    f"{times} makers were lost while they made unit {lease.key[1]} of step {lease.key[0] + 1}, whose "
                    f"first prompt is {lease.unit.non_tensor_batch['uid'][0]!r}; the last: {why}. Look at that prompt "
                    "and its reward, or raise supervise.unit_attempts"
                )
            insort(self._waiting, (lease.key, lease.unit), key=lambda entry: entry[0])
            self._leasable.notify_all()

    def drop(self, lease: Lease, why: str) -> bool:
        """A leased unit failed for good; its step goes on without it. False when no more units may be dropped."""
        if why not in REASONS:
            raise HocketError(f"{why!r} is no reason of the ledger; it has {', '.join(REASONS)}")
        with self._lock:
            if self._ends(lease):
                self.ledger.move("in_flight", why, lease.samples)
                self._note("dropped", unit=lease.key, why=why)
                self._dropped.add(lease.key)
                self._may_drop -= 1
                self._arrived.notify_all()
            return self._may_drop >= 0

    # --- the trainer --------------------------------------------------------------------------------------------

    def ready(self, step: int) -> list[Any] | None:
        """The experience of all units of `step` in prompt order; None while one is missing."""
        with self._lock:
            self._draw()
            if step not in self._sizes or self.missing(step):
                return None
            return [self._buffered[key][0] for key in self._keys(step) if key in self._buffered]

    def take(self, step: int, *, timeout: float, stop: Callable[[], None] = lambda: None) -> list[Any]:
        """`ready`, once they are there; it stays here until `trained`. `stop` may raise to end the wait.

        Raises WorkerDied when they do not come within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._arrived:
            while (units := self.ready(step)) is None:
                stop()
                if time.monotonic() > deadline:
                    raise WorkerDied(
                        f"waited {timeout:.0f} s for units {self.missing(step)} of step {step + 1}; no maker "
                        "delivered them"
                    )
                self._arrived.wait(_SLICE)
        return units

    def missing(self, step: int) -> list[int]:
        """Indices of the units of `step` that are neither there nor given up."""
        return [key[1] for key in self._keys(step) if key not in self._buffered and key not in self._dropped]

    def again(self, step: int) -> None:
        """What was made for `step` cannot be had any more: its units go back."""
        with self._lock:
            self._note("again", step=step)
            back = {unit_key(unit): unit for unit in self._units(step)}
            for key in [key for key in self._keys(step) if key in self._buffered]:
                self.ledger.move("buffered", "maker_lost", self._buffered.pop(key)[1])
                insort(self._waiting, (key, back[key]), key=lambda entry: entry[0])
            self._leasable.notify_all()

    def trained(self, step: int) -> Books:
        """`step` went into the weights; what is to be written down with them."""
        with self._lock:
            keys = self._keys(step)
            samples = sum(self._buffered.pop(key)[1] for key in keys if key in self._buffered)
            self.ledger.move("buffered", "trained", samples)
            self._dropped -= set(keys)
            del self._sizes[step]
            for key in keys:
                self._lost.pop(key, None)
            self.step = step + 1
            self._note("trained", step=step, samples=samples, timeline=self.timeline)
            balance = self.ledger.balance()
            dropped = tuple(sorted(self._dropped))
            return Books(step + 1, self.timeline, self._kept(), balance, dict(self._buffered), dropped)

    def advance(self, version: int) -> None:
        """All makers hold `version`, or will before their next unit."""
        with self._lock:
            self.version = version
            self._note("published", version=version, timeline=self.timeline)
            self._leasable.notify_all()

    def rewind(self, books: Books) -> int:
        """The trainer is back at `books`: a new timeline begins there. Returns how many samples were rolled back."""
        with self._lock:
            before = self.ledger.accounts["rolled_back"]
            for lease in self._leased.values():
                self.ledger.move("in_flight", "rolled_back", lease.samples)
            for _, samples in self._buffered.values():
                self.ledger.move("buffered", "rolled_back", samples)
            taken_back = self.ledger.accounts["trained"] - books.accounts.get("trained", 0)
            self.ledger.move("trained", "rolled_back", taken_back)
            self._leased, self._buffered, self._waiting, self._sizes = {}, {}, [], {}
            self._dropped = set(books.dropped)
            self.step = self.version = self._drawn = books.step
            self.timeline += 1
            self._note("rewound", step=self.step, timeline=self.timeline)
            self._leasable.notify_all()
            return self.ledger.accounts["rolled_back"] - before

    # --- the end, and what is going on --------------------------------------------------------------------------

    def close(self) -> None:
        """Hand out no more units."""
        with self._lock:
            self._closed = True
            self._leasable.notify_all()

    @property
    def closed(self) -> bool:
        """Whether no more units are handed out."""
        return self._closed

    @property
    def depth(self) -> int:
        """Units that wait for the trainer."""
        with self._lock:
            return len(self._buffered)

    def balance(self) -> dict[str, float]:
        """See Ledger."""
        with self._lock:
            return self.ledger.balance()

    def _kept(self) -> dict[str, int]:
        """The accounts as a run that resumes from here finds them: what is being made now will be made again."""
        accounts = dict(self.ledger.accounts)
        accounts["rolled_back"] += accounts.pop("in_flight")
        return accounts

    # --- under the lock -----------------------------------------------------------------------------------------

    def _draw(self) -> None:
        while self._drawn < self._steps and self._drawn - self._max_staleness <= self.version:
            units = self._units(self._drawn)
            self._sizes[self._drawn] = len(units)
            for unit in units:
                key = unit_key(unit)
                if key not in self._buffered and key not in self._dropped:
                    self._waiting.append((key, unit))
            self._drawn += 1

    def _ends(self, lease: Lease) -> bool:
        if self._leased.get(lease.key) is not lease:
            return False
        del self._leased[lease.key]
        return True

    def _keys(self, step: int) -> list[Key]:
        return [(step, i) for i in range(self._sizes.get(step, 0))]


def unit_key(unit: DataProto) -> Key:
    """Step and index of a unit."""
    return int(unit.meta_info["step"]), int(unit.meta_info["unit"])


def _nothing(fact: str, **what: Any) -> None:
    """Nobody wants to know."""
