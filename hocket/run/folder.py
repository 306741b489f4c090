"""The run's own folder: what is in it, and who may write there."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hocket.config import RunConfig
from hocket.errors import ConfigError
from hocket.observe.metrics import append_records

_PACKAGES = ("hocket", "torch", "transformers", "ray", "tensordict", "numpy")


class RunFolder:
    """Creates the folder of a run; every file of the run has its name here.

    Raises ConfigError when the folder holds an earlier run and `run.overwrite` is not set, or cannot be made.
    """

    def __init__(self, config: RunConfig) -> None:
        self.name = config.run.name or _auto_name(config)
        self.path = Path(config.run.dir or Path("runs") / self.name).resolve()
        try:
            if self.path.exists() and any(self.path.iterdir()):
                self._clear(overwrite=config.run.overwrite)
            for folder in (self.path, self.samples, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make run folder {str(self.path)!r}: {error}; choose another run.dir") from error
        latest = self.logs.parent / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(self.logs.name)
        (self.path / "config.resolved.yaml").write_text(config.to_yaml())
        self.write_json("env.json", environment())

    @property
    def samples(self) -> Path:
        """Folder of the written samples, a file per step."""
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        """Folder of the logs, a file per role."""
        return self.path / "logs" / "attempt_1"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, a folder per step."""
        return self.path / "checkpoints"

    def log(self, role: str) -> str:
        """The log file of a role."""
        return str(self.logs / f"{role}.log")

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file."""
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n")

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add samples to the file of their step."""
        append_records(self.samples / f"step_{step:06d}.jsonl", samples)

    def remove(self) -> None:
        """Take the folder away again."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _clear(self, *, overwrite: bool) -> None:
        ours = (self.path / "config.resolved.yaml").exists()
        if not overwrite:
            what = "holds an earlier run" if ours else "exists and is not empty"
            raise ConfigError(
                f"run folder {str(self.path)!r} {what}; choose another run.name or run.dir, "
                "or replace it with run.overwrite=true"
            )
        if not ours:
            raise ConfigError(f"{str(self.path)!r} is not a run folder; run.overwrite only replaces earlier runs")
        shutil.rmtree(self.path)


def environment() -> dict[str, Any]:
    """What a run's results may depend on: versions, machine, command; no environment variables."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def _auto_name(config: RunConfig) -> str:
    task = Path(config.data.path.removeprefix("recipe:")).stem
    model = Path(config.model.name).name if config.model.name else str(config.model.config["model_type"])
    return f"{task}--{model}--{time.strftime('%m%d-%H%M%S')}-{os.getpid() % 10000:04d}"
