"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hocket.config import RunConfig
from hocket.errors import CheckpointError, ConfigError
from hocket.observe.redact import redacted
from hocket.run.checkpoint import Saved, clear_leftovers, newest, read_checkpoint
from hocket.run.folder import run_path

# What may differ between a run and its continuation; anything else would make it another run.
_FREE = ("run", "placement", "sync", "eval", "checkpoint", "supervise", "logging", "ray", "trainer.max_steps")
Say = Callable[[str], None]


def find_checkpoint(config: RunConfig, say: Say) -> Saved | None:
    """The checkpoint that `run.resume` names; None when it names none, or a run that has not saved any yet.

    `latest` and `step:N` are those of the run's own folder; a path, of a checkpoint or of a run, forks another run.
    Raises CheckpointError when there is none that is whole, ConfigError when the configs do not fit.
    """
    wanted = config.run.resume
    if wanted is None:
        return None
    own = run_path(config)
    if wanted == "latest" or wanted.startswith("step:"):
        if own is None:
            raise ConfigError(f"run.resume={wanted} needs the run to go on with; set run.name or run.dir as it was")
        if not (own / "config.resolved.yaml").is_file():
            raise ConfigError(f"there is no run in {str(own)!r} to resume; check run.name and run.dir")
        clear_leftovers(own / "checkpoints")
        saved, run = _named(own / "checkpoints", wanted, say), own
    else:
        saved, run = _at(Path(wanted).expanduser().resolve(), say)
    _demand_same(config, run)
    return saved


def demand_prompts(saved: Saved, sha256: str) -> None:
    """Raise ConfigError when the prompts are not those of the checkpoint."""
    if saved.run["prompts_sha256"] != sha256:
        raise ConfigError(
            f"the prompts changed since checkpoint {str(saved.path)!r} was written: their SHA-256 is {sha256[:16]}, it "
            f"was {saved.run['prompts_sha256'][:16]}; give the same data.path, tokenizer and template, or begin a new "
            "run with model.name set to the checkpoint's hf folder"
        )


def _named(folder: Path, wanted: str, say: Say) -> Saved | None:
    if wanted == "latest":
        found = newest(folder, say=say)
        if found is None and any(folder.glob("step_" + "[0-9]" * 6)):
            raise CheckpointError(f"no checkpoint in {str(folder)!r} is whole; see above, and begin a new run")
        return found
    number = wanted.removeprefix("step:")
    if not number.isdecimal() or len(number) > 6:
        raise ConfigError(f"run.resume={wanted} is not readable; write latest, step:N, or a path")
    path = folder / f"step_{int(number):06d}"
    if not path.is_dir():
        there = ", ".join(str(int(p.name.removeprefix("step_"))) for p in sorted(folder.glob("step_" + "[0-9]" * 6)))
        raise CheckpointError(f"there is no checkpoint of step {int(number)} in {str(folder)!r}; there are: {there}")
    return read_checkpoint(path)


def _at(path: Path, say: Say) -> tuple[Saved, Path]:
    if (path / "checkpoints").is_dir():
        found = newest(path / "checkpoints", say=say)
        if found is None:
            raise CheckpointError(f"the run in {str(path)!r} has no whole checkpoint; name another one in run.resume")
        return found, path
    if not path.is_dir():
        raise CheckpointError(f"run.resume={str(path)!r} does not exist; write latest, step:N, or a path")
    return read_checkpoint(path), path.parent.parent


def _demand_same(config: RunConfig, run: Path) -> None:
    try:
        before: Any = OmegaConf.to_container(OmegaConf.load(run / "config.resolved.yaml"))
    except OSError as error:
        raise CheckpointError(f"run {str(run)!r} has no config.resolved.yaml: {error}") from error
    old, new = _flat(before), _flat(redacted(config.model_dump(mode="json")))
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and not _free(key)}
    if changed:
        lines = [f"{key}: was {old.get(key)!r}, is {new.get(key)!r}" for key in sorted(changed)]
        raise ConfigError(
            "the run cannot be resumed with other settings of what is learned; put them back, or begin a new run with "
            "model.name set to the checkpoint's hf folder\n" + "\n".join(lines)
        )


def _free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in _FREE)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
