"""What a group refuses by name: a method that would take a place of the group's own, a pool that is gone."""

import sys

import pytest
import ray

from hocket.errors import GroupError, WorkerDied
from hocket.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("_connected")]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get the classes, and do not import tests


class Greedy(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def workers(self):
        return []


@pytest.fixture(scope="module")
def _connected(ray_address):
    ray.init(address=ray_address, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_method_with_a_name_of_the_groups_own_is_refused():
    """Otherwise it would silently take the place of what the group itself needs."""
    with RayResourcePool([1]) as pool, pytest.raises(GroupError, match="the name 'workers' belongs to the group"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Greedy))


def test_a_call_after_the_pool_was_closed_says_so():
    pool = RayResourcePool([1])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Worker), watch=False)
    pool.close()
    calls = iter(lambda: group.execute_all_sync("get_cuda_visible_devices"), None)
    with pytest.raises(WorkerDied, match="its place was given back to the cluster"):
        list(calls)  # Ray ends the worker a moment later
