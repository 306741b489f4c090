"""What travels between processes, without one: the sender's bytes become memory that may not be written to."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest


class Store:
    """Like Ray's object store: `put` writes buffers once, every `get` reads the same read-only memory."""

    def __init__(self) -> None:
        self.parts: list[tuple[bytearray, bytes]] = []

    def put(self, value: Any) -> Callable[[], Any]:
        buffers: list[pickle.PickleBuffer] = []
        state = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        kept = [bytearray(buffer.raw()) for buffer in buffers]
        self.parts += [(memory, bytes(memory)) for memory in kept]
        self.sent, self.inline = sum(map(len, kept)), len(state)
        return lambda: pickle.loads(state, buffers=[memoryview(memory).toreadonly() for memory in kept])

    def untouched(self) -> bool:
        """Whether everything that was ever put still holds the bytes that were written."""
        return all(memory == before for memory, before in self.parts)


@pytest.fixture
def store() -> Store:
    return Store()
