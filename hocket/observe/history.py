"""What one role did, a line for each fact: written by the role itself, read by an auditor who trusts no counter."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from hocket.observe.closing import Closing


class History(Closing):
    """Appends facts to a JSON Lines file; each is handed to the system, whole, when `add` returns.

    So it survives the death of the process, though not that of the machine.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, fact: str, **what: Any) -> None:
        """One fact. JSON knows the values."""
        line = json.dumps({"fact": fact, **what}) + "\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)
                self._file.flush()

    def close(self) -> None:
        """See Closing."""
        with self._lock:
            self._file.close()
