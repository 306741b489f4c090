"""Results that are still with the workers: a future travels to other workers without passing the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from hocket.errors import BatchError


class Block(NamedTuple):
    """What one worker is about to return: a reference to the rows, and one to their number."""

    ref: Any
    rows: Any


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
        self._part, self._pad = part, pad

    @property
    def refs(self) -> list[Any]:
        """The references to the blocks."""
        return [future.ref if isinstance(future, Block) else future for future in self.futures]

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """`chunks` futures, each of an equal part of the rows in order; nothing is fetched."""
        index, of = self._part
        parts = [(index * chunks + i, of * chunks) for i in range(chunks)]
        return [
            DataProtoFuture(self.collect_fn, self.futures, self.dispatch_fn, part=part, pad=self._pad) for part in parts
        ]

    def get(self, timeout: float | None = None) -> Any:
        """Fetch the rows, as private copies.

        Raises what the workers raised, Ray's GetTimeoutError after `timeout` seconds, and BatchError when the rows
        do not divide into equal chunks.
        """
        if self.dispatch_fn is None and all(isinstance(future, Block) for future in self.futures):
            return self._get_blocks(timeout)
        joined = self.collect_fn(ray.get(self.refs, timeout=timeout))
        joined = self.dispatch_fn(joined) if self.dispatch_fn else joined
        return joined if (self._part, self._pad[0]) == ((0, 1), 0) else joined[slice(*self._window(len(joined)))]

    def _get_blocks(self, timeout: float | None) -> Any:
        try:
            counts = cast(list[int], ray.get([block.rows for block in self.futures], timeout=timeout))
        except GetTimeoutError:
            raise
        except RayError:
            for ref in ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[0]:
                with contextlib.suppress(RayError):
                    ray.get(ref)  # the same error; Ray reports a failed reference that nobody looks at
            raise
        first, last = self._window(sum(counts))
        picked: list[tuple[Any, int, int]] = []
        offset = 0
        for ref, count in zip(self.refs, counts, strict=True):
            start, stop = max(first - offset, 0), min(last - offset, count)
            if start < stop or (first == last and not picked):  # no rows at all: one empty block says of what kind
                picked.append((ref, start, max(start, stop)))
            offset += count
        values = ray.get([ref for ref, _, _ in picked], timeout=timeout)
        parts = [value[start:stop] for value, (_, start, stop) in zip(values, picked, strict=True)]
        return self.collect_fn(parts)

    def _window(self, total: int) -> tuple[int, int]:
        """First and last (exclusive) of `total` rows that are this future's."""
        index, of = self._part
        total = kept_rows(total, *self._pad)
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
