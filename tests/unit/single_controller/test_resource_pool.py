"""Pool arithmetic, and the answer to "can this ever be given?" against brute force over every assignment."""

import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hocket.single_controller import RayResourcePool, ResourcePool, SubRayResourcePool
from hocket.single_controller.resource_pool import Slot, _fits

ENTRIES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
ROOMS = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def test_an_uneven_pool_knows_size_and_place_of_each_process():
    pool = ResourcePool([2, 1])
    pool.add_node(3)
    assert pool.world_size == 6
    assert pool() == pool.store == [2, 1, 3]
    assert pool.local_world_size_list() == [2, 2, 1, 3, 3, 3]
    assert pool.local_rank_list() == [0, 1, 0, 0, 1, 2]


def test_a_pool_starts_empty_and_keeps_no_list_of_the_callers():
    assert (ResourcePool().world_size, ResourcePool().store) == (0, [])
    nodes = [1]
    pool = ResourcePool(nodes)
    pool.add_node(2)
    assert (nodes, pool.store) == ([1], [1, 2])


@given(ENTRIES)
def test_each_process_has_one_place_on_its_node(store):
    pool = ResourcePool(store)
    sizes, ranks = pool.local_world_size_list(), pool.local_rank_list()
    assert len(sizes) == len(ranks) == pool.world_size
    starts = [i for i, rank in enumerate(ranks) if rank == 0]
    assert [sizes[i] for i in starts] == store
    assert all(ranks[i : i + sizes[i]] == list(range(sizes[i])) for i in starts)


@given(ENTRIES, ROOMS)
def test_entries_that_stay_whole_fit_when_some_assignment_fits(entries, rooms):
    def fits(choice):
        return all(sum(n for n, node in zip(entries, choice, strict=True) if node == i) <= rooms[i] for i in nodes)

    nodes = range(len(rooms))
    assert _fits(entries, rooms, "STRICT_PACK") == any(map(fits, itertools.product(nodes, repeat=len(entries))))


@given(ENTRIES, ROOMS)
@example([3, 3, 1], [3, 3, 1])
@example([3, 3, 1], [3, 2, 1, 1])
def test_entries_that_spread_fit_when_some_choice_of_nodes_fits(entries, rooms):
    def fits(left, rooms):
        if not left:
            return True
        open_nodes = [i for i, room in enumerate(rooms) if room]
        return any(
            fits(left[1:], [room - (i in chosen) for i, room in enumerate(rooms)])
            for chosen in itertools.combinations(open_nodes, left[0])
        )

    assert _fits(entries, rooms, "STRICT_SPREAD") == fits(entries, rooms)


@given(ENTRIES, ROOMS, st.sampled_from(["PACK", "SPREAD"]))
def test_entries_that_may_lie_anywhere_fit_when_there_is_room_in_all(entries, rooms, strategy):
    assert _fits(entries, rooms, strategy) == (sum(entries) <= sum(rooms))


@pytest.mark.parametrize(
    ("entries", "rooms", "fits"),
    [
        ([1] * 24, [7, 8, 8], False),
        ([1] * 64, [8] * 7 + [7], False),
        ([8] * 64, [8] * 63 + [7, 7], False),
        ([8] * 64, [8] * 64, True),
        ([3] * 9, [8, 9, 10, 5], True),
        ([3] * 10, [8, 9, 10, 5], False),
        ([2, 2, 3] * 5 + [2, 3], [7] * 5 + [5], True),
        ([2, 2, 3] * 5 + [2, 3], [7] * 5 + [4, 1], False),
    ],
)
@pytest.mark.parametrize("strategy", ["STRICT_PACK", "STRICT_SPREAD"])
def test_the_answer_comes_at_once_for_large_clusters_too(entries, rooms, fits, strategy):
    start = time.process_time()
    answer = _fits(entries, rooms, strategy)
    assert time.process_time() - start < 1
    assert strategy == "STRICT_SPREAD" or answer == fits


def test_what_is_reserved_for_a_worker():
    pool = RayResourcePool([1], use_gpu=True, cpus_per_worker=2, gpus_per_worker=0.5, accelerator_type="H200")
    assert pool.bundle() == {"CPU": 2, "GPU": 0.5, "H200": 1e-4}
    assert pool.bundle("npu") == {"CPU": 2, "NPU": 0.5, "H200": 1e-4}
    assert pool.bundle("cpu") == {"CPU": 2, "H200": 1e-4}
    assert RayResourcePool([1], use_gpu=False, resources={"disk": 3}).bundle() == {"CPU": 1, "disk": 3}
    assert RayResourcePool([1], use_gpu=False, cpus_per_worker=0, resources={"disk": 3}).bundle() == {"disk": 3}


def test_the_number_of_groups_on_a_pool_does_not_change_what_it_reserves():
    few, many = (RayResourcePool([8], False, max_colocate_count=count) for count in (1, 10))
    assert few.bundle() == many.bundle() == {"CPU": 1}


def test_pools_have_names_of_their_own_unless_told():
    assert RayResourcePool([1]).name_prefix != RayResourcePool([1]).name_prefix
    assert RayResourcePool([1], name_prefix="").name_prefix == ""


def test_a_window_is_as_large_as_its_places():
    slots = [Slot(f"group{i // 2}", i % 2, f"node{i // 2}", "10.0.0.1") for i in range(6)]
    window = SubRayResourcePool(None, 1, 3, slots=slots, process_on_nodes=[2, 2, 2], use_gpu=False)
    assert (window.world_size, window.store) == (3, [2, 2, 2])
    assert window.slots() == slots[1:4]
    assert window.get_placement_groups() == ["group0", "group1"]
