"""A maker's sending end: messages leave in a thread of their own, while the next batch is made."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from hocket.data.proto import DataProto
from hocket.errors import WorkerDied

# sends one message: target, sequence number, rows, ticket -> what became of them
Send = Callable[[str, int, DataProto, int], Any]


class Outbox:
    """A bounded queue and the thread that empties it. A trainer that died is told by `lost`; other errors end it."""

    def __init__(self, send: Send, *, room: int = 2) -> None:
        self._send = send
        self._queue: queue.Queue[tuple[str, DataProto, int] | None] = queue.Queue(room)
        self._thread = threading.Thread(target=self._run, name="experience_io", daemon=True)
        self._seq: Counter[str] = Counter()
        self._error: BaseException | None = None
        self._stopped = False
        self.sent: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.lost: dict[str, str] = {}
        self._thread.start()

    def put(self, target: str, rows: DataProto, ticket: int) -> None:
        """Hand over one message, waiting while the queue is full. Raises what an earlier one failed with."""
        self._raise()
        self._queue.put((target, rows, ticket))

    def close(self) -> None:
        """Wait until everything is answered. Raises what a message failed with."""
        self.stop()
        self._thread.join()
        self._raise()

    def stop(self) -> None:
        """Let the thread end once the queue is empty; a second call does nothing."""
        if not self._stopped:
            self._stopped = True
            self._queue.put(None)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            target, rows, ticket = message
            try:
                self._deliver(target, rows, ticket)
            except WorkerDied as error:
                self.lost.setdefault(target, error.message)
                self.left[f"{target} died"] += len(rows)
            except BaseException as error:  # noqa: BLE001  raised again in the loop's own thread
                self._error = error
                self.left["the message could not be sent"] += len(rows)

    def _deliver(self, target: str, rows: DataProto, ticket: int) -> None:
        if target in self.lost:
            self.left[f"{target} died"] += len(rows)
            return
        self._seq[target] += 1
        ack = self._send(target, self._seq[target], rows, ticket)
        self.sent[target] += ack.accepted
        self.refused += ack.refused
        if ack.left:
            self.left[f"{target} had ended"] += ack.left
