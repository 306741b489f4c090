"""Units on their way: staleness is bounded before work is done, order is by prompt, nothing is lost or kept twice."""

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.data.proto import DataProto
from hocket.errors import HocketError, WorkerDied
from hocket.run.flow import Books, Flow

SAMPLES, PER_STEP, STEPS = 4, 3, 6


def unit(step, index):
    meta = {"step": step, "unit": index}
    return DataProto.from_dict({}, {"uid": [f"f.csv:{step}{index}:0"]}, meta)


def units(step):
    return [unit(step, i) for i in range(PER_STEP)]


def make_flow(**options):
    return Flow(units, **{"steps": STEPS, "samples": lambda one: SAMPLES, **options})


def make_all(flow, step):
    """Make and train one step."""
    while (lease := flow.offer("maker-0")) is not None:
        flow.made(lease, lease.key, SAMPLES)
    assert flow.ready(step) == [(step, i) for i in range(PER_STEP)]
    books = flow.trained(step)
    flow.advance(step + 1)
    return books


def keys(flow, **options):
    """The units that may start now."""
    found = []
    while (lease := flow.offer("maker-0", **options)) is not None:
        found.append(lease.key)
    return found


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_unit_starts_when_its_step_is_near_enough_and_in_prompt_order(bound):
    flow = make_flow(max_staleness=bound)
    assert keys(flow) == [(step, i) for step in range(bound + 1) for i in range(PER_STEP)]
    flow.advance(1)
    assert keys(flow) == [(bound + 1, i) for i in range(PER_STEP)]


def test_at_the_end_there_is_no_step_more():
    flow = make_flow(max_staleness=100)
    assert len(keys(flow)) == STEPS * PER_STEP


def test_a_lease_says_which_weights_are_old_enough():
    flow = make_flow(max_staleness=2, books=Books(4, 7, {}, {}))
    lease = flow.offer("maker-0")
    assert (lease.key, lease.at_least, lease.timeline, lease.samples) == ((4, 0), 2, 7, SAMPLES)


def test_a_maker_gets_what_fits_it_and_the_rest_waits():
    flow = make_flow()
    assert keys(flow, fits=lambda one: one.meta_info["unit"] == 1) == [(0, 1)]
    assert keys(flow) == [(0, 0), (0, 2)]


@pytest.mark.parametrize("seed", range(5))
def test_experience_comes_in_any_order_and_leaves_in_prompt_order(seed):
    flow = make_flow()
    leases = flow.offer_step("maker-0")
    random.Random(seed).shuffle(leases)
    for lease in leases:
        assert flow.ready(0) is None
        assert flow.made(lease, lease.key, SAMPLES)
    assert flow.ready(0) == [(0, 0), (0, 1), (0, 2)]
    assert flow.depth == 3
    books = flow.trained(0)
    assert (books.step, books.accounts["trained"], books.balance["ledger/trained"]) == (1, 12, 12.0)
    assert flow.depth == 0


def test_what_a_dead_maker_had_is_made_again_first_and_counted():
    flow = make_flow(max_staleness=1)
    first, second = flow.offer("maker-0"), flow.offer("maker-1")
    flow.lost(first, "it died")
    assert flow.balance()["ledger/maker_lost"] == SAMPLES
    again = flow.offer("maker-1")
    assert again.key == first.key == (0, 0)
    assert not flow.made(first, "from the one that was thought dead", SAMPLES)
    flow.lost(first, "twice")  # nothing happens: it is no longer its lease
    assert flow.made(again, "a", SAMPLES)
    assert not flow.made(again, "once more", SAMPLES)
    assert flow.made(second, "b", SAMPLES)
    assert flow.balance()["ledger/buffered"] == 2 * SAMPLES


def test_a_unit_that_costs_too_many_makers_ends_the_run_by_name():
    flow = make_flow(attempts=2)
    flow.lost(flow.offer("maker-0"), "it died")
    with pytest.raises(WorkerDied, match=r"2 makers were lost .* unit 0 of step 1, .*'f.csv:00:0'; the last: killed"):
        flow.lost(flow.offer("maker-1"), "killed")


def test_a_step_goes_on_without_a_unit_that_failed():
    flow = make_flow(may_drop=1)
    leases = flow.offer_step("maker-0")
    assert flow.drop(leases[1], "reward_error")
    for lease in (leases[0], leases[2]):
        flow.made(lease, lease.key, SAMPLES)
    assert flow.take(0, timeout=0) == [(0, 0), (0, 2)]
    assert flow.trained(0).accounts["trained"] == 2 * SAMPLES
    assert flow.balance()["ledger/reward_error"] == SAMPLES
    flow.advance(1)
    assert not flow.drop(flow.offer("maker-0"), "reward_error"), "one unit may be dropped, not two"


def test_a_reason_that_is_not_on_the_list():
    flow = make_flow()
    with pytest.raises(HocketError, match="'bored' is no reason of the ledger"):
        flow.drop(flow.offer("maker-0"), "bored")


def test_going_back_takes_everything_back_and_fences_what_was_out():
    flow = make_flow(max_staleness=1)
    saved = make_all(flow, 0)
    make_all(flow, 1)
    out = flow.offer("maker-0")
    flow.made(flow.offer("maker-1"), "waits", SAMPLES)
    before = flow.balance()
    lost = flow.rewind(saved)
    after = flow.balance()
    # the first two steps were made while version 0 was in use, the third after that: all but step 0 is taken back
    assert lost == before["ledger/in_flight"] + before["ledger/buffered"] + PER_STEP * SAMPLES
    assert after["ledger/trained"] == PER_STEP * SAMPLES
    assert after["ledger/in_flight"] == after["ledger/buffered"] == 0
    assert after["ledger/produced"] == before["ledger/produced"]
    assert (flow.step, flow.version, flow.timeline) == (1, 1, 1)
    assert not flow.made(out, "too late", SAMPLES)
    assert flow.offer("maker-0").key == (1, 0)


def test_a_run_resumes_with_what_waited_and_makes_the_rest():
    waiting = {(2, 1): ("kept", SAMPLES)}
    flow = make_flow(max_staleness=1, books=Books(2, 3, {"trained": 24, "buffered": 4}, {}, waiting))
    assert keys(flow) == [(2, 0), (2, 2), (3, 0), (3, 1), (3, 2)]
    assert flow.missing(2) == [0, 2]
    assert flow.balance()["ledger/produced"] == 24 + 4 + 5 * SAMPLES


def test_what_lay_on_a_lost_machine_is_made_again():
    flow = make_flow()
    for lease in flow.offer_step("maker-0"):
        flow.made(lease, lease.key, SAMPLES)
    flow.again(0)
    assert flow.ready(0) is None
    assert flow.balance()["ledger/maker_lost"] == PER_STEP * SAMPLES
    assert keys(flow) == [(0, 0), (0, 1), (0, 2)]


def test_no_unit_after_it_is_closed():
    flow = make_flow()
    flow.close()
    assert flow.next("maker-0") is None


def test_a_wait_for_a_unit_ends_when_one_may_start_and_at_a_stop():
    flow = make_flow()
    keys(flow)
    threading.Timer(0.05, flow.advance, (1,)).start()
    assert flow.next("maker-0").key == (1, 0)

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    keys(flow)
    with pytest.raises(Stop):
        flow.next("maker-0", stop=stop)
    with pytest.raises(Stop):
        flow.take(0, timeout=60, stop=stop)


def test_a_wait_for_experience_says_at_its_deadline_what_is_missing():
    flow = make_flow()
    flow.made(flow.offer("maker-0"), "a", SAMPLES)
    with pytest.raises(WorkerDied, match=r"waited 0 s for units \[1, 2\] of step 1; no maker delivered them"):
        flow.take(0, timeout=0.05)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_makers_in_threads_keep_the_bound_and_the_order(bound):
    flow, oldest, taken = make_flow(max_staleness=bound), [], []
    lock = threading.Lock()

    def make(name, pause):
        while (lease := flow.next(name)) is not None:
            with lock:
                oldest.append(lease.key[0] - flow.version)
            time.sleep(pause)
            flow.made(lease, lease.key, SAMPLES)

    threads = [threading.Thread(target=make, args=(f"maker-{i}", 0.001 * i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for step in range(STEPS):
        taken += flow.take(step, timeout=10)
        flow.trained(step)
        flow.advance(step + 1)
    flow.close()
    for thread in threads:
        thread.join(5)
    assert taken == [(step, i) for step in range(STEPS) for i in range(PER_STEP)]
    assert max(oldest) <= bound
    assert flow.balance()["ledger/trained"] == flow.balance()["ledger/produced"] == STEPS * PER_STEP * SAMPLES


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["lease", "make", "lose", "train", "save", "back", "late"]), max_size=80), st.data())
def test_the_ledger_balances_whatever_happens(acts, data):
    flow = make_flow(max_staleness=1, attempts=1000)
    saved = newest = Books(0, 0, {}, {})
    open_leases, old = [], []
    for act in acts:
        if act == "lease" and (lease := flow.offer("maker-0")):
            open_leases.append(lease)
        elif act in ("make", "lose") and open_leases:
            lease = open_leases.pop(data.draw(st.integers(0, len(open_leases) - 1)))
            old.append(lease)
            flow.made(lease, lease.key, SAMPLES) if act == "make" else flow.lost(lease, "chance")
        elif act == "late" and old:
            assert not flow.made(data.draw(st.sampled_from(old)), "again", SAMPLES)
        elif act == "train" and flow.step < STEPS and flow.ready(flow.step):
            newest = flow.trained(flow.step)
            flow.advance(flow.step)
        elif act == "save":
            saved = newest
        elif act == "back":
            flow.rewind(saved)
            newest = saved
            old += open_leases
            open_leases = []
        flow.balance()
        assert flow.version == flow.step
