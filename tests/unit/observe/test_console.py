import io
import os
import pty
import re
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest
from rich.console import Console

from hocket.observe.console import LiveConsole, PlainConsole, make_console, sparkline

_METRICS = {
    "step": 12,
    "reward/mean": 0.6134,
    "len/response_mean": 5.2,
    "kl/ref": 0.0012,
    "staleness/max": 1,
    "tokens_per_s": 412.3,
    "time/step": 0.41,
    "time/train": 0.15,
    "time/wait_experience": 0.05,
    "ledger/trained": 768,
    "ledger/in_flight": 32,
}


def _live(width: int = 80) -> tuple[io.StringIO, LiveConsole]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=40)
    return out, LiveConsole(console, title="sums--chars--7", total_steps=150)


def _last_frame(text: str) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return ("╭" + plain.rpartition("╭")[2]).splitlines()


def test_plain_lines_are_fixed_and_have_no_escapes() -> None:
    out = io.StringIO()
    with make_console(title="sums", total_steps=150, stream=out) as console:
        console.header(["placement colocated"])
        console.step(_METRICS)
        console.step({"step": 13, "reward/mean": 0.7})
        console.note("waiting for experience")
        console.note("waiting for experience")
    assert out.getvalue().splitlines() == [
        "sums",
        "  placement colocated",
        "step  12/150  reward 0.613  len 5.2  kl 0.0012  staleness 1  412 tok/s  0.41 s",
        "step  13/150  reward 0.700",
        "note  waiting for experience",
    ]


def test_lines_of_many_threads_stay_whole() -> None:
    out = io.StringIO()
    console = PlainConsole(out, title="sums", total_steps=9)
    threads = [threading.Thread(target=console.step, args=({"step": i},)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(out.getvalue().splitlines()) == [*(f"step {i}/9" for i in range(9)), "sums"]


def test_the_panel_shows_step_reward_sparkline_phases_ledger_and_notes_in_80_columns() -> None:
    out, live = _live()
    with live:
        live.header(["detached(makers=2)"])
        for step in range(1, 13):
            live.step(_METRICS | {"step": step, "reward/mean": step / 20})
        live.note("waiting for makers")
    frame = _last_frame(out.getvalue())
    text = "\n".join(frame)
    for part in ("sums--chars--7", "step 12/150", "ETA 0:00:57", "▁", "█", "0.050 → 0.600", "412"):
        assert part in text
    for part in ("train 0.15 s", "wait 0.05 s", "800 samples = 768 trained + 32 in flight", "waiting for makers"):
        assert part in text
    assert "detached(makers=2)" in out.getvalue()
    assert {len(line) for line in frame if line} == {80}


def test_a_narrow_terminal_and_a_step_without_numbers_still_give_a_whole_panel() -> None:
    out, live = _live(width=40)
    with live:
        live.step({"step": 1})
        live.note("a note that is longer than the forty columns of this terminal")
    assert {len(line) for line in _last_frame(out.getvalue()) if line} == {40}


def test_the_cursor_comes_back_after_an_interrupt() -> None:
    out, live = _live()

    def interrupted() -> None:
        with live:
            live.step(_METRICS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    hidden, shown = out.getvalue().rfind("\x1b[?25l"), out.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < shown
    live.close()


def test_threads_may_draw_at_the_same_time_as_the_panel() -> None:
    out, live = _live()

    def work(first: int) -> None:
        for step in range(first, first + 20):
            live.step(_METRICS | {"step": step})
            live.note(f"note {step}")
            live.header([f"line {step}"])

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100)]
    with live:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert "line 119" in out.getvalue()


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """A real terminal device that nobody looks at."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        yield stream
    os.close(master)


def test_a_terminal_gets_the_panel_and_anything_else_gets_lines(terminal: TextIO) -> None:
    console = make_console(title="t", total_steps=1, stream=terminal)
    console.close()
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    assert isinstance(console, PlainConsole if dumb else LiveConsole)
    assert isinstance(make_console(title="t", total_steps=1, stream=io.StringIO()), PlainConsole)


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([1.0, 1.0], "▁▁"), ([0, 1], "▁█"), (list(range(16)), "▁▂▃▄▅▆▇█"), ([3, 2, 1], "█▅▁")],
)
def test_a_sparkline_spans_the_whole_series(values: list[float], line: str) -> None:
    assert sparkline(values, width=8) == line
