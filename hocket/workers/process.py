"""What every worker process does first: its output goes to a log of its own, and it can show its stacks."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
from functools import cache
from pathlib import Path

from hocket.models.load import quiet


@cache  # two roles may share a process
def set_up_process(log: str | None) -> None:
    """Send stdout, stderr and log records to `log`; SIGUSR1 writes the stacks of all threads into it."""
    quiet()
    if log is None:
        return
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True, stream=sys.stderr
    )
    logging.getLogger("hocket").info("process %d started", os.getpid())


def where(actor: object) -> tuple[str, int]:
    """Host name and process number of the process that runs this."""
    return socket.gethostname(), os.getpid()
