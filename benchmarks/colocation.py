"""What colocation saves: the loop of examples/four_roles.py as one WorkerDict, and as four groups on one pool.

usage: python benchmarks/colocation.py [--workers 2] [--steps 10] [--rounds 3] [--json FILE]

Every run is a fresh driver with a cluster of its own, the two layouts in turn. Memory is that of the worker processes
after the last step: PSS (shared pages are divided among those who share them) and anonymous memory. Both layouts have
to end with the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from peer import show

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LAYOUTS = ("one WorkerDict", "four groups")
MIB = 2**20


def run(layout: str, *, workers: int, steps: int) -> dict[str, Any]:
    """Start the four roles in this process's own cluster, take some steps, and say what it took."""
    import four_roles

    from hocket.read_config import load_config
    from hocket.run.cluster import cluster
    from hocket.run.prepare import RECIPES, check_input, prepare

    config = load_config(RECIPES / "digits.yaml", ["seed=0", "algo.kl_coef=0.01", "rollout.prompts_per_unit=32"])
    with tempfile.TemporaryDirectory() as folder, cluster(None, [{"CPU": 1.0, "GPU": 0.0}] * workers):
        ready = prepare(check_input(config), Path(folder), lambda line: None)
        began = time.perf_counter()
        roles = four_roles.place(four_roles.specs(ready.blueprint), workers, separate=layout == LAYOUTS[1])
        weights = roles["actor"].sha256()  # a first reply
        started = time.perf_counter() - began
        times = []
        for _ in range(steps + 1):
            began = time.perf_counter()
            four_roles.train(roles, ready.schedule, ready.blueprint.algorithm, 1)
            times.append(time.perf_counter() - began)
        weights = roles["actor"].sha256()[0]
        return {"start": started, "first step": times[0], "step": median(times[1:]), "weights": weights, **held()}


def held() -> dict[str, int]:
    """Number and memory (bytes) of the processes that hold an actor of this process's cluster."""
    actors = [process for process in psutil.Process().children(recursive=True) if _is_actor(process)]
    smaps = [_table(Path(f"/proc/{actor.pid}/smaps_rollup")) for actor in actors]
    status = [_table(Path(f"/proc/{actor.pid}/status")) for actor in actors]
    return {
        "processes": len(actors),
        "pss": sum(table["Pss"] for table in smaps),
        "anonymous": sum(table["RssAnon"] for table in status),
    }


def _is_actor(process: psutil.Process) -> bool:
    """Whether Ray has named the process after an actor class, not as its own agent or a spare worker."""
    with contextlib.suppress(psutil.NoSuchProcess):
        title = " ".join(process.cmdline()).strip()
        return title.startswith("ray::") and not title.endswith(("Agent", "IDLE"))
    return False


def _table(file: Path) -> dict[str, int]:
    """The lines `name: number kB` of a file under /proc, in bytes."""
    cells = [line.split() for line in file.read_text().splitlines() if line.endswith(" kB")]
    return {cell[0].rstrip(":"): int(cell[1]) * 1024 for cell in cells}


def fresh(layout: str, options: argparse.Namespace) -> dict[str, Any]:
    """`run` in a new process; the workers find the example by PYTHONPATH."""
    with tempfile.TemporaryDirectory() as home:
        path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"HOME": home, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--layout", layout]
        command += ["--workers", str(options.workers), "--steps", str(options.steps)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run both layouts by turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout:
        print(json.dumps(run(options.layout, workers=options.workers, steps=options.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {layout: [] for layout in LAYOUTS}
    for _ in range(options.rounds):
        for layout in LAYOUTS:
            found[layout].append(fresh(layout, options))
    report(found, options)


def report(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Print the table, write the JSON; exit code 1 when the layouts do not agree."""

    def middle(layout: str, key: str) -> float:
        return median(result[key] for result in found[layout])

    rows = [
        [
            layout,
            f"{middle(layout, 'processes'):.0f}",
            *(f"{middle(layout, key) / MIB:.0f}" for key in ("pss", "anonymous")),
            *(f"{middle(layout, key):.2f}" for key in ("start", "first step", "step")),
        ]
        for layout in LAYOUTS
    ]
    header = ["layout", "processes", "PSS MiB", "RssAnon MiB", "start s", "first step s", "later step s"]
    show(f"Four roles on {options.workers} workers, median of {options.rounds} runs", header, rows)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if len({result["weights"] for results in found.values() for result in results}) != 1:
        sys.exit("the layouts do not end with the same weights")


if __name__ == "__main__":
    main()
