"""The driver, and the Ray cluster below it, are hit. The numbers are those of CHAOS.md."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from chaos import count, facts, learned, residual, until

from hocket.run.audit import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]
slow = pytest.mark.slow
AGENTS = ("dashboard", "runtime_env", "DashboardAgent", "RuntimeEnvAgent")  # Ray's own; they notice later


def alive(family):
    """Those that still run, a dead one that nobody reaps not counted; without Ray's agents."""
    left = []
    for process in family:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                command = " ".join(process.cmdline())
                left += [] if any(agent in command for agent in AGENTS) else [command]
        except psutil.NoSuchProcess:
            continue
    return left


def ray_process(run, name):
    return next(process for process in run.family if name in " ".join(process.cmdline()))


def resume(run, *settings):
    """The run goes on from its newest checkpoint for three steps more; its summary."""
    steps = count(run.folder, "trained") + 3
    command = [sys.executable, "-m", "hocket", "train", *run.settings, *settings, f"run.dir={run.folder}"]
    command += ["run.resume=latest", f"trainer.max_steps={steps}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["finished"]
    assert summary["steps"] == steps
    assert [record["step"] for record in learned(run.folder) if "reward/mean" in record] == list(range(1, steps + 1))
    assert residual(summary) == 0
    assert audit(run.folder).violations == []
    return summary


@pytest.mark.slow
def test_c16_nothing_is_left_of_a_killed_driver_and_its_run_goes_on(started):
    run = started()
    run.process.kill()
    run.process.wait(10)
    until(lambda: not alive(run.family), timeout=20)
    resume(run)


@slow
def test_c24_the_head_of_the_cluster_is_killed(started):
    """Ray ends the driver after about a minute, without a word: what there is lies in the folder, and goes on."""
    run = started()
    began = time.monotonic()
    ray_process(run, "gcs_server").kill()
    assert run.process.wait(120) != 0
    assert time.monotonic() - began < 100
    until(lambda: not alive(run.family), timeout=30)
    resume(run)


@slow
def test_c25_the_head_of_the_cluster_stands_still_for_20_seconds(started):
    """No false alarm: nobody is replaced, and the run goes on."""
    run = started("supervise.heartbeat=0.5")
    head = ray_process(run, "gcs_server")
    head.send_signal(signal.SIGSTOP)
    time.sleep(20)
    head.send_signal(signal.SIGCONT)
    before = len(run.done())
    until(lambda: len(run.done()) > before + 2, timeout=40)
    for role in ("maker-0", "maker-1", "trainer-0"):
        assert sum(fact["fact"] == "started" for fact in facts(run.folder, role)) == 1, role
    run.process.send_signal(signal.SIGTERM)
    assert run.ended()[0] == 143


@slow
@pytest.mark.parametrize("limit", ["size=1500k"])
def test_c31_a_disk_that_is_full_ends_the_run_and_keeps_the_last_whole_checkpoint(tmp_path, limit):
    """A small file system of its own for the run folder, which only this process sees."""
    disk = tmp_path / "disk"
    disk.mkdir()
    train = (
        f"{sys.executable} -m hocket train placement=local eval.path=null checkpoint.every=1 checkpoint.keep_last=null"
    )
    small = (
        "model.config.hidden_size=32 model.config.num_hidden_layers=1 model.warm_start.steps=1 trainer.max_steps=200"
    )
    script = f"""mount -t tmpfs -o {limit} tmpfs {disk} || exit 99
{train} {small} run.dir={disk}/run >{tmp_path}/out 2>{tmp_path}/err; code=$?
cp -r {disk}/run {tmp_path}/kept; exit $code"""
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    errors = (tmp_path / "err").read_text()
    assert done.returncode == 1, (done.returncode, done.stderr, errors)
    assert "cannot write checkpoint" in errors or "is full; free space" in errors, errors
    assert "Traceback" not in errors, errors
    kept = tmp_path / "kept" / "checkpoints"
    assert list(kept.glob("*.tmp*")) == []
    from hocket.run.checkpoint import newest

    assert newest(kept).step >= 1
