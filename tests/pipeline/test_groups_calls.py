"""Calls on groups of one to three workers: how arguments reach them and how results come back."""

import functools
import sys
from operator import itemgetter

import pytest
import ray
import torch

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
MESH = make_nd_compute_dataproto_dispatch_fn("mesh")


def shown(value):
    return value.tensor("x").tolist() if isinstance(value, DataProto) else value


def whole(worker, *args, **kwargs):
    """The worker's rank and what it got, batches as their rows."""
    return worker.rank, tuple(map(shown, args)), {key: shown(value) for key, value in kwargs.items()}


def mark(worker, data, other=None):
    """The rows, changed in place, plus 100 times the rank. By `tensor`: who needs no TensorDict starts sooner."""
    data.tensor("x").add_(100 * worker.rank + (0 if other is None else other.tensor("x")))
    return data


class Cook(Worker):
    """The same few bodies in every mode."""

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
    zero_of_meshed = register(MESH, ZERO)(mark)
    zero_later = register(Dispatch.RANK_ZERO, blocking=False)(whole)
    zero_of_as_it_is_later = register(Dispatch.ALL_TO_ALL, ZERO, blocking=False)(whole)

    split = register(Dispatch.DP_COMPUTE_PROTO)(mark)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def count(self, data):
        return len(data)

    def unregistered(self, *args, **kwargs):
        return whole(self, *args, **kwargs)

    def fails(self):
        raise ValueError("out of salt")


class Leaf(Worker):
    """A worker inside another one."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.tensor("x").add_(self.rank + 1)
        return data


class Bare(Worker):
    """Calls no constructor above it, and holds a worker of its own."""

    def __init__(self, start):
        self.start, self.leaf = start, Leaf()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.tensor("x").add_(self.start)
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
    return data.tensor("x").tolist()


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
    """D4, old traps: the caller kept padded rows, and the result had one more."""
    data = rows(length, auto_padding=True)
    wanted = [i + 100 * (i // max(-(-length // 3), 1)) for i in range(length)]
    assert x(group.split(data)) == x(group.split(data=data)) == wanted
    assert x(group.split(data, other=data)) == [value + i for i, value in enumerate(wanted)]
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
    assert x(group.zero_of_split(rows(4))) == x(group.zero_of_meshed(rows(4))) == [0, 1, 2, 3]


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


# -- functions of the driver's, workers of workers ------------------------------------------------------------------


class Oven:
    """Has a method to be sent to workers."""

    def __init__(self, heat):
        self.heat = heat

    def bake(self, worker, data):
        data.tensor("x").add_(self.heat + 100 * worker.start)
        return data


def stir(worker, data, extra=None, *, by=0):
    data.tensor("x").add_(by + (0 if extra is None else extra.tensor("x")))
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
