"""Results that are still with the workers: a future travels to other workers without passing the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import RayError

from hocket.errors import BatchError, HocketError
from hocket.waiting import Waiter


class Block(NamedTuple):
    """What one worker is about to return: a reference to the rows, one to their number, and who does what for it."""

    ref: Any
    rows: Any
    who: str = "a worker"
    what: str = "give its rows"


def kept_rows(total: int, pad: int, padded: int) -> int:
    """Rows of a result of `total` rows that answer to real input, when the last `pad` of `padded` input rows did not.

    A method may return several rows per input row; a result that is no multiple of its input is kept whole.
    """
    return total if total % padded else total - pad * (total // padded)


class DataProtoFuture:
    """Rows that lie in blocks behind references, one per worker that made them, in order.

    `collect_fn` joins a list of what the references give, `dispatch_fn` picks from the joined rows. References given
    as Block know their number of rows, so that a chunk fetches only the blocks which hold its rows. `pad` is
    (rows, of): so many of so many input rows were added by the dispatch and are left out again.
    """

    def __init__(
        self,
        collect_fn: Callable[[Any], Any],
        futures: Sequence[Any],
        dispatch_fn: Callable[[Any], Any] | None = None,
        *,
        part: tuple[int, int] = (0, 1),
        pad: tuple[int, int] = (0, 1),
    ) -> None:
        self.collect_fn, self.futures, self.dispatch_fn = collect_fn, list(futures), dispatch_fn
        self._part, self.pad = part, pad

    @property
    def refs(self) -> list[Any]:
        """The references to the blocks."""
        return [future.ref if isinstance(future, Block) else future for future in self.futures]

    def chunk(self, chunks: int, *, padded: bool = False) -> list[DataProtoFuture]:
        """`chunks` futures of equal parts of the rows in order, with the padding or without; nothing is fetched."""
        index, of = self._part
        pad = (0, 1) if padded else self.pad
        parts = [(index * chunks + i, of * chunks) for i in range(chunks)]
        return [DataProtoFuture(self.collect_fn, self.futures, self.dispatch_fn, part=part, pad=pad) for part in parts]

    def get(self, timeout: float = 3600) -> Any:
        """Fetch the rows, as private copies.

        Raises what the workers raised, as a group does, WorkerDied after `timeout` seconds, and BatchError when the
        rows do not divide into equal chunks.
        """
        if self.dispatch_fn is None and all(isinstance(future, Block) for future in self.futures):
            return self._get_blocks(timeout)
        joined = self.collect_fn(self._wait(self.refs, timeout))
        joined = self.dispatch_fn(joined) if self.dispatch_fn else joined
        return joined if (self._part, self.pad[0]) == ((0, 1), 0) else joined[slice(*self._window(len(joined)))]

    def _get_blocks(self, timeout: float) -> Any:
        counts = cast(list[int], self._wait([block.rows for block in self.futures], timeout))
        first, last = self._window(sum(counts))
        picked: list[tuple[Any, int, int]] = []
        offset = 0
        for ref, count in zip(self.refs, counts, strict=True):
            start, stop = max(first - offset, 0), min(last - offset, count)
            if start < stop or (first == last and not picked):  # no rows at all: one empty block says of what kind
                picked.append((ref, start, max(start, stop)))
            offset += count
        values = self._wait([ref for ref, _, _ in picked], timeout)
        parts = [value[start:stop] for value, (_, start, stop) in zip(values, picked, strict=True)]
        return self.collect_fn(parts)

    def _wait(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        named = [one if isinstance(one, Block) else Block(one, None) for one in self.futures]
        who = [next(block.who for block in named if ref in (block.ref, block.rows)) for ref in refs]
        try:
            return Waiter(timeout=timeout).gather(refs, who=who, what=named[0].what)
        except HocketError:
            for ref in ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[0]:
                with contextlib.suppress(RayError):
                    ray.get(ref)  # the same error; Ray reports a failed reference that nobody looks at
            raise

    def _window(self, total: int) -> tuple[int, int]:
        """First and last (exclusive) of `total` rows that are this future's."""
        index, of = self._part
        total = kept_rows(total, *self.pad)
        if total % of:
            raise BatchError(f"cannot split {total} rows of a future into {of} equal parts; use a multiple of {of}")
        return index * total // of, (index + 1) * total // of


def future_of(ref: Any) -> DataProtoFuture:
    """A future of what one reference gives."""
    return DataProtoFuture(itemgetter(0), [ref])


def materialize(value: Any) -> Any:
    """What a future stands for, also inside a list; anything else as it is."""
    if isinstance(value, list):
        return [materialize(item) for item in cast(list[Any], value)]
    return value.get() if isinstance(value, DataProtoFuture) else value
