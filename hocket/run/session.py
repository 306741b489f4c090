"""What a program has around its loop: units, records, waits, evaluation, the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from hocket.config import RunConfig
from hocket.data.proto import DataProto
from hocket.observe.console import RunConsole
from hocket.observe.metrics import MetricsWriter, diagnose
from hocket.observe.report import write_report
from hocket.observe.trace import Span, TraceFile, Tracer
from hocket.roles.maker import Report
from hocket.run.checkpoint import write_checkpoint
from hocket.run.folder import RunFolder
from hocket.run.ledger import Ledger
from hocket.run.prepare import Prepared

_LOG = logging.getLogger("hocket")
_PHASES = {"generate": "generate", "reward": "reward", "train": "train", "sync": "sync", "wait": "wait_experience"}


class Session:
    """One run while it goes on. Everything that it writes lies in its folder."""

    def __init__(self, config: RunConfig, folder: RunFolder, prepared: Prepared, console: RunConsole) -> None:
        self.config = config
        self.folder = folder
        self.blueprint = prepared.blueprint
        self.console = console
        self.ledger = Ledger()
        self.tracer = Tracer("trainer-0")
        self.summary: dict[str, Any] = {"folder": str(folder.path), "finished": False, "steps": 0}
        self._prepared = prepared
        self._metrics = MetricsWriter(folder.path / "metrics.jsonl")
        self._trace = TraceFile(folder.path / "trace.json")
        self._step_began = self._began = time.monotonic()
        self._said: set[str] = set()

    @property
    def steps(self) -> range:
        """The steps to train, from 0."""
        return range(self.config.trainer.max_steps)

    @property
    def units_per_step(self) -> int:
        """See PromptSchedule."""
        return self._prepared.schedule.units_per_step

    def units(self, step: int) -> list[DataProto]:
        """The units of a step in prompt order; the first ones are asked for the samples that people read."""
        if step == self.steps[0]:
            self._step_began = time.monotonic()
        units = self._prepared.schedule.units(step)
        if step in (self.steps[0], self.steps[-1]) or (step + 1) % self.config.logging.samples_every == 0:
            left = self.config.logging.samples
            for unit in units:
                unit.meta_info["samples"] = min(left, self.samples_of(unit))
                left -= unit.meta_info["samples"]
        return units

    def samples_of(self, unit: DataProto) -> int:
        """Samples that a unit becomes."""
        return len(unit) * self.config.rollout.group_size

    def evaluate(self, answer: Callable[[list[DataProto]], list[dict[str, list[float]]]], *, version: int) -> None:
        """Greedy answers to the held-out prompts, made by `answer`; means go to metrics, summary and console."""
        if self._prepared.held_out is None:
            return
        parts = answer(self._prepared.held_out.units(0))
        means = {f"eval/{name}": fmean(v for part in parts for v in part[name]) for name in parts[0]}
        count = sum(len(part["reward"]) for part in parts)
        self.summary.setdefault("eval", []).append({"version": version, "prompts": count, **means})
        self._metrics.write({"step": version, "time": time.time(), **means})
        text = ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in means.items())
        self.console.note(f"greedy answers to {count} held-out prompts, weights version {version}: {text}")

    def record(self, step: int, metrics: dict[str, float], reports: Iterable[Report], *, queue_depth: int = 0) -> None:
        """Write one finished step (from 0): metrics, spans, samples, a line on the console."""
        self.ledger.trained(int(metrics["samples"]))
        spans = self._keep(reports)
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        record = metrics | _phase_seconds(spans) | self.ledger.balance()
        record |= {"time/step": seconds, "tokens_per_s": metrics["tokens"] / seconds, "queue/depth": queue_depth}
        self._metrics.write({"step": step + 1, "time": time.time(), **record})
        self.console.step({"step": step + 1, **record})
        _LOG.info("step %d: mean reward %.4f, %.2f s", step + 1, record["reward/mean"], seconds)
        self.summary["steps"] = step + 1
        self.summary.setdefault("reward", []).append(metrics["reward/mean"])
        for warning in diagnose(record):
            self._say_once(warning)

    def checkpoint(self, step: int, save: Callable[[str], None], sha256: Callable[[], str]) -> None:
        """Save the weights after `step` steps, when it is time or the last one."""
        every = self.config.checkpoint.every
        if step == self.config.trainer.max_steps or (every and step % every == 0):
            self.summary["weights_sha256"] = sha256()
            path = write_checkpoint(self.folder.checkpoints, step, save, sha256=self.summary["weights_sha256"])
            self.summary["checkpoint"] = str(path)

    def finish(self, reports: Iterable[Report]) -> None:
        """The program came to its end."""
        self._keep(reports)
        self.summary["finished"] = True

    def close(self) -> None:
        """Write what there is: the rest of the trace, the summary, the report."""
        self._trace.close()
        self._metrics.close()
        self.summary["seconds"] = round(time.monotonic() - self._began, 2)
        self.summary["ledger"] = self.ledger.balance()
        self.folder.write_json("summary.json", _headline(self.summary))
        write_report(self.folder.path)

    def _keep(self, reports: Iterable[Report]) -> list[Span]:
        spans = self.tracer.drain()
        for report in reports:
            spans += report.spans
            for sample in report.samples:
                self.folder.write_samples(sample["step"], [sample])
        self._trace.add(spans)
        return spans

    def _say_once(self, text: str) -> None:
        kind = text.split()[0]
        if kind not in self._said:
            self._said.add(kind)
            self.console.note(text)


def _phase_seconds(spans: Iterable[Span]) -> dict[str, float]:
    seconds = {f"time/{name}": 0.0 for name in _PHASES.values()}
    for span in spans:
        if span.name in _PHASES and not (span.name == "wait" and span.role.startswith("maker")):
            seconds[f"time/{_PHASES[span.name]}"] += span.duration_ns / 1e9
    return seconds


def _headline(summary: dict[str, Any]) -> dict[str, Any]:
    rewards = summary.pop("reward", [])
    tenth = max(1, len(rewards) // 10)
    if rewards:
        summary["reward_first_tenth"] = fmean(rewards[:tenth])
        summary["reward_last_tenth"] = fmean(rewards[-tenth:])
    return summary
