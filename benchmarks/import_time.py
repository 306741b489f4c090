"""How long `import hocket` and `hocket --help` take, beside a bare Python start: prints one markdown row."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RUNS = 9


def main() -> None:
    """Measure the three commands in turn, so that a busy machine slows all of them alike."""
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import hocket": [sys.executable, "-c", "import hocket"],
        "hocket --help": [str(Path(sys.executable).parent / "hocket"), "--help"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, command in commands.items():
            seconds[name].append(measure(command))
    medians = [f"`{name}` {statistics.median(values):.3f} s" for name, values in seconds.items()]
    print(f"| Start-up | {', '.join(medians)} | median of {RUNS} runs each |")


def measure(command: Sequence[str]) -> float:
    """Seconds that one run of `command` takes; it must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
