"""The Trainer in a worker process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hocket.data.proto import DataProto
from hocket.observe.history import History
from hocket.roles.maker import Report
from hocket.roles.trainer import Trainer
from hocket.single_controller.decorator import Dispatch, concurrency, register
from hocket.single_controller.worker import Worker
from hocket.weights.manifest import Manifest
from hocket.workers.process import set_up_process

# Training computes; a checkpoint is written, and short questions are answered, meanwhile. The names are those of a
# trainer that drives itself, which has more of them.
STEP_GROUPS = {"compute": 1, "model_io": 1, "buffer_length": 1}


class TrainerWorker(Worker):
    """A thin shell: every method is the Trainer's. `build` makes the Trainer in here.

    `history` is a file that gets a line for each step trained: for an auditor who trusts no ledger.
    """

    def __init__(self, build: Callable[[], Trainer], *, log: str | None = None, history: str | None = None) -> None:
        super().__init__()
        set_up_process(log)
        self._history = History(Path(history)) if history else None
        if self._history:
            self._history.add("started", pid=os.getpid())
        self.trainer = build()

    @register(Dispatch.RANK_ZERO)
    @concurrency("compute")
    def train(self, units: Sequence[DataProto], *, step: int) -> dict[str, float]:
        """See Trainer.train; the units may be references, which this process fetches itself."""
        metrics = self.trainer.train(units, step=step)
        if self._history:
            keys = [[unit.meta_info["step"], unit.meta_info["unit"]] for unit in units]
            self._history.add("trained", step=step, units=keys, samples=sum(map(len, units)))
        return metrics

    @register(Dispatch.RANK_ZERO)
    @concurrency("compute")
    def publish(self, version: int, timeline: int = 0) -> tuple[Manifest, list[Any]]:
        """See Trainer.publish."""
        return self.trainer.publish(version, timeline=timeline)

    @register(Dispatch.RANK_ZERO)
    @concurrency("compute")
    def snapshot(self) -> None:
        """See Trainer.snapshot."""
        self.trainer.snapshot()

    @register(Dispatch.RANK_ZERO)
    @concurrency("model_io")
    def save(self, folder: str, names: Sequence[str] = (), units: Sequence[DataProto] = ()) -> dict[str, str]:
        """See Trainer.save; the units may be references."""
        return self.trainer.save(folder, names, units)

    @register(Dispatch.RANK_ZERO)
    @concurrency("compute")
    def restore(self, folder: str) -> None:
        """See Trainer.restore."""
        self.trainer.restore(folder)
        if self._history:
            self._history.add("restored", folder=Path(folder).name)

    @concurrency("buffer_length")
    def progress(self) -> list[str]:
        """See Tracer.progress."""
        return self.trainer.tracer.progress()

    @register(Dispatch.RANK_ZERO)
    @concurrency("compute")
    def sha256(self) -> str:
        """See Trainer.sha256."""
        return self.trainer.sha256()

    @register(Dispatch.RANK_ZERO)
    @concurrency("buffer_length")
    def report(self) -> Report:
        """See Trainer.report."""
        return self.trainer.report()
