"""Groups over actors that live already: from another process, by name or handle.

Run as a program, this file is a driver that starts a detached group and goes.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.job_config import JobConfig

from hocket.errors import WorkerDied
from hocket.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
NAMESPACE = "detached"


class Counter(Worker):
    def __init__(self, start):
        super().__init__()
        self.count = start

    @register(Dispatch.ONE_TO_ALL)
    def add(self, number):
        self.count += number
        return self.count, self.rank, os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)


class Plain:
    """No Worker, and not made by a group."""

    def __init__(self, number):
        self.number = number

    def plus(self, other=0):
        return self.number + other


def leave_a_group(address):
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    pool = RayResourcePool([2], name_prefix="kept", detached=True)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, start=10), name_prefix="kept", detached=True)
    sys.stdout.write(json.dumps([group.worker_names, group.add(1)]))


def soon(condition, timeout=20):
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def alive(pid):
    """Whether the process runs; one that ended and waits for its parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module", autouse=True)
def _connected(ray_address):
    here = JobConfig(_py_driver_sys_path=[str(Path(__file__).parent)], ray_namespace=NAMESPACE)
    ray.init(address=ray_address, job_config=here, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def left(ray_address):
    """Names and first answers of the workers of a driver that has gone."""
    command = [sys.executable, str(Path(__file__)), ray_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    names, answers = json.loads(done.stdout)
    yield names, [tuple(answer) for answer in answers]
    ray.util.remove_placement_group(ray.util.get_placement_group("kepthocket_group_2:0"))
    assert soon(lambda: ray.available_resources().get("CPU") == 4)


@pytest.fixture
def make():
    """Groups of two on one pool."""
    with RayResourcePool([2]) as pool:
        yield lambda: RayWorkerGroup(pool, RayClassWithInitArgs(Counter, start=0))


def test_a_detached_group_outlives_its_driver_and_is_found_by_names(left):
    names, answers = left
    assert names == ["keptCounter_0:0", "keptCounter_0:1"]
    assert [answer[:2] for answer in answers] == [(11, 0), (11, 1)]
    group = RayWorkerGroup.from_detached("kept", names, ray_cls_with_init=RayClassWithInitArgs(Counter))
    pids = [pid for _, _, pid in answers]
    assert (group.world_size, group.worker_names, group.name_prefix) == (2, names, "kept")
    assert group.add(5) == [(16, 0, pids[0]), (16, 1, pids[1])]
    del group
    gc.collect()
    again = RayWorkerGroup.from_detached(worker_names=names)
    assert again.execute_rank_zero_sync("add", 1) == (17, 0, pids[0])
    assert again.execute_all_sync("add", [0, 1]) == [(17, 0, pids[0]), (17, 1, pids[1])]


def test_without_a_class_a_group_has_no_methods_but_any_can_be_called(left):
    group = RayWorkerGroup.from_detached(worker_names=left[0])
    with pytest.raises(AttributeError, match="no registered method 'add'"):
        group.add(1)
    assert group.execute_all_sync("get_cuda_visible_devices") == ["not set"] * 2
    assert group.spawn(set()) == {}


def test_a_name_that_nobody_has_is_an_error():
    with pytest.raises(ValueError, match="nobody"):
        RayWorkerGroup.from_detached(worker_names=["nobody_0:0"])


def test_a_group_by_names_keeps_its_workers_alive_and_lets_them_go(make):
    group = make()
    names, pids = group.worker_names, [pid for _, _, pid in group.add(1)]
    attached = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=RayClassWithInitArgs(Counter))
    del group
    gc.collect()
    assert not soon(lambda: not all(map(alive, pids)), timeout=1.5)
    assert attached.add(1) == [(2, rank, pid) for rank, pid in enumerate(pids)]
    del attached
    gc.collect()
    assert soon(lambda: not any(map(alive, pids)))


def test_attaching_waits_for_workers_that_are_busy(make):
    group = make()
    refs = group.execute_all_async("sleep", 2)
    attached = RayWorkerGroup.from_detached(worker_names=group.worker_names)
    assert ray.wait(refs, num_returns=2, timeout=0)[0], "they came to it in turn"
    assert [answer[:2] for answer in attached.execute_all_sync("add", 4)] == [(4, 0), (4, 1)]
    attached.execute_all_async("sleep", 60)
    with pytest.raises(WorkerDied, match=r"rank 0 of worker.* did not answer within 1 s while it was to start"):
        RayWorkerGroup.from_detached(worker_names=group.worker_names, ray_wait_register_center_timeout=1)
    assert all(ray.get_actor(name) for name in group.worker_names), "a group that only visits kills nobody"


def test_actors_that_other_code_has_made_can_be_a_group():
    actor = ray.remote(num_cpus=0)(Plain)
    group = RayWorkerGroup.from_detached(worker_handles=[actor.remote(number) for number in (10, 20)])
    assert group.execute_all_sync("plus") == [10, 20]
    assert group.execute_all_sync("plus", other=[1, 2]) == [11, 22]
    assert ray.get(group.execute_all_async("plus", 5)) == [15, 25]
    assert group.execute_rank_zero_sync("plus", 7) == 17
    with pytest.raises(TypeError, match="rank 0 of worker failed while it was to plus"):
        group.execute_all_sync("plus", "text")


def test_a_visitor_watches_too(left):
    names, answers = left
    group = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=RayClassWithInitArgs(Counter))
    os.kill(answers[1][2], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 1 of Counter .*SIGKILL"):
        group.execute_all_sync("sleep", 60)
    assert time.monotonic() - start < 5


if __name__ == "__main__":
    leave_a_group(sys.argv[1])
