"""What the benchmarks against veRL share: its virtual environment, a side process, medians, and tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
VERL = "verl==0.9.1"
# all that veRL imports for `from verl import DataProto` and its single controller; its own list of requirements is
# for training, and holds packages that cannot be installed on a machine without a GPU
NEEDS = ("ray", "tensordict", "numpy", "transformers", "omegaconf")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that say which Python has veRL."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl-python", metavar="PATH", help="the Python of a virtual environment that has veRL")
    parser.add_argument("--make-verl", metavar="DIR", help=f"make such an environment in DIR, with {VERL}, and use it")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to FILE")
    return parser


def pythons(options: argparse.Namespace) -> dict[str, str]:
    """The Python of each library to measure: hocket, and verl when it was asked for."""
    if options.make_verl:
        options.verl_python = make_verl(Path(options.make_verl))
    return {"hocket": sys.executable} | ({"verl": options.verl_python} if options.verl_python else {})


def make_verl(folder: Path) -> str:
    """The Python of an environment in `folder` with veRL in it, with the versions that hocket is tested with."""
    python = folder / "bin" / "python"
    constraints = (HERE.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = [line for line in constraints if line.startswith("torch==")]
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *torch], check=True)  # first and alone: a later request would bring a CUDA build
    subprocess.run([*install, "-c", str(HERE.parent / "constraints.txt"), *NEEDS], check=True)
    subprocess.run([*install, "--no-deps", VERL], check=True)
    return str(python)


class Side:
    """A running side.py. `times` says how its start went; `seconds` asks for one measurement."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.times: dict[str, Any] = self._answer()

    @property
    def pid(self) -> int:
        """The driver process of that side."""
        return self._process.pid

    def seconds(self, operation: str, size: int, calls: int = 1) -> float:
        """The mean time of `calls` calls of `operation` on `size` bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([operation, size, calls]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            sys.exit(f"{' '.join(map(str, self._process.args))} ended without an answer:\n{tail}")
        return json.loads(line)


@contextlib.contextmanager
def side(library: str, python: str, *, kind: str = "echo") -> Iterator[Side]:
    """Start side.py under `python`, with folders of its own, and end it with the block.

    `verl-numpy` is verl with its other wire, for which both ends need the same variable in their environment.
    """
    with tempfile.TemporaryDirectory(prefix="hk-", ignore_cleanup_errors=True) as scratch:
        log = Path(scratch) / "log"
        # Ray keeps a token and its usage notes in the home folder
        env = os.environ | {"HOME": scratch, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
        name, _, wire = library.partition("-")
        if wire:
            env["VERL_DATAPROTO_SERIALIZATION_METHOD"] = wire
        command = [python, str(HERE / "side.py"), name, str(Path(scratch) / "r"), kind]
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            ) as process,
        ):
            try:
                yield Side(process, log)
            finally:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()


class Figure(NamedTuple):
    """Median and quartiles of some samples, in seconds."""

    median: float
    p25: float
    p75: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Figure:
        """The figure of at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, low, high)

    def ms(self) -> str:
        """`median (p25-p75)` in milliseconds, three digits each."""
        return f"{_digits(self.median)} ({_digits(self.p25)}-{_digits(self.p75)})"


def _digits(seconds: float) -> str:
    return f"{1000 * seconds:#.3g}".rstrip(".") if seconds < 1 else f"{1000 * seconds:.0f}"


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the table twice: for the eye, and as markdown for RESULTS.md."""
    table = Table(title=title)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print("\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)), flush=True)
