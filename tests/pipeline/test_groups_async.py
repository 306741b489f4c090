"""What runs at the same time and what does not, told by the order of events.

No test looks at a clock: where calls must overlap, one waits for what another does, and would wait until its deadline.
"""

import asyncio
import sys
import threading
from collections import defaultdict
from itertools import accumulate
from typing import ClassVar

import pytest
import ray

from hocket.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    register,
)

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get the classes, and do not import tests
LONG = 60  # seconds; a wait that nobody ends fails then


class Events(Worker):
    """Notes what begins and ends in its process, in order. A call may wait until another, by name, has begun."""

    log: ClassVar[list] = []  # one for all roles of a process

    def __init__(self):
        super().__init__()
        self.flags = defaultdict(threading.Event)

    def pass_by(self, name, wait_for=None):
        self.log.append(f"+{name}")
        self.flags[name].set()
        met = wait_for is None or self.flags[wait_for].wait(LONG)
        self.log.append(f"-{name}")
        return met

    step = register(Dispatch.ONE_TO_ALL, blocking=False)(pass_by)

    def let_now(self, name):
        self.flags[name].set()

    def read(self):
        return list(self.log)

    def clear(self):
        self.log.clear()
        self.flags.clear()


class Mixed(Events):
    """Has both kinds of methods."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def step_async(self, name, wait_for=None):
        self.log.append(f"+{name}")
        self.flags[name].set()
        while wait_for and not self.flags[wait_for].is_set():
            await asyncio.sleep(0.002)
        self.log.append(f"-{name}")
        return True

    @register(Dispatch.ONE_TO_ALL)
    async def let(self, name):
        self.let_now(name)


class Threads(Events):
    """Sync methods alone; how many run at once is said by max_concurrency."""

    let = register(Dispatch.ONE_TO_ALL)(Events.let_now)


class Lanes(Events):
    """Some of its methods have threads of their own."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    @ray.method(concurrency_group="io")
    def receive(self, name, wait_for=None):
        return self.pass_by(name, wait_for)

    @ray.method(concurrency_group="control")
    @register(Dispatch.ONE_TO_ALL)
    def let(self, name):
        self.let_now(name)


def roles():
    """The roles of the tests, each with its stated concurrency."""
    threads = RayClassWithInitArgs(Threads)
    threads.update_options({"max_concurrency": 3})
    bounded = RayClassWithInitArgs(Mixed)
    bounded.update_options({"max_concurrency": 2})
    lanes = RayClassWithInitArgs(ray.remote(concurrency_groups={"io": 1, "control": 1})(Lanes))
    return {"mixed": RayClassWithInitArgs(Mixed), "bounded": bounded, "threads": threads, "lanes": lanes}


@pytest.fixture(scope="module")
def pool(ray_address):
    ray.init(address=ray_address, log_to_driver=False)
    with RayResourcePool([1]) as pool:
        yield pool
    ray.shutdown()


@pytest.fixture(scope="module", params=["separate", "WorkerDict", "fused"])
def group(request, pool):
    """A group of one worker for each role, in one of three layouts."""
    if request.param == "separate":
        return {role: RayWorkerGroup(pool, spec, call_timeout=2 * LONG) for role, spec in roles().items()}
    bind = create_colocated_worker_cls if request.param == "WorkerDict" else create_colocated_worker_cls_fused
    return RayWorkerGroup(pool, bind(roles()), call_timeout=2 * LONG).spawn(set(roles()))


@pytest.fixture
def fresh(group):
    """The groups with an empty log."""
    for each in group.values():
        each.execute_all_sync("clear")
    return group


def log(group):
    return group.execute_rank_zero_sync("read")


def done(*calls):
    """Wait for calls of one worker each, all of which met whom they waited for."""
    assert ray.get([ref for refs in calls for ref in refs], timeout=LONG) == [True] * len(calls)


# -- what overlaps --------------------------------------------------------------------------------------------------


def test_async_methods_of_a_role_overlap(fresh):
    mixed = fresh["mixed"]
    done(mixed.step_async("a", wait_for="b"), mixed.step_async("b", wait_for="a"))
    assert {*log(mixed)[:2]} == {"+a", "+b"}


def test_sync_methods_keep_their_order_and_do_not_overlap(fresh):
    """D12, old trap: one `async def` in a role made all calls of the process overlap, the sync ones too."""
    mixed = fresh["mixed"]
    waiting = mixed.step_async("async", wait_for="x")
    steps = [mixed.step("first", wait_for="y"), *(mixed.step(str(i)) for i in range(4))]
    mixed.let("y")
    done(*steps)
    mixed.let("x")
    done(waiting)
    order = [event for event in log(mixed) if "async" not in event]
    assert order == [f"{sign}{name}" for name in ("first", *range(4)) for sign in "+-"]


def test_a_sync_method_does_not_stop_the_async_ones(fresh):
    """D12, old trap: a sync method blocked the event loop."""
    mixed = fresh["mixed"]
    busy = mixed.step("busy", wait_for="x")
    done(mixed.step_async("a", wait_for="busy"))
    mixed.let("x")  # itself async
    done(busy)
    assert log(mixed)[-2:] == ["-a", "-busy"]


def test_the_sync_methods_of_all_roles_of_a_process_keep_one_order(fresh):
    """In groups of their own, roles do not wait for one another."""
    mixed, bounded = fresh["mixed"], fresh["bounded"]
    held, *others = mixed.step("held", wait_for="x"), bounded.step("b"), mixed.step("c"), bounded.step("d")
    if mixed.workers[0] != bounded.workers[0]:
        done(others[0], others[2])
    mixed.let("x")
    done(held, *others)
    mine = ("held", "c") if mixed.workers[0] != bounded.workers[0] else ("held", "b", "c", "d")
    assert log(mixed) == [f"{sign}{name}" for name in mine for sign in "+-"]


def test_max_concurrency_bounds_async_calls(fresh):
    bounded = fresh["bounded"]
    calls = [bounded.step_async(name, wait_for=f"go {name}") for name in "abc"]
    done(bounded.step("sync"))  # not one of the two
    for name in "abc":
        bounded.execute_all_sync("let_now", f"go {name}")
    done(*calls)
    events = log(bounded)
    # the threads of a lane take calls in no promised order, but never three at a time
    own = [event[0] for event in events if "sync" not in event]
    assert sorted(own) == ["+"] * 3 + ["-"] * 3
    assert max(accumulate(1 if sign == "+" else -1 for sign in own)) <= 2


def test_max_concurrency_lets_sync_calls_overlap(fresh):
    threads = fresh["threads"]
    done(threads.step("a", wait_for="b"), threads.step("b", wait_for="a"))
    assert {*log(threads)[:2]} == {"+a", "+b"}


def test_concurrency_groups_have_threads_of_their_own(fresh):
    """Facts, old trap: bound to a WorkerDict such calls were serialised silently, or failed on a bare assertion."""
    lanes = fresh["lanes"]
    computing, received = lanes.step("compute", wait_for="first"), lanes.receive("first", wait_for="y")
    queued = lanes.receive("second")
    done(computing)
    lanes.let("y")
    done(received, queued)
    assert [event for event in log(lanes) if "compute" not in event] == ["+first", "-first", "+second", "-second"]
