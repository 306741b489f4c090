"""What a program has around its loop: units, records, checkpoints, evaluation, the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

from hocket.config import RunConfig
from hocket.data.proto import DataProto
from hocket.errors import RewardError
from hocket.observe.console import RunConsole
from hocket.observe.history import History
from hocket.observe.metrics import MetricsWriter, diagnose, read_metrics
from hocket.observe.report import write_report
from hocket.observe.trace import Span, TraceFile, Tracer
from hocket.roles.maker import Report
from hocket.run.checkpoint import Checkpoints, Saved, Saves, abandon_after, newest
from hocket.run.flow import Books, Flow, Lease
from hocket.run.folder import RunFolder
from hocket.run.prepare import Prepared

_LOG = logging.getLogger("hocket")
_PHASES = {"generate": "generate", "reward": "reward", "train": "train", "sync": "sync", "wait": "wait_experience"}
Evaluate = Callable[[list[DataProto]], list[dict[str, list[float]]]]


class Draining(Exception):
    """Raised in the wait for experience when the user asked to stop: the step that is waited for is not begun."""


class Session:
    """One run while it goes on, from its beginning or from a checkpoint. All that it writes lies in its folder."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        prepared: Prepared,
        console: RunConsole,
        *,
        saved: Saved | None = None,
    ) -> None:
        self.config, self.folder, self.console = config, folder, console
        self.blueprint = prepared.blueprint
        self.tracer = Tracer("trainer-0")
        self.stop_requested: str | None = None
        self.saved_all = self.finished = False
        self.summary: dict[str, Any] = {}
        self._prepared, self._saved = prepared, saved
        self._history = History(folder.path / "history" / "driver.jsonl")
        self.checkpoints = Checkpoints(folder.checkpoints, config.checkpoint, say=console.note)
        if saved is not None and self._own(saved) and (gone := abandon_after(folder.checkpoints, saved.step)):
            console.note(f"{', '.join(gone)} are put aside: the run goes on from {saved.path.name}")
        self.flow = self._flow()
        self.checkpoints.fence(self.flow.timeline)
        self._books: Books | None = None
        self._metrics = self._open_metrics()
        self._trace = TraceFile(folder.path / "trace.json")
        self._began = self._step_began = time.monotonic()
        self._said: set[str] = set()
        self._weights: dict[str, str] = {}

    # --- what is to be done -------------------------------------------------------------------------------------

    @property
    def going(self) -> bool:
        """Whether there is another step to train."""
        return self.flow.step < self.config.trainer.max_steps and self.stop_requested is None

    @property
    def patience(self) -> float:
        """Seconds that a step may wait for its experience: for what no other deadline foresees."""
        return 2 * self.config.ray.call_timeout

    def check(self) -> None:
        """Raise Draining when the user asked to stop."""
        if self.stop_requested is not None:
            raise Draining

    def units(self, step: int) -> list[DataProto]:
        """The units of a step in prompt order; the first ones are asked for the samples that people read."""
        units = self._prepared.schedule.units(step)
        last = self.config.trainer.max_steps - 1
        if step in (0, last) or (step + 1) % self.config.logging.samples_every == 0:
            left = self.config.logging.samples
            for unit in units:
                unit.meta_info["samples"] = min(left, self.samples_of(unit))
                left -= unit.meta_info["samples"]
        return units

    def samples_of(self, unit: DataProto) -> int:
        """Samples that a unit becomes."""
        return len(unit) * self.config.rollout.group_size

    def give_up(self, lease: Lease | None, error: RewardError) -> None:
        """The reward failed on a unit: its step goes on without it. Raises `error` when that is not allowed."""
        if lease is None or not self.flow.drop(lease, "reward_error"):
            raise error
        step, unit = lease.key
        self.console.note(f"unit {unit} of step {step + 1} is given up: {error.message}")

    def wanted_makers(self) -> int | None:
        """How many makers `hocket scale` asks for, once for each request."""
        return self.folder.take_request("makers")

    def scaled(self, answer: str) -> None:
        """What became of the request, in words."""
        self.console.note(answer)
        self._history.add("scaled", answer=answer)
        self.folder.answer_request("makers", answer)

    # --- what was done ------------------------------------------------------------------------------------------

    def evaluate(self, answer: Evaluate, *, first: bool = False) -> None:
        """Greedy answers to the held-out prompts, made by `answer`; means go to metrics and console.

        The first one belongs to the start: a run that resumes has it already.
        """
        if self._prepared.held_out is not None and not (first and self.flow.step > 0):
            self._evaluate(answer)
        self._step_began = time.monotonic()

    def _evaluate(self, answer: Evaluate) -> None:
        assert self._prepared.held_out is not None
        version = self.flow.step
        parts = answer(self._prepared.held_out.units(0))
        means = {f"eval/{name}": fmean(v for part in parts for v in part[name]) for name in parts[0]}
        count = sum(len(part["reward"]) for part in parts)
        self._metrics.write({"step": version, "time": time.time(), "eval/prompts": count, **means})
        text = ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in means.items())
        self.console.note(f"greedy answers to {count} held-out prompts, weights version {version}: {text}")

    def record(
        self, books: Books, metrics: dict[str, float], reports: Iterable[Report], *, queue_depth: int = 0
    ) -> None:
        """Write one finished step: metrics, spans, samples, a line on the console."""
        self._books = books
        spans = self._keep(reports)
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        record = metrics | _phase_seconds(spans) | dict(books.balance)
        record |= {"time/step": seconds, "tokens_per_s": metrics["tokens"] / seconds, "queue/depth": queue_depth}
        self._metrics.write({"step": books.step, "time": time.time(), **record})
        self.console.step({"step": books.step, **record})
        _LOG.info("step %d: mean reward %.4f, %.2f s", books.step, record["reward/mean"], seconds)
        for warning in diagnose(record):
            self._say_once(warning)

    def checkpoint(self, books: Books, trainer: Saves, metrics: dict[str, float]) -> None:
        """Save the state after a step when it is time. Raises what went wrong with an earlier one."""
        self.checkpoints.poll()
        stopping = self.stop_requested is not None and self.config.checkpoint.on_signal
        if self.checkpoints.due(books.step) or books.step == self.config.trainer.max_steps or stopping:
            self._save(books, trainer, metrics)

    def restore(self, restore: Callable[[str], None]) -> None:
        """Put the checkpoint that the run resumes from into a trainer that was just made."""
        if self._saved is not None:
            restore(str(self._saved.path))

    def rewind(self, restore: Callable[[str], None]) -> None:
        """A trainer that was just made takes the place of one that died: all goes back to the newest checkpoint."""
        self.checkpoints.poll(wait=True, quiet=True)
        saved = newest(self.folder.checkpoints, say=self.console.note) or self._saved
        if saved is not None:
            restore(str(saved.path))
        lost = self.flow.rewind(saved.books(buffered=False) if saved else Books(0, 0, {}, {}))
        self._books = None
        self.checkpoints.fence(self.flow.timeline)
        self._metrics.close()
        self.folder.forget_after(self.flow.step)
        self._metrics = MetricsWriter(self.folder.metrics)
        where = f"checkpoint {saved.path.name}" if saved else "the start"
        self.console.note(f"training goes on from {where}; {lost} samples are rolled back")

    def save_last(self, trainer: Saves) -> None:
        """There is no step more, because all are done or because the user asked to stop: have the state on the disk."""
        stopped = self.stop_requested is not None
        if not stopped and self._books is None and self._saved is None:  # a run of no steps has weights, too
            self._books = Books(0, self.flow.timeline, self.flow.ledger.accounts, {})
        if self._books is not None and (not stopped or self.config.checkpoint.on_signal):
            self._save(self._books, trainer, {})
        self.checkpoints.poll(wait=True)
        self.saved_all = True

    def conclude(self, evaluate: Evaluate, reports: Callable[[], Iterable[Report]]) -> None:
        """The loops came to their end."""
        if self.stop_requested is None:
            self.evaluate(evaluate)
        self._keep(reports())
        self.finished = self.stop_requested is None

    def close(self, *, ended_by: str | None = None) -> None:
        """Write what there is: the rest of the trace, the summary, the report."""
        self._trace.close()
        self._metrics.close()
        self._history.add("ended", accounts=self.flow.ledger.accounts, produced=self.flow.ledger.produced)
        self._history.close()
        self.summary = self._summary() | ({"ended_by": ended_by} if ended_by else {})
        self.folder.write_json("summary.json", self.summary)
        write_report(self.folder.path)

    # --- inside -------------------------------------------------------------------------------------------------

    def _flow(self) -> Flow:
        saved, supervise = self._saved, self.config.supervise
        books = None
        if saved is not None:
            books = saved.books()
            accounts = dict(books.accounts)
            # what the attempt before had begun, and not saved
            begun = self.folder.samples_begun if self._own(saved) else 0
            accounts["rolled_back"] += max(0, begun - sum(accounts.values()))
            timeline = max(books.timeline, self.folder.fence) + 1
            books = replace(books, timeline=timeline, accounts=accounts)
            self._history.add(
                "resumed",
                step=books.step,
                timeline=timeline,
                accounts=accounts,
                waiting=[[*key, samples] for key, (_, samples) in sorted(books.buffered.items())],
                fork_of=None if self._own(saved) else str(saved.path),
            )
        return Flow(
            self.units,
            steps=self.config.trainer.max_steps,
            samples=self.samples_of,
            max_staleness=self.config.placement.max_staleness,
            attempts=supervise.unit_attempts,
            may_drop=supervise.failed_units,
            books=books,
            note=self._history.add,
        )

    def _own(self, saved: Saved) -> bool:
        return saved.path.parent == self.folder.checkpoints

    def _open_metrics(self) -> MetricsWriter:
        if self._saved is not None:
            self.folder.forget_after(self.flow.step)
        return MetricsWriter(self.folder.metrics)

    def _save(self, books: Books, trainer: Saves, metrics: dict[str, float]) -> None:
        if self.checkpoints.step == books.step:
            return
        self.checkpoints.begin(books, trainer, metrics=metrics, prompts=self._prepared.schedule.sha256)

    def _summary(self) -> dict[str, Any]:
        records = read_metrics(self.folder.metrics) if self.folder.metrics.exists() else []
        steps = [record for record in records if "reward/mean" in record]
        evals = [record for record in records if any(name.startswith("eval/") for name in record)]
        summary: dict[str, Any] = {"folder": str(self.folder.path), "finished": self.finished, "steps": self.flow.step}
        summary["eval"] = [
            {"version": one["step"], "prompts": one["eval/prompts"]}
            | {name: value for name, value in one.items() if name.startswith("eval/") and name != "eval/prompts"}
            for one in evals
        ]
        if steps:
            rewards, tenth = [record["reward/mean"] for record in steps], max(1, len(steps) // 10)
            summary["reward_first_tenth"] = fmean(rewards[:tenth])
            summary["reward_last_tenth"] = fmean(rewards[-tenth:])
        if (last := self.checkpoints.last) is not None:
            summary |= {key: last.facts[key] for key in ("weights_sha256", "optimizer_sha256")}
            summary["checkpoint"] = str(last.path)
        summary["ledger"] = self.flow.balance()
        return summary | {"seconds": round(time.monotonic() - self._began, 2)}

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
