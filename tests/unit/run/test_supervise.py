"""Loops live and die together; the first failure is the one that is raised."""

import threading
import time

import pytest

from hocket.errors import RewardError
from hocket.run.supervise import Supervisor


def waits(supervisor, ended):
    def loop():
        try:
            while True:
                supervisor.check()
                time.sleep(0.005)
        finally:
            ended.append(threading.current_thread().name)

    return loop


def fails(error, *, after=0.02):
    def loop():
        time.sleep(after)
        raise error

    return loop


def test_all_run_to_their_end():
    supervisor, done = Supervisor(), []
    supervisor.together(
        {"a": lambda: done.append("a"), "late": lambda: [time.sleep(0.3), done.append("late")]},
        main=lambda: done.append("main"),
    )
    assert sorted(done) == ["a", "late", "main"]


def test_a_failing_loop_ends_the_others_and_is_raised_with_its_name():
    supervisor, ended = Supervisor(), []
    error = RewardError("reward f raised KeyError")
    with pytest.raises(RewardError) as caught:
        supervisor.together(
            {"loop of maker-0": fails(error), "loop of maker-1": waits(supervisor, ended)},
            main=waits(supervisor, ended),
        )
    assert caught.value is error
    assert caught.value.__notes__ == ["(raised in the loop of maker-0)"]
    assert sorted(ended) == [threading.current_thread().name, "loop of maker-1"]


def test_a_failing_main_ends_the_loops():
    supervisor, ended = Supervisor(), []
    with pytest.raises(ValueError, match="main") as caught:
        supervisor.together({"maker": waits(supervisor, ended)}, main=fails(ValueError("main")))
    assert caught.value.__notes__ == ["(raised in the trainer loop)"]
    assert ended == ["maker"]


def test_ctrl_c_ends_the_loops():
    supervisor, ended = Supervisor(), []
    with pytest.raises(KeyboardInterrupt):
        supervisor.together({"maker": waits(supervisor, ended)}, main=fails(KeyboardInterrupt()))
    assert ended == ["maker"]


def test_the_first_of_several_failures_is_raised():
    supervisor = Supervisor()
    with pytest.raises(ValueError, match="first"):
        supervisor.together(
            {"a": fails(ValueError("first"), after=0.01), "b": fails(KeyError("second"), after=0.1)},
            main=fails(OSError("third"), after=0.2),
        )


def test_a_loop_that_fails_after_main_has_ended_is_raised_too():
    with pytest.raises(ValueError, match="late"):
        Supervisor().together({"maker": fails(ValueError("late"), after=0.3)}, main=lambda: None)
