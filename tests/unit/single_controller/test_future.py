"""What futures know without being fetched. What needs a store is in tests/pipeline/test_groups_futures.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.single_controller import DataProtoFuture
from hocket.single_controller.future import Block, kept_rows, materialize


class Ready(DataProtoFuture):
    """A future of a value that is there."""

    def __init__(self, value):
        super().__init__(None, [])
        self.value = value

    def get(self, timeout=None):
        return self.value


@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 5))
def test_rows_that_answer_to_padding_are_not_kept(real, world, times):
    """D4: also when a method returns several rows for each that it got, or none."""
    pad = -real % world
    assert kept_rows((real + pad) * times, pad, max(real + pad, 1)) == real * times


def test_a_result_with_rows_of_its_own_is_kept_whole():
    assert kept_rows(2, 1, 4) == 2, "one row per worker, say"
    assert kept_rows(7, 0, 1) == 7


def test_a_chunk_of_a_chunk_shares_the_references():
    future = DataProtoFuture(list, [Block("rows 0", "count 0"), "rows 1"])
    parts = [inner for outer in future.chunk(2) for inner in outer.chunk(3)]
    assert len(parts) == 6
    assert all(part.refs == ["rows 0", "rows 1"] for part in parts)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(Ready(1), 1), ([Ready(1), [Ready(2), 3]], [1, [2, 3]]), ((Ready, 1), (Ready, 1)), ("text", "text"), (None, None)],
)
def test_futures_are_replaced_also_in_lists_and_nothing_else_is(value, wanted):
    assert materialize(value) == wanted
