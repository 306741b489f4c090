"""Calls on groups of one to three workers: how arguments reach them and how results come back."""

import functools
import sys
import threading
from operator import itemgetter

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from hocket.data.proto import DataProto
from hocket.errors import BatchError, GroupError, HocketError
from hocket.single_controller import (
    DISPATCH_MODE_FN_REGISTRY,
    Broadcast,
    DataProtoFuture,
    Dispatch,
    Execute,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Scatter,
    Worker,
    collect_all_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    split_resource_pool,
    update_dispatch_mode,
)

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get the classes, and do not import tests


def count_up(group, value):
    """A mode of the tests' own, as people write them: a list with one entry per worker."""
    return ([value + i for i in range(group.world_size)],), {}


def add_up(group, output):
    return sum(output)


register_dispatch_mode("COUNTED", count_up, add_up)

ZERO = Execute.RANK_ZERO
TURNED, SHARED, ALONE = map(make_nd_compute_dataproto_dispatch_fn, ("turned", "shared", "alone"))
EACH = {**SHARED, "collect_fn": collect_all_to_all}  # the rows of a mesh, but what every worker says
BIG = 100_000  # numbers: such a tensor goes through the store, a small one with the call


def shown(value):
    return value.batch["x"].tolist() if isinstance(value, DataProto) else value


def whole(worker, *args, **kwargs):
    """The worker's rank and what it got, batches as their rows."""
    return worker.rank, tuple(map(shown, args)), {key: shown(value) for key, value in kwargs.items()}


def mark(worker, data, other=None):
    """The rows, changed in place, plus 100 times the rank."""
    table = data.batch if isinstance(data, DataProto) else data
    table["x"] += 100 * worker.rank + (0 if other is None else other.batch["x"])
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
    """The same few bodies in every mode. It stands in meshes of its ranks, which are 0, 1, 2, or 0 alone."""

    def __init__(self):
        super().__init__()
        self.go, self.kept = threading.Event(), None
        self._register_dispatch_collect_info("turned", dp_rank=[2, 0, 1][self.rank], is_collect=True)
        self._register_dispatch_collect_info("shared", dp_rank=self.rank % 2, is_collect=self.rank > 0)
        self._register_dispatch_collect_info("alone", dp_rank=self.rank, is_collect=self.rank == 0)

    to_all = register(Dispatch.ONE_TO_ALL)(whole)
    as_it_is = register(Dispatch.ALL_TO_ALL)(whole)
    listed = register(Dispatch.DP_COMPUTE)(whole)
    measured = register(Dispatch.DP_COMPUTE_METRIC)(whole)
    counted = register(Dispatch.COUNTED)(lambda worker, value: value)
    by_dict = register({"dispatch_fn": count_up, "collect_fn": add_up})(lambda worker, value: value)
    direct = register(Dispatch.DIRECT_ROLLOUT_METHOD)(whole)
    to_all_later = register(Dispatch.ONE_TO_ALL, blocking=False)(whole)

    zero = register(Dispatch.RANK_ZERO)(whole)
    zero_of_to_all = register(Dispatch.ONE_TO_ALL, ZERO)(whole)
    zero_of_as_it_is = register(Dispatch.ALL_TO_ALL, ZERO)(whole)
    zero_of_listed = register(Dispatch.DP_COMPUTE, ZERO)(whole)
    zero_of_measured = register(Dispatch.DP_COMPUTE_METRIC, ZERO)(whole)
    zero_of_split = register(Dispatch.DP_COMPUTE_PROTO, ZERO)(mark)
    zero_of_turned = register(TURNED, ZERO)(mark)
    zero_later = register(Dispatch.RANK_ZERO, blocking=False)(whole)
    zero_of_as_it_is_later = register(Dispatch.ALL_TO_ALL, ZERO, blocking=False)(whole)

    split = register(Dispatch.DP_COMPUTE_PROTO)(mark)
    turned = register(TURNED)(mark)
    shared = register(SHARED)(mark)
    shared_later = register(SHARED, blocking=False)(mark)
    alone = register(ALONE)(mark)
    each = register(EACH)(whole)

    spoil = register(Dispatch.ONE_TO_ALL)(spoil)
    spoil_shared = register(EACH)(spoil)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def keep(self, data):
        self.kept = data
        return data

    def spoil_kept(self):
        self.kept.batch["x"] += 7

    def kept_rows(self):
        return self.kept

    @register(Dispatch.DP_COMPUTE_PROTO)
    def count(self, data):
        return len(data)

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

    def unregistered(self, *args, **kwargs):
        return whole(self, *args, **kwargs)

    def fails(self):
        raise ValueError("out of salt")


class Leaf(Worker):
    """A worker inside another one."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.batch["x"] += self.rank + 1
        return data


class Bare(Worker):
    """Calls no constructor above it, and holds a worker of its own."""

    def __init__(self, start):
        self.start, self.leaf = start, Leaf()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.batch["x"] += self.start
        return self.leaf.add(data)


@pytest.fixture(scope="module")
def pool(ray_address):
    ray.init(address=ray_address, log_to_driver=False)
    with RayResourcePool([1, 2]) as pool:
        yield pool
    ray.shutdown()


@pytest.fixture(scope="module")
def windows(pool):
    return split_resource_pool(pool, [1, 2])


@pytest.fixture(scope="module")
def group(pool):
    return RayWorkerGroup(pool, RayClassWithInitArgs(Cook), call_timeout=60)


@pytest.fixture(scope="module")
def single(windows):
    return RayWorkerGroup(windows[0], RayClassWithInitArgs(Cook), call_timeout=60)


@pytest.fixture(scope="module")
def bare(windows):
    return RayWorkerGroup(windows[1], RayClassWithInitArgs(Bare, start=10), call_timeout=60)


def rows(n, **options):
    return DataProto.from_dict({"x": torch.arange(n)}, **options)


def x(data):
    return data.batch["x"].tolist()


# -- modes ----------------------------------------------------------------------------------------------------------


def test_uneven_nodes_make_one_world_of_three(group):
    """D2, old trap: `[1, 2]` started two workers that believed in a world of three."""
    assert group.world_size == 3
    assert group.execute_all_sync("get_master_addr_port") == [(group.master_address, group.master_port)] * 3
    assert x(group.split(rows(6))) == [0, 1, 102, 103, 204, 205]


def test_one_to_all(group):
    got = ((rows(1),), {"key": [1, 2, 3]})
    wanted = [(rank, ([0],), {"key": [1, 2, 3]}) for rank in range(3)]
    assert group.to_all(*got[0], **got[1]) == wanted
    refs = group.to_all_later(*got[0], **got[1])
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert ray.get(refs, timeout=60) == wanted


def test_all_to_all_and_the_rule_of_lists(group):
    assert group.as_it_is([1, 2, 3], key=["a", "b", "c"]) == [
        *[(0, (1,), {"key": "a"}), (1, (2,), {"key": "b"}), (2, (3,), {"key": "c"})]
    ]
    for mixed in (([1, 2, 3], "text"), ((1, 2, 3),), ([1, 2],), ()):
        assert group.as_it_is(*mixed) == [(rank, mixed, {}) for rank in range(3)]


def test_marks_say_what_a_list_of_three_means(group):
    """D13, old trap: a list with one entry per worker was always taken apart, whatever was meant."""
    assert group.as_it_is(Broadcast([1, 2, 3])) == [(rank, ([1, 2, 3],), {}) for rank in range(3)]
    assert group.as_it_is(Scatter([1, 2, 3]), "all", key=Broadcast([4, 5, 6])) == [
        (rank, (rank + 1, "all"), {"key": [4, 5, 6]}) for rank in range(3)
    ]


@pytest.mark.parametrize("entries", [[1, 2], [1, 2, 3, 4]])
def test_a_scatter_has_an_entry_for_every_worker(group, entries):
    with pytest.raises(GroupError, match=rf"(?s){len(entries)}.*3"):
        group.execute_all_sync("unregistered", Scatter(entries))


def test_the_rule_of_lists_does_not_end_at_one_worker(single, group):
    for each in (single, group):
        size = each.world_size
        assert each.as_it_is([f"for {i}" for i in range(size)]) == [(i, (f"for {i}",), {}) for i in range(size)]
        assert each.counted(5) == each.by_dict(5) == sum(range(5, 5 + size))
        assert each.zero_of_as_it_is(["text"]) == (0, (["text"],), {})


def test_dp_compute_scatters_a_tuple_too(group):
    """D13, old trap: a tuple of the right length was given whole to every worker."""
    assert group.listed((1, 2, 3), key=[4, 5, 6]) == [(i, (1 + i,), {"key": 4 + i}) for i in range(3)]


def test_dp_compute_metric_keeps_what_every_worker_says(group):
    """D4, old trap: with padded rows the list lost entries."""
    data = rows(4, auto_padding=True)
    assert group.measured(data) == [(0, ([0, 1],), {}), (1, ([2, 3],), {}), (2, ([3, 3],), {})]


@pytest.mark.parametrize("length", range(8))
def test_padded_rows_come_back_as_many_as_went(group, length):
    """D4, old traps: the caller kept padded rows, a future gave them back, and a mesh call could not pad at all."""
    data = rows(length, auto_padding=True)
    wanted = [i + 100 * (i // max(-(-length // 3), 1)) for i in range(length)]
    assert x(group.split(data)) == x(group.split(data=data)) == wanted
    assert x(group.split(data, other=data)) == [value + i for i, value in enumerate(wanted)]
    assert len(group.shared(data)) == len(group.shared_later(data).get(timeout=60)) == length
    assert x(data) == list(range(length))


def test_rows_that_do_not_divide(group):
    with pytest.raises(BatchError, match=r"cannot split 4 rows into 3 equal parts; use a multiple of 3"):
        group.split(rows(4))


def test_a_worker_that_returns_no_rows_is_named(group):
    with pytest.raises(BatchError, match=r"rank 0 returned int; .*DP_COMPUTE_METRIC"):
        group.count(rows(3))


@pytest.mark.parametrize("mode", ["", "_of_to_all", "_of_as_it_is", "_of_listed", "_of_measured"])
def test_rank_zero_gets_the_value_itself(group, mode):
    """D14, old traps: rank 0 got a list of N copies or of N chunks; a class with Dispatch.RANK_ZERO broke."""
    assert getattr(group, f"zero{mode}")(rows(3), key=[1, 2, 3]) == (0, ([0, 1, 2],), {"key": [1, 2, 3]})


def test_rank_zero_in_modes_that_join_rows(group):
    """D14: there is nothing to split for one worker, so nothing has to divide."""
    assert x(group.zero_of_split(rows(4))) == x(group.zero_of_turned(rows(4))) == [0, 1, 2, 3]


def test_rank_zero_later(group):
    assert ray.get(group.zero_of_as_it_is_later([1, 2, 3]), timeout=60) == (0, ([1, 2, 3],), {})
    future = group.zero_later([1, 2, 3])
    assert isinstance(future, DataProtoFuture)
    assert future.get(timeout=60) == (0, ([1, 2, 3],), {})


def test_a_failure_of_rank_zero_names_it(group):
    for call in (
        lambda: group.execute_rank_zero_sync("fails"),
        lambda: group.execute_func_rank_zero(int, "salt"),
    ):
        with pytest.raises(ValueError, match=r"rank 0 of Cook .* ValueError: ") as raised:
            call()
        assert isinstance(raised.value, HocketError)


def test_direct_methods_are_called_on_a_handle(group):
    with pytest.raises(GroupError, match=r"group.workers\[i\]"):
        group.direct(1)
    assert ray.get(group.workers[2].direct.remote(1, key=2), timeout=60) == (2, (1,), {"key": 2})


# -- any method, by name --------------------------------------------------------------------------------------------


def test_execute_all_and_rank_zero_reach_methods_that_are_not_registered(group):
    wanted = [(rank, (1,), {"key": 2}) for rank in range(3)]
    assert group.execute_all_sync("env_keys") == [Worker.env_keys()] * 3
    assert group.execute_all_sync("unregistered", 1, key=2) == wanted
    for call in (group.execute_all, group.execute_all_async):
        assert ray.get(call("unregistered", 1, key=2), timeout=60) == wanted
    assert group.execute_rank_zero_sync("unregistered", 1, key=2) == wanted[0]
    for call in (group.execute_rank_zero, group.execute_rank_zero_async):
        assert ray.get(call("unregistered", 1, key=2), timeout=60) == wanted[0]


def test_only_registered_methods_are_methods_of_the_group(group):
    with pytest.raises(AttributeError, match=r"no registered method 'unregistered'; it has \["):
        _ = group.unregistered
    assert {"split", "zero", "execute_func_rank_zero"} < set(group.method_names)


def test_call_objects_have_the_name_of_their_method(group):
    assert type(group.split).__name__ == "split"
    assert type(group.split.options(timeout=5)).__name__ == "split"


# -- modes of one's own ---------------------------------------------------------------------------------------------


def test_a_mode_of_the_callers_own(group):
    assert group.by_dict(10) == group.counted(10) == 10 + 11 + 12


def test_a_replaced_mode_holds_for_groups_bound_from_then_on(group):
    before = dict(DISPATCH_MODE_FN_REGISTRY[Dispatch.COUNTED])
    try:
        update_dispatch_mode(Dispatch.COUNTED, before["dispatch_fn"], lambda group, output: max(output))
        again = RayWorkerGroup.from_detached(
            worker_handles=group.workers, ray_cls_with_init=group.ray_cls_with_init, watch=False
        )
        assert (group.counted(10), again.counted(10)) == (33, 12)
    finally:
        update_dispatch_mode(Dispatch.COUNTED, **before)


def test_members_keep_their_identity_also_those_that_workers_do_not_know(group):
    """Old trap (spec 1.1): a mode that the driver alone had registered could not be unpickled in a worker."""
    ours = Dispatch.register("driver_only")
    try:
        for mode in (Dispatch.DP_COMPUTE, Dispatch.COUNTED, ours):
            assert all(got is mode for _, (got,), _ in group.to_all(mode))
    finally:
        Dispatch.remove("driver_only")


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


def test_a_mesh_that_nobody_registered_is_named(bare):
    with pytest.raises(GroupError, match=r"mesh 'shared' is not registered in Bare, which has \[\]"):
        bare.dispatch_info("shared")


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


# -- functions of the driver's, workers of workers ------------------------------------------------------------------


class Oven:
    """Has a method to be sent to workers."""

    def __init__(self, heat):
        self.heat = heat

    def bake(self, worker, data):
        data.batch["x"] += self.heat + 100 * worker.start
        return data


def stir(worker, data, extra=None, *, by=0):
    data.batch["x"] += by + (0 if extra is None else extra.batch["x"])
    return data


@pytest.mark.parametrize(
    ("function", "added"),
    [(lambda worker, data: Oven(1).bake(worker, data), 1001), (functools.partial(stir, by=5), 5), (Oven(2).bake, 1002)],
    ids=["lambda", "partial", "bound method"],
)
def test_a_function_of_the_drivers_runs_on_every_worker(bare, function, added):
    """Old trap (spec 1.3): only plain functions were let through. Padding is left out again, as in DP_COMPUTE_PROTO."""
    assert x(bare.execute_with_func_generator(function, rows(4))) == [added + i for i in range(4)]
    assert x(bare.execute_with_func_generator(function, rows(3, auto_padding=True))) == [added + i for i in range(3)]


def test_further_batches_and_keywords_are_split_too(bare):
    assert x(bare.execute_with_func_generator(stir, rows(4), extra=rows(4))) == [0, 2, 4, 6]
    assert x(bare.execute_with_func_generator(stir, rows(4), rows(4))) == [0, 2, 4, 6]


def test_any_function_runs_on_rank_zero(group):
    assert group.execute_func_rank_zero(lambda a, b: a - b, 5, b=3) == 2
    assert group.execute_func_rank_zero(functools.partial(int, base=2), "11") == 3
    assert group.execute_func_rank_zero(itemgetter(1), [1, 2, 3]) == 2
    assert group.execute_func_rank_zero([1, 2].index, 2) == 1


def test_a_worker_inside_a_worker_whose_class_skips_the_constructor(bare):
    """A direct call inside the process is a plain one: the rows are not split again."""
    assert x(bare.add(rows(4))) == [11, 12, 14, 15]
