"""`report.html`: one page that needs no network and tells what a run did, from the files of its folder."""

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hocket.errors import DataError
from hocket.observe.metrics import diagnose, read_metrics
from hocket.observe.trace import Span, busy, read_trace, role_order

COLOURS = {
    "wait": "#d5dbe5",
    "start": "#94a3b8",
    "generate": "#3b82f6",
    "train": "#10b981",
    "reward": "#f59e0b",
    "eval": "#ec4899",
    "checkpoint": "#a16207",
    "sync": "#8b5cf6",
}
"""One colour per phase on the whole page, in the order of drawing: a later one lies on top."""

_INK = "#334155"
_MAX_POINTS = 1000
_SAMPLES = 10
_Trace = dict[str, Any]
_Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class _Run:
    name: str
    records: _Records
    config: str
    env: dict[str, Any]
    spans: list[Span]
    samples: list[tuple[str, list[dict[str, Any]]]]


@dataclass(frozen=True)
class _Chart:
    """A figure in plotly's terms; without traces only the sentence `absent` is shown."""

    title: str
    absent: str
    traces: list[_Trace]
    note: str = ""
    layout: dict[str, Any] = field(default_factory=dict[str, Any])


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run folder from its metrics, samples, trace, config and environment.

    Every one of these files may be absent, and the run may be unfinished: the page says what is missing.

    Raises:
        DataError: the folder does not exist, or one of its files is damaged in more than its end.
    """
    run = _load(Path(run_dir))
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = _charts(run)
    page = templates.get_template("report.html.j2").render(
        run=run,
        state=_state(run),
        cards=_headline(run),
        advice=diagnose(run.records[-1]) if run.records else [],
        charts=charts,
        figures=[{"data": chart.traces, "layout": chart.layout} for chart in charts if chart.traces],
        ledger=_ledger(run.records),
        hue=_hue,
        plotly=Markup(get_plotlyjs()),
    )
    path = Path(run_dir) / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _load(folder: Path) -> _Run:
    if not folder.is_dir():
        raise DataError(f"no run folder {folder}; give the folder that holds metrics.jsonl.")
    metrics, config, env, trace = (
        folder / name for name in ("metrics.jsonl", "config.resolved.yaml", "env.json", "trace.json")
    )
    return _Run(
        name=folder.resolve().name,
        records=_by_step(read_metrics(metrics)) if metrics.is_file() else [],
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        env=_read_env(env) if env.is_file() else {},
        spans=read_trace(trace) if trace.is_file() else [],
        samples=_samples(sorted(folder.glob("samples/*.jsonl"))),
    )


def _read_env(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is no JSON object ({error}); mend it, or remove it and report again.") from error


def _by_step(records: _Records) -> _Records:
    """One record per step: an evaluation joins its step, and a step done again after a resume replaces it."""
    steps: dict[float, dict[str, Any]] = {}
    for record in records:
        steps.setdefault(record.get("step", 0), {}).update(record)
    return [steps[step] for step in sorted(steps)]


def _samples(files: list[Path]) -> list[tuple[str, list[dict[str, Any]]]]:
    titles = {0: "First samples", len(files) - 1: "Last samples"} if files else {}
    return [(title, read_metrics(files[index])[:_SAMPLES]) for index, title in titles.items()]


def _state(run: _Run) -> str:
    if not run.records:
        return "This run has no finished step yet, so there is nothing to draw."
    done, total = run.records[-1].get("step", 0), _total_steps(run)
    if total and done < total:
        return f"This run is unfinished: it stopped, or still goes on, at step {done} of {total}."
    if len(run.records) == 1:
        return "This run has one step only, so each chart is a single point."
    return ""


def _headline(run: _Run) -> list[tuple[str, str]]:
    """Label and value of each figure at the top of the page."""
    total = _total_steps(run)
    steps = str(run.records[-1].get("step", 0)) if run.records else "0"
    cards = [("steps", f"{steps} of {total}" if total else steps)]
    for name in ["reward/mean", *_evals(run.records)]:
        values = _values(run.records, name)
        if values:  # single steps are noisy: first and last tenth
            tenth = max(1, len(values) // 10)
            ends = dict.fromkeys(f"{statistics.fmean(part):.3f}" for part in (values[:tenth], values[-tenth:]))
            cards.append((name.removesuffix("/mean"), " → ".join(ends)))
    times = _values(run.records, "time")
    if times:
        seconds = times[-1] - times[0] + next(iter(_values(run.records, "time/step")), 0.0)
        clock = str(timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.1f} s"
        cards.append(("wall time", clock))
        cards.append(("first step", f"{datetime.fromtimestamp(times[0], UTC):%Y-%m-%d %H:%M} UTC"))
    if speeds := _values(run.records, "tokens_per_s"):
        cards.append(("tokens/s, median", f"{statistics.median(speeds):,.0f}"))
    if placement := _placement(run.config):
        cards.insert(0, ("placement", placement))
    return cards


def _total_steps(run: _Run) -> int:
    found = re.search(r"^\s*max_steps:\s*(\d+)", run.config, re.MULTILINE)
    return int(found[1]) if found else 0


def _placement(config: str) -> str:
    """The kind of placement and what tells it from others of its kind."""
    found = re.search(r"^placement:(.*(?:\n[ -].*)*)", config, re.MULTILINE)
    section = found[1] if found else ""
    settings = dict(re.findall(r"(\w+): *(\w+)", section))
    kind = str(settings.get("kind", section.strip()))
    makers = int(settings.get("makers", "1"))
    return f"{kind}, {makers} maker{'s' * (makers != 1)}" if kind == "detached" else kind


def _ledger(records: _Records) -> dict[str, Any]:
    """The latest accounts, their sum, and what the run says it produced (None where it does not)."""
    books = [{k.removeprefix("ledger/"): n for k, n in r.items() if k.startswith("ledger/")} for r in records]
    accounts = next((book for book in reversed(books) if book), {})
    produced = accounts.pop("produced", None)
    return {"accounts": accounts, "sum": sum(accounts.values()), "produced": produced}


def _hue(score: float, samples: _Records) -> int:
    """Colour of a score in degrees, 0 (red) to 130 (green), on the scale 0..1, wider if its fellows are."""
    scores = [float(sample["score"]) for sample in samples if sample.get("score") is not None]
    low, high = min([0.0, *scores]), max([1.0, *scores])
    return round(130 * (score - low) / (high - low))


def _charts(run: _Run) -> list[_Chart]:
    stride = max(1, math.ceil(len(run.records) / _MAX_POINTS))
    records = run.records[::-stride][::-1]  # thinned from the end, so that the last step is always drawn
    return [
        _Chart("Reward", "no reward was recorded", _reward(records)),
        _kl(records),
        _staleness(records),
        _throughput(records),
        _lengths(records),
        _Chart(
            "Time per phase, in seconds per step",
            "no times were recorded",
            _phases(records),
            note="Phases of different roles run side by side, so their sum may exceed the step.",
        ),
        _timeline(run.spans),
    ]


def _reward(records: _Records) -> list[_Trace]:
    """The reward of each step, its rolling mean, and around it the band of one standard deviation."""
    window = max(1, min(20, len(records) // 8))
    mean = _rolling(_column(records, "reward/mean"), window)
    spread = _rolling(_column(records, "reward/std"), window)
    low, high = ([_plus(m, s, sign) for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    line = partial(_line, records)
    return [
        *line("reward/std", "", _INK, y=low, showlegend=False, **edge),
        *line("reward/std", "± std", _INK, y=high, fill="tonexty", fillcolor="rgba(245,158,11,.16)", **edge),
        *line("reward/mean", "each step", "rgba(245,158,11,.5)"),
        *line("reward/mean", f"mean of {window}", "#d97706", y=mean, line={"color": "#d97706", "width": 3}),
        *(
            trace
            for name, colour in zip(_evals(records), cycle(("#ec4899", "#0ea5e9", "#22c55e")))
            for trace in line(name, name, colour, mode="lines+markers")
        ),
    ]


def _kl(records: _Records) -> _Chart:
    traces = [
        *_line(records, "kl/ref", "to the reference", "#3b82f6"),
        *_line(records, "kl/proximal", "within the update", "#10b981"),
        *_line(records, "mismatch/abs_mean", "maker to trainer", "#ef4444"),
    ]
    # The three lie orders of magnitude apart; but a log axis would hide an exact zero or a negative one.
    positive = all(value > 0 for trace in traces for value in trace["y"] if value is not None)
    layout = {"yaxis": {"type": "log", "exponentformat": "power", "dtick": 1}} if positive else {}
    return _Chart("KL and mismatch", "neither was recorded", traces, layout=layout)


def _staleness(records: _Records) -> _Chart:
    traces = [
        *_line(records, "staleness/max", "max", "#c4b5fd", line={"shape": "hv", "color": "#c4b5fd"}),
        *_line(records, "staleness/mean", "mean", "#7c3aed"),
    ]
    top = 1.1 * max([1.0, *_values(records, "staleness/max")])
    return _Chart("Staleness, in versions", "it was not recorded", traces, layout={"yaxis": {"range": [0, top]}})


def _throughput(records: _Records) -> _Chart:
    area = {"fill": "tozeroy", "fillcolor": "rgba(14,165,233,.12)"}
    traces = _line(records, "tokens_per_s", "tokens/s", "#0ea5e9", **area)
    layout = {"yaxis": {"rangemode": "tozero"}}
    return _Chart("Throughput, in tokens per second", "it was not recorded", traces, layout=layout)


def _lengths(records: _Records) -> _Chart:
    traces = [
        *_line(records, "len/response_max", "longest", "#a5b4fc"),
        *_line(records, "len/response_mean", "mean", "#4f46e5"),
        *_line(records, "len/truncated_frac", "cut off (right axis)", "#ef4444", yaxis="y2"),
    ]
    right = {"overlaying": "y", "side": "right", "range": [0, 1], "dtick": 0.25, "tickformat": ".0%"}
    right |= {"showgrid": False, "automargin": True}
    layout = {"yaxis": {"rangemode": "tozero"}, "yaxis2": right}
    return _Chart("Response length, in tokens", "it was not recorded", traces, layout=layout)


def _phases(records: _Records) -> list[_Trace]:
    area = partial(_line, records, stackgroup="phases")
    names = {name: "wait_experience" if name == "wait" else name for name in COLOURS}
    layers = [
        trace
        for phase in ("train", "sync", "generate", "reward", "wait")
        for trace in area(
            f"time/{names[phase]}",
            phase,
            COLOURS[phase],
            fillcolor=COLOURS[phase],
            line={"width": 0.5, "color": COLOURS[phase]},
        )
    ]
    whole = {"color": _INK, "width": 1.5, "dash": "dot"}
    return [*layers, *_line(records, "time/step", "whole step", _INK, line=whole)]


def _timeline(spans: list[Span]) -> _Chart:
    """Who did what in the last three steps: a row per role, a bar per span."""
    title, absent = "The last steps, role by role", "there is no trace"
    if not spans:
        return _Chart(title, absent, [])
    steps = sorted({step for span in spans if isinstance(step := span.args.get("step"), int)})[-3:]
    recent = [span for span in spans if not steps or span.args.get("step") in steps]
    start, end = min(span.start_ns for span in recent), max(span.end_ns for span in recent)
    shown = [span for span in spans if span.end_ns > start and span.start_ns < end]
    phases = sorted({span.name for span in shown}, key=[*COLOURS, *(span.name for span in shown)].index)
    bars = [_bars([span for span in shown if span.name == phase], start) for phase in phases]
    roles = sorted({span.role for span in shown}, key=role_order)
    layout = {
        "barmode": "overlay",
        "height": 150 + 42 * len(roles),
        "xaxis": {"title": {"text": "seconds"}, "range": [0, (end - start) / 1e9]},
        "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": roles},
        "hovermode": "closest",
    }
    named = f"Steps {steps[0]} to {steps[-1]}. " if steps else ""
    return _Chart(title, absent, bars, note=named + _shares(shown, (start, end)), layout=layout)


def _shares(spans: list[Span], window: tuple[int, int]) -> str:
    total = (window[1] - window[0]) / 1e9 or math.inf
    roles = [
        f"{role}: " + ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in phases.items())
        for role, phases in busy(spans, window).items()
    ]
    return "Share of this time: " + "; ".join(roles) + "."


def _bars(spans: list[Span], origin_ns: int) -> _Trace:
    name = spans[0].name
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [span.role for span in spans],
        "base": [round((span.start_ns - origin_ns) / 1e9, 6) for span in spans],
        "x": [round(span.duration_ns / 1e9, 6) for span in spans],
        "customdata": [" ".join(f"{key} {value}" for key, value in span.args.items()) for span in spans],
        "hovertemplate": "%{y} " + name + "<br>%{x:.3f} s<br>%{customdata}<extra></extra>",
        "marker": {"color": COLOURS.get(name, "#64748b"), "line": {"width": 0.5, "color": "#fff"}},
        "width": 0.7,
    }


def _line(records: _Records, metric: str, label: str, colour: str, **style: Any) -> list[_Trace]:
    """A line over the steps, or none when no record has the metric."""
    values = _column(records, metric)
    if all(value is None for value in values):
        return []
    trace: _Trace = {"type": "scatter", "name": label, "x": [r.get("step", 0) for r in records], "y": values}
    trace |= {"mode": "lines+markers" if len(records) < 30 else "lines", "connectgaps": True}
    return [trace | {"line": {"color": colour, "width": 2}, "marker": {"color": colour, "size": 5}} | style]


def _column(records: _Records, metric: str) -> list[float | None]:
    """One number per record, to six digits, None where it is missing: what the page needs and no more."""
    found = [record.get(metric) for record in records]
    return [float(f"{value:.6g}") if isinstance(value, int | float) else None for value in found]


def _evals(records: _Records) -> list[str]:
    return sorted({name for record in records for name in record if name.startswith("eval/")})


def _values(records: _Records, metric: str) -> list[float]:
    return [record[metric] for record in records if isinstance(record.get(metric), int | float)]


def _rolling(values: list[float | None], window: int) -> list[float | None]:
    """The mean of each value and those before it, `window` in all; None where there is none."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    known = [[value for value in part if value is not None] for part in parts]
    return [float(f"{statistics.fmean(part):.6g}") if part else None for part in known]


def _plus(mean: float | None, spread: float | None, sign: int) -> float | None:
    return None if mean is None or spread is None else mean + sign * spread
