"""Weights on their way from a trainer to its makers, while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from hocket.errors import HocketError, WorkerDied
from hocket.weights.manifest import Manifest
from hocket.workers.peers import Peer

_LOG = logging.getLogger("hocket")
Message = tuple[Manifest, list[Any]]


class Courier:
    """Tells every maker to fetch what was put out once for all of them, each in a thread of its own.

    So a slow maker delays nobody; a newer version takes the place of one that a maker has not fetched yet. A maker
    that died is passed over from then on; any other refusal is raised by the next `push` or `flush`. When all have
    fetched a version, `release` is called: the sender need not keep it. A maker that is added then gets the next push.
    """

    def __init__(self, release: Callable[[], None] = lambda: None) -> None:
        self._release = release
        self._changed = threading.Condition()
        self._newest: tuple[int, Message] | None = None
        self._errors: list[BaseException] = []
        self.version = -1
        self.delivered: dict[str, int] = {}
        self.lost: dict[str, str] = {}

    def add(self, maker: Peer) -> None:
        """Serve this maker too; one that is served already stays as it is."""
        if maker.name not in self.delivered:
            self.delivered[maker.name] = -1
            if self._newest is None:
                self.version = -1  # nothing is there to fetch: a push of the same version is none too many
            threading.Thread(target=self._serve, args=(maker,), name=f"to {maker.name}", daemon=True).start()

    def push(self, version: int, publish: Callable[[], Message]) -> None:
        """Put the weights out now, unless nobody wants them; makers fetch them in the background."""
        self._raise()
        self.version = version
        if self.makers:
            with self._changed:
                self._newest = None  # its chunks go, before there are new ones
            message = publish()
            with self._changed:
                self._newest = (version, message)
                self._changed.notify_all()

    def flush(self, timeout: float) -> None:
        """Wait until every maker has the newest version. Raises what one refused it with, WorkerDied in the end."""
        with self._changed:
            done = self._changed.wait_for(lambda: bool(self._errors) or not self._late(), timeout)
            late = self._late()
        self._raise()
        if not done:
            raise WorkerDied(f"{', '.join(late)} did not take the new weights within {timeout:.0f} s")

    @property
    def makers(self) -> list[str]:
        """Those that are alive."""
        return [name for name in self.delivered if name not in self.lost]

    def _late(self) -> list[str]:
        newest = self._newest[0] if self._newest else -1
        return [name for name in self.makers if self.delivered[name] < newest]

    def _serve(self, maker: Peer) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._newest is not None and self._newest[0] > self.delivered[maker.name]
                )
                assert self._newest is not None
                version, message = self._newest
            try:
                maker.call("receive", *message)
            except WorkerDied as error:
                _LOG.warning("no more weights for %s: %s", maker.name, error.message)
                with self._changed:
                    self.lost[maker.name] = error.message
                    self._settle()
                return
            except BaseException as error:  # noqa: BLE001  raised in the trainer's own thread
                self._fail(error)
                return
            del message
            with self._changed:
                self.delivered[maker.name] = version
                self._settle()

    def _settle(self) -> None:
        """Under the lock: who waits for the makers may look, and what all have is let go."""
        if self._newest is not None and not self._late():
            self._newest = None
            self._release()
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._errors.append(error)
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._errors:
            error = self._errors[0]
            raise error if isinstance(error, HocketError) else HocketError(f"weights could not be sent: {error!r}")
