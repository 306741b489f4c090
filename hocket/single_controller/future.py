"""Results that are still with the workers: a future travels to other workers without passing the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import accumulate, pairwise
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
    """Of `total` rows of a result those that answer to real input, when the last `pad` of `padded` input rows did not.

    A method may return several rows per input row; a result that is no multiple of its input is kept whole.
    """
    return total if total % padded else total - pad * (total // padded)


@dataclass(eq=False)
class DataProtoFuture:
    """Rows that lie in blocks behind references, one per worker that made them, in order.

    `collect_fn` joins a list of what the references give, `dispatch_fn` picks from the joined rows. Of `futures` that
    are Blocks a chunk fetches only those with its rows. `part` is (number of the chunk, of how many), `pad` is (rows
    that were added to the input, rows with them).
    """

    collect_fn: Callable[[Any], Any]
    futures: Sequence[Any]
    dispatch_fn: Callable[[Any], Any] | None = None
    _: KW_ONLY
    part: tuple[int, int] = (0, 1)
    pad: tuple[int, int] = (0, 1)

    @property
    def refs(self) -> list[Any]:
        """The references to the blocks."""
        return [future.ref if isinstance(future, Block) else future for future in self.futures]

    def chunk(self, chunks: int, *, padded: bool = False) -> list[DataProtoFuture]:
        """`chunks` futures of equal parts of the rows in order, with the padding or without; nothing is fetched."""
        (index, of), pad = self.part, (0, 1) if padded else self.pad
        return [replace(self, part=(index * chunks + i, of * chunks), pad=pad) for i in range(chunks)]

    def get(self, timeout: float = 3600) -> Any:
        """Fetch the rows, as private copies.

        Raises what the workers raised, WorkerDied after `timeout` seconds, BatchError for rows that do not divide.
        """
        if self.dispatch_fn is None and all(isinstance(future, Block) for future in self.futures):
            return self._get_blocks(timeout)
        joined = self.collect_fn(self._wait(self.refs, timeout))
        joined = self.dispatch_fn(joined) if self.dispatch_fn else joined
        return joined if (self.part, self.pad[0]) == ((0, 1), 0) else joined[slice(*self._window(len(joined)))]

    def _get_blocks(self, timeout: float) -> Any:
        ends = list(accumulate(self._wait([block.rows for block in self.futures], timeout), initial=0))
        first, last = self._window(ends[-1])
        rows = [(max(first - start, 0), min(last, end) - start) for start, end in pairwise(ends)]
        # of no rows at all the first block says what kind they are
        picked = [i for i, (start, stop) in enumerate(rows) if start < stop] or [0]
        values = self._wait([self.refs[i] for i in picked], timeout)
        return self.collect_fn([value[slice(*rows[i])] for i, value in zip(picked, values, strict=True)])

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
        index, of = self.part
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
