"""Which rows go to which worker, so that all workers have about the same number of tokens to compute.

The better of two results. Differencing: N. Karmarkar, R. M. Karp, "The Differencing Method of Set Partitioning",
report UCB/CSD 82/113, Berkeley 1982; with equal counts it starts from groups of k rows of neighbouring length, one for
each part: W. Michiels, J. Korst, E. Aarts, J. van Leeuwen, "Performance Ratios for the Differencing Method Applied to
the Balanced Number Partitioning Problem", STACS 2003. Then every part gets one row of each size class, which is far
from even when a few rows are very long. Longest first, each to the smallest part with room: R. L. Graham, "Bounds on
Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17, 1969.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush

from hocket.data.rows import blocks
from hocket.errors import BatchConflict

Part = tuple[int, list[int]]  # sum of lengths, row numbers


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = True
) -> list[list[int]]:
    """`k_partitions` lists of row numbers, ascending, whose sums of lengths are close; none of them is empty.

    With `equal_size` all have the same number of rows. The largest sum is never above that of `k_partitions` blocks
    of adjoining rows. Use: `data.reorder(torch.tensor([row for part in parts for row in part]))`, then chunk.

    Raises BatchConflict when there are fewer rows than parts, or rows that do not divide with `equal_size`.
    """
    rows, k = len(seqlen_list), k_partitions
    if k < 1 or rows < k or (equal_size and rows % k):
        wanted = f"a multiple of {k}" if equal_size else f"at least {k}"
        raise BatchConflict(f"cannot balance {rows} rows over {k} parts; give {wanted}")
    lengths = [int(length) for length in seqlen_list]
    found = [[list(range(block.start, block.stop)) for block in blocks(rows, k, uneven=True)]]
    found += [_differencing(lengths, k, equal=equal_size)]
    found += [_longest_first(lengths, k)] if equal_size else []
    return min(found, key=lambda parts: max(sum(lengths[row] for row in part) for part in parts))


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> list[list[int]]:
    """As `get_seqlen_balanced_partitions` with equal sizes, and rows of one uid stay in one part.

    Raises BatchConflict when uids have different numbers of rows, or their number does not divide.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(uid_list):
        groups.setdefault(uid, []).append(row)
    members = list(groups.values())
    if len(uid_list) != len(seqlen_list) or len({len(rows) for rows in members}) > 1:
        sizes = sorted({len(rows) for rows in members})
        raise BatchConflict(
            f"{len(seqlen_list)} lengths, groups of {sizes} rows; give one uid a row, as often as others"
        )
    sums = [sum(int(seqlen_list[row]) for row in rows) for rows in members]
    parts = get_seqlen_balanced_partitions(sums, k_partitions)
    return [sorted(row for group in part for row in members[group]) for part in parts]


def _differencing(lengths: Sequence[int], k: int, *, equal: bool) -> list[list[int]]:
    """Join the two most uneven partial solutions, large parts with small ones, until one is left."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)
    step = k if equal else 1
    firsts = [[(lengths[row], [row]) for row in order[i : i + step]] for i in range(0, len(order), step)]
    heap = [_entry(number, [*parts, *[(0, [])] * (k - len(parts))]) for number, parts in enumerate(firsts)]
    heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        (_, _, first), (_, _, second) = heappop(heap), heappop(heap)
        joined = [(a + b, [*rows, *more]) for (a, rows), (b, more) in zip(first, reversed(second), strict=True)]
        heappush(heap, _entry(number, joined))
    return [sorted(rows) for _, rows in heap[0][2]]


def _entry(number: int, parts: list[Part]) -> tuple[int, int, list[Part]]:
    """For the heap: the most uneven first, then the oldest; parts from large to small."""
    parts = sorted(parts, key=lambda part: (part[0], len(part[1])), reverse=True)
    return parts[-1][0] - parts[0][0], number, parts


def _longest_first(lengths: Sequence[int], k: int) -> list[list[int]]:
    """Each row, from long to short, to the part of the smallest sum that is not full."""
    parts: list[list[int]] = [[] for _ in range(k)]
    heap = [(0, i) for i in range(k)]
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True):
        total, i = heappop(heap)
        parts[i].append(row)
        if len(parts[i]) < len(lengths) // k:
            heappush(heap, (total + lengths[row], i))
    return [sorted(rows) for rows in parts]
