"""The Maker in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hocket.data.proto import DataProto
from hocket.roles.maker import Maker, Report
from hocket.single_controller.decorator import Dispatch, concurrency, register
from hocket.single_controller.worker import Worker
from hocket.weights.manifest import Manifest
from hocket.workers.process import set_up_process

# Generation computes; experience leaves, and weights arrive, meanwhile: each group is a thread of its own.
MAKER_GROUPS = {"compute": 1, "experience_io": 1, "model_io": 1}


class MakerWorker(Worker):
    """A thin shell: every method is the Maker's, plus what only a process has. `build` makes the Maker in here."""

    def __init__(self, build: Callable[[], Maker], *, log: str | None = None) -> None:
        super().__init__()
        set_up_process(log)
        self.maker = build()

    @register(Dispatch.RANK_ZERO, blocking=False)
    def make(self, unit: DataProto, *, at_least: int = 0) -> DataProto:
        """See Maker.make."""
        return self.maker.make(unit, at_least=at_least)

    @concurrency("compute", num_returns=2)
    def make_unit(self, unit: DataProto, *, at_least: int = 0) -> tuple[DataProto, int]:
        """`make`, and its number of rows as a second, small result: the controller looks at that one only."""
        experience = self.maker.make(unit, at_least=at_least)
        return experience, len(experience)

    @register(Dispatch.RANK_ZERO)
    @concurrency("compute")
    def evaluate(self, unit: DataProto, *, at_least: int = 0) -> dict[str, list[float]]:
        """See Maker.evaluate."""
        return self.maker.evaluate(unit, at_least=at_least)

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
