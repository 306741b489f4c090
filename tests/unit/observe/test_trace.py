import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hocket.observe.trace import Span, TraceFile, Tracer, busy, read_trace, role_order

_SECOND = 1_000_000_000


def test_a_span_has_the_wall_clock_start_the_length_and_the_arguments() -> None:
    tracer = Tracer("maker-0")
    before = time.time_ns()
    with tracer.span("generate", step=3, unit=1):
        time.sleep(0.01)
    (span,) = tracer.drain()
    assert (span.role, span.name, span.args) == ("maker-0", "generate", {"step": 3, "unit": 1})
    assert before <= span.start_ns <= time.time_ns()
    assert 10_000_000 <= span.duration_ns < _SECOND
    assert tracer.drain() == []
    assert pickle.loads(pickle.dumps(span)) == span


def test_a_body_that_raises_is_recorded_and_its_error_goes_on() -> None:
    tracer = Tracer("trainer-0")
    with pytest.raises(ZeroDivisionError), tracer.span("train"):
        _ = 1 / 0
    assert [span.name for span in tracer.drain()] == ["train"]


def test_threads_lose_no_span_and_are_told_apart() -> None:
    tracer = Tracer("maker-0")
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait()
        for unit in range(50):
            with tracer.span("generate", unit=unit):
                pass
        gate.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = tracer.drain()
    assert len(spans) == 200
    assert {span.thread for span in spans} == {0, 1, 2, 3}


def _spans() -> list[Span]:
    roles = ["maker-1", "driver", "maker-0", "trainer-0"]
    return [Span(role, "wait", i * _SECOND, 2000, {"step": i}) for i, role in enumerate(roles)]


def _named(events: list[dict[str, Any]], kind: str) -> dict[int, Any]:
    return {event["pid"]: next(iter(event["args"].values())) for event in events if event["name"] == kind}


def test_a_closed_file_is_json_with_one_named_and_ordered_track_per_role(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "trace.json") as trace:
        trace.add(_spans()[:2])
        trace.add(_spans()[2:])
        trace.add([Span("maker-1", "sync", 9 * _SECOND, 1500, {}, thread=1)])
    events = json.loads((tmp_path / "trace.json").read_text())
    names, order = _named(events, "process_name"), _named(events, "process_sort_index")
    assert [names[pid] for pid in sorted(order, key=lambda pid: order[pid])] == [
        "driver",
        "trainer-0",
        "maker-0",
        "maker-1",
    ]
    assert _named(events, "thread_name") == names
    last = events[-1]
    assert (last["ph"], last["ts"], last["dur"], names[last["pid"]]) == ("X", 9e6, 1.5, "maker-1")


def test_an_empty_file_is_json_too(tmp_path: Path) -> None:
    TraceFile(tmp_path / "trace.json").close()
    assert json.loads((tmp_path / "trace.json").read_text()) == []


def test_what_a_killed_run_leaves_lacks_only_the_end_bracket(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    trace.add(_spans())
    text = (tmp_path / "trace.json").read_text()
    trace.close()
    assert len(json.loads(text + "]")) == 4 * 4


@pytest.mark.parametrize("cut", [2, 30, 95])
def test_a_torn_file_is_read_up_to_the_tear_and_a_resumed_run_mends_it(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path) as trace:
        trace.add(_spans())
    path.write_bytes(path.read_bytes()[:-cut])
    whole = read_trace(path)
    assert whole == _spans()[: len(whole)]
    assert len(whole) >= 3
    late = Span("trainer-0", "train", 99 * _SECOND, 1000)
    with TraceFile(path) as trace:
        trace.add([late])
    assert read_trace(path) == [*whole, late]
    names = _named(json.loads(path.read_text()), "process_name")
    assert len(set(names.values())) == len(names) == 4


def test_busy_adds_up_phases_and_cuts_at_the_window() -> None:
    spans = [
        Span("maker-0", "generate", 0, 2 * _SECOND),
        Span("maker-0", "generate", 3 * _SECOND, 2 * _SECOND),
        Span("maker-0", "reward", 5 * _SECOND, _SECOND),
        Span("trainer-0", "train", 1 * _SECOND, _SECOND),
    ]
    assert busy(spans) == {"trainer-0": {"train": 1.0}, "maker-0": {"generate": 4.0, "reward": 1.0}}
    assert busy(spans, (_SECOND, 4 * _SECOND)) == {"trainer-0": {"train": 1.0}, "maker-0": {"generate": 2.0}}


def test_roles_are_ordered_by_kind_then_number() -> None:
    roles = ["worker-0", "maker-10", "maker-2", "trainer-1", "driver", "trainer-0"]
    assert sorted(roles, key=role_order) == [
        "driver",
        "trainer-0",
        "trainer-1",
        "maker-2",
        "maker-10",
        "worker-0",
    ]
