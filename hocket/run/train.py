"""`hocket train`: one call from a config to a finished run folder."""

from __future__ import annotations

import errno
import json
import logging
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from hocket.config import RunConfig
from hocket.errors import HocketError
from hocket.observe.console import make_console
from hocket.run.checkpoint import Saved
from hocket.run.cluster import demand_gpus, total
from hocket.run.folder import RunFolder, run_path
from hocket.run.prepare import check_input, prepare
from hocket.run.programs import run_program
from hocket.run.resume import demand_prompts, find_checkpoint
from hocket.run.session import Session
from hocket.run.signals import stopping, uninterrupted

_LOG = logging.getLogger("hocket")


class Interrupted(KeyboardInterrupt):
    """The run ended because the user asked for it; `signal` is SIGINT or SIGTERM."""

    def __init__(self, signal: str) -> None:
        super().__init__(signal)
        self.signal = signal


def train(config: RunConfig, *, stream: TextIO | None = None) -> dict[str, Any]:
    """Run `config` to its end and return its summary (also in `summary.json` of the run folder).

    With `run.resume` it goes on from a checkpoint; a run that has all its steps is left as it is. On an error or
    Ctrl-C the folder still gets what there is; the error is raised again.
    """
    if config.ray.address is None:
        demand_gpus(config.placement.bundles)
    notes: list[str] = []
    saved = find_checkpoint(config, notes.append)
    if saved is not None and saved.step >= config.trainer.max_steps:
        return _finished(saved.path.parent.parent, saved.step, stream or sys.stdout)
    with begin(config, stream=stream or sys.stdout, saved=saved, notes=notes) as session:
        run_program(session)
    return session.summary


@contextmanager
def begin(
    config: RunConfig, *, stream: TextIO, saved: Saved | None = None, notes: Sequence[str] = ()
) -> Generator[Session, None, None]:
    """The session of a run, with its folder, console and log; its summary is written in the end, whatever happens.

    A signal in the body lets the program end after its step; then Interrupted is raised.
    """
    checked = check_input(config)
    again = config.run.resume is not None and (saved is None or saved.path.parent.parent == run_path(config))
    folder = RunFolder(config, again=again)
    title = f"{folder.name} · {config.algo.name} · {config.placement.kind}"
    with ExitStack() as stack:
        stack.callback(folder.close)
        console = make_console(title=title, total_steps=config.trainer.max_steps, stream=stream)
        stack.enter_context(console)
        stack.enter_context(_log_to(folder.log("driver")))
        console.header([f"run folder {_short(folder.path)}", *notes])
        console.header(checked.facts)
        try:
            prepared = prepare(checked, folder.path, console.note)
            if saved is not None:
                demand_prompts(saved, prepared.schedule.sha256)
        except BaseException:
            if not again:
                folder.remove()  # nothing has run: the name is free again
            raise
        session = Session(config, folder, prepared, console, saved=saved)
        if config.run.resume is not None:
            console.header([_resumed(session)])
        yield from _guarded(session)


def _guarded(session: Session) -> Generator[Session, None, None]:
    ended_by: str | None = None
    try:
        with stopping(session):
            yield session
        ended_by = session.stop_requested
    except BaseException as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        known = HocketError(f"{error}: the disk of {str(session.folder.path)!r} is full; free space") if full else error
        ended_by = known.message if isinstance(known, HocketError) else session.stop_requested or type(error).__name__
        _LOG.exception("the run ended early")
        if isinstance(error, KeyboardInterrupt) and session.stop_requested is not None:
            raise Interrupted(session.stop_requested) from None
        if full:
            raise known from error
        raise
    finally:
        with uninterrupted():
            _close(session, ended_by)
    if session.stop_requested is not None:
        raise Interrupted(session.stop_requested)


def _close(session: Session, ended_by: str | None) -> None:
    """Close it; a disk that is full must not hide why the run ended."""
    try:
        session.close(ended_by=ended_by)
    except OSError as error:
        if ended_by is None:
            raise HocketError(f"cannot write the end of run {str(session.folder.path)!r}: {error}") from error
        session.console.note(f"the end of the run could not be written: {error}")


def check(config: RunConfig) -> list[str]:
    """What `train` would find and do, without a model, a process or a run folder; ConfigError, DataError if not."""
    bundles = config.placement.bundles
    asked = f"asks Ray for {len(bundles)} processes: {total(bundles)}" if bundles else "needs no Ray"
    return [*check_input(config).facts, f"placement {config.placement.kind} {asked}", "", config.to_yaml()]


def _finished(folder: Path, step: int, stream: TextIO) -> dict[str, Any]:
    """The summary of a run that has all its steps already; nothing is touched."""
    print(f"already at max_steps: run folder {_short(folder)} has {step} steps", file=stream)
    return json.loads((folder / "summary.json").read_text())


def _resumed(session: Session) -> str:
    step, accounts = session.flow.step, session.flow.ledger.accounts
    if not step:
        return "resumed: there was no checkpoint yet, so it begins again"
    return (
        f"resumed behind step {step}: weights, optimizers, ledger and prompts go on; "
        f"{accounts['buffered']} samples wait, {accounts['rolled_back']} were rolled back so far"
    )


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
