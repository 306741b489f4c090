"""What it costs to send a DataProto through a group of two workers and back, against plain Ray and against veRL.

usage: python benchmarks/dispatch.py [--verl-python PATH | --make-verl DIR] [--sizes 1KiB,1MiB,64MiB,256MiB]
                                     [--rounds 7] [--memory] [--json FILE]

Everything is measured in one run, in alternating rounds, so that a busy machine slows all alike. The floor is the same
bytes as numpy arrays, sent to plain Ray actors in hocket's own cluster and joined on the driver; its workers may not
change what they get, those of both libraries do. veRL is measured with both of its wires. With --memory: what a first
echo adds to the driver's anonymous memory. Exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from peer import Figure, Side, arguments, pythons, show, side

KIB, MIB = 2**10, 2**20
WHO = ("floor", "hocket", "verl", "verl-numpy")
WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """One operation of side.py, and what it is compared with."""

    title: str
    operation: str
    floor: str | None = None
    sized: bool = True  # False: data plays no part

    def calls(self, size: int) -> int:
        """Calls per sample: enough that a sample takes a few milliseconds."""
        return max(1, min(20, 16 * MIB // max(size, 1))) if self.sized else 50


ROWS = (
    Row("ONE_TO_ALL, no argument", "call", "floor call", sized=False),
    Row("DP_COMPUTE_PROTO echo", "dp", "floor dp"),
    Row("same, blocking=False and get()", "dp later", "floor dp"),
    Row("nd-mesh echo", "nd", "floor dp"),
    Row("ONE_TO_ALL, one batch", "take", "floor take"),
    Row("DataProto.chunk(2)", "chunk"),
    Row("concat of neighbouring chunks", "concat neighbours"),
    Row("concat of two batches", "concat"),
    Row("pickle and back", "pickle"),
)


@dataclass
class Measured:
    """Samples of one row at one size, in seconds, by who made them."""

    row: Row
    size: int
    samples: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, above: str, below: str) -> float | None:
        """Median of the one over median of the other, when both were measured."""
        if above not in self.samples or below not in self.samples:
            return None
        return Figure.of(self.samples[above]).median / Figure.of(self.samples[below]).median

    def cells(self) -> list[str]:
        """The row of the table."""
        times = [Figure.of(self.samples[who]).ms() if who in self.samples else "" for who in WHO]
        ratios = [self.ratio("hocket", "floor"), *(self.ratio(who, "hocket") for who in WHO[2:])]
        size = named(self.size) if self.row.sized else ""
        return [self.row.title, size, *times, *("" if r is None else f"{r:.2f}" for r in ratios)]

    def missed(self) -> list[str]:
        """The goals that this row misses, in words."""
        faults: list[str] = []
        to_floor, to_verl = self.ratio("hocket", "floor"), self.ratio("verl", "hocket")
        most = {"call": 1.2, "dp": 2.0 if self.size >= MIB else None}.get(self.row.operation)
        if most and to_floor and to_floor > most:
            faults.append(f"{self.row.title} {named(self.size)}: {to_floor:.2f} x the floor, wanted at most {most}")
        if self.row.operation == "dp" and self.size >= 64 * MIB and to_verl and to_verl < 3:
            faults.append(f"{self.row.title} {named(self.size)}: {to_verl:.2f} x faster than veRL, wanted 3")
        return faults


def measure(sides: dict[str, Side], sizes: Sequence[int], rounds: int) -> list[Measured]:
    """All rows at all sizes; who goes first changes from round to round."""
    found = [Measured(row, 0) for row in ROWS if not row.sized]
    found += [Measured(row, size) for size in sizes for row in ROWS if row.sized]
    for size in (0, *sizes):
        for name in sides if size else ():
            sides[name].seconds("check", size)
        for number in range(-WARM_UP, rounds):
            for measured in (m for m in found if m.size == size):
                sample(measured, sides, number)
        print(f"{named(size) if size else 'calls'} measured", file=sys.stderr)
    return found


def sample(measured: Measured, sides: dict[str, Side], number: int) -> None:
    """One sample of a row from everyone; those of warm-up rounds (negative numbers) are dropped."""
    row = measured.row
    asked = [(name, name, row.operation) for name in sides] + ([("floor", "hocket", row.floor)] if row.floor else [])
    turn = number % len(asked)
    for who, name, operation in asked[turn:] + asked[:turn]:
        seconds = sides[name].seconds(operation, measured.size, row.calls(measured.size))
        if number >= 0:
            measured.samples.setdefault(who, []).append(seconds)


def memory(commands: dict[str, str], size: int) -> list[str]:
    """Show what a first echo of `size` bytes adds to the anonymous memory of a fresh driver; the goals missed."""
    added = {}
    rows = []
    for who in (who for who in WHO if who == "floor" or who in commands):
        before, peak, after = first_echo(commands, who, size)
        added[who] = (peak - before) / size
        rows.append([who, *(f"{x / MIB:.0f}" for x in (before, peak, after)), f"{added[who]:.2f}"])
    header = ["driver", "before MiB", "peak MiB", "after MiB", "(peak - before) / size"]
    show(f"RssAnon of the driver, first echo of {named(size)}", header, rows)
    return [f"a first echo adds {added['hocket']:.2f} x its size, wanted at most 1.2"] if added["hocket"] > 1.2 else []


def first_echo(commands: dict[str, str], who: str, size: int) -> tuple[int, int, int]:
    """RssAnon in bytes before, at its highest during, and after, while the result is still held."""
    name, operation = ("hocket", "floor dp") if who == "floor" else (who, "dp")
    with side(name, commands[name]) as driver:
        driver.seconds(operation, KIB)
        driver.seconds("prepare", size)
        before = rss_anon(driver.pid)
        with watching(lambda: rss_anon(driver.pid)) as seen:
            driver.seconds(operation, size)
        after = rss_anon(driver.pid)
    return before, max([*seen, after]), after


def rss_anon(pid: int) -> int:
    """Anonymous resident memory of a process, in bytes: not what it shares with Ray's object store."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * KIB


@contextlib.contextmanager
def watching(probe: Callable[[], int]) -> Iterator[list[int]]:
    """Collect what `probe` says every two milliseconds until the block ends."""
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen.append(probe())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def named(size: int) -> str:
    """A size in words, such as `64 MiB`."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def parsed(text: str) -> list[int]:
    """The sizes of a list such as `1KiB,64MiB`."""
    units = {"KiB": KIB, "MiB": MIB}
    return [int(word.strip()[:-3]) * units[word.strip()[-3:]] for word in text.split(",")]


def report(found: Sequence[Measured], options: argparse.Namespace) -> list[str]:
    """Print the table, write the JSON, and return the goals that were missed."""
    header = ["operation", "size", "floor ms (p25-p75)", "hocket ms", "veRL ms", "veRL numpy wire ms", "hocket / floor"]
    header += ["veRL / hocket", "numpy wire / hocket"]
    show(f"DataProto through 2 workers, median of {options.rounds}", header, [m.cells() for m in found])
    if options.json:
        rows = [{"operation": m.row.operation, "bytes": m.size, "seconds": m.samples} for m in found]
        facts = {"date": date.today().isoformat(), "cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return [fault for measured in found for fault in measured.missed()]


def main() -> None:
    """Read the command line, measure, report."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=parsed, default=parsed("1KiB,1MiB,64MiB,256MiB"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    commands = pythons(options)
    if "verl" in commands:
        commands["verl-numpy"] = commands["verl"]
    began = time.monotonic()
    if options.memory:
        missed = memory(commands, max(options.sizes))
    else:
        with contextlib.ExitStack() as stack:
            sides = {name: stack.enter_context(side(name, python)) for name, python in commands.items()}
            found = measure(sides, options.sizes, options.rounds)
        missed = report(found, options)
    print(f"{time.monotonic() - began:.0f} s in all", file=sys.stderr)
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
