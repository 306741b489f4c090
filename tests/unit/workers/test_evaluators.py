"""Flops by hand, times of stages of known length, and nothing divided by zero."""

import time
from itertools import chain

import pytest
import torch

from hocket.data.experience import Experience
from hocket.workers.callbacks import notify
from hocket.workers.evaluators import ExperienceMakerPerformanceEvaluator, Timer, TrainerPerformanceEvaluator


def batch(rows=2, width=10, actions=4):
    start = width - actions
    return Experience.from_dict(
        {
            "input_ids": torch.zeros(rows, width, dtype=torch.int64),
            "prompt_length": torch.full((rows,), start),
            "response_mask": torch.ones(rows, width, dtype=torch.bool),
        }
    )


def make(evaluator, experiences, *, seconds=0.0):
    """The calls of a working loop; making takes `seconds`, sending half of it, and as much is spent between."""
    notify([evaluator], "on_loop_start")
    for experience in experiences:
        notify([evaluator], "on_batch_start")
        time.sleep(seconds / 2)
        notify([evaluator], "on_make_experience_start")
        time.sleep(seconds)
        notify([evaluator], "on_make_experience_end", experience)
        notify([evaluator], "on_send_start")
        time.sleep(seconds / 2)
        notify([evaluator], "on_send_end")
        notify([evaluator], "on_batch_end")
    notify([evaluator], "on_loop_end")
    return evaluator


def fit(evaluator, episodes, *, seconds=0.0):
    """The calls of `fit`; each episode trains its experiences in two epochs; training and pushing take `seconds`."""
    notify([evaluator], "on_fit_start")
    for i, experiences in enumerate(episodes):
        notify([evaluator], "on_episode_start", i)
        for experience in chain(experiences, experiences):
            notify([evaluator], "on_batch_start")
            time.sleep(seconds)
            notify([evaluator], "on_batch_end", {}, experience)
        notify([evaluator], "on_update_start")
        time.sleep(seconds)
        notify([evaluator], "on_update_end")
        notify([evaluator], "on_episode_end", i)
    notify([evaluator], "on_fit_end")
    return evaluator


def maker(**more):
    lines = []
    return ExperienceMakerPerformanceEvaluator(100, 100, 100, 100, say=lines.append, **more), lines


def trainer(*args, **more):
    lines = []
    return TrainerPerformanceEvaluator(100, 100, *args, say=lines.append, **more), lines


def test_a_timer_adds_up():
    timer = Timer()
    timer.end()  # nothing runs
    assert timer.duration == 0
    for _ in range(2):
        timer.start()
        time.sleep(0.01)
        timer.end()
    assert timer.duration >= 0.02
    timer.reset()
    assert timer.duration == 0


@pytest.mark.parametrize(
    ("kv_cache", "flop"),
    [
        (False, 28000),  # 6 + 7 + 8 + 9 = 30 positions per row for the answer, 10 for each of four scores
        (True, 19600),  # 6 + 1 + 1 + 1 = 9 positions per row, and the scores
    ],
)
def test_the_flops_of_making(kv_cache, flop):
    evaluator, _ = maker(kv_cache=kv_cache)
    assert make(evaluator, [batch()]).flop == flop
    assert make(evaluator, [batch(), batch()]).report()["flop"] == 2 * flop  # one loop's, not three
    assert make(evaluator, [batch(actions=0)]).flop == 16000  # scores alone
    assert make(evaluator, [batch(actions=1)]).flop == 16000 + 2 * 2 * 100 * 9  # one forward over the prompt either way


def test_the_flops_of_training():
    assert fit(trainer(False, 0)[0], [[batch()]]).flop == 2 * 24000  # two epochs
    assert fit(trainer(True, 0)[0], [[batch()]]).flop == 2 * 32000


@pytest.mark.parametrize(("ignored", "counted"), [(0, 12), (1, 8), (2, 4), (3, 0)])
def test_the_first_episodes_do_not_count(ignored, counted):
    evaluator, lines = trainer(ignore_first_episodes=ignored)
    assert fit(evaluator, [[batch()]] * 3).report()["samples"] == counted
    assert (evaluator.report()["throughput"] > 0) == (counted > 0)
    assert ("no samples that count" in lines[-1]) == (counted == 0)


def test_a_maker_by_hand():
    evaluator, lines = maker(world_size=3)
    report = make(evaluator, [batch(), batch()], seconds=0.02).report()
    overall, making, sending = (t.duration for t in (evaluator.overall, evaluator.computing, evaluator.sending))
    assert overall >= 0.08
    assert 0.04 <= making < overall
    assert 0.02 <= sending < overall - making
    assert report == pytest.approx(
        {
            "samples": 4,
            "flop": 56000,
            "throughput": 12 / overall,
            "tflops": 56000 / 1e12 / making,
            "overall_seconds_per_sample": overall / 12,
            "make_seconds_per_sample": making / 12,
            "send_seconds_per_sample": sending / 12,
            "make_share": making / overall,
            "send_share": sending / overall,
        }
    )
    assert f"{12 / overall:.3g} samples/s" in lines[1]
    assert f"make {making / 12:.3g} s ({making / overall:.0%})" in lines[2]


def test_a_trainer_by_hand():
    evaluator, lines = trainer(False, 1)
    begun = time.perf_counter()
    report = fit(evaluator, [[batch()], [batch()]], seconds=0.01).report()
    everything = time.perf_counter() - begun
    overall, training, pushing = (t.duration for t in (evaluator.overall, evaluator.computing, evaluator.sending))
    assert evaluator.samples == 4
    assert 0.03 <= overall <= everything - 0.03  # the first episode does not count
    assert 0.02 <= training < overall - pushing < overall
    assert report["throughput"] == pytest.approx(4 / overall)
    assert report["tflops"] == pytest.approx(48000 / 1e12 / training)
    assert report["train_seconds_per_sample"] == pytest.approx(training / 4)
    assert report["update_share"] == pytest.approx(pushing / overall)
    assert lines[1].startswith("trainer: ")


def test_nothing_made_is_said_and_not_divided_by():
    for evaluator, lines in (maker(), trainer()):
        (make if hasattr(evaluator, "on_loop_start") else fit)(evaluator, [])
        assert set(evaluator.report().values()) == {0.0}
        assert "no samples that count" in lines[-1]


def test_a_b_is_a_billion():
    lines = []
    ExperienceMakerPerformanceEvaluator(1_500_000_000, 124_000_000, 0, 2**30, say=lines.append)
    assert lines == ["parameters: actor 1.500 B, critic 0.124 B, initial 0.000 B, reward 1.074 B"]
