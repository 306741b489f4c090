"""A run that was stopped and resumed is, bit for bit, the run that was never stopped."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos import facts, learned, residual

from hocket.run.audit import audit
from hocket.run.train import train

STEPS = 6
BASE = {"trainer": {"max_steps": STEPS, "schedule": "cosine"}, "checkpoint": {"every": 1, "keep_last": None}}
RUNNER = """
import json, sys
from hocket.read_config import parse_config
from hocket.run.train import train
train(parse_config(json.loads(sys.stdin.read())))
"""
RAISES = """
import pathlib, time

def reward(completion, prompt):
    time.sleep(0.003)
    metrics = pathlib.Path({run!r}, "metrics.jsonl")
    if pathlib.Path({flag!r}).exists() and metrics.read_text().count("reward/mean") >= {step}:
        raise ValueError("as planned")
    return float(len(completion)) / 10
"""


@pytest.fixture(scope="session")
def whole():
    """Uninterrupted local runs by algorithm."""
    return {}


def start(config):
    """The run in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdin.write(json.dumps(config.model_dump(mode="json")))
    process.stdin.close()
    return process


def stop_after(config, step, how, flag):
    """Run until `step` steps are trained and saved, then end it so."""
    if how == "exception":
        flag.write_text("")
    process = start(config)
    saved = Path(config.run.dir) / "checkpoints" / f"step_{step:06d}"
    while how != "exception" and not saved.is_dir() and process.poll() is None:
        time.sleep(0.002)
    if how != "exception":
        process.send_signal(how)
    process.wait(60)
    flag.unlink(missing_ok=True)
    assert process.returncode != 0, process.stdout.read()
    return process.stderr.read()


def check_equal(found, wanted):
    """Weights, optimizers, metrics and what was trained are those of the whole run."""
    for digest in ("weights_sha256", "optimizer_sha256"):
        assert found[digest] == wanted[digest]
    assert learned(found["folder"]) == learned(wanted["folder"])
    assert found["eval"] == wanted["eval"]
    for account in ("ledger/trained", "ledger/buffered", "ledger/in_flight"):
        assert found["ledger"][account] == wanted["ledger"][account]
    assert residual(found) == 0
    assert audit(Path(found["folder"])).violations == []


CASES = [
    (algo, step, how, placement)
    for algo in ("ppo", "grpo")
    for step in (1, 3, 5)
    for how in (signal.SIGKILL, signal.SIGTERM, "exception")
    for placement in ("local", "colocated", "detached(makers=2)")
]
QUICK = {
    ("ppo", 1, signal.SIGKILL, "local"),
    ("grpo", 3, signal.SIGTERM, "local"),
    ("ppo", 5, "exception", "local"),
    ("grpo", 5, signal.SIGKILL, "local"),
    ("ppo", 3, signal.SIGKILL, "detached(makers=2)"),
    ("grpo", 1, signal.SIGTERM, "local"),
}


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("algo", "step", "how", "placement"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    make_config, ray_address, tmp_path, whole, algo, step, how, placement
):
    reward, flag, run = tmp_path / "reward.py", tmp_path / "flag", tmp_path / "run"
    reward.write_text(RAISES.format(flag=str(flag), run=str(run), step=step))
    settings = {**BASE, "algo": {"name": algo}, "reward": str(reward), "run": {"dir": str(run), "grace": 30}}
    if placement != "local":
        settings["ray"] = {"address": ray_address}
    if algo not in whole:
        calm = {**settings, "run": {"dir": str(tmp_path / "calm")}, "ray": {}}
        whole[algo] = train(make_config(**calm, placement="local"), stream=io.StringIO())
    config = make_config(**settings, placement=placement)
    stop_after(config, step, how, flag)
    done = [fact for fact in facts(run, "driver") if fact["fact"] == "trained"]
    assert step <= len(done) < STEPS, "it was to be stopped in the middle"
    again = make_config(**{**settings, "run": {"dir": str(run), "resume": "latest"}}, placement=placement)
    stream = io.StringIO()
    summary = train(again, stream=stream)
    assert "resumed behind step " in stream.getvalue()
    check_equal(summary, whole[algo])
