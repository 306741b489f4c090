"""Admission bounds staleness before the work is done, whoever asks and however slow anybody is."""

import random
import threading
import time

import pytest

from hocket.data.proto import DataProto
from hocket.run.admission import Admission

UNITS, STEPS = 3, 12


def units(step):
    return [DataProto(meta_info={"step": step, "unit": unit}) for unit in range(UNITS)]


class Enough(Exception):
    pass


def enough():
    raise Enough


def test_units_come_in_order_and_end_with_none():
    admission = Admission(units, steps=range(2), max_staleness=5)
    order = [(unit.meta_info["step"], unit.meta_info["unit"]) for unit in iter(admission.next, None)]
    assert order == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert admission.next() is None


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_more_than_the_bound_before_the_first_version(bound):
    admission = Admission(units, steps=range(STEPS), max_staleness=bound)
    assert [admission.next(stop=enough).meta_info["step"] for _ in range(UNITS * (bound + 1))][-1] == bound
    with pytest.raises(Enough):
        admission.next(stop=enough)
    admission.advance(1)
    unit = admission.next(stop=enough)  # the unit that had to wait is not lost
    assert unit.meta_info == {"step": bound + 1, "unit": 0}
    assert admission.oldest(unit) == 1


@pytest.mark.parametrize("version", [0, 4])
def test_the_oldest_version_that_a_unit_may_have(version):
    admission = Admission(units, steps=range(4, 8), max_staleness=2, version=version)
    assert [admission.oldest(units(step)[0]) for step in (0, 1, 2, 3, 7)] == [0, 0, 0, 1, 5]
    if version == 4:  # a run that goes on at step 4
        assert admission.next(stop=enough).meta_info["step"] == 4


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("makers", [1, 3])
def test_the_bound_holds_and_is_used_under_threads(bound, makers):
    admission = Admission(units, steps=range(STEPS), max_staleness=bound)
    lock, done, version, seen, lags = threading.Condition(), dict.fromkeys(range(STEPS), 0), [0], [], []

    def make(seed):
        noise = random.Random(seed)
        while (unit := admission.next()) is not None:
            step = unit.meta_info["step"]
            with lock:
                lags.append(step - version[0])
                assert admission.oldest(unit) <= version[0]
            time.sleep(noise.random() * 0.002)
            with lock:
                seen.append((step, unit.meta_info["unit"]))
                done[step] += 1
                lock.notify_all()

    threads = [threading.Thread(target=make, args=(seed,)) for seed in range(makers)]
    for thread in threads:
        thread.start()
    for step in range(STEPS):
        with lock:
            assert lock.wait_for(lambda step=step: done[step] == UNITS, timeout=20)
        time.sleep(0.005)  # a slow trainer: makers run ahead as far as they may
        with lock:
            version[0] = step + 1
            admission.advance(step + 1)
    for thread in threads:
        thread.join(20)
    assert sorted(seen) == [(step, unit) for step in range(STEPS) for unit in range(UNITS)]
    assert max(lags) == bound
