"""What a person sees while a run goes on: a live panel on a terminal, one plain line per step elsewhere."""

import io
import statistics
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hocket.observe.closing import Closing

_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = {
    "reward/mean": "reward {:.3f}",
    "len/response_mean": "len {:.1f}",
    "kl/ref": "kl {:.2g}",
    "staleness/max": "staleness {:.0f}",
    "tokens_per_s": "{:.0f} tok/s",
    "time/step": "{:.2f} s",
}
_TABLE = {
    "reward/mean": ("reward", "{:.3f}"),
    "reward/std": ("reward std", "{:.3f}"),
    "group/zero_std_frac": ("equal groups", "{:.0%}"),
    "len/response_mean": ("length", "{:.1f}"),
    "len/truncated_frac": ("truncated", "{:.0%}"),
    "entropy": ("entropy", "{:.3g}"),
    "kl/ref": ("kl ref", "{:.2g}"),
    "mismatch/abs_mean": ("mismatch", "{:.1e}"),
    "clip/high": ("clipped", "{:.1%}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "lr": ("lr", "{:.1e}"),
    "value/explained_var": ("value fit", "{:.2f}"),
    "staleness/max": ("staleness", "{:.0f}"),
    "queue/depth": ("queue", "{:.0f}"),
    "tokens_per_s": ("tok/s", "{:.0f}"),
}
_PHASES = {
    "generate": "blue",
    "reward": "yellow",
    "train": "green",
    "sync": "magenta",
    "wait_experience": "red",
}


class RunConsole(Closing):
    """Tells a person about a run. Every method may be called from any thread; a `with` closes it."""

    @abstractmethod
    def header(self, lines: Sequence[str]) -> None:
        """Say once what runs: model, data, placement."""

    @abstractmethod
    def step(self, metrics: Mapping[str, float]) -> None:
        """Show a finished step; metrics that are absent are left out. `step` counts those done."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show one sentence: what is waited for, or a diagnosis. The same one again is not repeated."""


def make_console(*, title: str, total_steps: int, stream: TextIO | None = None) -> RunConsole:
    """A live panel when `stream` (default: standard output) is a terminal that can draw it, else lines."""
    out: TextIO = sys.stdout if stream is None else stream
    console = Console(file=out)
    draws = out.isatty() and not console.is_dumb_terminal and console.encoding.startswith("utf")
    if draws:
        return LiveConsole(console, title=title, total_steps=total_steps)
    return PlainConsole(out, title=title, total_steps=total_steps)


class PlainConsole(RunConsole):
    """One line per step and no escape codes: for files, pipes and batch systems."""

    def __init__(self, stream: TextIO, *, title: str, total_steps: int) -> None:
        self._stream = stream
        self._total = total_steps
        self._last_note = ""
        self._lock = threading.Lock()
        self._print(title)

    def header(self, lines: Sequence[str]) -> None:
        self._print("\n".join(f"  {line}" for line in lines))

    def step(self, metrics: Mapping[str, float]) -> None:
        number = f"step {metrics.get('step', 0):>{len(str(self._total))}.0f}/{self._total}"
        shown = [text.format(metrics[name]) for name, text in _PLAIN.items() if _known(metrics, name)]
        self._print("  ".join([number, *shown]))

    def note(self, text: str) -> None:
        if text != self._last_note:
            self._last_note = text
            self._print(f"note  {text}")

    def close(self) -> None:
        self._stream.flush()

    def _print(self, text: str) -> None:
        with self._lock:
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except BrokenPipeError:  # nobody reads any more (`| head`); the run goes on
                self._stream = io.StringIO()


class LiveConsole(RunConsole):
    """One panel that is redrawn in place; what the process prints meanwhile scrolls above it."""

    def __init__(self, console: Console, *, title: str, total_steps: int) -> None:
        self._title = title
        self._total = total_steps
        self._started = time.monotonic()
        self._metrics: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._seconds: deque[float] = deque(maxlen=20)
        self._notes: deque[str] = deque(maxlen=3)
        # Never held while calling into Live: its redrawing thread holds Live's own lock when it wants this.
        self._lock = threading.Lock()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4)
        self._live.start()

    def header(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._live.console.print(line, markup=False, highlight=False)

    def step(self, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._metrics = dict(metrics)
            self._rewards += [metrics["reward/mean"]] if _known(metrics, "reward/mean") else []
            self._seconds += [metrics["time/step"]] if _known(metrics, "time/step") else []

    def note(self, text: str) -> None:
        with self._lock:
            if text not in self._notes:
                self._notes.append(text)

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        with self._lock:
            parts: list[RenderableType | None] = [
                self._progress(),
                self._sparkline(),
                _metrics_table(self._metrics),
                _phases_line(self._metrics),
                Text(f"ledger  {line}", style="dim") if (line := ledger_line(self._metrics)) else None,
                *(Text(f"• {note}", style="yellow") for note in self._notes),
            ]
        return Panel(Group(*(part for part in parts if part is not None)), title=Text(self._title), border_style="blue")

    def _progress(self) -> RenderableType:
        done = int(self._metrics.get("step", 0))
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        elapsed = _clock(time.monotonic() - self._started)
        left = statistics.median(self._seconds) * (self._total - done) if self._seconds else None
        eta = "--:--" if left is None else _clock(left)
        bar = ProgressBar(total=max(self._total, 1), completed=done)
        grid.add_row(f"step {done}/{self._total}", bar, f"{elapsed}  ETA {eta}")
        return grid

    def _sparkline(self) -> Text | None:
        if not self._rewards:
            return None
        line = Text(sparkline(self._rewards, width=40), style="green")
        return Text.assemble("reward ", line, f"  {self._rewards[0]:.3f} → {self._rewards[-1]:.3f}")


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw the whole series in at most `width` block characters, each the mean of its share of the values."""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _metrics_table(metrics: Mapping[str, float]) -> RenderableType | None:
    cells = [
        Text.assemble((f"{label:<13}", "dim"), text.format(metrics[name]))
        for name, (label, text) in _TABLE.items()
        if _known(metrics, name)
    ]
    # A fixed width, so that the columns stand still while the numbers change.
    return Columns(cells, width=22, padding=(0, 2)) if cells else None


def _phases_line(metrics: Mapping[str, float]) -> Text | None:
    parts = [
        (f"{phase.removesuffix('_experience')} {metrics[name]:.2f} s   ", colour)
        for phase, colour in _PHASES.items()
        if _known(metrics, name := f"time/{phase}")
    ]
    return Text.assemble(*parts) if parts else None


def ledger_line(metrics: Mapping[str, float]) -> str | None:
    """The ledger as a sum, `656 samples = 640 trained + 16 maker lost`; accounts that are empty are left out."""
    accounts = {
        name.removeprefix("ledger/"): value
        for name, value in metrics.items()
        if name.startswith("ledger/") and _known(metrics, name)
    }
    if not accounts:
        return None
    produced = accounts.pop("produced", sum(accounts.values()))
    parts = [f"{value:.0f} {name.replace('_', ' ').replace('/', ': ')}" for name, value in accounts.items() if value]
    return f"{produced:.0f} samples" + (" = " + " + ".join(parts) if parts else "")


def _known(metrics: Mapping[str, float], name: str) -> bool:
    """Present and a number: a record from a file holds None where a number was not finite."""
    return isinstance(metrics.get(name), int | float)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
