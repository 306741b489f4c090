"""Faults on real processes: who is where, by the history that each writes, and a thread that does them harm."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil


def facts(run, role):
    """What a role has noted so far."""
    path = Path(run) / "history" / f"{role}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def pid_of(run, role):
    """The process that the role is now."""
    return [fact["pid"] for fact in facts(run, role) if fact["fact"] == "started"][-1]


def learned(run):
    """The metrics that say what was learned, and nothing that says how long it took or what was lost."""
    timed = ("time", "tokens_per_s", "queue", "ledger")
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in records]


def residual(summary):
    """Samples that the ledger has lost sight of."""
    ledger = summary["ledger"]
    return 2 * ledger["ledger/produced"] - sum(ledger.values())


class Fault(NamedTuple):
    """Once `steps` steps were trained in all, and `pause` seconds later, `number` goes to `role`."""

    steps: int
    pause: float
    role: str
    number: int = signal.SIGKILL


def schedule(seed, roles, *, faults=2, steps=10):
    """Faults at random moments of a run of so many steps."""
    rng = random.Random(seed)
    moments = sorted(rng.randrange(1, steps) for _ in range(faults))
    return [Fault(moment, rng.uniform(0, 0.2), rng.choice(roles)) for moment in moments]


class Chaos(threading.Thread):
    """Does what a schedule says to the run in a folder; `done` lists what was done, `pids` whom it met."""

    def __init__(self, run, faults):
        super().__init__(daemon=True)
        self.run_folder, self.faults = run, faults
        self.done, self.pids = [], []

    def run(self):
        for fault in self.faults:
            while sum(fact["fact"] == "trained" for fact in facts(self.run_folder, "driver")) < fault.steps:
                time.sleep(0.01)
            time.sleep(fault.pause)
            try:
                pid = pid_of(self.run_folder, fault.role)
                os.kill(pid, fault.number)
            except (ProcessLookupError, IndexError):
                continue  # it was dead already, and its successor is not there yet
            self.done.append(fault)
            self.pids.append(pid)


class Strike(threading.Thread):
    """Does `harm(run)` to the run in a folder once `moment(run)` is true; `failure` is what either of them raised."""

    def __init__(self, run, moment, harm):
        super().__init__(daemon=True)
        self.run_folder, self.moment, self.harm = run, moment, harm
        self.done_at, self.failure = None, None
        self.start()

    def run(self):
        try:
            until(lambda: self.moment(self.run_folder), timeout=120, pause=0.002)
            self.done_at = time.monotonic()
            self.harm(self.run_folder)
        except BaseException as error:  # noqa: BLE001  raised again by `check`
            self.failure = error

    def check(self):
        """Wait for its end; raise what went wrong in it."""
        self.join(60)
        if self.failure is not None:
            raise self.failure
        assert self.done_at is not None, "the moment never came"


def until(condition, *, timeout, pause=0.05):
    """Wait until the condition is true, and give what it gave; AssertionError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"not true within {timeout} s: {condition}"
        time.sleep(pause)
    return value


def count(run, fact, **what):
    """How many such facts the driver has noted."""
    wanted = what.items()
    return sum(one["fact"] == fact and wanted <= one.items() for one in facts(run, "driver"))


def at_work(run):
    """Who makes a unit now, by unit."""
    leased = {}
    for fact in facts(run, "driver"):
        if fact["fact"] == "leased":
            leased[tuple(fact["unit"])] = fact["worker"]
        elif fact["fact"] in ("made", "lost", "dropped"):
            leased.pop(tuple(fact["unit"]), None)
    return leased


def kill(*roles, number=signal.SIGKILL):
    """Harm: that signal to what those roles are now."""

    def harm(run):
        for role in roles:
            os.kill(pid_of(run, role), number)

    return harm


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
        self.folder, self.settings = folder, [*SMALL, *settings]
        command = [sys.executable, "-m", "hocket", "train", *self.settings, f"run.dir={folder}"]
        self._errors = Path(f"{folder}.stderr")
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, env=os.environ | env
            )
        until(lambda: len(self.done()) >= 2 or self.process.poll() is not None, timeout=100)
        assert self.process.poll() is None, self.errors()
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def done(self):
        """Facts of the steps that are trained."""
        return [fact for fact in facts(self.folder, "driver") if fact["fact"] == "trained"]

    def errors(self):
        return self._errors.read_text()

    def ended(self, within=60):
        """Exit code and stderr, when nothing of the run is left."""
        code = self.process.wait(within)
        left = psutil.wait_procs(self.family, timeout=5)[1]
        assert left == [], [p.cmdline() for p in left]
        return code, self.errors()

    def end(self):
        """Whatever became of it."""
        for member in self.family:
            if member.is_running():
                member.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
