"""Who did what when: spans measured in each process, joined into one Chrome trace.

Phases that hocket names: generate, reward, train, sync, wait, and start, eval, checkpoint.
"""

import json
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.observe.closing import Closing

Arg = int | float | str
_RANKS = {"driver": 0, "trainer": 1, "maker": 2}


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one role. Times are nanoseconds of the wall clock, so that processes line up."""

    role: str
    name: str
    start_ns: int
    duration_ns: int
    args: dict[str, Arg] = field(default_factory=dict[str, Arg])
    thread: int = 0
    """Which of the role's threads, counted from 0: spans of one thread nest, spans of two may overlap."""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Tracer:
    """Collects the spans of one role (`driver`, `trainer-0`, `maker-1`, ...) from any of its threads."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._threads: dict[int, int] = {}
        self._now: dict[int, list[str]] = {}
        self._begun = 0

    @contextmanager
    def span(self, name: str, **args: Arg) -> Generator[None, None, None]:
        """Measure the body of the `with`; a body that raises is recorded too."""
        start, tick = time.time_ns(), time.perf_counter_ns()
        with self._lock:
            now = self._now.setdefault(threading.get_ident(), [])
            self._begun += 1
            now.append(f"{name} {self._begun}")
        try:
            yield
        finally:
            now.pop()
            # The length comes from the steady clock: the wall clock may be set back in between.
            self._add(name, start, time.perf_counter_ns() - tick, args)

    def progress(self) -> list[str]:
        """What each of the role's threads is at: phase and a number, which is another one each time."""
        with self._lock:
            return [now[-1] for now in self._now.values() if now]

    def drain(self) -> list[Span]:
        """The spans that ended since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def _add(self, name: str, start: int, duration: int, args: dict[str, Arg]) -> None:
        with self._lock:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self._spans.append(Span(self.role, name, start, duration, args, thread))


class TraceFile(Closing):
    """A trace for chrome://tracing or Perfetto; each role is a track of its own.

    It is Chrome's *array* form, one event per line, because viewers accept an array without its end bracket:
    what a killed run leaves can be opened as it is. After `close` the file is valid JSON. In a file that
    exists, as when a run resumes, writing goes on behind the last whole event.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier = _read_events(self.path) if self.path.is_file() else []
        self._roles = {event["args"]["name"]: event["pid"] for event in earlier if _names_role(event)}
        self._file = self.path.open("w", encoding="utf-8")
        self._file.write("[")
        self._separator = "\n"
        self._write(earlier)

    def add(self, spans: Iterable[Span]) -> None:
        """Append spans of any roles, in any order."""
        events: list[dict[str, Any]] = []
        for span in spans:
            if span.role not in self._roles:
                self._roles[span.role] = len(self._roles) + 1
                events += _track(span.role, self._roles[span.role])
            events.append(_event(span, self._roles[span.role]))
        self._write(events)

    def close(self) -> None:
        """End the array; a second call does nothing."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def _write(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self._file.write(self._separator + json.dumps(event))
            self._separator = ",\n"
        self._file.flush()


def read_trace(path: Path | str) -> list[Span]:
    """The spans of a trace file in the order written; a torn end is left out."""
    events = _read_events(Path(path))
    roles = {event["pid"]: event["args"]["name"] for event in events if _names_role(event)}
    return [_span(event, roles[event["pid"]]) for event in events if event["ph"] == "X"]


def role_order(role: str) -> tuple[int, int, str]:
    """Sort key of a role's name: driver, trainers, makers, others; by number within a kind."""
    kind, _, number = role.rpartition("-") if "-" in role else (role, "", "0")
    return _RANKS.get(kind, len(_RANKS)), int(number) if number.isdecimal() else 0, role


def busy(spans: Iterable[Span], window: tuple[int, int] | None = None) -> dict[str, dict[str, float]]:
    """Seconds that each role spent in each phase, inside the window `(start_ns, end_ns)` if one is given.

    A span inside another one counts for both of their phases.
    """
    seconds: dict[str, dict[str, float]] = {}
    for span in spans:
        start, end = window or (span.start_ns, span.end_ns)
        inside = min(span.end_ns, end) - max(span.start_ns, start)
        if inside > 0:
            phases = seconds.setdefault(span.role, {})
            phases[span.name] = phases.get(span.name, 0.0) + inside / 1e9
    return {role: seconds[role] for role in sorted(seconds, key=role_order)}


def _track(role: str, pid: int) -> list[dict[str, Any]]:
    rank, number, _ = role_order(role)
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": role}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": role}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": rank * 1000 + number}},
    ]


def _event(span: Span, pid: int) -> dict[str, Any]:
    times = {"ts": span.start_ns / 1000, "dur": span.duration_ns / 1000}  # Chrome counts microseconds
    return {"ph": "X", "name": span.name, "pid": pid, "tid": span.thread, **times, "args": span.args}


def _span(event: dict[str, Any], role: str) -> Span:
    start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
    return Span(role, event["name"], start, duration, event["args"], event["tid"])


def _names_role(event: dict[str, Any]) -> bool:
    return event["ph"] == "M" and event["name"] == "process_name"


def _read_events(path: Path) -> list[dict[str, Any]]:
    """The whole events of a file as `TraceFile` writes it; reads line by line up to where it was torn."""
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        try:
            events.append(json.loads(line.rstrip(",")))
        except json.JSONDecodeError:  # the end bracket, or the event that a killed run was writing
            break
    return events
