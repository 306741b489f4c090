"""Balanced parts: a partition with equal counts, never worse than blocks of adjoining rows, groups kept whole."""

import random
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.data.balance import get_group_balanced_partitions, get_seqlen_balanced_partitions
from hocket.data.proto import DataProto
from hocket.errors import BatchConflict


def largest(lengths, parts):
    return max(sum(lengths[row] for row in part) for part in parts)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 6), st.booleans())
def test_parts_are_a_partition_of_equal_counts_and_never_worse_than_blocks(data, k, equal):
    per_part = data.draw(st.integers(1, 8))
    rows = k * per_part if equal else data.draw(st.integers(k, 8 * k))
    lengths = data.draw(st.lists(st.integers(0, 5000), min_size=rows, max_size=rows))
    parts = get_seqlen_balanced_partitions(lengths, k, equal)
    assert sorted(row for part in parts for row in part) == list(range(rows))
    assert all(part and part == sorted(part) for part in parts)
    assert not equal or {len(part) for part in parts} == {per_part}
    if equal:
        blocks = [list(range(i * per_part, (i + 1) * per_part)) for i in range(k)]
        assert largest(lengths, parts) <= largest(lengths, blocks)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=4, max_size=8).filter(lambda x: len(x) % 2 == 0))
def test_two_parts_are_near_the_best_there_is(lengths):
    """Against all ways to halve the rows: the sum above the best is at most the largest length."""
    total, half = sum(lengths), len(lengths) // 2
    best = min(max(sum(pick), total - sum(pick)) for pick in combinations(lengths, half))
    assert largest(lengths, get_seqlen_balanced_partitions(lengths, 2)) <= best + max(lengths)


def test_a_few_very_long_rows_do_not_spoil_the_balance():
    """Differencing alone ends 20 % above the mean here."""
    noise = random.Random(2)
    lengths = [int(noise.lognormvariate(6, 1)) for _ in range(1024)]
    assert largest(lengths, get_seqlen_balanced_partitions(lengths, 16)) < 1.01 * sum(lengths) / 16


def test_lengths_that_balance_exactly_do():
    lengths = [100, 1, 100, 1, 50, 51, 50, 51]
    parts = get_seqlen_balanced_partitions(lengths, 4)
    assert {sum(lengths[row] for row in part) for part in parts} == {101}
    data = DataProto.from_dict({"length": torch.tensor(lengths)})
    data.reorder(torch.tensor([row for part in parts for row in part]))
    assert [int(block.tensor("length").sum()) for block in data.chunk(4)] == [101] * 4


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_groups_stay_whole(data, k, per_part, size):
    uids = data.draw(st.permutations([group for group in range(k * per_part) for _ in range(size)]))
    lengths = data.draw(st.lists(st.integers(0, 999), min_size=len(uids), max_size=len(uids)))
    parts = get_group_balanced_partitions(lengths, uids, k)
    assert sorted(row for part in parts for row in part) == list(range(len(uids)))
    assert {len(part) for part in parts} == {per_part * size}
    owners = [{uids[row] for row in part} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: get_seqlen_balanced_partitions([1, 2, 3], 2), "3 rows over 2 parts; give a multiple of 2"),
        (lambda: get_seqlen_balanced_partitions([1], 2, False), "1 rows over 2 parts; give at least 2"),
        (lambda: get_seqlen_balanced_partitions([1], 0), "over 0 parts"),
        (lambda: get_group_balanced_partitions([1, 2, 3], "aab", 1), "groups of [1, 2] rows"),
        (lambda: get_group_balanced_partitions([1, 2, 3], "ab", 1), "3 lengths"),
        (lambda: get_group_balanced_partitions([1, 2], "ab", 4), "2 rows over 4 parts"),
    ],
)
def test_refusals(act, text):
    with pytest.raises(BatchConflict) as caught:
        act()
    assert text in caught.value.message
