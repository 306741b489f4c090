"""DataProto: what it holds, how it is cut and joined, and that it travels without sharing memory."""

import pickle

import numpy as np
import pytest
import torch

from hocket.data.proto import DataProto, as_column
from hocket.errors import BatchError


def batch(rows=4, width=3, start=0):
    ids = torch.arange(start, start + rows * width).reshape(rows, width)
    uid = [f"p:{start + i}" for i in range(rows)]
    return DataProto.from_dict({"ids": ids, "flag": ids[:, 0] % 2 == 0}, {"uid": uid}, {"step": 1})


def test_from_dict_leaves_its_arguments_alone():
    tensors, columns, meta = {"a": torch.zeros(2)}, {"u": ["x", "y"]}, {"m": 1}
    data = DataProto.from_dict(tensors, columns, meta)
    data.meta_info["m"] = 2
    assert (list(tensors), columns, meta) == (["a"], {"u": ["x", "y"]}, {"m": 1})
    assert len(data) == 2
    assert sorted(data.keys()) == ["a", "u"]


@pytest.mark.parametrize(
    ("tensors", "columns", "text"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, "found rows per tensor {'a': 2, 'b': 3}"),
        ({"a": torch.tensor(1.0)}, {}, "{'a': None}"),
        ({"a": torch.zeros(2)}, {"u": ["x"]}, "column 'u' has 1 rows, the batch has 2"),
        ({}, {"u": ["x"], "v": ["x", "y"]}, "column 'v' has 2 rows, the batch has 1"),
    ],
)
def test_unequal_rows_are_refused(tensors, columns, text):
    with pytest.raises(BatchError) as caught:
        DataProto.from_dict(tensors, columns)
    assert text in caught.value.message


def test_without_tensors_or_without_anything():
    columns = DataProto.from_dict({}, {"u": ["x", "y", "z"]})
    assert (len(columns), len(columns[1:]), len(DataProto())) == (3, 2, 0)
    assert columns.tensors() == {}
    assert [list(part.non_tensor_batch["u"]) for part in columns.split(2)] == [["x", "y"], ["z"]]


def test_a_slice_is_a_view_and_indices_are_a_copy():
    data = batch()
    data[1:3].tensor("ids")[0, 0] = -1
    assert int(data.tensor("ids")[1, 0]) == -1
    data[[1, 2]].tensor("ids")[0, 0] = -2
    assert int(data.tensor("ids")[1, 0]) == -1


def test_a_part_has_facts_of_its_own():
    data = batch()
    data[:2].meta_info["step"] = 9
    assert data.meta_info == {"step": 1}


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (slice(1, None), [1, 2, 3]),
        (slice(None, None, 2), [0, 2]),
        ([3, 0, 0], [3, 0, 0]),
        ([-1], [3]),
        ([True, False, False, True], [0, 3]),
        (np.array([False, True, False, False]), [1]),
        (torch.tensor([2, 1]), [2, 1]),
        ([], []),
        (slice(4, 9), []),
    ],
)
def test_choosing_rows(rows, wanted):
    part = batch()[rows]
    assert part.tensor("ids")[:, 0].tolist() == [3 * i for i in wanted]
    assert part.non_tensor_batch["uid"].tolist() == [f"p:{i}" for i in wanted]
    assert len(part) == len(wanted)


def test_iteration_gives_rows():
    assert [row.non_tensor_batch["uid"] for row in batch(2)] == ["p:0", "p:1"]


def test_chunk_split_and_concat_are_inverse():
    data = batch(6)
    for parts in (data.chunk(3), data.split(4)):
        again = DataProto.concat(parts)
        assert torch.equal(again.tensor("ids"), data.tensor("ids"))
        assert again.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
        assert again.meta_info == data.meta_info
    assert [len(part) for part in data.chunk(3)] == [2, 2, 2]
    assert [len(part) for part in data.split(4)] == [4, 2]
    assert [len(part) for part in data[:0].chunk(2)] == [0, 0]


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: batch(5).chunk(2), "cannot split 5 rows into 2 equal parts; use a multiple of 2"),
        (lambda: batch().chunk(0), "cannot split rows into 0 parts"),
        (lambda: batch().split(0), "blocks of 0 rows"),
        (lambda: DataProto.concat([]), "empty list"),
        (lambda: DataProto.concat([batch(), batch().select(["ids"])]), "part 1 holds ['ids'], part 0 holds"),
        (lambda: DataProto.concat([batch(), batch(width=2)]), "pad rows of different length with"),
        (lambda: DataProto.concat([batch(), retyped()]), "int32"),
        (lambda: batch().union(batch(3)), "batches of 4 and 3 rows"),
        (lambda: batch().union(batch(start=1)), "with different values"),
        (lambda: batch().union(retyped()), "'ids' with different values"),
        (lambda: batch().union(DataProto.from_dict({}, {"ids": [0, 3, 6, 9]})), "['ids']: a tensor in one batch"),
        (lambda: batch().select(["ids", "oops"]), "no ['oops']; it has ['flag', 'ids', 'uid']"),
        (lambda: batch().tensor("oops"), "no tensor 'oops'"),
    ],
)
def test_refusals(act, text):
    with pytest.raises(BatchError) as caught:
        act()
    assert text in caught.value.message


def retyped():
    data = batch()
    return DataProto.from_dict(data.tensors() | {"ids": data.tensor("ids").int()}, data.non_tensor_batch)


def test_repeat_puts_copies_beside_one_another():
    data = batch(2).repeat(3)
    assert data.non_tensor_batch["uid"].tolist() == ["p:0"] * 3 + ["p:1"] * 3
    assert data.tensor("ids")[:, 0].tolist() == [0, 0, 0, 3, 3, 3]
    assert len(batch(2).repeat(0)) == 0


def test_union_takes_in_names_and_leaves_the_other_side_alone():
    left, right = batch(), batch().select([]).union(DataProto.from_dict({"score": torch.ones(4)}, None, {"m": 2}))
    assert left.union(right) is left
    assert sorted(left.keys()) == ["flag", "ids", "score", "uid"]
    assert left.meta_info == {"step": 1, "m": 2}
    assert "ids" not in right.keys()  # noqa: SIM118  (DataProto iterates rows)


def test_union_compares_columns_of_arrays_and_dicts():
    def data(n):
        return DataProto.from_dict({}, {"x": [np.arange(2), np.arange(n)], "row": [{"a": 1}, {"b": [n]}]})

    assert len(data(2).union(data(2))) == 2
    with pytest.raises(BatchError, match="different values"):
        data(2).union(data(3))


@pytest.mark.parametrize(
    "values", [[[1, 2], [3, 4]], [(1,), (2,)], [1, [2, 3]], [None, "x"], ["a", "b"], [{"a": 1}, {}], []]
)
def test_a_column_has_one_entry_per_row(values):
    column = as_column(values)
    assert column.shape == (len(values),)
    assert column.tolist() == values


TENSORS = [
    torch.randn(3, 2),
    torch.randn(3, 2).bfloat16(),
    torch.tensor([True, False, True]),
    torch.arange(6, dtype=torch.int32).reshape(3, 2),
    torch.arange(3),
    torch.zeros(0, 5),
    torch.zeros(3, 0, dtype=torch.int64),
    torch.randn(2, 6)[:, ::2],
    torch.tensor(3.5),
]


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_pickle_round_trip(rows):
    data = batch(4)[:rows].union(DataProto.from_dict({"h": torch.ones(rows, 2).bfloat16()}))
    again = pickle.loads(pickle.dumps(data, protocol=5))
    assert len(again) == rows
    assert {k: (t.dtype, tuple(t.shape)) for k, t in again.tensors().items()} == {
        k: (t.dtype, tuple(t.shape)) for k, t in data.tensors().items()
    }
    assert all(torch.equal(again.tensor(k), data.tensor(k)) for k in data.tensors())
    assert again.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    assert again.meta_info == data.meta_info


def test_a_slice_pickles_only_its_rows():
    data = DataProto.from_dict({"a": torch.zeros(1000, 100)})
    assert len(pickle.dumps(data[:1])) < 5000


def test_what_arrives_is_private_and_writable():
    """L64: a store hands out read-only buffers that all its readers share."""
    data = DataProto.from_dict({"adv": torch.ones(4, 2)}, {"n": np.arange(4), "o": ["a"] * 4})
    buffers = []
    wire = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    first, second = (pickle.loads(wire, buffers=frozen) for _ in range(2))
    first.tensor("adv").sub_(first.tensor("adv").mean())
    first.non_tensor_batch["n"][0] = 7
    first.non_tensor_batch["o"][0] = "b"
    assert bool((second.tensor("adv") == 1).all())
    assert (second.non_tensor_batch["n"][0], second.non_tensor_batch["o"][0]) == (0, "a")
    assert bool((data.tensor("adv") == 1).all())


def test_to_a_device_keeps_everything_else():
    moved = batch().to("cpu")
    assert torch.equal(moved.tensor("ids"), batch().tensor("ids"))
    assert moved.non_tensor_batch["uid"].tolist() == ["p:0", "p:1", "p:2", "p:3"]


def test_a_column_set_directly_is_checked_where_rows_are_taken():
    """Old trap: columns set by hand with too few rows were cut into parts of other sizes without a word."""
    data = DataProto.from_dict({"x": torch.arange(4)})
    data.non_tensor_batch["q"] = np.array([1])
    for use in (lambda: data.chunk(2), lambda: data[1:3], lambda: DataProto.concat([data, data])):
        with pytest.raises(BatchError, match="column 'q' has 1 rows, the batch has 4"):
            use()
