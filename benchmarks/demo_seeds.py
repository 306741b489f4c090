"""The main job on seeds 0 to 4: does the reward rise by 0.2, does the accuracy rise, how long does it take?

usage: python benchmarks/demo_seeds.py [key=value ...]     (overrides of the digits recipe)
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(seed: int, overrides: list[str]) -> tuple[dict[str, object], float]:
    """The summary of `hocket train` with that seed, and its wall time in seconds, start of Python included."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        began = time.monotonic()
        command = [sys.executable, "-m", "hocket", "train", f"seed={seed}", f"run.dir={folder}", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads((folder / "summary.json").read_text()), time.monotonic() - began


def main(overrides: list[str]) -> None:
    """Print one row of a markdown table per seed; exit code 1 when a seed misses what is asked."""
    print("| seed | reward, first 10 % | reward, last 10 % | rise | accuracy before | after | wall s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    missed = []
    for seed in range(5):
        summary, seconds = run(seed, overrides)
        first, last = summary["reward_first_tenth"], summary["reward_last_tenth"]
        before, after = (e["eval/accuracy"] for e in summary["eval"])
        cells = [f"{x:.3f}" for x in (first, last, last - first, before, after)]
        print(f"| {seed} | " + " | ".join(cells) + f" | {seconds:.0f} |", flush=True)
        if last - first < 0.2 or after <= before:
            missed.append(seed)
    if missed:
        sys.exit(f"seeds {missed} missed a rise of 0.2 or a better accuracy")


if __name__ == "__main__":
    main(sys.argv[1:])
