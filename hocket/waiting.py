"""The one place where the controller waits for workers: with a deadline, and saying for whom."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from hocket.errors import DataLost, HocketError, StartFailed, WorkerDied

_SLICE = 0.5
_SAY_AFTER = 10.0
_GRACE = 1.0  # seconds for the other workers, once one has failed, to say that they failed too


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
        self._timeout, self._logs, self._say, self._stop = timeout, logs, say, stop
        self._processes: list[tuple[str, int]] = []
        self._longest: dict[str, float] = {}

    def watch(self, host: str, pid: int) -> None:
        """A process whose stacks are wanted when a deadline passes; it writes them to its log at SIGUSR1."""
        self._processes.append((host, pid))

    def get(self, ref: Any, *, who: str, what: str, timeout: float | None = None) -> Any:
        """The value of `ref`, which `who` is to give by doing `what`; see `gather`."""
        return self.gather([ref], who=[who], what=what, timeout=timeout)[0]

    def gather(
        self,
        refs: Sequence[Any],
        *,
        who: Sequence[str],
        what: str,
        timeout: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """The values of all `refs`, of which `who` names the workers; `check` is asked beside `stop`.

        Raises what the first worker to fail raised, as one of hocket's errors that is also of the original type, with
        what became of the others; WorkerDied when a process ended or did not answer in time, with the end of its log.
        """
        limit = timeout or self._timeout
        kind = f"{who[0]} {what.split()[0]}"
        start, patience = time.monotonic(), max(_SAY_AFTER, 2 * self._longest.get(kind, 0.0))
        while True:
            try:
                values = ray.get(list(refs), timeout=max(0.0, min(_SLICE, start + limit - time.monotonic())))
                break
            except GetTimeoutError:
                self._stop()
                check()
            except RayError as error:
                raise self._first_failure(refs, who, what, error) from error
            waited = time.monotonic() - start
            if waited >= limit and (late := _pending(refs, who)):
                raise self._too_late(late, what, limit)
            if waited > patience:
                names = ", ".join(_pending(refs, who))
                self._say(f"waiting for {names} to {what} ({waited:.0f} s so far, at most {limit:.0f} s)")
                patience = limit
        self._longest[kind] = max(self._longest.get(kind, 0.0), time.monotonic() - start)
        self._stop()
        return values

    def show_stacks(self) -> None:
        """Have every watched process of this machine write its stacks into its log."""
        for host, pid in self._processes:
            if host == socket.gethostname():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(1)  # the time to write the stacks

    def _too_late(self, late: Sequence[str], what: str, limit: float) -> HocketError:
        self.show_stacks()
        stacks = "its stacks are in the log" if self._processes else "look into Ray's logs"
        knobs = ("ray.start_timeout", "the ray_wait_register_center_timeout of the group")
        run, own = knobs if what == "start" else ("ray.call_timeout", "the timeout of the group or call")
        return WorkerDied(
            f"{', '.join(late)} did not answer within {limit:g} s while it was to {what}; {stacks}. If the work is "
            f"that long, raise {run} of a run, or {own}.{self._tail(late[0])}"
        )

    def _first_failure(self, refs: Sequence[Any], who: Sequence[str], what: str, error: RayError) -> HocketError:
        failed: list[tuple[str, RayError]] = []
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=_GRACE)[0]:
            try:
                ray.get(ref)
            except RayError as reason:
                failed.append((who[list(refs).index(ref)], reason))
        (first, reason), *others = failed or [(", ".join(who), error)]
        told = self.explain(reason, who=first, what=what)
        notes = [f"{name} failed too" for name, _ in others]
        notes += [f"{name} is still at it" for name in _pending(refs, who)]
        return type(told)(f"{told.message} ({'; '.join(notes)})") if notes else told

    def explain(self, error: RayError, *, who: str, what: str) -> HocketError:
        """The first cause in words, as one of hocket's errors."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, HocketError):
            return type(cause)(f"{who}: {cause.message}" if who.startswith("rank ") else cause.message)
        if isinstance(cause, ObjectLostError):
            return DataLost(f"what {who} needed to {what} is gone with the machine that held it")
        if isinstance(cause, (ActorDiedError, ActorUnavailableError, WorkerCrashedError, OutOfMemoryError)):
            kind = StartFailed if _in_constructor(cause) else WorkerDied
            return kind(f"{who} died while it was to {what}: {reason_of_death(cause)}{self._tail(who)}")
        text = f"{who} failed while it was to {what}: {type(cause).__name__}: {cause}{self._tail(who)}"
        try:  # so that `except ValueError` still catches a worker's ValueError
            members = {
                "__init__": Exception.__init__,
                "__str__": Exception.__str__,
                "__module__": HocketError.__module__,
            }
            return type(type(cause).__name__, (HocketError, type(cause)), members)(text)
        except TypeError:
            return HocketError(text)

    def _tail(self, who: str, lines: int = 20) -> str:
        log = self._logs / f"{who}.log" if self._logs else None
        if log is None or not log.is_file():
            return ""
        last = "\n  ".join(log.read_text(errors="replace").splitlines()[-lines:])
        return f"\nEnd of {log}:\n  {last}"


def _pending(refs: Sequence[Any], who: Sequence[str]) -> list[str]:
    left = ray.wait(list(refs), num_returns=len(refs), timeout=0)[1]
    return [name for ref, name in zip(refs, who, strict=True) if ref in left]


def reason_of_death(error: BaseException) -> str:
    """What ended a process, from Ray's long text, which guesses more than it knows."""
    text = str(error)
    if _in_constructor(error):
        return text.strip().splitlines()[-1]
    if "placement group was removed" in text:
        return "its place was given back to the cluster, as the `close` of its pool does"
    if "INTENDED_USER_EXIT" in text:
        return "the code that it ran asked the process to exit"
    if "connection error code 2" in text or "SIGKILL" in text:
        return (
            "the process ended without a word: killed (SIGKILL, as the kernel does when memory runs out), crashed in "
            "native code, or ended by the code that it ran"
        )
    return (text.strip() or type(error).__name__).splitlines()[0]


def _in_constructor(error: BaseException) -> bool:
    return "creation task" in str(error) or "__init__" in str(error)
