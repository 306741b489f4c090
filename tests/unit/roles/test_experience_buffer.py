"""Units come in any order and leave as whole steps in prompt order."""

import threading
import time

import pytest

from hocket.errors import WorkerDied
from hocket.roles.experience_buffer import ExperienceBuffer


def test_any_order_in_prompt_order_out():
    buffer = ExperienceBuffer(units_per_step=3, timeout=1)
    for step, unit in [(1, 2), (0, 1), (0, 2), (1, 0), (0, 0)]:
        buffer.put(step, unit, f"{step}.{unit}")
    assert buffer.depth == 5
    assert buffer.take(0) == ["0.0", "0.1", "0.2"]
    assert buffer.depth == 2
    buffer.put(1, 1, "1.1")
    assert buffer.take(1) == ["1.0", "1.1", "1.2"]
    assert buffer.depth == 0


def test_a_unit_that_comes_twice_counts_once():
    buffer = ExperienceBuffer(units_per_step=2, timeout=0.05)
    buffer.put(0, 0, "first")
    buffer.put(0, 0, "again")
    with pytest.raises(WorkerDied, match=r"units \[1\] of step 1; no maker delivered them"):
        buffer.take(0)
    buffer.put(0, 1, "b")
    assert buffer.take(0) == ["again", "b"]


def test_take_waits_for_other_threads():
    buffer = ExperienceBuffer(units_per_step=8, timeout=10)
    threads = [threading.Thread(target=lambda i=i: [time.sleep(0.01 * (8 - i)), buffer.put(0, i, i)]) for i in range(8)]
    for thread in threads:
        thread.start()
    assert buffer.take(0) == list(range(8))
    for thread in threads:
        thread.join()


def test_stop_ends_the_wait():
    class Enough(Exception):
        pass

    def stop():
        raise Enough

    with pytest.raises(Enough):
        ExperienceBuffer(units_per_step=1, timeout=60).take(0, stop=stop)
