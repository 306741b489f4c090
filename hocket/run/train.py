"""`hocket train`: one call from a config to a finished run folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from hocket.config import RunConfig
from hocket.errors import HocketError
from hocket.observe.console import make_console
from hocket.run.cluster import demand_gpus, total
from hocket.run.folder import RunFolder
from hocket.run.prepare import check_input, prepare
from hocket.run.programs import run_program
from hocket.run.session import Session
from hocket.run.signals import uninterrupted

_LOG = logging.getLogger("hocket")


def train(config: RunConfig, *, stream: TextIO | None = None) -> dict[str, Any]:
    """Run `config` to its end and return its summary (also in `summary.json` of the run folder).

    On an error or Ctrl-C the folder still gets what there is; the error is raised again.
    """
    if config.ray.address is None:
        demand_gpus(config.placement.bundles)
    checked = check_input(config)
    folder = RunFolder(config)
    title = f"{folder.name} · {config.algo.name} · {config.placement.kind}"
    with ExitStack() as stack:
        console = make_console(title=title, total_steps=config.trainer.max_steps, stream=stream or sys.stdout)
        stack.enter_context(console)
        stack.enter_context(_log_to(folder.log("driver")))
        console.header([f"run folder {_short(folder.path)}"])
        console.header(checked.facts)
        try:
            prepared = prepare(checked, folder.path, console.note)
        except BaseException:
            folder.remove()  # nothing has run: the name is free again
            raise
        session = Session(config, folder, prepared, console)
        try:
            run_program(session)
        except BaseException as error:
            session.summary["ended_by"] = error.message if isinstance(error, HocketError) else type(error).__name__
            _LOG.exception("the run ended early")
            raise
        finally:
            with uninterrupted():
                session.close()
    return session.summary


def check(config: RunConfig) -> list[str]:
    """What `train` would find and do, without a model, a process or a run folder; ConfigError, DataError if not."""
    bundles = config.placement.bundles
    asked = f"asks Ray for {len(bundles)} processes: {total(bundles)}" if bundles else "needs no Ray"
    return [*check_input(config).facts, f"placement {config.placement.kind} {asked}", "", config.to_yaml()]


@contextmanager
def _log_to(path: str) -> Generator[None, None, None]:
    """hocket's own log records of this process go to `path`; nobody else's logging is touched."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        handler.close()


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
