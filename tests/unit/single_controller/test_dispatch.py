"""The functions of the dispatch modes, on a group that is only what they see of one. No Ray process."""

import functools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hocket.data.batches import concat, register_batch_type
from hocket.data.proto import DataProto, DataProtoConfig
from hocket.errors import BatchError, GroupError
from hocket.single_controller import (
    DISPATCH_MODE_FN_REGISTRY,
    Broadcast,
    DataProtoFuture,
    Dispatch,
    Scatter,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)


@dataclass
class Group:
    """What a mode sees of a group: its size, and of each worker the dp rank and whether it collects."""

    world_size: int = 2
    ranks: list = field(default_factory=list)
    collects: list = field(default_factory=list)

    def dispatch_info(self, mesh_name):
        return self.ranks

    def collect_info(self, mesh_name):
        return self.collects


def functions(mode):
    found = get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode
    return found["dispatch_fn"], found["collect_fn"]


def rows(n, *, start=0, **options):
    return DataProto.from_dict({"x": torch.arange(start, start + n)}, **options)


def numbers(data):
    return data.batch["x"].tolist()


PROTO = [Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC]
mesh = make_nd_compute_dataproto_dispatch_fn("mesh")


# -- the table of modes ---------------------------------------------------------------------------------------------


def test_every_mode_has_its_two_functions():
    """D14, old trap: Dispatch.RANK_ZERO had no functions, a KeyError when a class that used it was bound."""
    assert set(DISPATCH_MODE_FN_REGISTRY) == set(Dispatch)
    assert Dispatch.RANK_ZERO in DISPATCH_MODE_FN_REGISTRY
    for mode in Dispatch:
        assert all(map(callable, functions(mode)))


def test_one_to_all_means_the_same_for_every_worker_also_for_a_list_of_their_number():
    """D13, old trap: a list with one entry per worker was taken apart although all were to get it."""
    dispatch, collect = functions(Dispatch.ONE_TO_ALL)
    args, kwargs = dispatch(Group(), [1, 2], key=3)
    assert args == (Broadcast([1, 2]),)
    assert kwargs == {"key": Broadcast(3)}
    assert collect(Group(), ["a", "b"]) == ["a", "b"]


def test_all_to_all_touches_nothing():
    dispatch, collect = functions(Dispatch.ALL_TO_ALL)
    value, output = object(), [1, 2]
    assert dispatch(Group(), value, key=value) == ((value,), {"key": value})
    assert collect(Group(), output) is output


@pytest.mark.parametrize("kind", [list, tuple])
def test_dp_compute_scatters_lists_and_tuples_alike(kind):
    """D13, old trap: a tuple passed the check and then went whole to every worker."""
    dispatch, collect = functions(Dispatch.DP_COMPUTE)
    (first,), kwargs = dispatch(Group(), kind([1, 2]), key=kind([3, 4]))
    assert isinstance(first, Scatter)
    assert (first, kwargs) == ([1, 2], {"key": [3, 4]})
    assert collect(Group(), ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(("value", "found"), [([1], "1 entries"), ((1, 2, 3), "3 entries"), ("ab", "str"), (3, "int")])
def test_dp_compute_wants_an_entry_per_worker(value, found):
    dispatch, _ = functions(Dispatch.DP_COMPUTE)
    with pytest.raises(AssertionError, match=f"found {found}; DP_COMPUTE wants a list with one entry for each of 2"):
        dispatch(Group(), value)


def test_direct_methods_are_not_called_through_the_group():
    for function in functions(Dispatch.DIRECT_ROLLOUT_METHOD):
        with pytest.raises(GroupError, match=r"group.workers\[i\]"):
            function(Group())


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PROTO)
def test_rows_are_cut_into_equal_blocks_in_order(mode):
    (first,), kwargs = functions(mode)[0](Group(3), rows(6), other=rows(3, start=10))
    assert [numbers(block) for block in first] == [[0, 1], [2, 3], [4, 5]]
    assert [numbers(block) for block in kwargs["other"]] == [[10], [11], [12]]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 5), st.integers(0, 12), st.sampled_from([*PROTO, mesh]), st.sampled_from(["batch", "keyword", "all"])
)
def test_auto_padding_never_alters_the_caller_and_is_no_row_of_the_result(world, length, mode, how):
    """D4, old trap: the caller's object stayed padded; and nd-mesh calls had no padding at all."""
    data = rows(length, non_tensors={"name": list("abcdefghijkl"[:length])}, auto_padding=how == "batch")
    before = DataProtoConfig.auto_padding
    try:
        DataProtoConfig.auto_padding = how != "batch"
        group = Group(world, list(range(world)), [True] * world)
        args, kwargs = functions(mode)[0](group, data=data) if how == "keyword" else functions(mode)[0](group, data)
    finally:
        DataProtoConfig.auto_padding = before
    (blocks,) = [*args, *kwargs.values()]
    pad = -length % world
    assert len(data) == length
    assert numbers(data) == list(range(length))
    assert len(blocks) == world
    assert len({len(block) for block in blocks}) == 1
    joined = concat(list(blocks))
    assert numbers(joined) == [*range(length), *[length - 1] * pad]
    assert list(joined.non_tensor_batch["name"]) == list("abcdefghijkl"[:length]) + ["abcdefghijkl"[length - 1]] * pad
    assert blocks.pad == ((pad, length + pad) if pad else (0, 1))


def test_rows_that_do_not_divide_are_an_error_unless_padding_is_asked_for():
    with pytest.raises(BatchError, match=r"cannot split 3 rows into 2 equal parts"):
        functions(Dispatch.DP_COMPUTE_PROTO)[0](Group(), rows(3))


def test_arguments_that_are_padded_together_must_agree_in_length():
    with pytest.raises(BatchError, match=r"\[3, 4\] rows; padding needs them to agree"):
        functions(Dispatch.DP_COMPUTE_PROTO)[0](Group(), rows(3, auto_padding=True), rows(4, auto_padding=True))


@pytest.mark.parametrize("mode", [*PROTO, mesh])
@pytest.mark.parametrize("value", [3, [1, 2], {"x": torch.zeros(2)}, torch.zeros(2), None])
def test_what_has_no_rows_is_refused_by_its_type(mode, value):
    with pytest.raises(BatchError, match=f"of type {type(value).__name__}.*Use ONE_TO_ALL"):
        functions(mode)[0](Group(2, [0, 1]), value)


def test_results_that_are_no_rows_are_refused_by_rank():
    _, collect = functions(Dispatch.DP_COMPUTE_PROTO)
    with pytest.raises(BatchError, match=r"rank 1 returned int; .*DP_COMPUTE_METRIC"):
        collect(Group(), [rows(1), 7])
    _, collect = functions(Dispatch.DP_COMPUTE_METRIC)
    assert collect(Group(), [0.5, 0.25]) == [0.5, 0.25]


def ragged(shapes, dim):
    """A jagged tensor whose rows count on, ragged along axis `dim`."""
    parts = [torch.arange(torch.Size(shape).numel()).reshape(shape) + 100 * i for i, shape in enumerate(shapes)]
    offsets = torch.tensor([0, *(sum(shape[dim - 1] for shape in shapes[: i + 1]) for i in range(len(shapes)))])
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts, dim - 1), offsets, jagged_dim=dim), parts


@pytest.mark.parametrize(
    ("shapes", "dim"),
    [([(2,), (0,), (3,), (1,)], 1), ([(2, 3), (1, 3), (4, 3), (2, 3)], 1), ([(3, 2), (3, 1), (3, 4), (3, 2)], 2)],
    ids=["two axes", "three axes", "three axes, the last one ragged"],
)
def test_a_tensordict_with_jagged_tensors_is_cut_and_joined(shapes, dim):
    tensor, parts = ragged(shapes, dim)
    data = TensorDict({"ids": tensor, "x": torch.arange(4)}, batch_size=[4])
    (blocks,), _ = functions(Dispatch.DP_COMPUTE_PROTO)[0](Group(), data)
    assert [block.batch_size for block in blocks] == [(2,), (2,)]
    assert blocks[1]["x"].tolist() == [2, 3]
    joined = functions(Dispatch.DP_COMPUTE_PROTO)[1](Group(), list(blocks))
    assert joined["ids"].dim() == tensor.dim()
    assert joined["x"].tolist() == [0, 1, 2, 3]
    assert all(map(torch.equal, joined["ids"].unbind(0), parts))


class Letters(str):
    """A batch type of a user's own."""


def test_a_registered_type_is_split_and_joined_by_its_own_functions():
    register_batch_type(
        Letters,
        chunk=lambda text, n: [Letters(text[len(text) * i // n : len(text) * (i + 1) // n]) for i in range(n)],
        concat=lambda parts: Letters("".join(parts)),
    )
    (blocks,), _ = functions(Dispatch.DP_COMPUTE_PROTO)[0](Group(3), Letters("abcde"))
    assert blocks == ["a", "bc", "de"]
    assert functions(Dispatch.DP_COMPUTE_PROTO)[1](Group(3), blocks) == "abcde"


@pytest.mark.parametrize(
    "func",
    [lambda worker, data: data, functools.partial(max, 1), "abc".join, len],
    ids=["lambda", "partial", "bound", "builtin"],
)
def test_a_function_of_any_kind_goes_to_all_workers(func):
    """Old trap (spec 1.3): a partial or a bound method was refused; only plain functions passed."""
    (first, blocks), _ = functions(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)[0](Group(), func, rows(2))
    assert first == Broadcast(func)
    assert [numbers(block) for block in blocks] == [[0], [1]]
    with pytest.raises(GroupError, match=r"the first argument is a DataProto; .* function of \(worker, \*chunks\)"):
        functions(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)[0](Group(), rows(2), func)


# -- meshes ---------------------------------------------------------------------------------------------------------


@st.composite
def meshes(draw):
    """dp rank of each worker in any order, each dp rank 1 to 3 times, and one collector of each."""
    dp = draw(st.integers(1, 4))
    ranks = draw(st.permutations([rank for rank in range(dp) for _ in range(draw(st.integers(1, 3)))]))
    keepers = {rank: draw(st.sampled_from([i for i, r in enumerate(ranks) if r == rank])) for rank in range(dp)}
    return dp, list(ranks), [keepers[rank] == i for i, rank in enumerate(ranks)]


@settings(deadline=None, max_examples=40)
@given(meshes(), st.integers(0, 3))
def test_rows_of_a_mesh_come_back_in_their_order_wherever_the_dp_ranks_lie(mesh_of, per_rank):
    """D3, old trap: results were joined in the order of the ranks; dp ranks [1, 0] gave the rows 2, 3, 0, 1."""
    dp, ranks, collects = mesh_of
    group, data = Group(len(ranks), ranks, collects), rows(dp * per_rank)
    (blocks,), _ = mesh["dispatch_fn"](group, data)
    assert len(blocks) == len(ranks)
    for rank, block in zip(ranks, blocks, strict=True):
        assert numbers(block) == list(range(rank * per_rank, (rank + 1) * per_rank))
        assert block is blocks[ranks.index(rank)], "the ranks of one dp rank share one object"
    assert numbers(mesh["collect_fn"](group, list(blocks))) == numbers(data)


@pytest.mark.parametrize(
    ("ranks", "collects"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], [True, False, False, False] * 2),  # infer: dp 2, tp 4
        ([0, 0, 1, 1, 0, 0, 1, 1], [False] * 4 + [True, False] * 2),  # train: pp 2, dp 2, tp 2; last stage, tp 0
    ],
    ids=["infer", "train"],
)
def test_meshes_of_eight(ranks, collects):
    group = Group(8, ranks, collects)
    args, kwargs = mesh["dispatch_fn"](group, rows(4), other=rows(2))
    assert [numbers(block) for block in args[0]] == [[0, 1] if rank == 0 else [2, 3] for rank in ranks]
    assert [numbers(block) for block in kwargs["other"]] == [[rank] for rank in ranks]
    outputs = [rows(2, start=10 * i) for i in range(8)]
    chosen = [i for i, collect in enumerate(collects) if collect]
    assert numbers(mesh["collect_fn"](group, outputs)) == [10 * i + j for i in chosen for j in range(2)]


@pytest.mark.parametrize(
    ("collects", "found"),
    [
        ([False] * 4, r"\{0: \[\], 1: \[\]\}"),
        ([True, False, False, False], r"\{1: \[\]\}"),
        ([True] * 4, r"\{0: \[0, 1\]"),
    ],
    ids=["nobody", "not dp rank 1", "two of one"],
)
def test_a_dp_rank_without_exactly_one_collector_is_an_error(collects, found):
    with pytest.raises(GroupError, match=rf"'mesh' needs one worker with is_collect=True for each dp rank; .*{found}"):
        mesh["collect_fn"](Group(4, [0, 0, 1, 1], collects), [rows(1)] * 4)


def test_a_mesh_call_without_positional_arguments():
    """D15, old trap: IndexError when the arguments were all keywords, or none."""
    group = Group(2, [0, 1], [True, True])
    assert mesh["dispatch_fn"](group) == ((), {})
    args, kwargs = mesh["dispatch_fn"](group, data=rows(2))
    assert args == ()
    assert [numbers(block) for block in kwargs["data"]] == [[0], [1]]


def test_a_future_is_cut_without_being_fetched():
    future = DataProtoFuture(concat, ["reference 0", "reference 1"])
    (parts,), _ = mesh["dispatch_fn"](Group(2, [1, 0], [True, True]), future)
    assert [part.refs for part in parts] == [future.refs] * 2
    assert parts[0] is not parts[1]


# -- modes of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture
def registry():
    """The registry, filled and emptied in place as it was."""
    before, names = dict(DISPATCH_MODE_FN_REGISTRY), Dispatch.names()
    yield DISPATCH_MODE_FN_REGISTRY
    DISPATCH_MODE_FN_REGISTRY.clear()
    DISPATCH_MODE_FN_REGISTRY.update(before)
    for name in set(Dispatch.names()) - set(names):
        Dispatch.remove(name)


def spread(group, *args, **kwargs):
    return args, kwargs


def first(group, output):
    return output[0]


def test_a_new_mode_is_a_member_and_an_entry(registry):
    register_dispatch_mode("OF_MY_OWN", spread, first)
    assert "OF_MY_OWN" in Dispatch
    assert registry[Dispatch.OF_MY_OWN] == {"dispatch_fn": spread, "collect_fn": first}
    assert functions(Dispatch.OF_MY_OWN) == (spread, first)
    with pytest.raises(AssertionError, match=r"Dispatch.OF_MY_OWN exists already"):
        register_dispatch_mode("of_my_own", spread, first)


def test_a_mode_is_replaced_in_the_very_dict_that_is_exported(registry):
    update_dispatch_mode(Dispatch.ONE_TO_ALL, spread, first)
    assert registry is DISPATCH_MODE_FN_REGISTRY
    assert functions(Dispatch.ONE_TO_ALL) == (spread, first)


def test_the_registry_can_be_emptied_and_filled_in_place(registry):
    kept = dict(registry)
    registry.clear()
    for unknown in (
        lambda: get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL),
        lambda: update_dispatch_mode(Dispatch.ONE_TO_ALL, spread, first),
    ):
        with pytest.raises(AssertionError, match=r"Dispatch.ONE_TO_ALL has no functions here; register_dispatch_mode"):
            unknown()
    registry.update(kept)
    assert functions(Dispatch.ONE_TO_ALL) == tuple(kept[Dispatch.ONE_TO_ALL].values())
