"""How a run ends when somebody ends it: the user, or the death of a process that may not be replaced."""

import json
import os
import re
import signal
import time

import pytest
from chaos import kill, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
slow = pytest.mark.slow


def check_folder(folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] >= 2
    assert not summary["finished"]
    ledger = summary["ledger"]
    assert sum(ledger.values()) == 2 * ledger["ledger/produced"]
    assert (folder / "report.html").exists()
    json.loads((folder / "trace.json").read_text())
    return summary


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=slow)])
def test_the_first_signal_finishes_the_step_and_saves_it(started, number, code):
    run = started()
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)  # a terminal sends it to the whole group
    else:
        run.process.send_signal(number)
    found, errors = run.ended()
    assert found == code
    assert "interrupted" in errors
    assert "Traceback" not in errors
    summary = check_folder(run.folder)
    assert summary["ended_by"] == signal.Signals(number).name
    assert summary["checkpoint"].endswith(f"step_{summary['steps']:06d}"), "the last step is on the disk"
    assert list((run.folder / "checkpoints").glob("*.tmp*")) == []


@slow
def test_without_saving_on_a_signal_the_last_checkpoint_stays_the_newest(started):
    run = started("checkpoint.on_signal=false", "checkpoint.every=100000")
    run.process.send_signal(signal.SIGTERM)
    assert run.ended()[0] == 143
    assert list((run.folder / "checkpoints").glob("step_*")) == []


HANGS = """
import os, time

def reward(completions, answer):
    while os.path.exists({hold!r}):
        time.sleep(0.05)
    return [1.0 for _ in completions]
"""


@pytest.mark.slow
def test_the_second_signal_ends_at_once(started, tmp_path):
    """The step could not be finished: its reward hangs."""
    path, hold = tmp_path / "hangs.py", tmp_path / "hold"
    path.write_text(HANGS.format(hold=str(hold)))
    run = started(f"reward={path}", "run.grace=600")
    hold.touch()
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert run.process.poll() is None, "the first one waits for the step"
    run.process.send_signal(signal.SIGINT)
    code, errors = run.ended(within=20)
    assert code == 130
    assert "Traceback" not in errors
    check_folder(run.folder)


@slow
def test_the_grace_of_a_signal_ends(started, tmp_path):
    path, hold = tmp_path / "hangs.py", tmp_path / "hold"
    path.write_text(HANGS.format(hold=str(hold)))
    run = started(f"reward={path}", "run.grace=2")
    hold.touch()
    time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)
    assert run.ended(within=25)[0] == 143


@slow
def test_c18_a_signal_while_a_checkpoint_is_written(started):
    run = started()
    until(lambda: list((run.folder / "checkpoints").glob("*.tmp-*")), timeout=30, pause=0.001)
    run.process.send_signal(signal.SIGINT)
    assert run.ended()[0] == 130
    summary = check_folder(run.folder)
    assert summary["checkpoint"].endswith(f"step_{summary['steps']:06d}")
    assert list((run.folder / "checkpoints").glob("*.tmp*")) == []


@pytest.mark.parametrize("role", ["maker-1", pytest.param("trainer-0", marks=slow)])
def test_a_killed_process_ends_the_run_by_name_and_cause_when_none_may_be_replaced(started, role):
    run = started("supervise.maker_restarts=0", "supervise.trainer_restarts=0")
    began = time.monotonic()
    kill(role)(run.folder)
    code, errors = run.ended()
    assert time.monotonic() - began < 30
    assert code == 3
    assert re.search(rf"WorkerDied: {role} died", errors), errors
    assert "SIGKILL" in errors
    assert "Traceback" not in errors
    assert role in json.loads((run.folder / "summary.json").read_text())["ended_by"]
