"""The run's own folder: what is in it, and who may write there."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from hocket.config import RunConfig
from hocket.errors import ConfigError
from hocket.observe.metrics import append_records, read_metrics
from hocket.observe.redact import redacted_command
from hocket.run.checkpoint import newest_timeline

_PACKAGES = ("hocket", "torch", "transformers", "ray", "tensordict", "numpy")


class RunFolder:
    """Creates the folder of a run, or opens it again to resume; every file of the run has its name here.

    One process at a time owns it. Raises ConfigError when another one does, when the folder holds an earlier run and
    neither `run.overwrite` nor `run.resume` is set, or cannot be made.
    """

    def __init__(self, config: RunConfig, *, again: bool = False) -> None:
        self.name = config.run.name or _auto_name(config)
        self.path = run_path(config) or (Path("runs") / self.name).resolve()
        try:
            if not again and self.path.exists() and any(self.path.iterdir()):
                self._clear(overwrite=config.run.overwrite)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _own(self.path)
            self._attempt = 1 + len(list((self.path / "logs").glob("attempt_*")))
            for folder in (self.samples, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            latest = self.logs.parent / "latest"
            latest.unlink(missing_ok=True)
            latest.symlink_to(self.logs.name)
            (self.path / "config.resolved.yaml").write_text(config.to_yaml())
            self.write_json("env.json", environment())
        except OSError as error:
            raise ConfigError(f"cannot make run folder {str(self.path)!r}: {error}; choose another run.dir") from error

    @property
    def samples(self) -> Path:
        """Folder of the written samples, a file per step."""
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        """Folder of the logs of this attempt, a file per role."""
        return self.path / "logs" / f"attempt_{self._attempt}"

    @property
    def metrics(self) -> Path:
        """A record per step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, a folder per step."""
        return self.path / "checkpoints"

    def log(self, role: str) -> str:
        """The log file of a role."""
        return str(self.logs / f"{role}.log")

    def history(self, role: str) -> str:
        """The file in which a role notes what it did."""
        return str(self.path / "history" / f"{role}.jsonl")

    @property
    def samples_begun(self) -> int:
        """Samples that all attempts in this folder handed out, by the driver's own history."""
        path = Path(self.history("driver"))
        return (
            sum(fact.get("samples", 0) for fact in read_metrics(path) if fact["fact"] == "leased")
            if path.exists()
            else 0
        )

    @property
    def fence(self) -> int:
        """The newest timeline that began in this folder; -1 before the first."""
        return newest_timeline(self.checkpoints)

    def forget_after(self, step: int) -> None:
        """Take back the records and samples of the steps behind `step`: they will be made again."""
        if self.metrics.exists():
            kept = [record for record in read_metrics(self.metrics) if record["step"] <= step]
            aside = self.metrics.with_suffix(".tmp")
            aside.unlink(missing_ok=True)
            append_records(aside, kept)
            aside.replace(self.metrics)
        for path in self.samples.glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def take_request(self, what: str) -> int | None:
        """The number that `make_request` asked for, once."""
        try:
            path = self.path / f"request.{what}"
            number = int(path.read_text())
            path.unlink()
        except (OSError, ValueError):
            return None
        return number

    def answer_request(self, what: str, answer: str) -> None:
        """Say in words what became of a request."""
        _write_whole(self.path / f"answer.{what}", answer)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file."""
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n")

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add samples to the file of their step."""
        append_records(self.samples / f"step_{step:06d}.jsonl", samples)

    def remove(self) -> None:
        """Take the folder away again."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Another process may have it."""
        self._lock.close()

    def _clear(self, *, overwrite: bool) -> None:
        ours = (self.path / "config.resolved.yaml").exists()
        if not overwrite:
            what = "holds an earlier run" if ours else "exists and is not empty"
            raise ConfigError(
                f"run folder {str(self.path)!r} {what}; choose another run.name or run.dir, "
                "replace it with run.overwrite=true" + (", or go on with it with --resume" if ours else "")
            )
        if not ours:
            raise ConfigError(f"{str(self.path)!r} is not a run folder; run.overwrite only replaces earlier runs")
        _own(self.path).close()
        shutil.rmtree(self.path)


def make_request(run: Path, what: str, number: int, *, timeout: float = 120) -> str:
    """Ask the run that goes on in `run` for a number of something; returns its answer, in words.

    Raises ConfigError when no run goes on there, or none answers within `timeout` seconds.
    """
    if not (run / "config.resolved.yaml").is_file():
        raise ConfigError(f"{str(run)!r} is no run folder; give the folder of a run that goes on")
    _demand_owner(run)
    answer = run / f"answer.{what}"
    answer.unlink(missing_ok=True)
    _write_whole(run / f"request.{what}", str(number))
    end = time.monotonic() + timeout
    while not answer.exists():
        if time.monotonic() > end:
            (run / f"request.{what}").unlink(missing_ok=True)
            raise ConfigError(f"the run in {str(run)!r} did not answer within {timeout:g} s; look at its driver.log")
        _demand_owner(run)
        time.sleep(0.2)
    return answer.read_text()


def run_path(config: RunConfig) -> Path | None:
    """The folder that the config names; None when a name is to be made up."""
    if config.run.dir is None and config.run.name is None:
        return None
    return Path(config.run.dir or Path("runs") / str(config.run.name)).resolve()


def _demand_owner(run: Path) -> None:
    if (lock := _lock(run)) is not None:
        lock.close()
        raise ConfigError(f"no run goes on in {str(run)!r}; give the folder of one that does")


def _own(folder: Path) -> TextIO:
    """A lock on the folder, which goes with the process that holds it. Raises ConfigError naming who has it."""
    if (lock := _lock(folder)) is None:
        raise ConfigError(
            f"run folder {str(folder)!r} is in use by {(folder / 'lock').read_text().strip() or 'another process'}; "
            "wait until that run has ended, or choose another run.name or run.dir"
        )
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}\n")
    lock.flush()
    return lock


def _lock(folder: Path) -> TextIO | None:
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(text)
    aside.replace(path)


def environment() -> dict[str, Any]:
    """What a run's results may depend on: versions, machine, command; no environment variables."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": redacted_command([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def _auto_name(config: RunConfig) -> str:
    task = Path(config.data.path.removeprefix("recipe:")).stem
    model = Path(config.model.name).name if config.model.name else str(config.model.config["model_type"])
    return f"{task}--{model}--{time.strftime('%m%d-%H%M%S')}-{os.getpid() % 10000:04d}"
