"""The Trainer in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hocket.data.proto import DataProto
from hocket.roles.maker import Report
from hocket.roles.trainer import Trainer
from hocket.single_controller.decorator import Dispatch, register
from hocket.single_controller.worker import Worker
from hocket.weights.manifest import Manifest
from hocket.workers.process import set_up_process


class TrainerWorker(Worker):
    """A thin shell: every method is the Trainer's. `build` makes the Trainer in here."""

    def __init__(self, build: Callable[[], Trainer], *, log: str | None = None) -> None:
        super().__init__()
        set_up_process(log)
        self.trainer = build()

    @register(Dispatch.RANK_ZERO)
    def train(self, units: Sequence[DataProto], *, step: int) -> dict[str, float]:
        """See Trainer.train; the units may be references, which this process fetches itself."""
        return self.trainer.train(units, step=step)

    @register(Dispatch.RANK_ZERO)
    def publish(self, version: int) -> tuple[Manifest, list[Any]]:
        """See Trainer.publish."""
        return self.trainer.publish(version)

    @register(Dispatch.RANK_ZERO)
    def save(self, folder: str) -> None:
        """See Trainer.save."""
        self.trainer.save(folder)

    @register(Dispatch.RANK_ZERO)
    def sha256(self) -> str:
        """See Trainer.sha256."""
        return self.trainer.sha256()

    @register(Dispatch.RANK_ZERO)
    def report(self) -> Report:
        """See Trainer.report."""
        return self.trainer.report()
