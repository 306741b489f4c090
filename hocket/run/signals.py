"""Ctrl-C and SIGTERM: the first ends a run between two steps, the second at once; neither while it cleans up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from hocket.run.session import Session

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping(session: Session) -> Generator[None, None, None]:
    """In the body a signal asks the session to stop; after `run.grace` seconds, or with a second one, it is a
    KeyboardInterrupt. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if session.stop_requested is not None:
            raise KeyboardInterrupt
        session.stop_requested = signal.Signals(number).name
        grace = session.config.run.grace
        timers.append(threading.Timer(grace, os.kill, (os.getpid(), number)))
        timers[0].daemon = True
        timers[0].start()
        session.console.note(f"stopping after this step, within {grace:g} s; once more to stop at once")

    before = [signal.signal(number, stop) for number in _NUMBERS]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Generator[None, None, None]:
    """SIGINT and SIGTERM are ignored in the body, which is short and ends by itself; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, signal.SIG_IGN) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)
