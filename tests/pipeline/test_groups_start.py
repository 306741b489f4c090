"""Starting a group: which processes, with which environment, and what is said when a constructor fails."""

import os
import re
import socket
import time
import traceback
from pathlib import Path

import pytest
import ray
from ray.job_config import JobConfig

from hocket.errors import BatchError, GroupError, HocketError, WorkerDied
from hocket.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
    split_resource_pool,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
RANKS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "WORLD_SIZE")


class Probe(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def ranks(self):
        return [int(os.environ[name]) for name in RANKS]

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def variable(self, name):
        return os.environ.get(name)

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self):
        import torch  # here: all workers import this module, and few need it

        torch.distributed.init_process_group("gloo")
        number = torch.tensor([10**self.rank])
        torch.distributed.all_reduce(number)
        torch.distributed.destroy_process_group()
        return number.item()

    def see(self, devices):
        os.environ["CUDA_VISIBLE_DEVICES"] = devices

    def get_node_id(self):
        return ray.get_runtime_context().get_node_id()


class Fails(Worker):
    """Rank 1 fails in its constructor in the way asked for; the others write their number and wait for it."""

    def __init__(self, how, folder):
        super().__init__()
        (Path(folder) / str(self.rank)).write_text(str(os.getpid()))
        if self.rank == 1:
            self.fail(how)
        elif how == "rendezvous":
            import torch

            torch.distributed.init_process_group("gloo")

    def fail(self, how):
        if how == "exit":
            os._exit(7)
        elif how == "hang":
            time.sleep(600)
        elif how == "batch":
            raise BatchError("found no rows")
        raise ValueError("no such model")

    @register(Dispatch.ONE_TO_ALL)
    def ping(self):
        return "pong"


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


def free_ports(length):
    """The first of so many ports in a row that are free now."""
    for first in range(21000, 30000, length):
        try:
            for port in range(first, first + length):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def pool(ray_address):
    here = JobConfig(_py_driver_sys_path=[str(Path(__file__).parent)])  # where workers find this module
    ray.init(address=ray_address, job_config=here, log_to_driver=False)
    with RayResourcePool([2, 1], cpus_per_worker=0.5) as pool:  # most is left for the pools of single tests
        yield pool
    assert soon(lambda: ray.available_resources().get("CPU") == 4), "everything was given back"
    ray.shutdown()


@pytest.fixture(scope="module")
def ports():
    first = free_ports(4)
    return [first, first + 4]


@pytest.fixture(scope="module")
def spec():
    return RayClassWithInitArgs(Probe)


@pytest.fixture(scope="module")
def group(pool, spec, ports):
    return RayWorkerGroup(pool, spec, name_prefix="first", master_port_range=ports, worker_env={"COLOUR": "red"})


@pytest.fixture(scope="module")
def second(pool, spec, ports, group):
    """A group of the same class object on the same places."""
    return RayWorkerGroup(pool, spec, master_port_range=ports)


# -- which processes, with which environment ------------------------------------------------------------------------


def test_an_uneven_pool_starts_a_worker_for_each_place(group):
    assert group.world_size == 3
    assert group.ranks() == [[0, 0, 2, 2, 3], [1, 1, 2, 2, 3], [2, 0, 1, 1, 3]]
    assert len(set(group.pid())) == 3


def test_two_groups_on_one_pool_are_separate_processes_with_ports_of_their_own(group, second, ports):
    assert not set(group.pid()) & set(second.pid())
    assert group.master_port != second.master_port
    assert {int(group.master_port), int(second.master_port)} <= set(range(*ports))


def test_the_workers_meet_at_the_port_that_was_held_for_them(group, ports):
    assert group.execute_all_sync("get_master_addr_port") == [(group.master_address, group.master_port)] * 3
    assert int(group.master_port) in range(*ports)
    assert group.all_reduce() == [111] * 3


def test_groups_made_from_one_class_object_share_no_options(group, second, spec):
    assert spec.options == RayClassWithInitArgs(Probe).options
    assert group.variable("COLOUR") == ["red"] * 3
    assert second.variable("COLOUR") == [None] * 3
    assert group.variable("WG_PREFIX") == ["first"] * 3
    assert second.variable("WG_PREFIX") == [second.name_prefix] * 3 != ["first"] * 3


def test_workers_have_names_by_which_they_are_found(group, second):
    assert group.worker_names == ["firstProbe_0:0", "firstProbe_0:1", "firstProbe_1:0"]
    assert second.worker_names == [f"{second.name_prefix}Probe_{place}" for place in ("0:0", "0:1", "1:0")]
    assert ray.get(ray.get_actor("firstProbe_1:0").pid.remote()) == group.pid()[2]


def test_a_prefix_that_is_taken_is_a_clear_error_and_harms_nobody(pool, spec, group):
    with pytest.raises(GroupError, match=r"firstProbe_0:0.*give each group a name_prefix of its own"):
        RayWorkerGroup(pool, spec, name_prefix="first")
    assert group.ranks()[2][0] == 2


def test_a_worker_may_share_the_node_and_the_devices_of_another(spec, group):
    group.execute_rank_zero_sync("see", "3")
    mine = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    beside = spec(None, 0, sharing_with=group.workers[0], env=mine)
    assert ray.get(beside.get_cuda_visible_devices.remote()) == "3"
    assert ray.get(beside.get_node_id.remote()) == ray.get_runtime_context().get_node_id()


def test_a_wide_worker_with_variables_and_a_meeting_point_of_its_own(group):
    spec = RayClassWithInitArgs(Probe)
    spec.update_options({"runtime_env": {"env_vars": {"SHAPE": "round", "COLOUR": "blue"}}})
    meeting = {"master_addr": "10.1.2.3", "master_port": 4567}
    with RayResourcePool([1], cpus_per_worker=2) as wide:
        alone = RayWorkerGroup(wide, spec, worker_env={"COLOUR": "green"}, **meeting)
        assert [alone.variable(name)[0] for name in ("SHAPE", "COLOUR", "OMP_NUM_THREADS")] == ["round", "green", "2"]
        assert alone.execute_all_sync("get_master_addr_port") == [("10.1.2.3", "4567")]
        assert (alone.master_address, alone.master_port) == ("10.1.2.3", "4567")
    assert spec.options["runtime_env"] == {"env_vars": {"SHAPE": "round", "COLOUR": "blue"}}
    assert group.variable("OMP_NUM_THREADS") == ["1"] * 3


# -- arguments that cannot work -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"master_addr": "10.1.2.3"}, "master_addr and master_port go together"),
        ({"master_port": 4567}, "master_addr and master_port go together"),
        (
            {"worker_env": {"RANK": "5", "A": "b", "WORLD_SIZE": "9"}},
            re.escape("worker_env sets ['RANK', 'WORLD_SIZE']"),
        ),
        ({"ray_cls_with_init": None}, "found a pool but no class"),
        ({"detached": True}, "detached=True on a pool that ends with this process"),
    ],
)
def test_arguments_that_contradict_are_an_error_before_anything_starts(pool, spec, arguments, words):
    with pytest.raises(ValueError, match=words):
        RayWorkerGroup(pool, **{"ray_cls_with_init": spec, **arguments})


def test_gpus_are_not_given_on_a_pool_that_was_made_without(spec):
    with pytest.raises(GroupError, match="use_gpu=True on a pool that was made with use_gpu=False"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), spec, use_gpu=True)


# -- constructors that fail -----------------------------------------------------------------------------------------


def start(pool, tmp_path, how, **options):
    """The error of a group whose rank 1 fails; the processes that it had."""
    begun = time.monotonic()
    with pytest.raises(HocketError) as caught:
        RayWorkerGroup(pool, RayClassWithInitArgs(Fails, how, str(tmp_path)), **options)
    return caught.value, time.monotonic() - begun, [int(path.read_text()) for path in tmp_path.iterdir()]


def test_a_constructor_that_raises_while_others_wait_for_it_is_reported_with_rank_node_and_traceback(pool, tmp_path):
    error, _, pids = start(pool, tmp_path, "rendezvous")
    node = pool.slots()[1].address
    assert isinstance(error, ValueError)
    assert f"rank 1 of Fails on node {node} failed while it was to start: ValueError: no such model" in str(error)
    for rank in (0, 2):
        assert f"rank {rank} of Fails on node {node} is still at it" in str(error)
    told = "".join(traceback.format_exception(error))
    assert "in fail" in told
    assert 'raise ValueError("no such model")' in told
    assert pids
    assert soon(lambda: not any(map(alive, pids))), "the others of the group are gone too"


def test_the_pool_can_be_used_after_a_group_that_failed(pool, spec):
    window = split_resource_pool(pool, [2, 1])[0]
    assert RayWorkerGroup(window, spec).ranks() == [[0, 0, 2, 2, 2], [1, 1, 2, 2, 2]]


def test_hockets_own_errors_are_reported_with_rank_and_node_too(pool, tmp_path):
    error, _, _ = start(split_resource_pool(pool, [2, 1])[0], tmp_path, "batch")
    assert isinstance(error, BatchError)
    assert re.search(r"rank 1 of Fails on node \S+: found no rows", str(error))


def test_a_constructor_that_ends_its_process_is_reported(pool, tmp_path):
    error, _, pids = start(split_resource_pool(pool, [2, 1])[0], tmp_path, "exit")
    assert isinstance(error, WorkerDied)
    assert "rank 1 of Fails on node" in str(error)
    assert "died while it was to start" in str(error)
    assert soon(lambda: not any(map(alive, pids)))


def test_a_constructor_that_hangs_is_reported_at_the_deadline(pool, tmp_path):
    window = split_resource_pool(pool, [2, 1])[0]
    error, seconds, pids = start(window, tmp_path, "hang", ray_wait_register_center_timeout=3)
    assert isinstance(error, WorkerDied)
    assert re.search(r"rank 1 of Fails on node \S+ did not answer within 3 s while it was to start", str(error))
    assert 3 <= seconds < 20
    assert soon(lambda: not any(map(alive, pids)))


def test_without_waiting_the_first_call_reports_the_constructor(pool, tmp_path):
    window = split_resource_pool(pool, [2, 1])[0]
    spec = RayClassWithInitArgs(Fails, "raise", str(tmp_path))
    group = RayWorkerGroup(window, spec, wait_ready=False)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rank 1 of Fails on node .* to ping: ValueError: no such model"):
            group.ping()
    assert ray.get(group.workers[0].ping.remote(), timeout=30) == "pong"
