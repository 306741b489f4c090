"""Who feeds whom: the table of senders and receivers, and what is wrong with name lists before anything starts."""

import pytest

from hocket.errors import ConfigError, PlacementError
from hocket.workers.topology import check_topology, get_receivers_per_sender, target_makers, target_trainers


@pytest.mark.parametrize(
    ("senders", "receivers", "idle", "table"),
    [
        (1, 3, False, [[0, 1, 2]]),
        (2, 4, False, [[0, 2], [1, 3]]),
        (2, 3, False, [[0, 2], [1]]),
        (3, 2, False, [[0], [1], [0]]),
        (3, 2, True, [[0], [1], []]),
        (4, 2, True, [[0], [1], [], []]),
        (5, 3, False, [[0], [1], [2], [0], [1]]),
        (1, 1, True, [[0]]),
    ],
)
def test_the_table(senders, receivers, idle, table):
    assert [get_receivers_per_sender(i, senders, receivers, idle) for i in range(senders)] == table


@pytest.mark.parametrize("senders", range(1, 7))
@pytest.mark.parametrize("receivers", range(1, 7))
def test_every_receiver_is_served_and_nobody_idles_who_may_not(senders, receivers):
    shared = [get_receivers_per_sender(i, senders, receivers, False) for i in range(senders)]
    single = [get_receivers_per_sender(i, senders, receivers, True) for i in range(senders)]
    assert all(shared)
    assert {r for targets in shared for r in targets} == set(range(receivers))
    assert sorted(r for targets in single for r in targets) == list(range(receivers))  # exactly one sender each


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 0, 2, False), "found 0 senders and 2 receivers"),
        ((0, 2, 0, False), "found 2 senders and 0 receivers"),
        ((2, 2, 2, True), "found sender 2 of 2; wanted a number from 0 to 1"),
        ((-1, 2, 2, True), "found sender -1 of 2"),
    ],
)
def test_senders_that_are_not_there(arguments, text):
    with pytest.raises(ConfigError, match=text):
        get_receivers_per_sender(*arguments)


def flow(num_makers, num_trainers):
    """The name lists of the walk-through."""
    makers = {f"maker_{i}": target_trainers(i, num_makers, num_trainers) for i in range(num_makers)}
    trainers = {f"trainer_{i}": target_makers(i, num_trainers, num_makers) for i in range(num_trainers)}
    return (
        {name: [f"trainer_{x}" for x in targets] for name, targets in makers.items()},
        {name: [f"maker_{x}" for x in targets] for name, targets in trainers.items()},
    )


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (5, 3)])
def test_the_walk_through_is_sound_and_loses_no_sample(sizes):
    lines = check_topology(*flow(*sizes), samples_per_maker=7)
    assert len(lines) == 2 * sizes[0] + sizes[1]
    assert sum(int(line.split()[-2]) for line in lines if "can expect" in line) == 7 * sizes[0]


def test_the_lines():
    makers = {"m0": ["t0", "t1"], "m1": ["t1"]}
    assert check_topology(makers, {"t0": ["m0"], "t1": []}, samples_per_maker={"m0": 5, "m1": 4}) == [
        "m0 feeds t0, t1",
        "m1 feeds t1",
        "m0 gets weights from t0",
        "m1 gets weights from nobody: it keeps the weights it started with",
        "t0 can expect 3 samples",
        "t1 can expect 6 samples",
    ]


def test_an_unknown_number_of_samples_is_not_guessed():
    lines = check_topology({"m0": ["t0"], "m1": ["t0", "t1"]}, {"t0": [], "t1": []}, samples_per_maker={"m1": 4})
    assert [line for line in lines if "expect" in line] == ["t1 can expect 2 samples"]


def say(makers, trainers, **more):
    with pytest.raises(PlacementError) as caught:
        check_topology(makers, trainers, **more)
    return caught.value.message


@pytest.mark.parametrize(
    ("makers", "trainers", "more", "text"),
    [
        ({"m": ["trainer0"]}, {"trainer_0": []}, {}, "no trainer is called so: did you mean 'trainer_0'?"),
        ({"m": ["t"]}, {"t": ["other"]}, {}, "t names 'other', but no maker is called so: there are ['m']"),
        ({"m": ["t"]}, {"t": []}, {"groups": {"u": "g"}}, "`groups` names 'u', but no trainer"),
        ({"m": ["t"]}, {"t": []}, {"samples_wanted": {"tt": 1}}, "`samples_wanted` names 'tt', but no trainer"),
        ({"m": ["t"]}, {"t": []}, {"samples_per_maker": {"mm": 1}}, "`samples_per_maker` names 'mm', but no maker"),
        ({"m": ["t", "t"]}, {"t": []}, {}, "m names 't' 2 times; once is enough"),
        ({"m": ["t"]}, {"t": ["m", "m"]}, {}, "t names 'm' 2 times"),
        ({"x": ["x"]}, {"x": ["x"]}, {}, "'x' is a maker and a trainer"),
        ({"m": []}, {"t": []}, {}, "m has no trainer to send its experience to; t starves: no maker feeds it"),
        ({"m": ["t"]}, {"t": ["m"], "u": []}, {}, "u starves: no maker feeds it"),
    ],
)
def test_name_lists_that_cannot_work(makers, trainers, more, text):
    assert text in say(makers, trainers, **more)


def test_a_trainer_that_would_starve_is_told_with_its_numbers():
    text = say(*flow(3, 2), samples_per_maker=32, samples_wanted=48)  # the plan of equal shares, which nobody deals
    assert "trainer_1 starves: it wants 48 samples and gets 32 from maker_1" in text
    assert "trainer_0" not in text
    assert check_topology(*flow(3, 2), samples_per_maker=32, samples_wanted={"trainer_1": 32})


def test_weights_come_from_one_group():
    crossed = {"m0": ["t0", "t1"], "m1": ["t0", "t1"]}, {"t0": ["m0", "m1"], "t1": ["m0", "m1"]}
    text = say(*crossed)
    assert "m0 gets weights from t0, t1, which are no data-parallel group" in text
    assert "m1 gets weights from t0, t1" in text
    assert "t0, t1" in say(*crossed, groups={"t0": "t1"})  # a group is not the trainer of that name
    assert "m0 gets weights from t0, t1" in check_topology(*crossed, groups={"t0": "g", "t1": "g"})
    assert check_topology(*crossed, arbitrate="latest")
    with pytest.raises(ConfigError, match="found arbitrate='newest'; wanted None or 'latest'"):
        check_topology(*crossed, arbitrate="newest")


def test_all_faults_are_in_one_message():
    text = say({"m": ["a", "b"], "n": []}, {"t": ["m", "m"]})
    assert all(part in text for part in ("'a'", "'b'", "n has no trainer", "'m' 2 times", "t starves"))
