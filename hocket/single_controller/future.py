"""Results that are still with the workers: a future travels to other workers without passing the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ray

from hocket.data.proto import DataProto


class DataProtoFuture:
    """Rows that lie in blocks behind object references, one per worker that made them."""

    def __init__(self, refs: Sequence[Any]) -> None:
        self.refs = list(refs)

    def get(self) -> DataProto:
        """Fetch all blocks, as private copies, and join their rows."""
        parts = cast(list[DataProto], ray.get(self.refs))
        return parts[0] if len(parts) == 1 else DataProto.concat(parts)


def materialize(value: Any) -> Any:
    """What a future stands for, also inside a list; anything else as it is."""
    if isinstance(value, list):
        return [materialize(item) for item in cast(list[Any], value)]
    return value.get() if isinstance(value, DataProtoFuture) else value
