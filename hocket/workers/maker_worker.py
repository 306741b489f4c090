"""The Maker in a worker process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.data.proto import DataProto
from hocket.data.schema import swap_points
from hocket.observe.history import History
from hocket.roles.maker import Maker, Report
from hocket.single_controller.decorator import Dispatch, concurrency, register
from hocket.single_controller.worker import Worker
from hocket.weights.manifest import Manifest
from hocket.workers.process import set_up_process

# Generation computes; experience leaves, and weights arrive, meanwhile: each group is a thread of its own.
MAKER_GROUPS = {"compute": 1, "experience_io": 1, "model_io": 1}


@dataclass(frozen=True)
class UnitFacts:
    """What the controller wants to know of a unit that was made: rows, (decode step, weights version) pairs, and what
    else the maker has to tell, which so needs no call of its own."""

    rows: int
    versions: list[tuple[int, int]]
    report: Report


class MakerWorker(Worker):
    """A thin shell: every method is the Maker's, plus what only a process has. `build` makes the Maker in here.

    `history` is a file that gets a line for each unit made: for an auditor who trusts no ledger.
    """

    def __init__(self, build: Callable[[], Maker], *, log: str | None = None, history: str | None = None) -> None:
        super().__init__()
        set_up_process(log)
        self._history = History(Path(history)) if history else None
        if self._history:
            self._history.add("started", pid=os.getpid())
        self.maker = build()

    @register(Dispatch.RANK_ZERO, blocking=False)
    def make(self, unit: DataProto, *, at_least: int = 0, timeline: int = 0) -> DataProto:
        """See Maker.make."""
        return self.maker.make(unit, at_least=at_least, timeline=timeline)

    @concurrency("compute", num_returns=2)
    def make_unit(self, unit: DataProto, *, at_least: int = 0, timeline: int = 0) -> tuple[DataProto, UnitFacts]:
        """`make`, and facts as a second, small result: the controller looks at that one only."""
        experience = self.maker.make(unit, at_least=at_least, timeline=timeline)
        facts = UnitFacts(len(experience), swap_points(experience), self.maker.report())
        if self._history:
            key = [unit.meta_info["step"], unit.meta_info["unit"]]
            self._history.add("made", unit=key, samples=facts.rows, timeline=timeline, versions=facts.versions)
        return experience, facts

    @concurrency("experience_io")
    def progress(self) -> list[str]:
        """See Tracer.progress."""
        return self.maker.tracer.progress()

    @register(Dispatch.RANK_ZERO)
    @concurrency("compute")
    def evaluate(self, unit: DataProto, *, at_least: int = 0, timeline: int = 0) -> dict[str, list[float]]:
        """See Maker.evaluate."""
        return self.maker.evaluate(unit, at_least=at_least, timeline=timeline)

    @register(Dispatch.RANK_ZERO)
    @concurrency("model_io")
    def receive(self, manifest: Manifest, handles: Sequence[Any]) -> None:
        """See Maker.receive."""
        self.maker.receive(manifest, handles)

    @register(Dispatch.RANK_ZERO)
    @concurrency("experience_io")
    def report(self) -> Report:
        """See Maker.report."""
        return self.maker.report()
