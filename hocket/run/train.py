"""`hocket train`: one call from a config to a finished run folder."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from hocket.config import RunConfig
from hocket.errors import HocketError
from hocket.observe.console import make_console
from hocket.run.cluster import demand, demand_gpus, total
from hocket.run.folder import RunFolder
from hocket.run.prepare import prepare
from hocket.run.programs import run_program
from hocket.run.session import Session


def train(config: RunConfig, *, stream: TextIO | None = None) -> dict[str, Any]:
    """Run `config` to its end and return its summary (also in `summary.json` of the run folder).

    On an error or Ctrl-C the folder still gets what there is; the error is raised again.
    """
    if config.ray.address is None:
        demand_gpus(demand(config.placement))
    folder = RunFolder(config)
    title = f"{folder.name} · {config.algo.name} · {config.placement.kind}"
    with make_console(title=title, total_steps=config.trainer.max_steps, stream=stream or sys.stdout) as console:
        logging.basicConfig(filename=folder.log("driver"), level=logging.INFO, force=True)
        console.header([f"run folder {_short(folder.path)}"])
        prepared = prepare(config, folder.path, console.note)
        console.header(prepared.facts)
        session = Session(config, folder, prepared, console)
        try:
            run_program(session)
        except BaseException as error:
            session.summary["ended_by"] = error.message if isinstance(error, HocketError) else type(error).__name__
            logging.getLogger("hocket").exception("the run ended early")
            raise
        finally:
            session.close()
    return session.summary


def check(config: RunConfig) -> list[str]:
    """What `train` would find and do, without a model, a process or a run folder; ConfigError, DataError if not."""
    with tempfile.TemporaryDirectory() as scratch:
        cold = config.model.warm_start.model_copy(update={"steps": 0})
        model = config.model.model_copy(update={"warm_start": cold})
        prepared = prepare(config.model_copy(update={"model": model}), Path(scratch), lambda text: None)
    bundles = demand(config.placement)
    asked = f"asks Ray for {len(bundles)} processes: {total(bundles)}" if bundles else "needs no Ray"
    return [*prepared.facts, f"placement {config.placement.kind} {asked}", "", config.to_yaml()]


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
