"""What a group says when its workers raise, die, or do not answer; and when the driver itself is to end."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from ray.job_config import JobConfig

from hocket.errors import HocketError, WorkerDied
from hocket.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


class Awkward(Exception):
    """An error that pickle cannot bring to another process, as libraries have them."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


ERRORS = {
    "value": lambda: int("no number"),
    "key": lambda: {}["no key"],
    "file": lambda: Path("/no/file").read_text(),
    "unicode": lambda: b"\xff".decode(),
}


class Busy(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        """Process number, and the file that the process writes errors to."""
        return os.getpid(), os.readlink("/proc/self/fd/2")

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def only_rank_one_sleeps(self, seconds):
        return self.sleep(seconds if self.rank == 1 else 0)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, kind, while_zero_works=0):
        if self.rank == 0:
            time.sleep(while_zero_works)
        elif kind == "awkward":
            raise Awkward(7, "as the library says")
        else:
            ERRORS[kind]()
        return self.rank


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


@pytest.fixture(scope="module")
def make(ray_address):
    """Groups of so many workers, on one pool."""
    here = JobConfig(_py_driver_sys_path=[str(Path(__file__).parent)])  # where workers find this module
    ray.init(address=ray_address, job_config=here, log_to_driver=False)
    with RayResourcePool([3], cpus_per_worker=0.5) as pool:
        yield lambda **options: RayWorkerGroup(pool, RayClassWithInitArgs(Busy), **options)
    ray.shutdown()


@pytest.fixture(scope="module")
def group(make):
    return make(call_timeout=60)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_says_who_and_what_and_what_became_of_the_others(group):
    with pytest.raises(HocketError) as caught:
        group.fail("value", while_zero_works=2)
    words = str(caught.value)
    assert words.startswith("rank 1 of Busy on node ")
    assert "failed while it was to fail: ValueError: invalid literal for int() with base 10: 'no number'" in words
    assert words.count("rank 2 of Busy") == words.count("rank 0 of Busy") == 1
    assert "failed too; rank 0 of Busy" in words
    assert words.endswith("is still at it)")
    assert group.sleep(0) == [0, 1, 2], "the group is as good as before"


@pytest.mark.parametrize(
    ("kind", "type_", "words"),
    [
        ("value", ValueError, "ValueError: invalid literal"),
        ("key", KeyError, "KeyError: 'no key'"),
        ("file", FileNotFoundError, "FileNotFoundError: .* No such file or directory: '/no/file'"),
        ("unicode", UnicodeDecodeError, "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
        ("awkward", HocketError, "(?s:.*)Awkward: 7: as the library says"),
    ],
)
def test_the_type_of_a_workers_error_can_be_caught(group, kind, type_, words):
    with pytest.raises(type_, match=f"rank 1 of Busy .*{words}") as caught:
        group.fail(kind)
    assert isinstance(caught.value, HocketError)


# -- deadlines ------------------------------------------------------------------------------------------------------


def test_a_call_beyond_its_deadline_is_named_and_its_stacks_are_in_the_log(group):
    log = Path(group.place()[1][1])
    with pytest.raises(WorkerDied) as caught:
        group.only_rank_one_sleeps.options(timeout=2)(4)
    words = str(caught.value)
    assert words.startswith("rank 1 of Busy on node ")
    assert "did not answer within 2 s while it was to only_rank_one_sleeps" in words
    assert "rank 0" not in words
    assert "rank 2" not in words
    assert soon(lambda: "in only_rank_one_sleeps" in log.read_text(errors="replace"))
    assert group.only_rank_one_sleeps(0) == [0, 1, 2], "the late one is waited for, and the group goes on"


def test_every_call_of_a_group_has_the_deadline_of_the_group(make):
    hurried = make(call_timeout=1)
    with pytest.raises(WorkerDied, match=r"rank 0 of Busy .*rank 1.*rank 2.* did not answer within 1 s .* to sleep"):
        hurried.execute_all_sync("sleep", 2)
    assert len(hurried.place.options(timeout=60)()) == 3, "a call may have longer"


# -- deaths ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_while_busy_is_reported_by_rank_and_cause(make):
    group = make()
    pids = [pid for pid, _ in group.place()]
    killed = []

    def kill():
        os.kill(pids[1], signal.SIGKILL)
        killed.append(time.monotonic())

    threading.Timer(1, kill).start()
    with pytest.raises(WorkerDied) as caught:
        group.sleep(60)
    assert time.monotonic() - killed[0] < 5
    words = str(caught.value)
    assert words.startswith("rank 1 of Busy on node ")
    assert "died while it was to sleep: the process ended without a word: killed (SIGKILL" in words
    assert "rank 0 of Busy" in words, "which is still at it"
    with pytest.raises(WorkerDied, match="rank 1 of Busy"):
        group.place()


def test_a_worker_that_is_killed_while_idle_is_told_to_a_function_and_to_the_next_call(make):
    told, heard = [], threading.Event()

    def on_death(error):
        told.append(error)
        heard.set()

    group = make(watch=on_death)
    pids = [pid for pid, _ in group.place()]
    os.kill(pids[2], signal.SIGKILL)
    assert heard.wait(5)
    assert isinstance(told[0], WorkerDied)
    assert str(told[0]).startswith("rank 2 of Busy on node ")
    assert "SIGKILL" in str(told[0])
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 2 of Busy .*SIGKILL"):
        group.sleep(60)
    assert time.monotonic() - start < 1, "nothing is sent to a group that is not whole"
    assert len(told) == 1
    del group
    gc.collect()
    assert soon(lambda: not any(map(alive, pids))), "a group that nobody has any more ends, though it is watched"


# -- the driver -----------------------------------------------------------------------------------------------------

DRIVER = """
import sys, time
import ray
from hocket.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

def start():
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    pool = RayResourcePool([1], cpus_per_worker=0.1)
    return pool, RayWorkerGroup(pool, RayClassWithInitArgs(Sleeper))

def until_interrupted(wait):
    print("waiting", flush=True)
    try:
        wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)

pool, group = start()
until_interrupted(lambda: group.sleep(60))
until_interrupted(RayResourcePool([4]).slots)
ray.shutdown()
time.sleep(1.5)
pool, group = start()
time.sleep(1.5)
print("leaving", flush=True)
"""


@pytest.fixture(scope="module")
def driver(ray_address):
    """What a driver printed that was interrupted twice, and how long after each time it said so."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, ray_address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines, waits = [], []
    for _ in range(2):
        lines.append(process.stdout.readline().strip())
        time.sleep(1)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        lines.append(process.stdout.readline().strip())
        waits.append(time.monotonic() - start)
    rest, errors = process.communicate(timeout=90)
    return [*lines, *rest.split()], waits, errors, process.returncode


def test_an_interrupt_ends_a_call_and_the_wait_for_a_pool_at_once(driver):
    lines, waits, errors, _ = driver
    assert lines[:4] == ["waiting", "interrupted"] * 2, errors
    assert max(waits) < 5


def test_that_a_cluster_has_no_accelerators_is_said_once_though_several_pools_are_made(driver):
    assert driver[2].count("the cluster has no accelerators: pools made without use_gpu get CPU workers") == 1


def test_shutdown_and_exit_with_a_watched_group_are_quiet(driver):
    lines, _, errors, code = driver
    assert (lines[4:], code) == (["leaving"], 0), errors
    assert "Traceback" not in errors
    assert "Error" not in errors
