"""What a pool reserves, what it gives back, and what it refuses and when, on one node with 4 CPUs."""

import threading
import time

import pytest
import ray
from ray.util.placement_group import placement_group_table

from hocket.errors import GroupError, PlacementError
from hocket.single_controller import RayResourcePool, merge_resource_pool, split_resource_pool
from hocket.workers.pools import ResourcePoolManager

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("_connected")]


def soon(condition, timeout=20):
    """Whether the condition comes true in time; Ray counts what is free a moment later."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def free(kind="CPU"):
    return ray.available_resources().get(kind, 0)


def refusal(make):
    """The words of a PlacementError, and the seconds until it came."""
    start = time.monotonic()
    try:
        make()
    except PlacementError as error:
        return str(error), time.monotonic() - start
    return "nothing was refused", 0.0


@pytest.fixture(scope="module")
def _connected(ray_address):
    ray.init(address=ray_address, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("nodes", "options", "asks"),
    [
        ([5], {}, "5 CPU (4 in all, 4 free)"),
        ([1, 4], {}, "5 CPU (4 in all, 4 free)"),
        ([2], {"cpus_per_worker": 3}, "6 CPU (4 in all, 4 free)"),
        ([1], {"use_gpu": True}, "1 CPU (4 in all, 4 free), 1 GPU (0 in all, 0 free)"),
        ([1], {"resources": {"disk": 2}}, "1 CPU (4 in all, 4 free), 2 disk (0 in all, 0 free)"),
        ([1], {"accelerator_type": "H200"}, "0.0001 H200 (0 in all, 0 free)"),
    ],
)
def test_what_can_never_be_given_is_refused_at_once(nodes, options, asks):
    assert soon(lambda: free() == 4)
    words, seconds = refusal(RayResourcePool(nodes, name_prefix="never", **options).slots)
    assert asks in words
    assert "can never be given" in words
    assert seconds < 5
    assert not [one for one in placement_group_table().values() if one["name"].startswith("never")]


def test_a_pool_reserves_and_gives_back():
    assert soon(lambda: free() == 4)
    with RayResourcePool([1, 2], name_prefix="two") as pool:
        assert pool.get_placement_groups() == pool.get_placement_groups()
        assert [group.bundle_count for group in pool.get_placement_groups()] == [1, 2]
        names = {one["name"] for one in placement_group_table().values() if one["state"] == "CREATED"}
        assert {"twohocket_group_1_2:0", "twohocket_group_1_2:1"} <= names
        assert soon(lambda: free() == 1)
    assert soon(lambda: free() == 4)
    assert len(pool.slots()) == 3, "a closed pool can be used again"
    pool.close()
    pool.close()
    assert soon(lambda: free() == 4)


def test_a_pool_waits_for_places_and_then_says_who_to_ask_and_holds_nothing():
    assert soon(lambda: free() == 4)
    late = RayResourcePool([1, 3], name_prefix="late", ready_timeout=0.5)
    with RayResourcePool([1]) as held:
        held.slots()
        words, seconds = refusal(late.slots)
        assert "4 CPU (4 in all, " in words
        assert "waited 0.5 s for others to give their places back" in words
        assert 0.5 <= seconds < 10
        states = [one["state"] for one in placement_group_table().values() if one["name"].startswith("late")]
        assert states == ["REMOVED", "REMOVED"]
        assert soon(lambda: free() == 3), "also the place that it had got"
    assert soon(lambda: free() == 4)
    late.ready_timeout = 60
    with late:
        assert len(late.slots()) == 4, "it can be asked again"


def test_a_pool_gets_places_that_are_given_back_while_it_waits():
    first = RayResourcePool([4])
    first.slots()
    threading.Timer(1, first.close).start()
    with RayResourcePool([3]) as second:
        assert len(second.slots()) == 3


def test_windows_and_merged_pools_are_places_of_their_parents():
    with RayResourcePool([1, 3], name_prefix="whole") as whole:
        slots = whole.slots()
        halves = split_resource_pool(whole, 2)
        assert [half.slots() for half in halves] == [slots[:2], slots[2:]]
        assert [half.name_prefix for half in halves] == ["whole_split_0", "whole_split_1"]
        one, three = split_resource_pool(whole, [1, 3])
        assert (one.slots(), three.slots(), three.world_size) == (slots[:1], slots[1:], 3)
        middle = split_resource_pool(three, [1, 2])
        assert [part.slots() for part in middle] == [slots[1:2], slots[2:]]
        merged = merge_resource_pool(middle[1], one)
        assert (merged.slots(), merged.world_size) == ([*slots[2:], slots[0]], 3)
        assert merged.name_prefix == "whole_split_1_split_1_whole_split_0"
        assert split_resource_pool(merged, 3)[0].slots() == merged.slots()
        with merged, one:
            pass
        assert soon(lambda: free() == 0), "a window gives nothing back; the pool does"
        for wrong in (3, 0, -1, [1, 1], [5, -1], [4, 0], []):
            with pytest.raises(GroupError, match="cannot split a pool of 4 places into"):
                split_resource_pool(whole, wrong)
        with pytest.raises(GroupError, match=r"differ in \['cpus_per_worker'\]"):
            merge_resource_pool(whole, RayResourcePool([1], cpus_per_worker=2))
    assert soon(lambda: free() == 4)


@pytest.mark.parametrize("nodes", [[], [0], [2, 0], [-1]])
def test_a_node_without_workers_is_an_error(nodes):
    with pytest.raises(GroupError, match="at least one for each entry"):
        RayResourcePool(nodes).slots()


def test_a_manager_makes_named_pools_for_roles_when_there_is_enough_for_all():
    roles = {"actor": "train", "critic": "train", "maker": "make"}
    manager = ResourcePoolManager({"train": [2], "make": [1]}, roles)
    manager.create_resource_pool()
    train = manager.get_resource_pool("actor")
    assert train is manager.get_resource_pool("critic")
    assert (train.store, train.name_prefix, train.max_colocate_count) == ([2], "train", 3)
    assert manager.get_resource_pool("maker").store == [1]
    assert manager.get_n_gpus() == 3
    with pytest.raises(PlacementError, match=r"ask for more than there is \(asked, in all\): .*'CPU': \(5, 4"):
        ResourcePoolManager({"train": [2], "make": [3]}, roles).create_resource_pool()
    assert soon(lambda: free() == 4), "nothing is reserved before a group needs it"
