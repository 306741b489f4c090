"""`hocket replay`: an asynchronous run once more, in one process, from the record of what it did when."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hocket.config import RunConfig
from hocket.errors import ConfigError, DataError
from hocket.observe.metrics import read_metrics
from hocket.read_config import load_config
from hocket.run.checkpoint import newest
from hocket.run.flow import Key, Versions
from hocket.run.programs import replayed
from hocket.run.resume import find_checkpoint
from hocket.run.train import begin


@dataclass(frozen=True)
class Flight:
    """What a run's recorder holds of the lineage that survived: the weights versions of each unit, and its start."""

    versions: dict[Key, Versions]
    fork_of: str | None


def read_flight(run: Path) -> Flight:
    """Read `history/driver.jsonl`. Raises DataError when it is missing."""
    versions: dict[Key, Versions] = {}
    fork_of: str | None = None
    for fact in read_metrics(run / "history" / "driver.jsonl"):
        if fact["fact"] == "made" and fact["taken"]:
            step, unit = fact["unit"]
            versions[step, unit] = [(at, version) for at, version in fact["versions"]]
        elif fact["fact"] in ("rewound", "resumed"):
            waiting = {(step, unit) for step, unit, _ in fact.get("waiting", ())}
            versions = {key: v for key, v in versions.items() if key[0] < fact["step"] or key in waiting}
            fork_of = fact.get("fork_of") or fork_of
    return Flight(versions, fork_of)


def replay(run: Path, *, folder: Path | None = None, stream: TextIO | None = None) -> tuple[dict[str, Any], str]:
    """Repeat what the run in `run` had trained at its newest checkpoint, into `folder` (default: RUN-replay).

    Returns the summary of the repetition, and the SHA-256 that the weights had in `run`. Raises ConfigError for a run
    that cannot be repeated, DataError for one that recorded nothing.
    """
    if not (run / "config.resolved.yaml").is_file():
        raise DataError(f"{str(run)!r} is no run folder: it has no config.resolved.yaml")
    saved, flight = newest(run / "checkpoints"), read_flight(run)
    if saved is None:
        raise DataError(f"the run in {str(run)!r} has no whole checkpoint to compare with")
    config = _config(load_config(run / "config.resolved.yaml"), folder or run.with_name(f"{run.name}-replay"), flight)
    start = find_checkpoint(config, lambda text: None)
    with begin(config, stream=stream or sys.stdout, saved=start) as session:
        replayed(session, flight.versions, until=saved.step)
    return session.summary, str(saved.facts["weights_sha256"])


def _config(config: RunConfig, folder: Path, flight: Flight) -> RunConfig:
    trainers = getattr(config.placement, "trainers", 1)
    if trainers > 1:
        raise ConfigError(f"a run with {trainers} trainers adds up in another order than one process; it has no replay")
    run = config.run.model_copy(update={"dir": str(folder), "name": None, "resume": flight.fork_of})
    checkpoint = config.checkpoint.model_copy(update={"every": None})
    return config.model_copy(update={"run": run, "checkpoint": checkpoint})
