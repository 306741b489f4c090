"""The one place where the controller waits for a worker: with a deadline, and saying for whom."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError, WorkerCrashedError

from hocket.errors import HocketError, WorkerDied

_SLICE = 0.5
_SAY_AFTER = 10.0


class Waiter:
    """Waits for results of workers of one run.

    `say` is told when a wait takes long, and twice as long as that kind of wait has taken before. `logs` is the
    folder of the workers' logs. `stop` is asked several times a second and may raise to end every wait.
    """

    def __init__(
        self,
        *,
        timeout: float,
        logs: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout = timeout
        self._logs = logs
        self._say = say
        self._stop = stop
        self._processes: list[tuple[str, int]] = []
        self._longest: dict[str, float] = {}

    def watch(self, host: str, pid: int) -> None:
        """A process whose stacks are wanted when a deadline passes; it writes them to its log at SIGUSR1."""
        self._processes.append((host, pid))

    def get(self, ref: Any, *, who: str, what: str, timeout: float | None = None) -> Any:
        """The value of `ref`, which `who` is to give by doing `what`.

        Raises what the worker raised when that is one of hocket's errors; WorkerDied when the process ended
        or did not answer in time, with the end of its log.
        """
        limit = timeout or self._timeout
        kind = f"{who} {what.split()[0]}"
        start, patience = time.monotonic(), max(_SAY_AFTER, 2 * self._longest.get(kind, 0.0))
        while not ray.wait([ref], timeout=_SLICE)[0]:
            self._stop()
            waited = time.monotonic() - start
            if waited > limit:
                self._ask_for_stacks()
                raise WorkerDied(
                    f"{who} did not answer within {limit:.0f} s while it was to {what}; its stacks are in the log. "
                    f"If the work is that long, raise ray.call_timeout.{self._tail(who)}"
                )
            if waited > patience:
                self._say(f"waiting for {who} to {what} ({waited:.0f} s so far, at most {limit:.0f} s)")
                patience = limit
        self._longest[kind] = max(self._longest.get(kind, 0.0), time.monotonic() - start)
        self._stop()
        try:
            return ray.get(ref)
        except RayError as error:
            raise self.explain(error, who=who, what=what) from error

    def explain(self, error: RayError, *, who: str, what: str) -> HocketError:
        """The first cause in words, as one of hocket's errors."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, HocketError):
            return type(cause)(cause.message)
        if isinstance(cause, (ActorDiedError, ActorUnavailableError, WorkerCrashedError)):
            return WorkerDied(f"{who} died while it was to {what}: {_reason(cause)}{self._tail(who)}")
        return HocketError(f"{who} failed while it was to {what}: {type(cause).__name__}: {cause}{self._tail(who)}")

    def _ask_for_stacks(self) -> None:
        for host, pid in self._processes:
            if host == socket.gethostname():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(1)  # the time to write them

    def _tail(self, who: str, lines: int = 20) -> str:
        log = self._logs / f"{who}.log" if self._logs else None
        if log is None or not log.is_file():
            return ""
        last = "\n  ".join(log.read_text(errors="replace").splitlines()[-lines:])
        return f"\nEnd of {log}:\n  {last}"


def _reason(error: BaseException) -> str:
    """What ended a process, from Ray's long text, which guesses more than it knows."""
    text = str(error)
    if "creation task" in text or "__init__" in text:
        return text.strip().splitlines()[-1]
    if "INTENDED_USER_EXIT" in text:
        return "the code that it ran asked the process to exit"
    if "connection error code 2" in text or "SIGKILL" in text:
        return (
            "the process ended without a word: killed (SIGKILL, as the kernel does when memory runs out), crashed in "
            "native code, or ended by the code that it ran"
        )
    return (text.strip() or type(error).__name__).splitlines()[0]
