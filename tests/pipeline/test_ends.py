"""How a run ends when somebody ends it: the user, or the death of a process that may not be replaced."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from chaos import facts, kill, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
slow = pytest.mark.slow
SMALL = [
    "placement=detached(makers=2, max_staleness=1)",
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=1",
    "model.warm_start.steps=1",
    "trainer.max_steps=100000",
    "eval.path=null",
    "checkpoint.every=1",
]


class Started:
    """A run in a process group of its own, past its second step; with all processes that belong to it."""

    def __init__(self, folder, settings, env):
        self.folder = folder
        command = [sys.executable, "-m", "hocket", "train", *SMALL, f"run.dir={folder}", *settings]
        errors = Path(f"{folder}.stderr").open("w+")  # noqa: SIM115  open as long as the process is
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, text=True, start_new_session=True, env=os.environ | env
        )
        self._errors = errors
        until(lambda: len(self.done()) >= 2 or self.process.poll() is not None, timeout=100)
        assert self.process.poll() is None, self.errors()
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def done(self):
        """Facts of the steps that are trained."""
        return [fact for fact in facts(self.folder, "driver") if fact["fact"] == "trained"]

    def errors(self):
        self._errors.seek(0)
        return self._errors.read()

    def ended(self, within=60):
        """Exit code and stderr, when nothing of the run is left."""
        code = self.process.wait(within)
        left = psutil.wait_procs(self.family, timeout=5)[1]
        assert left == [], [p.cmdline() for p in left]
        return code, self.errors()

    def end(self):
        """Whatever became of it."""
        for member in [*self.family, psutil.Process(os.getpid())][:-1]:
            if member.is_running():
                member.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


@pytest.fixture
def started(tmp_path):
    """Starts runs, and ends them."""
    runs = []

    def start(*settings, folder=None, env=None):
        runs.append(Started(folder or tmp_path / f"run{len(runs)}", settings, env or {}))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


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


@pytest.mark.parametrize("role", [pytest.param("maker-1", marks=slow), "trainer-0"])
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
