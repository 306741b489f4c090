"""How a run ends when somebody ends it: the user, or the death of a process."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

SMALL = [
    "placement=detached(makers=2, max_staleness=1)",
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=1",
    "model.warm_start.steps=1",
    "trainer.max_steps=100000",
    "eval.path=null",
]


@pytest.fixture
def started(tmp_path):
    """A run in a process group of its own, past its first step; with all processes that belong to it."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "hocket", "train", *SMALL, f"run.dir={folder}"]
    output = tmp_path / "stdout"
    with output.open("w") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while "\nstep" not in output.read_text():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    yield process, folder, family
    for member in [*family, process]:
        if member.is_running() if isinstance(member, psutil.Process) else member.poll() is None:
            member.kill()


def ended(process, family):
    """Exit code and stderr, when nothing of the run is left."""
    errors = process.stderr.read()
    code = process.wait(60)
    left = psutil.wait_procs(family, timeout=5)[1]
    assert left == [], [p.cmdline() for p in left]
    return code, errors


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_ends_cleanly_and_writes_what_there_is(started, number):
    process, folder, family = started
    time.sleep(1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends it to the whole group
    else:
        process.send_signal(number)
    code, errors = ended(process, family)
    assert code == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] >= 1
    assert not summary["finished"]
    accounts = {k: v for k, v in summary["ledger"].items() if k != "ledger/produced"}
    assert sum(accounts.values()) == summary["ledger"]["ledger/produced"]
    assert (folder / "report.html").exists()
    json.loads((folder / "trace.json").read_text())


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("role", ["maker-1", pytest.param("trainer-0", marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_run_by_name_and_cause(started, role):
    process, folder, family = started
    pid = int(re.search(r"process (\d+) started", (folder / "logs" / "latest" / f"{role}.log").read_text())[1])
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    code, errors = ended(process, family)
    assert time.monotonic() - began < 30
    assert code == 3
    assert re.search(rf"WorkerDied: {role} died while .*SIGKILL", errors), errors
    assert "Traceback" not in errors
    assert role in json.loads((folder / "summary.json").read_text())["ended_by"]
