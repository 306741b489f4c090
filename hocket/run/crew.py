"""The workers of a detached run, over all their incarnations: called, watched, replaced, added and taken away."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any, Protocol

from hocket.config import SuperviseSection
from hocket.data.proto import DataProto
from hocket.errors import StartFailed, WeightsGone, WorkerDied
from hocket.roles.maker import Report
from hocket.run.flow import Lease
from hocket.run.remote import Ranks, Remote
from hocket.run.supervise import Restarts, Supervisor
from hocket.single_controller.future import future_of
from hocket.weights.manifest import Manifest
from hocket.workers.maker_worker import UnitFacts

Weights = tuple[Manifest, list[Any]]
_PATIENCE = 2.0  # seconds for all reports together: a worker that is busy gives its own with the next step


class Workshop(Protocol):
    """Starts processes."""

    def maker(self, index: int, *, late: bool = False) -> Remote:
        """Start a maker; returns at once. Raises PlacementError when there is no place for one that joins `late`."""
        ...

    def trainer(self) -> Ranks:
        """Start all ranks of the trainer; returns at once."""
        ...

    def ready(self, *roles: Remote, check: Callable[[], None] = lambda: None) -> None:
        """Wait until they are started; `check` may raise to end that. StartFailed has what their making raised."""
        ...


class Retired(Exception):
    """Raised in the loop of a maker that is to leave."""


class Member:
    """A maker, or all ranks of the trainer: the process that it is now, and why it is none, once that is known."""

    def __init__(self, name: str, now: Any) -> None:
        self.name = name
        self.now = now
        self.gone: str | None = None
        self.retired = False
        self.incarnation = 0
        self._seen: dict[str, dict[str, float]] = {}
        self._told: dict[str, Any] = {}
        self._receiving: list[Any] = []
        self._reported: list[Report] = []
        self._made = False  # a unit since the watchdog looked

    def check(self) -> None:
        """Raise WorkerDied when the watchdog has found it dead or hung, Retired when it is to leave."""
        if self.gone is not None:
            raise WorkerDied(self.gone)
        if self.retired:
            raise Retired

    def become(self, now: Any) -> None:
        """Another process takes its place."""
        self.now, self.gone, self._receiving = now, None, []
        self._seen.clear()
        self._told.clear()
        self.incarnation += 1

    # --- what makers do -------------------------------------------------------------------------------------

    def receive(self, weights: Weights) -> None:
        """Tell it to fetch these weights, beside whatever it does."""
        self._receiving.append(self.now.send("receive", *weights))

    def make(self, lease: Lease) -> tuple[Any, UnitFacts]:
        """The experience of a unit, as a future, and facts about it."""
        experience, facts = self.now.send("make_unit", lease.unit, at_least=lease.at_least, timeline=lease.timeline)
        step, index = lease.key
        told = self.now.get(facts, what=f"make unit {index} of step {step + 1}", check=self._settle)
        self._settle()
        self._made = True
        self._reported.append(told.report)
        return future_of(experience), told

    def evaluate(self, unit: DataProto, *, at_least: int, timeline: int) -> dict[str, list[float]]:
        """See Maker.evaluate."""
        ref = self.now.send("evaluate", unit, at_least=at_least, timeline=timeline)
        return self.now.get(ref, what="evaluate", check=self._settle)

    def _settle(self) -> None:
        """Raise what a delivery of weights was refused with. One whose trainer is gone will be followed by another."""
        while self._receiving and self.now.done(self._receiving[0]):
            with contextlib.suppress(WeightsGone):
                self.now.get(self._receiving.pop(0), what="receive weights")

    def ask(self) -> None:
        """Ask each process for its report, unless one is still on its way."""
        for part in self.now.parts:
            if part.name not in self._told:
                self._told[part.name] = part.send("report")

    def told(self) -> list[Report]:
        """What came with the units that it made since the last time."""
        told, self._reported = self._reported, []
        return told

    def reports(self, end: float) -> Iterable[Report]:
        """Those that are there by the time `end`."""
        for part in self.now.parts:
            if part.done(self._told[part.name], max(0.0, end - time.monotonic())):
                with contextlib.suppress(WorkerDied):  # whoever works with it finds out
                    yield part.get(self._told.pop(part.name), what="report")

    # --- the watchdog ---------------------------------------------------------------------------------------

    def watch(self, settings: SuperviseSection) -> None:
        """Look at each of its processes. One that is dead, or too long at one thing, is noted as the reason.

        One that has just made a unit is neither, and need not be asked.
        """
        if self._made:
            self._made = False
            self._seen.clear()
            return
        process = self.now
        for part in process.parts:
            phases, dead = part.look()
            if dead is not None:
                self._lose(process, f"{part.name} died: {dead}")
                return
            now, seen = time.monotonic(), self._seen.get(part.name, {})
            if phases is None:  # it has not answered: what it was at, it still is
                phases = [*(seen or {"answer": now})]
            self._seen[part.name] = {phase: seen.get(phase, now) for phase in phases}
            if why := _stall(part, {p: now - since for p, since in self._seen[part.name].items()}, settings):
                part.show_stacks()
                part.kill()
                self._lose(process, why)
                return

    def _lose(self, process: Any, why: str) -> None:
        """Note why `process` is gone, unless another one has its place by now."""
        if self.now is process:
            self.gone = why


def _stall(part: Remote, spent: dict[str, float], settings: SuperviseSection) -> str | None:
    """Why a process is hung: it has been at one phase for too long; "wait" is nobody's fault."""
    for phase, seconds in spent.items():
        name = phase.split()[0]
        limit = settings.deadlines.get(name, settings.stall_timeout)
        if name != "wait" and seconds > limit:
            return (
                f"{part.name} made no progress for {seconds:.0f} s while it was to {name} (limit {limit:g} s: "
                f"supervise.stall_timeout, or supervise.deadlines.{name}); its stacks are in its log"
            )
    return None


class Crew:
    """All members of a run, and the newest weights, which a maker that joins late gets by itself."""

    def __init__(
        self,
        workshop: Workshop,
        settings: SuperviseSection,
        supervisor: Supervisor,
        *,
        makers: int,
        say: Callable[[str], None],
    ) -> None:
        self._workshop, self._settings, self._supervisor, self._say = workshop, settings, supervisor, say
        self._budgets = {kind: Restarts.of(settings, kind) for kind in ("maker", "trainer")}
        started = [workshop.maker(i) for i in range(makers)]
        ranks = workshop.trainer()
        workshop.ready(*started, *ranks.parts)
        self.makers = [Member(remote.name, remote) for remote in started]
        self.trainer = Member("trainer", ranks)
        self._lock = threading.Lock()
        self._weights: Weights | None = None

    @property
    def restarts(self) -> dict[str, int]:
        """How many makers and trainers were replaced."""
        return {name: budget.count for name, budget in self._budgets.items()}

    def publish(self, version: int, timeline: int) -> None:
        """Put the trainer's weights out as `version`, and tell all makers to fetch them."""
        with self._lock:
            self._weights = None  # so that its chunks can go before there are new ones
        weights: Weights = self.trainer.now.call("publish", version, timeline)
        with self._lock:
            self._weights = weights
            for maker in self.makers:
                maker.receive(weights)

    def evaluate(self, units: list[DataProto], *, version: int, timeline: int) -> list[dict[str, list[float]]]:
        """Held-out units over all makers in turn, in unit order. A maker that dies is replaced."""
        found: list[dict[str, list[float]] | None] = [None] * len(units)
        makers = list(self.makers)

        def answer(which: int) -> None:
            for i in range(which, len(units), len(makers)):
                while found[i] is None:
                    try:
                        found[i] = makers[which].evaluate(units[i], at_least=version, timeline=timeline)
                    except WorkerDied as error:
                        self.replace_maker(makers[which], error)

        loops = {f"evaluation by {maker.name}": partial(answer, i) for i, maker in enumerate(makers)}
        self._supervisor.together(loops, main=lambda: None)
        return [part for part in found if part is not None]

    def replace_maker(self, maker: Member, error: WorkerDied, *, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Another process in the place of one that is gone, with the newest weights; False when it is not `wanted` any
        more before it is ready.

        Raises StartFailed when it cannot be made, and the last error when the budget is spent.
        """
        index = int(maker.name.rpartition("-")[2])
        remote = self._another(maker, error, partial(self._workshop.maker, index), wanted)
        if remote is None:
            return False
        with self._lock:
            maker.become(remote)
            if self._weights is not None:
                maker.receive(self._weights)
        return True

    def replace_trainer(self, error: WorkerDied) -> None:
        """New processes for all ranks, which know nothing yet. Raises as `replace_maker` does."""
        self.trainer.become(self._another(self.trainer, error, self._workshop.trainer))

    def scale(self, wanted: int) -> list[Member]:
        """So many makers: returns those that were added; when it is fewer, the last ones leave after their unit.

        Raises PlacementError when there is no place for more.
        """
        for maker in self.makers[wanted:]:
            maker.retired = True
        taken = {maker.name for maker in self.makers}
        free = (i for i in count() if f"maker-{i}" not in taken)
        started = [self._workshop.maker(next(free), late=True) for _ in range(wanted - len(self.makers))]
        self._workshop.ready(*started)
        added = [Member(remote.name, remote) for remote in started]
        with self._lock:
            self.makers += added
            for maker in added:
                if self._weights is not None:
                    maker.receive(self._weights)
        return added

    def dismiss(self, maker: Member) -> None:
        """End the process of a maker that has finished its last unit."""
        with self._lock:
            self.makers.remove(maker)
        maker.now.kill()

    def watch(self) -> None:
        """Look at everybody, every `supervise.heartbeat` seconds, until the run ends."""
        while True:
            for member in [*self.makers, self.trainer]:
                if member.gone is None:
                    member.watch(self._settings)
            self._supervisor.pause(self._settings.heartbeat)

    def reports(self, *, last: bool = False) -> Iterable[Report]:
        """What makers told with their units, and the trainer when asked; for the `last` time, everybody is asked.

        Who does not answer soon tells it the next time.
        """
        end = time.monotonic() + _PATIENCE
        asked = [*self.makers, self.trainer] if last else [self.trainer]
        for member in asked:
            member.ask()
        for maker in self.makers:
            yield from maker.told()
        for member in asked:
            yield from member.reports(end)

    def _another(
        self,
        member: Member,
        error: WorkerDied,
        start: Callable[[], Any],
        wanted: Callable[[], bool] = lambda: True,
    ) -> Any:
        """A process that is ready; one that dies before it is costs another one of the budget. None: see above."""
        kind = member.name.partition("-")[0]
        member.now.kill()
        error = WorkerDied(member.gone) if member.gone else error  # the watchdog knows better why

        def check() -> None:
            if not wanted():
                raise Retired

        while True:
            pause = self._budgets[kind].spend(error)
            self._say(f"{error.message.splitlines()[0]}; a new {kind} takes its place")
            self._supervisor.pause(pause)
            now = start()
            try:
                self._workshop.ready(*now.parts, check=check)
                return now
            except StartFailed:
                raise
            except (WorkerDied, Retired) as ended:
                now.kill()
                if isinstance(ended, Retired):
                    return None
                error = ended
