"""Loops live and die together, the first failure is the one that is raised; what died is replaced so often."""

import threading
import time

import pytest

from hocket.config import SuperviseSection
from hocket.errors import RewardError, WorkerDied
from hocket.run.supervise import Restarts, Stopped, Supervisor


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


def test_a_loop_that_is_spawned_while_the_others_run_is_waited_for():
    supervisor, done = Supervisor(), []
    supervisor.together(
        {"first": lambda: supervisor.spawn("second", lambda: [time.sleep(0.2), done.append("second")])},
        main=lambda: None,
    )
    assert done == ["second"]


def test_a_spawned_loop_that_fails_ends_all_too():
    supervisor, ended = Supervisor(), []
    with pytest.raises(ValueError, match="late") as caught:
        supervisor.together(
            {"first": lambda: supervisor.spawn("second", fails(ValueError("late")))}, main=waits(supervisor, ended)
        )
    assert caught.value.__notes__ == ["(raised in the second)"]
    assert len(ended) == 1


def test_nobody_waits_for_a_loop_beside_and_its_failure_ends_all():
    supervisor, ended = Supervisor(), []
    supervisor.beside("watchdog", waits(supervisor, ended))
    supervisor.together({}, main=lambda: None)
    assert ended == []
    supervisor.beside("scaling", fails(ValueError("no such number")))
    with pytest.raises(ValueError, match="no such number") as caught:
        supervisor.together({}, main=waits(supervisor, ended))
    assert caught.value.__notes__ == ["(raised in the scaling)"]
    deadline = time.monotonic() + 5
    while "watchdog" not in ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "watchdog" in ended


def test_a_pause_lasts_unless_the_loops_are_to_end():
    supervisor = Supervisor()
    before = time.monotonic()
    supervisor.pause(0.05)
    assert time.monotonic() - before >= 0.05
    threading.Timer(0.05, supervisor.end).start()
    with pytest.raises(Stopped):
        supervisor.pause(60)
    assert time.monotonic() - before < 10
    with pytest.raises(Stopped):
        supervisor.check()


def test_it_can_run_loops_more_than_once():
    supervisor, done = Supervisor(), []
    for name in ("evaluation", "training"):
        supervisor.together({name: lambda name=name: done.append(name)}, main=lambda: done.append("main"))
    assert sorted(done) == ["evaluation", "main", "main", "training"]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def restarts(**options):
    clock = Clock()
    return clock, Restarts("maker", **{"limit": 3, "window": 100, "backoff": 0.5, "clock": clock, **options})


DIED = WorkerDied("maker-1 died")


def test_replacements_are_further_and_further_apart_and_then_there_are_no_more():
    _, budget = restarts()
    assert [budget.spend(DIED) for _ in range(3)] == [0.5, 1.0, 2.0]
    error = WorkerDied("maker-0 died")
    with pytest.raises(WorkerDied, match="maker-0 died") as caught:
        budget.spend(error)
    assert caught.value is error
    assert caught.value.__notes__ == [
        "(not replaced: 3 makers were within 100 s, which is supervise.maker_restarts)",
    ]
    assert budget.count == 3


def test_what_is_long_ago_is_forgotten_one_by_one():
    clock, budget = restarts()
    for _ in range(3):
        budget.spend(DIED)
        clock.now += 40
    assert clock.now == 1120
    assert budget.spend(DIED) == 2.0, "the first of three is over 100 s ago"
    with pytest.raises(WorkerDied):
        budget.spend(WorkerDied("too soon"))
    clock.now += 1000
    assert budget.spend(DIED) == 0.5
    assert budget.count == 5


def test_no_pause_is_longer_than_half_a_minute():
    _, budget = restarts(limit=50)
    assert max(budget.spend(DIED) for _ in range(50)) == 30.0
    _, budget = restarts(limit=2000)
    assert max(budget.spend(DIED) for _ in range(2000)) == 30.0


def test_without_a_budget_the_error_is_raised_as_it_is():
    _, budget = restarts(limit=0)
    error = WorkerDied("maker-0 died")
    with pytest.raises(WorkerDied) as caught:
        budget.spend(error)
    assert not hasattr(caught.value, "__notes__")


def test_makers_and_trainers_have_budgets_of_their_own():
    settings = SuperviseSection(maker_restarts=2, trainer_restarts=1, backoff=0)
    makers, trainers = (Restarts.of(settings, kind) for kind in ("maker", "trainer"))
    assert [makers.spend(DIED), makers.spend(DIED), trainers.spend(DIED)] == [0, 0, 0]
    with pytest.raises(WorkerDied) as caught:
        trainers.spend(WorkerDied("trainer-0 died"))
    assert caught.value.__notes__ == [
        "(not replaced: 1 trainers were within 3600 s, which is supervise.trainer_restarts)"
    ]


def test_threads_that_spend_at_once_never_spend_more_than_there_is():
    _, budget = restarts(limit=20, backoff=0)
    refused = []

    def spend():
        for _ in range(10):
            try:
                budget.spend(WorkerDied("x"))
            except WorkerDied:
                refused.append(1)

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (budget.count, len(refused)) == (20, 20)
