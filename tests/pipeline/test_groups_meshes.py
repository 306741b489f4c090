"""Workers that share rows: meshes, TensorDicts, what is put into the store, and who sees a change in place."""

import sys
import threading

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from hocket.data.proto import DataProto
from hocket.errors import GroupError
from hocket.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    collect_all_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get the classes, and do not import tests

TURNED, SHARED, ALONE = map(make_nd_compute_dataproto_dispatch_fn, ("turned", "shared", "alone"))
EACH = {**SHARED, "collect_fn": collect_all_to_all}  # the rows of a mesh, but what every worker says
BIG = 100_000  # numbers: such a tensor goes through the store, a small one with the call


def mark(worker, data):
    """The rows, changed in place, plus 100 times the rank."""
    table = data.batch if isinstance(data, DataProto) else data
    table["x"] += 100 * worker.rank
    return data


def spoil(worker, data):
    """Add the number of the worker, counted from 1, to all that is in there, in place."""
    mine = worker.rank + 1
    if isinstance(data, DataProto):
        for column in (*data.non_tensor_batch.values(), *data.meta_info.values()):
            column += mine
        spoil(worker, data.batch)
    for tensor in data.values() if isinstance(data, TensorDict) else [] if isinstance(data, DataProto) else [data]:
        tensor += mine
    return data


class Cook(Worker):
    """Three of them stand in several meshes."""

    def __init__(self):
        super().__init__()
        self.go, self.kept = threading.Event(), None
        self._register_dispatch_collect_info("turned", dp_rank=[2, 0, 1][self.rank], is_collect=True)
        self._register_dispatch_collect_info("shared", dp_rank=self.rank % 2, is_collect=self.rank > 0)
        self._register_dispatch_collect_info("alone", dp_rank=self.rank, is_collect=self.rank == 0)

    turned = register(TURNED)(mark)
    shared = register(SHARED)(mark)
    shared_later = register(SHARED, blocking=False)(mark)
    alone = register(ALONE)(mark)
    spoil = register(Dispatch.ONE_TO_ALL)(spoil)
    spoil_shared = register(EACH)(spoil)

    @register(EACH)
    def each(self, *args, **kwargs):
        return self.rank, args, {key: value.batch["x"].tolist() for key, value in kwargs.items()}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def keep(self, data):
        self.kept = data
        return data

    def spoil_kept(self):
        self.kept.batch["x"] += 7

    def kept_rows(self):
        return self.kept

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def hold(self, *data):
        return self.go.wait(60)

    hold_split = register(Dispatch.DP_COMPUTE_METRIC, blocking=False)(hold.__wrapped__)
    hold_shared = register(EACH, blocking=False)(hold.__wrapped__)

    @register(Dispatch.ONE_TO_ALL)
    async def release(self):
        self.go.set()

    @register(Dispatch.ONE_TO_ALL)
    def forget(self):
        self.go.clear()


@pytest.fixture(scope="module")
def group(ray_address):
    ray.init(address=ray_address, log_to_driver=False)
    with RayResourcePool([3]) as pool:
        yield RayWorkerGroup(pool, RayClassWithInitArgs(Cook), call_timeout=60)
    ray.shutdown()


def rows(n, **options):
    return DataProto.from_dict({"x": torch.arange(n)}, **options)


def x(data):
    return data.batch["x"].tolist()


# -- meshes ---------------------------------------------------------------------------------------------------------


def test_rows_of_a_mesh_come_back_in_dp_order(group):
    """D3, old trap: they came in the order of the ranks, here 4, 5, 0, 1, 2, 3."""
    assert group.dispatch_info("turned") == [2, 0, 1]
    assert group.dispatch_info("turned") is group.dispatch_info("turned")
    assert x(group.turned(rows(6))) == [100, 101, 202, 203, 4, 5]


def test_only_those_that_collect_hand_back_rows(group):
    assert (group.dispatch_info("shared"), group.collect_info("shared")) == ([0, 1, 0], [False, True, True])
    assert x(group.shared(rows(4))) == [200, 201, 102, 103]
    assert x(group.shared_later(rows(4)).get(timeout=60)) == [200, 201, 102, 103]


def test_a_mesh_without_collectors_is_named(group):
    with pytest.raises(GroupError, match=r"'alone' needs one worker with is_collect=True .*\{1: \[\], 2: \[\]\}"):
        group.alone(rows(3))


def test_a_mesh_that_nobody_registered_is_named(group):
    with pytest.raises(
        GroupError, match=r"'other' is not registered in Cook, which has \['alone', 'shared', 'turned'\]"
    ):
        group.dispatch_info("other")


@pytest.mark.parametrize("length", range(5))
def test_rows_of_a_mesh_are_padded_and_the_padding_is_left_out(group, length):
    """D4, old trap: a mesh call could not pad at all."""
    data = rows(length, auto_padding=True)
    half = -(-length // 2)
    wanted = [i + (200 if i < half else 100) for i in range(length)]
    assert x(group.shared(data)) == x(group.shared_later(data).get(timeout=60)) == wanted
    assert x(data) == list(range(length))


def test_a_mesh_call_with_keywords_only_and_with_nothing(group):
    """D15, old trap: IndexError without a positional argument."""
    assert group.each() == [(rank, (), {}) for rank in range(3)]
    assert group.each(data=rows(2)) == [(rank, (), {"data": [rank % 2]}) for rank in range(3)]


def test_a_tensordict_with_jagged_tensors_of_two_and_three_axes(group):
    """D23, old trap: nested tensors broke when they were cut, sent or joined."""
    offsets = torch.tensor([0, 1, 3, 6, 8])
    flat = torch.nested.nested_tensor_from_jagged(torch.arange(8), offsets)
    tall = torch.nested.nested_tensor_from_jagged(torch.arange(16).reshape(8, 2), offsets)
    wide = torch.nested.nested_tensor_from_jagged(torch.arange(16).reshape(2, 8), offsets, jagged_dim=2)
    data = TensorDict({"flat": flat, "tall": tall, "wide": wide, "x": torch.arange(4)}, batch_size=[4])
    for out in (group.shared(data), group.shared_later(data).get(timeout=60)):
        assert out["x"].tolist() == [200, 201, 102, 103]
        for key in ("flat", "tall", "wide"):
            assert all(map(torch.equal, out[key].unbind(0), data[key].unbind(0)))
    parts = [future.get(timeout=60) for future in group.shared_later(data).chunk(4)]
    assert all(torch.equal(part["wide"].unbind(0)[0], row) for part, row in zip(parts, wide.unbind(0), strict=True))
    assert data["x"].tolist() == [0, 1, 2, 3]


# -- the store ------------------------------------------------------------------------------------------------------


def in_flight(group, method, *args):
    """For each object in the store that calls under way were given: how many calls share it."""
    core = ray._private.worker.global_worker.core_worker
    before = set(core.get_all_reference_counts())
    refs = getattr(group, method)(*args)
    counts = [count["submitted"] for ref, count in core.get_all_reference_counts().items() if ref not in before]
    group.release()
    assert ray.get(refs, timeout=60) == [True] * 3
    group.forget()
    return sorted(count for count in counts if count)


@pytest.mark.parametrize(
    ("method", "big", "small"),
    [("hold_shared", [1, 2], []), ("hold", [3], []), ("hold_split", [1, 1, 1], [])],
    ids=["a block for each dp rank", "one for all", "a block each"],
)
def test_what_is_large_is_put_once_however_many_share_it(group, method, big, small):
    """V12. A block that one worker gets goes with the call, which may put it: never twice. Small ones are inlined."""
    group.dispatch_info("shared")
    assert in_flight(group, method, rows(6 * BIG)) == big
    assert in_flight(group, method, rows(6)) == small


def spoilt(size):
    """A batch with tensors, a column and a fact that can be changed in place."""
    return DataProto.from_dict({"x": torch.zeros(size)}, {"n": np.zeros(size)}, {"fact": np.zeros(2)})


def changed(data):
    """The first numbers of all that it holds."""
    if isinstance(data, DataProto):
        return {*changed(data.batch), float(data.non_tensor_batch["n"][0]), float(data.meta_info["fact"][0])}
    return {float(tensor[0]) for tensor in (data.values() if isinstance(data, TensorDict) else [data])}


@pytest.mark.parametrize("size", [6, 6 * BIG], ids=["inlined", "in the store"])
@pytest.mark.parametrize(
    "make",
    [spoilt, lambda n: TensorDict({"x": torch.zeros(n)}, batch_size=[n]), torch.zeros],
    ids=["DataProto", "TensorDict", "tensor"],
)
def test_workers_change_what_they_get_in_place_and_nobody_else_sees_it(group, make, size):
    """All workers share the argument's bytes (facts: an op on a view of the store writes into it, for all to see)."""
    data = make(size)
    kept = ray.put(data)
    for argument in (data, kept):
        assert [changed(result) for result in group.spoil(argument)] == [{1.0}, {2.0}, {3.0}]
    if make is not torch.zeros:
        assert [changed(result) for result in group.spoil_shared(data)] == [{1.0}, {2.0}, {3.0}]
    assert changed(data) == changed(ray.get(kept)) == {0.0}


@pytest.mark.parametrize("size", [6, 6 * BIG], ids=["inlined", "in the store"])
def test_what_a_worker_returned_is_not_what_it_keeps(group, size):
    result = group.keep(rows(size))
    group.execute_all_sync("spoil_kept")
    assert x(result[:3]) == [0, 1, 2]
    result.batch["x"] += 1
    assert x(group.execute_rank_zero_sync("kept_rows")[:2]) == [7, 8]
