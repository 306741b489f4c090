"""How long a group of two workers takes to its first reply, and what a worker's imports cost: hocket and veRL.

usage: python benchmarks/group_start.py [--verl-python PATH | --make-verl DIR] [--rounds 5] [--json FILE]

Every start is in a fresh driver with a cluster of its own (side.py), the two libraries in turn. `bare` workers only
answer; those of `echo` have methods on DataProto as well. Which of numpy, torch, tensordict and transformers a worker
has loaded when it answers is shown too: a worker of hocket loads what it needs when data first arrives.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from peer import Figure, arguments, pythons, show, side

IMPORTS = {
    "hocket": ("ray", "torch", "hocket.single_controller", "hocket.single_controller, torch", "hocket.data.proto"),
    "verl": ("verl.single_controller.ray", "verl.protocol"),
}
STARTS = (("hocket", "plain"), ("hocket", "bare"), ("verl", "bare"), ("hocket", "echo"), ("verl", "echo"))


def starts(commands: dict[str, str], rounds: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What side.py says about its start, by library and kind of worker, once per round."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for _ in range(rounds):
        for name, kind in STARTS:
            if name in commands:
                with side(name, commands[name], kind=kind) as driver:
                    found[name, kind].append(driver.times)
    return found


def imports(commands: dict[str, str], rounds: int) -> list[tuple[str, str, list[float]]]:
    """(library, modules, seconds of each `import` over those of an empty program)."""
    asked = [(name, what) for name in commands for what in IMPORTS[name]]
    samples: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for number in range(-1, rounds):  # the first round fills the file cache
        empty = {name: wall([python, "-c", "pass"]) for name, python in commands.items()}
        for name, what in asked:
            seconds = wall([commands[name], "-c", f"import {what}"]) - empty[name]
            if number >= 0:
                samples[name, what].append(seconds)
    return [(name, what, samples[name, what]) for name, what in asked]


def wall(command: Sequence[str]) -> float:
    """Seconds of a command that must succeed."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return time.perf_counter() - begin


def heaviest(python: str, what: str, count: int = 4) -> str:
    """The packages whose modules take longest by themselves, from `-X importtime`."""
    done = subprocess.run(
        [python, "-X", "importtime", "-c", f"import {what}"], check=True, capture_output=True, text=True
    )
    own: collections.Counter[str] = collections.Counter()
    for line in done.stderr.splitlines():
        cells = line.removeprefix("import time:").split("|")
        if len(cells) == 3 and cells[0].strip().isdigit():
            own[cells[2].strip().split(".")[0]] += int(cells[0])
    return ", ".join(f"{package} {micros / 1e6:.2f}" for package, micros in own.most_common(count))


def seconds(samples: Sequence[float]) -> str:
    """`median (p25-p75)` in seconds."""
    figure = Figure.of(samples)
    return f"{figure.median:.2f} ({figure.p25:.2f}-{figure.p75:.2f})"


def main() -> None:
    """Measure and print both tables."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    commands = pythons(options)
    imported = imports(commands, options.rounds)
    rows = [[name, what, seconds(values), heaviest(commands[name], what)] for name, what, values in imported]
    header = ["library", "import", "s over an empty program (p25-p75)", "s by package, self time of its modules"]
    show(f"Imports, median of {options.rounds}", header, rows)
    started = starts(commands, options.rounds)
    header = [
        "group of 2",
        "ray.init s",
        "group to first reply s",
        "to first echo of data s",
        "loaded at the first reply",
    ]
    rows = [
        [
            "plain Ray actors" if kind == "plain" else f"{name}, {kind}",
            *(
                seconds([t[step] for t in times]) if step in times[0] else ""
                for step in ("init", "first reply", "first echo")
            ),
            ", ".join(times[0].get("loaded", ())),
        ]
        for (name, kind), times in started.items()
    ]
    show(f"Start of a group, median of {options.rounds}", header, rows)
    if options.json:
        facts = {"imports": imported, "starts": [[*key, times] for key, times in started.items()]}
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
