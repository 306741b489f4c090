"""Does a long run stay flat, and what do kills cost it?

usage: python benchmarks/soak.py [--steps 2000]                        memory, files and threads of each role
       python benchmarks/soak.py --minutes 15 --kill-every 20          asynchronous, undisturbed and with kills

The model is tiny: hocket's own parts are what is measured. Each run has its own process and its own private cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from hocket.run.audit import audit

SMALL = [
    *("model.config.hidden_size=32", "model.config.num_hidden_layers=1", "model.config.intermediate_size=64"),
    *("model.warm_start.steps=1", "eval.path=null", "checkpoint.every=20", "trainer.prompts_per_step=4"),
    *("rollout.group_size=4", "rollout.prompts_per_unit=2", "rollout.max_new_tokens=6"),
    *("supervise.heartbeat=0.5", "supervise.backoff=0.1", "supervise.window=30"),
    *("supervise.maker_restarts=1000", "supervise.trainer_restarts=1000", "supervise.unit_attempts=1000"),
]
ROLES = ("maker-0", "maker-1", "trainer-0")
MIB = 1 << 20


def main() -> None:
    """One of the two measurements; the exit code says whether all limits held."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--kill-every", type=float, default=20.0)
    parser.add_argument("--placement", default=None)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks at the processes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        good = kills(Path(folder), options) if options.minutes else flat(Path(folder), options)
    sys.exit(0 if good else 1)


def flat(folder: Path, options: argparse.Namespace) -> bool:
    """So many steps: the slope of each role's memory after a quarter of the time, its files and threads."""
    placement = options.placement or "detached(makers=2)"
    run, process = start(folder / "run", f"placement={placement}", f"trainer.max_steps={options.steps}")
    seen = list(watch(run, process, options))
    summary = ended(run, process)
    print(f"{summary['steps']} steps in {summary['seconds']:.0f} s, {placement}")
    print("role          MiB   MB/min   files       threads")
    good = [row(role, seen) for role in ("driver", *ROLES)]  # every row is printed
    return all(good)


def row(role: str, seen: list[tuple[float, dict[str, tuple[int, int, int]]]]) -> bool:
    """A line of the table; whether the role stayed flat."""
    points = [(when, found[role]) for when, found in seen if role in found]
    points = points[len(points) // 4 :]
    if len(points) < 3:
        print(f"{role:<10}  too short to measure: {len(points)} looks")
        return False
    times = [when / 60 for when, _ in points]
    slope = statistics.linear_regression(times, [rss / 1e6 for _, (rss, _, _) in points]).slope
    files = [files for _, (_, files, _) in points]
    threads = [threads for _, (_, _, threads) in points]
    rss = points[-1][1][0] / MIB
    print(
        f"{role:<10}  {rss:>7.0f}  {slope:>+7.2f}   {min(files)} to {max(files):<4}  {min(threads)} to {max(threads)}"
    )
    return slope < 1.0 and is_flat(files) and is_flat(threads)


def is_flat(numbers: list[int]) -> bool:
    """Whether the last third has on the average no more than the first; short calls come and go."""
    third = max(1, len(numbers) // 3)
    return statistics.fmean(numbers[-third:]) <= statistics.fmean(numbers[:third]) + 3


def kills(folder: Path, options: argparse.Namespace) -> bool:
    """Asynchronous runs: one undisturbed, one of so many minutes that loses a process every so many seconds."""
    calm, _ = measured(folder / "calm", options, minutes=min(options.minutes, 3.0), every=None)
    harmed, met = measured(folder / "harmed", options, minutes=options.minutes, every=options.kill_every)
    found = audit(folder / "harmed")
    starts = sum(len(started(folder / "harmed", role)) for role in ROLES) - len(ROLES)
    share = harmed / calm
    print(f"undisturbed {calm:.2f} steps/s, with a kill every {options.kill_every:g} s {harmed:.2f}: {share:.0%}")
    print(
        f"{sum(met.values())} kills ({', '.join(f'{role} {n}' for role, n in sorted(met.items()))}), {starts} restarts"
    )
    print(f"auditor: {len(found.violations)} violations {found.violations[:3]}")
    return share >= 0.7 and starts == sum(met.values()) and not found.violations


def measured(
    run: Path, options: argparse.Namespace, *, minutes: float, every: float | None
) -> tuple[float, Counter[str]]:
    """Trained steps per second between the first one and the end, of the surviving lineage; and whom a kill met."""
    placement = options.placement or "detached(makers=2, max_staleness=2)"
    run, process = start(run, f"placement={placement}", "trainer.max_steps=1000000")
    while not trained(run):
        time.sleep(0.1)
    began, rng, met = time.monotonic(), random.Random(0), Counter[str]()
    while (left := began + 60 * minutes - time.monotonic()) > 0:
        time.sleep(min(left, every or left))
        if every and time.monotonic() < began + 60 * minutes - 10:
            met[strike(run, rng)] += 1
    steps, seconds = trained(run), time.monotonic() - began
    process.send_signal(signal.SIGTERM)
    ended(run, process)
    return steps / seconds, met


def strike(run: Path, rng: random.Random) -> str:
    """Kill a role that is there; makers and trainer in turn at random."""
    while True:
        role = rng.choice(ROLES)
        try:
            os.kill(started(run, role)[-1], signal.SIGKILL)
        except ProcessLookupError:
            time.sleep(0.1)
            continue
        return role


def start(run: Path, *settings: str) -> tuple[Path, subprocess.Popen[bytes]]:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "hocket", "train", *SMALL, *settings, f"run.dir={run}"]
    return run, subprocess.Popen(command, stdout=subprocess.DEVNULL)


def ended(run: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The summary, once the run has ended as it should."""
    code = process.wait(300)
    if code not in (0, 143):
        raise SystemExit(f"the run ended with {code}: see above")
    return json.loads((run / "summary.json").read_text())


def watch(
    run: Path, process: subprocess.Popen[bytes], options: argparse.Namespace
) -> Iterator[tuple[float, dict[str, tuple[int, int, int]]]]:
    """Seconds, and private memory in bytes, open files and threads of each role, as long as the run goes on."""
    began = time.monotonic()
    while process.poll() is None:
        pids = {"driver": process.pid} | {role: pids[-1] for role in ROLES if (pids := started(run, role))}
        found: dict[str, tuple[int, int, int]] = {}
        for role, pid in pids.items():
            try:
                one = psutil.Process(pid)
                memory = one.memory_info()
                # pages of the object store are shared, and counted in whoever touched them
                found[role] = (memory.rss - memory.shared, one.num_fds(), one.num_threads())
            except psutil.Error:
                continue
        if 0 < trained(run) < options.steps - 1:  # not while all is taken down
            yield time.monotonic() - began, found
        time.sleep(options.every)


def facts(run: Path, role: str) -> list[dict[str, Any]]:
    """What a role noted so far; a last line that is being written is left out."""
    path = run / "history" / f"{role}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def started(run: Path, role: str) -> list[int]:
    """The processes that a role was, in turn."""
    return [fact["pid"] for fact in facts(run, role) if fact["fact"] == "started"]


def trained(run: Path) -> int:
    """Steps that are in the weights now."""
    path = run / "metrics.jsonl"
    return sum('"reward/mean"' in line for line in path.read_text().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    main()
