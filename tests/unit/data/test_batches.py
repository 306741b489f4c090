"""The one place for batches of any type: which there are, how they are cut and joined, what they weigh."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.data import batches
from hocket.data.merge import same
from hocket.data.proto import DataProto
from hocket.data.tensordict_utils import get_tensordict, nested_tensor_from_tensor_list
from hocket.errors import BatchConflict


class Keys:
    """A batch type of a user: names of rows that lie elsewhere."""

    def __init__(self, names):
        self.names = names

    def __getitem__(self, rows):
        return Keys(self.names[rows])


class MoreKeys(Keys):
    pass


batches.register_batch_type(
    Keys,
    chunk=lambda keys, n: [Keys(list(part)) for part in np.array_split(keys.names, n)],
    concat=lambda parts: Keys([name for part in parts for name in part.names]),
)


def proto(rows):
    return DataProto.from_dict({"n": torch.arange(rows)})


def tensordict(rows):
    nested = [torch.arange(i + 1.0) for i in range(rows)]
    positions = [torch.arange(i + 1).expand(2, i + 1) for i in range(rows)]
    entries = {"n": torch.arange(rows), "name": [f"r{i}" for i in range(rows)]}
    if rows:
        entries |= {"2-D": nested_tensor_from_tensor_list(nested), "3-D": nested_tensor_from_tensor_list(positions)}
    return get_tensordict(entries, {"temp": 1.0})


def numbers(batch):
    return batch["n"].tolist() if not isinstance(batch, DataProto) else batch.tensor("n").tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.sampled_from([proto, tensordict]))
def test_chunks_joined_give_the_whole(count, per_part, make):
    whole = make(count * per_part)
    parts = batches.chunk(whole, count)
    assert [numbers(part) for part in parts] == [list(range(i * per_part, (i + 1) * per_part)) for i in range(count)]
    joined = batches.concat(parts)
    assert numbers(joined) == numbers(whole)
    if make is tensordict:
        assert same(joined, whole)
        assert all(part["temp"] == 1.0 for part in parts)
        assert not per_part or {part["3-D"]._ragged_idx for part in parts} == {2}


@pytest.mark.parametrize("make", [proto, tensordict])
def test_rows_of_any_type(make):
    assert numbers(batches.rows(make(5), 1, 3)) == [1, 2]
    assert numbers(batches.rows(make(5), 2, 2)) == []


def test_a_registered_type_and_its_subclasses_are_batches():
    keys = MoreKeys(["a", "b", "c"])
    assert batches.is_batch(keys)
    parts = batches.chunk(keys, 2)
    assert [part.names for part in parts] == [["a", "b"], ["c"]]
    assert batches.concat(parts).names == ["a", "b", "c"]
    assert batches.rows(keys, 1, 3).names == ["b", "c"]


def test_what_is_a_batch():
    assert all(map(batches.is_batch, [proto(1), tensordict(1), Keys([])]))
    assert not any(map(batches.is_batch, [[1, 2], {"a": torch.ones(2)}, torch.ones(2), np.ones(2), None, "text"]))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: batches.chunk([1, 2], 2), "a list is no batch; pass a DataProto or TensorDict"),
        (lambda: batches.chunk(proto(3), 2), "3 rows into 2 equal parts"),
        (lambda: batches.chunk(tensordict(3), 2), "3 rows into 2 equal parts"),
        (lambda: batches.concat([]), "parts of types []; give at least one"),
        (lambda: batches.concat([proto(1), tensordict(1)]), "types ['DataProto', 'TensorDict']"),
        (lambda: batches.concat([proto(1), 3]), "a int is no batch"),
        (lambda: batches.concat([tensordict(1), get_tensordict({"n": torch.ones(1)})]), "part 1 holds ['n']"),
    ],
)
def test_refusals(act, text):
    with pytest.raises(BatchConflict) as caught:
        act()
    assert text in caught.value.message


def test_a_type_that_cuts_wrongly_is_named():
    class Torn:
        pass

    batches.register_batch_type(Torn, chunk=lambda value, n: [value], concat=lambda parts: parts[0])
    with pytest.raises(BatchConflict, match="Torn was cut into 1 parts, wanted 2"):
        batches.chunk(Torn(), 2)


def test_weights(store):
    """Near the bytes that travel, whatever holds them; nothing is opened for it."""
    big = DataProto.from_dict({"x": torch.zeros(100, 1000)}, {"o": [np.zeros(1000)] * 100, "n": np.zeros(100)})
    arrived = store.put(big)()
    for value in (big, arrived, [big], {"a": (big,)}):
        assert batches.nbytes(value) == pytest.approx(400_000 + 800_000 + 800, rel=0.01)
    assert type(arrived.leaves()["x"]).__name__ == "FrozenTensor"
    assert batches.nbytes(tensordict(1000)) > 4 * 500_000 + 2 * 8 * 500_000
    assert batches.nbytes(b"x" * 1000) == 1000
    assert batches.nbytes([b"x" * 1000] * 5000) == pytest.approx(5_000_000, rel=0.01)
    assert max(batches.nbytes(value) for value in (None, 3, [], {}, Keys([]))) <= 64
    ring: list = []
    ring.append(ring)
    assert batches.nbytes(ring) < 1000
