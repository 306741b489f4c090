"""What self-driven makers and trainers leave in a run folder: files of their own, so that nobody waits for anybody."""

from __future__ import annotations

import time
from pathlib import Path

from hocket.observe.metrics import MetricsWriter, append_records
from hocket.observe.trace import TraceFile
from hocket.roles.maker import Report


class RunRecord:
    """`metrics.jsonl` of the leading trainer, `trace-<name>.json` and `samples/<name>.jsonl` of each role."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder = Path(folder)
        self._name = name
        (self._folder / "samples").mkdir(parents=True, exist_ok=True)
        self._trace: TraceFile | None = None
        self._metrics: MetricsWriter | None = None
        self._steps = 0

    def step(self, metrics: dict[str, float], report: Report) -> None:
        """One training step."""
        if self._metrics is None:
            self._metrics = MetricsWriter(self._folder / "metrics.jsonl")
        self._steps += 1
        self._metrics.write({"step": self._steps, "time": time.time(), **metrics})
        self.role(report)

    def role(self, report: Report) -> None:
        """What a role has to tell: spans and samples."""
        if self._trace is None:
            self._trace = TraceFile(self._folder / f"trace-{self._name}.json")
        self._trace.add(report.spans)
        if report.samples:
            append_records(self._folder / "samples" / f"{self._name}.jsonl", report.samples)

    def close(self, report: Report) -> None:
        """The loop has ended."""
        self.role(report)
        for file in (self._trace, self._metrics):
            if file is not None:
                file.close()
        self._trace = self._metrics = None
