"""DataProto's names and results are veRL's; where that has a trap, the test names it and shows our answer."""

import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import distributed

from hocket.data.merge import same
from hocket.data.proto import DataProto, DataProtoConfig
from hocket.data.reshape import (
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from hocket.data.rows import DataProtoItem
from hocket.errors import BatchConflict, BatchLookup

NAN = float("nan")


def batch(rows=4, **meta):
    tensors = {"x": torch.arange(rows * 2.0).reshape(rows, 2), "n": torch.arange(rows)}
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(rows)]}, meta)


def numbers(data):
    return data.batch["n"].tolist()


def empty_handed(rows=3):
    """Columns and facts, no tensors."""
    return DataProto.from_dict(non_tensors={"uid": [f"u{i}" for i in range(rows)]}, meta_info={"m": 1})


# -- what it may hold


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DataProto(TensorDict({"a": torch.zeros(2, 3)}, [2, 3])), "found batch size (2, 3)"),
        (lambda: DataProto(TensorDict({}, [2]), {"u": np.zeros(3)}), "'u' has 3 rows, the batch has 2"),
        (lambda: DataProto(None, {"u": [1, 2]}), "'u' is a list, not a numpy array"),
        (lambda: DataProto(None, {"u": np.zeros(2), "v": np.zeros(3)}), "'v' has 3 rows"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2, 2)}, num_batch_dims=2), "one batch axis, not 2"),
        (lambda: DataProto.from_single_dict({"x": [1]}), "['x'] are neither"),
    ],
)
def test_broken_invariants_are_assertion_errors(make, text):
    """veRL does not compare lengths of columns when there are no tensors."""
    with pytest.raises(AssertionError) as caught:
        make()
    assert text in caught.value.message


def test_the_callers_containers_stay_as_they_were():
    """veRL turns lists into arrays inside the caller's dict, and keeps the dict that it is given."""
    columns, meta, tensors = {"u": ["a", "b"]}, {"m": 1}, {"x": torch.zeros(2)}
    data = DataProto.from_dict(tensors, columns, meta)
    direct = DataProto(data.batch, data.non_tensor_batch, meta)
    for one in (data, direct):
        one.meta_info["m"] = 2
        one.pop(["x"], ["u"], ["m"])
    assert (columns, meta, list(tensors)) == ({"u": ["a", "b"]}, {"m": 1}, ["x"])


def test_rows_of_lists_stay_rows_whatever_their_lengths():
    """veRL makes a matrix of equally long lists, so that shapes depend on values and parts may not join."""
    even, odd = (DataProto.from_dict(non_tensors={"turns": t}) for t in ([[1, 2], [3, 4]], [[1], [2, 3]]))
    joined = DataProto.concat([even, odd])
    assert joined.non_tensor_batch["turns"].tolist() == [[1, 2], [3, 4], [1], [2, 3]]


def test_single_dict_to_tensordict_and_back():
    data = DataProto.from_single_dict({"x": torch.ones(2), "u": np.array(["a", "b"])}, {"m": {"k": [1]}})
    again = DataProto.from_tensordict(data.to_tensordict(), {"more": 2})
    assert again.non_tensor_batch["u"].tolist() == ["a", "b"]
    assert again.meta_info == {"m": {"k": [1]}, "more": 2}
    assert again.tensor("x").tolist() == [1, 1]
    bare = DataProto.from_tensordict(empty_handed().to_tensordict())  # an AttributeError in veRL
    assert (bare.batch, bare.non_tensor_batch["uid"].tolist(), bare.meta_info) == (None, ["u0", "u1", "u2"], {"m": 1})
    data.meta_info["x"] = 1
    with pytest.raises(AssertionError, match=r"\['x'\] are names of several things"):
        data.to_tensordict()


# -- rows


def test_an_int_gives_an_item_and_iteration_gives_items():
    data = batch(3, m=1)
    assert isinstance(data[np.int64(-1)], DataProtoItem)
    assert (data[-1].batch["n"].item(), data[-1].non_tensor_batch["uid"]) == (2, "u2")
    assert data[0].meta_info is data.meta_info
    assert [item.batch["n"].item() for item in data] == [0, 1, 2]
    assert [item.batch for item in empty_handed()] == [None] * 3
    again = collate_fn(list(data))
    assert same(again.tensors(), data.tensors())
    assert again.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2"]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_rows_are_chosen_as_numpy_does(data, rows):
    row = st.integers(-rows, rows - 1)
    index = data.draw(
        st.one_of(
            st.lists(row, max_size=8),
            st.lists(st.booleans(), min_size=rows, max_size=rows),
            st.lists(row, min_size=1, max_size=8).map(np.array),
            st.lists(row, min_size=1, max_size=8).map(torch.tensor),
            st.lists(st.booleans(), min_size=rows, max_size=rows).map(torch.tensor),
            st.lists(row, min_size=1, max_size=8).map(lambda x: np.array(x, np.int8)),
            st.slices(rows),
        )
    )
    plain = index.numpy() if isinstance(index, torch.Tensor) else index
    wanted = np.arange(rows)[plain if isinstance(plain, slice) or len(plain) else slice(0)].tolist()
    for source in (batch(rows), pickle.loads(pickle.dumps(batch(rows))), batch(rows).select(["n"])):
        part = source[index]
        assert part.batch["n"].tolist() == wanted
        assert part.batch.batch_size == torch.Size([len(wanted)])
        assert part.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in wanted]
        assert len(part) == len(wanted)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (torch.tensor(1), IndexError),
        (4, IndexError),
        (-5, IndexError),
        ([0, 4], IndexError),
        ([-5], IndexError),
        ([True, False], IndexError),
        ([0.5], IndexError),
        (np.zeros((2, 2), int), IndexError),
        ((0, 1), TypeError),
        ("x", TypeError),
        (None, TypeError),
    ],
)
def test_rows_that_are_not_there(index, error):
    with pytest.raises(error):
        batch()[index]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 12), st.integers(1, 5), st.booleans(), st.booleans())
def test_chunks_and_splits_joined_give_the_whole(rows, count, padding, arrived):
    """With padding on, veRL's chunk fails or gives fewer chunks when the rows do not divide."""
    data = batch(rows, m=[1, {"k": np.zeros(2)}])
    data.meta_info |= {DataProtoConfig.auto_padding_key: True} if padding else {}
    data = pickle.loads(pickle.dumps(data)) if arrived else data
    parts = data.split(count)
    assert [len(part) for part in parts] == [count] * (rows // count) + [rows % count] * bool(rows % count)
    if rows % count and not padding:
        with pytest.raises(AssertionError, match=f"{rows} rows into {count} equal parts"):
            data.chunk(count)
    else:
        chunks = data.chunk(count)
        sizes = [len(chunk) for chunk in chunks]
        assert len(chunks) == count
        assert max(sizes) - min(sizes) <= 1
        parts = chunks
    if parts:
        joined = DataProto.concat(parts)
        assert same(joined.tensors(), data.tensors())
        assert same(joined.non_tensor_batch, data.non_tensor_batch)
        assert same(joined.meta_info, data.meta_info)


def test_neighbours_are_joined_without_a_copy():
    """The joined batch is a view: it and the parent see each other's changes."""
    data = batch(6)
    joined = DataProto.concat(data.chunk(3)[1:])
    assert joined.tensor("x").data_ptr() == data.tensor("x")[2:].data_ptr()
    joined.tensor("x")[0] = -1
    assert data.tensor("x")[2].tolist() == [-1, -1]
    first, second, third = data.chunk(3)
    for parts in ([second, first], [first, third], [first, first], [first, third[:0], second]):
        rows = [i for part in parts for i in numbers(part)]
        joined = DataProto.concat(parts)
        assert numbers(joined) == rows
        joined.tensor("x").fill_(7)
        assert data.tensor("x")[0, 0] == 0


def test_joined_parts_keep_their_gradient():
    leaf = torch.ones(4, 2, requires_grad=True)
    parts = DataProto.from_dict({"x": leaf * 2}).chunk(2)
    DataProto.concat(parts).tensor("x").sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[2, 2]] * 4


def test_concat_of_nothing_and_of_empty_batches():
    """veRL: an IndexError for no parts, a TypeError when only some have tensors."""
    with pytest.raises(ValueError, match="empty list"):
        DataProto.concat([])
    assert len(DataProto.concat([DataProto(), DataProto()])) == 0
    assert numbers(DataProto.concat([batch(0), batch(2), batch(0)])) == [0, 1]
    assert len(DataProto.concat([empty_handed(1), empty_handed(2)])) == 3
    with pytest.raises(AssertionError, match="part 1 holds"):
        DataProto.concat([batch(), empty_handed()])
    with pytest.raises(AssertionError, match="some parts have a batch"):
        DataProto.concat([batch().select([], ["uid"]), empty_handed()])
    with pytest.raises(AssertionError, match=r"part 1 holds columns \[\]"):
        DataProto.concat([batch(), batch().select(None, [])])
    with pytest.raises(AssertionError, match="column 'u' in shapes"):
        DataProto.concat([DataProto(None, {"u": np.zeros((2, n))}) for n in (1, 2)])


def test_facts_are_compared_by_value():
    """veRL: arrays among the facts break concat, NaN differs from NaN, a float of another rounding aborts it."""
    facts = {"grid": np.array([1.0, NAN]), "loss": NAN, "w": torch.ones(2), "time": 0.1 + 0.2}
    joined = DataProto.concat([batch(**facts), batch(**(facts | {"time": 0.3, "own": 1}))])
    assert joined.meta_info["own"] == 1
    assert len(batch(**facts).union(batch(**facts)).meta_info) == 4
    for other in ({"grid": np.array([1.0, 2.0])}, {"loss": 1.0}, {"w": torch.zeros(2)}, {"time": 0.31}):
        with pytest.raises(AssertionError, match="Conflicting values for meta_info key"):
            DataProto.concat([batch(**facts), batch(**(facts | other))])


def test_metrics_are_collected_once():
    """veRL nests the lists when parts are joined again, and refuses parts that measured different things."""
    first = DataProto.concat([batch(metrics={"loss": 1.0}), batch(metrics=[{"loss": 2.0, "kl": 0.5}])])
    assert first.meta_info["metrics"] == {"loss": [1.0, 2.0], "kl": [0.5]}
    again = DataProto.concat([first, batch(), batch(metrics={"loss": 3.0})])
    assert again.meta_info["metrics"] == {"loss": [1.0, 2.0, 3.0], "kl": [0.5]}
    assert DataProto.concat([again]).meta_info["metrics"] == again.meta_info["metrics"]
    assert first.meta_info["metrics"] == {"loss": [1.0, 2.0], "kl": [0.5]}


def test_repeats():
    data = batch(3)
    assert numbers(data.repeat()) == [0, 0, 1, 1, 2, 2]
    assert numbers(data.repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    for times in ([2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])):
        assert numbers(data.sample_level_repeat(times)) == [0, 0, 2]
    for wrong in ([1, 2], [1, 1, -1], torch.ones(3, 1, dtype=torch.int64)):
        with pytest.raises(AssertionError):
            data.sample_level_repeat(wrong)
    tagged = DataProto(TensorDict({"n": torch.arange(2)}, [2], device="cpu"))
    assert tagged.repeat(2).batch.device == torch.device("cpu")  # lost in veRL
    assert len(empty_handed().repeat(2)) == 6


def test_unfolding_columns():
    """veRL: a TypeError without keys when there are columns."""
    data = DataProto.from_dict({"x": torch.arange(8).reshape(2, 4)}, {"u": [["a", "b"], ["c", "d"]], "v": ["p", "q"]})
    out = data.unfold_column_chunks(2, ["x", "u"])
    assert out.tensor("x").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert out.non_tensor_batch["u"].tolist() == [["a"], ["b"], ["c"], ["d"]]
    assert out.non_tensor_batch["v"].tolist() == ["p", "p", "q", "q"]
    numeric = DataProto.from_dict(non_tensors={"u": np.arange(4).reshape(2, 2)}).unfold_column_chunks(2, ["u"])
    assert (numeric.non_tensor_batch["u"].dtype, numeric.non_tensor_batch["u"].shape) == (np.int64, (4, 1))
    assert data.unfold_column_chunks(2).tensor("x").tolist() == data.repeat(2).tensor("x").tolist()
    for keys, n in ((["x"], 3), (["v"], 2)):
        with pytest.raises(AssertionError, match="cannot be cut"):
            data.unfold_column_chunks(n, keys)


def test_folding_changes_only_the_result():
    """veRL reshapes the source's columns too."""
    data = batch(6)
    folded = fold_batch_dim(data, 3)
    assert (folded.tensor("x").shape, folded.non_tensor_batch["uid"].shape, len(folded)) == ((3, 2, 2), (3, 2), 3)
    assert data.non_tensor_batch["uid"].shape == (6,)
    assert same(unfold_batch_dim(folded).tensors(), data.tensors())
    assert len(unfold_batch_dim(fold_batch_dim(batch(0), 1))) == 0
    assert len(unfold_batch_dim(fold_batch_dim(empty_handed(4), 2))) == 4  # without a batch: an error in veRL
    with pytest.raises(AssertionError, match="6 rows do not fold into 4"):
        fold_batch_dim(data, 4)


def test_reorder_and_padding_are_in_place():
    for make in (batch, empty_handed):  # without a batch: errors in veRL
        data = make(3)
        assert data.reorder(torch.tensor([2, 0, 1])) is None
        assert data.non_tensor_batch["uid"].tolist() == ["u2", "u0", "u1"]
        assert data.padding(2) is None
        data.padding(1, "first")
        assert data.non_tensor_batch["uid"].tolist() == ["u2", "u0", "u1", "u1", "u1", "u2"]
    with pytest.raises(IndexError):
        batch(0).padding(1)


@given(st.integers(0, 9), st.integers(1, 5))
def test_padding_to_a_multiple_never_alters_the_caller(rows, divisor):
    data = batch(rows, metrics={"loss": 1.0})
    padded, pad = pad_dataproto_to_divisor(data, divisor)
    assert (len(padded), len(data)) == (rows + pad, rows)
    assert len(padded) % divisor == 0
    assert pad < divisor
    assert numbers(padded) == [i % rows for i in range(rows + pad)]
    assert padded.meta_info == {"metrics": {"loss": 1.0}}  # rewritten in veRL
    assert same(unpad_dataproto(padded, pad).tensors(), data.tensors())
    if pad:
        padded.tensor("x").fill_(-1)
        padded.non_tensor_batch["uid"][:] = "changed"
    assert same(data.tensors(), batch(rows).tensors())
    assert same(data.non_tensor_batch, batch(rows).non_tensor_batch)


def test_mini_batches():
    data = batch(6, m=1)
    assert [numbers(part) for part in data.make_iterator(3, epochs=2)] == [[0, 1, 2], [3, 4, 5]] * 2
    shuffled = [
        [numbers(part) for part in data.make_iterator(2, 2, seed=s, dataloader_kwargs={"shuffle": True})]
        for s in (1, 1, 2)
    ]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(row for part in shuffled[0][:3] for row in part) == list(range(6))
    assert next(iter(data.make_iterator(3, 1))).meta_info == {"m": 1}
    with pytest.raises(AssertionError, match="6 rows do not divide into mini-batches of 4"):
        data.make_iterator(4, 1)


def test_auto_padding_is_asked_for_by_batch_process_or_environment():
    assert not batch().is_padding_enabled()
    assert DataProto.from_dict({"x": torch.zeros(2)}, auto_padding=True).is_padding_enabled()
    assert DataProto.from_single_dict({"x": torch.zeros(2)}, auto_padding=True)[:1].is_padding_enabled()
    try:
        DataProtoConfig.auto_padding = True
        assert batch().is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    try:
        os.environ["HOCKET_AUTO_PADDING"] = "true"
        assert batch().is_padding_enabled()
    finally:
        del os.environ["HOCKET_AUTO_PADDING"]
    with pytest.raises(TypeError):
        DataProtoConfig.auto_padding = 1


# -- names


def test_select_shares_tensors_and_no_container():
    """Without keys, veRL gives back the very same containers: a pop from one empties the other."""
    data = batch(2, m=[1])
    chosen = data.select()
    assert chosen.tensor("x") is data.tensor("x")
    chosen.pop(["x"], ["uid"], ["m"])
    chosen.batch["n"] = torch.zeros(2)
    assert (sorted(data.keys()), data.meta_info) == (["n", "uid", "x"], {"m": [1]})
    assert numbers(data) == [0, 1]
    assert data.select(["n"], [], []).keys() == ["n"]
    assert data.select([]).batch.batch_size == torch.Size([2])
    deep = data.select(deepcopy=True)
    deep.meta_info["m"].append(2)
    deep.non_tensor_batch["uid"][0] = "x"
    assert (data.meta_info, data.non_tensor_batch["uid"][0]) == ({"m": [1]}, "u0")
    assert data.select(["n"], ["nothing"], ["nothing"]).keys() == ["n"]
    with pytest.raises(KeyError, match=r"the batch has no \['oops'\]; it has \['n', 'uid', 'x'\]"):
        data.select(["oops"])


def test_pop_moves_all_or_nothing():
    data = batch(2, m=1)
    for keys in ((["x", "oops"],), (["x"], ["oops"]), (["x"], None, ["oops"])):
        with pytest.raises(AssertionError, match="oops"):
            data.pop(*keys)
    out = data.pop(["x"], ["uid"], ["m"])
    assert (out.keys(), out.meta_info, data.keys(), data.meta_info) == (["x", "uid"], {"m": 1}, ["n"], {})
    assert data.pop(["n"]).keys() == ["n"]
    assert (len(data), data.pop().batch) == (2, None)


def test_rename():
    data = batch(2)
    assert data.rename("x", "y").rename(["y", "n"], ["n", "y"]) is data
    assert data.tensor("y").tolist() == [0, 1]
    for old, new, error in (
        ("x", "z", KeyError),
        (["y", "n"], ["z"], ValueError),
        ("y", "n", ValueError),
        (None, "z", TypeError),
        (3, "z", TypeError),
    ):
        with pytest.raises(error):
            data.rename(old, new)
    assert sorted(data.keys()) == ["n", "uid", "y"]


def test_union_is_all_or_nothing():
    """veRL leaves the new tensors in when the facts then turn out to differ."""
    data = batch(2, m=1)
    for other in (
        DataProto.from_dict({"new": torch.ones(2)}, {"own": ["a", "b"]}, {"m": 2}),
        DataProto.from_dict({"new": torch.ones(2)}, {"uid": ["a", "b"]}),
        DataProto.from_dict({"new": torch.ones(2), "n": torch.ones(2)}),
        DataProto.from_dict({"new": torch.ones(2), "n": torch.arange(2.0)}),
        DataProto.from_dict({"new": torch.ones(2), "uid": torch.ones(2)}),
        DataProto.from_dict({"new": torch.ones(3)}),
    ):
        with pytest.raises(AssertionError):
            data.union(other)
        assert sorted(data.keys()) == ["n", "uid", "x"]
        assert data.meta_info == {"m": 1}


def test_union_takes_nan_for_nan_and_needs_no_batch():
    """In veRL NaN differs from NaN, and a side without tensors is an AttributeError."""
    left, right = (DataProto.from_dict({"x": torch.tensor([1.0, NAN])}, {"u": [NAN, {"a": NAN}]}) for _ in range(2))
    assert left.union(right) is left
    assert left.union(DataProto(meta_info={"m": 1})).meta_info == {"m": 1}
    assert empty_handed(2).union(left).tensor("x").shape == (2,)
    assert sorted(left.union(empty_handed(2)).keys()) == ["u", "uid", "x"]
    assert DataProto().union(left).tensor("x").shape == (2,)


# -- elsewhere


def test_to_is_in_place():
    data = batch(2)
    assert data.to("cpu") is data
    assert data.batch.device == torch.device("cpu")
    assert empty_handed().to("cpu").batch is None
    assert data.to("meta").tensor("x").device.type == "meta"


def test_files_sizes_and_descriptions(tmp_path, capsys):
    data = batch(3, m=1)
    data.save_to_disk(tmp_path / "batch.pkl")
    again = DataProto.load_from_disk(tmp_path / "batch.pkl")
    assert same(again.tensors(), data.tensors())
    assert again.meta_info == {"m": 1}
    data.print_size("now:")
    assert capsys.readouterr().out == "now: tensors: 0.000 GiB, columns: 0.000 GiB\n"
    assert data.get_data_info().splitlines() == [
        "3 rows", "x: torch.float32 (3, 2)", "n: torch.int64 (3,)", "uid: object (3,)", "m: int"
    ]  # fmt: skip
    assert empty_handed().get_data_info().splitlines()[0] == "3 rows"
    assert repr(data) == "DataProto(3 rows of ['x', 'n', 'uid'], meta_info ['m'])"


def test_lists_of_dicts():
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == {"a": [1, 3], "b": [2, 4]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(BatchConflict, match=r"dict 1 has the names \['a'\], dict 0 \['a', 'b'\]"):
        list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3}])


def _gather(rank, path, results):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    data = batch(rank + 1, rank=rank)
    all_gather_data_proto(data, distributed.group.WORLD)
    results.put((rank, numbers(data), data.non_tensor_batch["uid"].tolist(), data.meta_info))
    distributed.destroy_process_group()


def test_gathering_over_ranks_with_different_numbers_of_rows(tmp_path):
    """veRL's tensors need equal rows on all ranks."""
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    ranks = [fork.Process(target=_gather, args=(rank, tmp_path / "meet", results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
    assert found == [(rank, [0, 0, 1], ["u0", "u0", "u1"], {"rank": rank}) for rank in range(2)]


def test_errors_travel_and_are_what_code_for_verl_catches():
    for error, kinds in ((BatchConflict, (AssertionError, ValueError)), (BatchLookup, (KeyError, IndexError))):
        again = pickle.loads(pickle.dumps(error("no 'x'")))
        assert isinstance(again, kinds[0])
        assert isinstance(again, kinds[1])
        assert str(again) == again.message == "no 'x'"
