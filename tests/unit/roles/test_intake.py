"""The trainer's end of the stream: credits, order, whole groups, ends, refusals; nothing lost, nothing twice."""

import itertools
import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.data.proto import DataProto
from hocket.errors import ConfigError, WorkerDied
from hocket.roles.intake import Intake
from hocket.roles.routing import Router


@pytest.fixture
def items(experience):
    seeds = itertools.count()

    def items(rows, *, width=6, group=1):
        made = experience([width] * rows, group=group, seed=next(seeds))
        return DataProto.from_dict(made.tensors(), made.non_tensor_batch, {"kl_coef": 0.1})

    return items


def send(intake, items, maker="m", *, seq=1, wanted=None):
    grant = intake.admit(maker, wanted or len(items))
    assert grant.samples == len(items)
    return intake.put(maker, seq, items, ticket=grant.ticket)


def take(intake, timeout=1.0):
    return intake.take(timeout=timeout)


def test_batches_are_formed_first_come_first_served_over_makers(items):
    intake = Intake(batch_size=4)
    parts = [items(3), items(2, width=9), items(3)]
    for part, maker in zip(parts, "aba", strict=True):
        send(intake, part, maker, seq=next(SEQ))
    assert len(intake) == 2
    first, second = take(intake), take(intake)
    assert first.tensor("score").tolist() == torch.cat([p.tensor("score") for p in parts])[:4].tolist()
    assert second.tensor("score").tolist() == torch.cat([p.tensor("score") for p in parts])[4:].tolist()
    assert first.tensor("input_ids").shape == (4, 9)  # padded to the widest
    assert first.tensor("version")[0].tolist()[-3:] == [-1, -1, -1]
    assert len(intake) == 0


SEQ = itertools.count(1)


def test_what_is_left_at_the_end_of_all_streams_is_trained(items):
    intake = Intake(batch_size=4)
    send(intake, items(3), "a")
    intake.join("b")
    intake.end("a")
    with pytest.raises(WorkerDied, match=r"t waited 0 s for experience: 3 of 4 samples are there; still to send: b"):
        Intake.take(_named(intake, "t"), timeout=0.01)
    intake.end("b")
    assert len(take(intake)) == 3
    assert take(intake) is None
    assert intake.trained == 3


def _named(intake, name):
    intake.name = name
    return intake


def test_a_credit_comes_back_when_the_sample_goes_into_a_batch(items):
    """D6: not on arrival, so that a slow trainer slows its makers."""
    intake = Intake(batch_size=4, limit=2)
    for _ in range(2):
        send(intake, items(4), seq=next(SEQ))
    assert intake.outstanding == 8
    assert intake.admit("m", 1).samples == 0
    take(intake)
    assert intake.outstanding == 4
    assert intake.admit("m", 4).samples == 4
    assert intake.outstanding == 8
    intake.end("m")  # what it did not send is void
    assert intake.outstanding == 4


def test_a_batch_can_always_be_filled(items):
    """A limit of one batch, and messages that do not divide it: the credit goes a little above, no deadlock."""
    intake = Intake(batch_size=8, limit=1)
    send(intake, items(5), seq=1)
    send(intake, items(5), seq=2)
    assert intake.admit("m", 5).samples == 0
    assert len(take(intake)) == 8


def test_no_limit(items):
    intake = Intake(batch_size=2, limit=None)
    for _ in range(40):
        send(intake, items(2), seq=next(SEQ))
    assert intake.outstanding == 80


def test_the_same_message_twice_is_one(items):
    intake, part = Intake(batch_size=2), items(2)
    grant = intake.admit("m", 2)
    first = intake.put("m", 1, part, ticket=grant.ticket)
    assert intake.put("m", 1, part, ticket=grant.ticket) is first
    assert len(intake) == 1
    assert intake.accepted == {"m": 2}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t["score"].__setitem__(1, torch.nan), "its score is not finite"),
        (lambda t: t["rollout_logprobs"].__setitem__((1, 4), torch.inf), "its rollout_logprobs are not finite"),
        (lambda t: t["length"].__setitem__(1, 99), "its lengths are not"),
        (lambda t: t["response_mask"].__setitem__((1, 0), True), "its response_mask reaches outside the response"),
        (lambda t: t["input_ids"].__setitem__((1, 0), -1), "it holds negative token ids"),
    ],
)
def test_a_bad_item_is_refused_alone(items, spoil, reason):
    """D7, the old trap: the bad item stayed in the collector, and every later message failed as well."""
    intake, part = Intake(batch_size=2), items(3)
    tensors = {key: tensor.clone() for key, tensor in part.tensors().items()}
    spoil(tensors)
    ack = send(intake, DataProto.from_dict(tensors, part.non_tensor_batch))
    assert ack.accepted == 2
    assert [(count, why.startswith(reason)) for why, count in ack.refused.items()] == [(1, True)]
    assert take(intake).tensor("score").tolist() == part.tensor("score")[[0, 2]].tolist()
    assert intake.outstanding == 0
    send(intake, items(2), seq=2)
    assert len(take(intake)) == 2


def test_a_message_of_another_kind_is_refused_whole_and_says_why(items):
    intake = Intake(batch_size=2)
    part = items(2)
    lacking = DataProto.from_dict({k: t for k, t in part.tensors().items() if k != "score"}, part.non_tensor_batch)
    ack = send(intake, lacking)
    assert ack.accepted == 0
    assert ack.refused == Counter({next(iter(ack.refused)): 2})
    assert "lacks ['score']" in next(iter(ack.refused))
    assert intake.outstanding == 0


def test_groups_stay_together(items):
    intake = Intake(batch_size=6, whole_groups=True)
    send(intake, items(12, group=4))
    sizes = [take(intake)]
    intake.end("m")
    sizes += [take(intake), take(intake)]
    assert [len(batch) for batch in sizes if batch is not None] == [4, 4, 4]


def test_staleness_is_bounded_before_work_is_done(items):
    intake = Intake(batch_size=4, limit=None, max_staleness=1)
    assert intake.admit("m", 4).samples == 0  # how much a version trains is not known yet
    intake.plan(8)
    grants = [intake.admit("m", 4) for _ in range(5)]
    assert [grant.samples for grant in grants] == [4, 4, 4, 4, 0]  # versions 0 and 1 train 8 each
    assert [grant.at_least for grant in grants[:4]] == [0, 0, 0, 0]
    intake.advance(1)
    late = [intake.admit("m", 6) for _ in range(2)]
    assert [grant.samples for grant in late] == [6, 2]  # only up to the bound
    assert [grant.at_least for grant in late] == [1, 1]


def test_batches_keep_the_order_of_the_tickets_when_staleness_is_bounded(items):
    """A slow maker's samples, admitted first, must not be trained after later ones and become too old."""
    intake = Intake(batch_size=2, max_staleness=0, limit=None)
    intake.plan(4)
    slow, fast = intake.admit("slow", 2), intake.admit("fast", 2)
    intake.put("fast", 1, items(2), ticket=fast.ticket)
    with pytest.raises(WorkerDied):
        take(intake, timeout=0.01)
    part = items(2)
    intake.put("slow", 1, part, ticket=slow.ticket)
    assert take(intake).tensor("score").tolist() == part.tensor("score").tolist()
    assert len(take(intake)) == 2


def test_given_back_credits_are_for_others():
    intake = Intake(batch_size=2, max_staleness=0, limit=None)
    intake.plan(4)
    grant = intake.admit("a", 4)
    assert intake.admit("b", 4).samples == 0
    intake.release("b", grant.ticket, 4)  # not its own
    assert intake.outstanding == 4
    intake.release("a", grant.ticket + 2, 2)
    assert intake.admit("b", 4).samples == 2


def test_a_group_that_no_version_divides_into():
    intake = Intake(batch_size=6, max_staleness=0)
    intake.plan(6)
    with pytest.raises(ConfigError, match="a version trains on 6 samples, which is no multiple of the 4 samples"):
        intake.admit("m", 8, multiple=4)


def test_after_the_end_nothing_is_admitted_and_everything_is_counted(items):
    intake = Intake(batch_size=2)
    grant = intake.admit("m", 3)
    send(intake, items(3), "n")
    assert intake.close("enough") == 3
    assert intake.admit("m", 1).ended
    assert intake.put("m", 1, items(3), ticket=grant.ticket).left == 3
    assert intake.outstanding == 0
    assert intake.refused == {}


def test_clear_gives_the_credits_back(items):
    intake = Intake(batch_size=2)
    send(intake, items(5))
    assert intake.clear() == 5
    assert (len(intake), intake.outstanding) == (0, 0)


def test_hungry_says_that_the_trainer_waits(items):
    intake = Intake(batch_size=4)
    assert not intake.admit("m", 1).hungry
    waiting = threading.Thread(target=take, args=(intake,))
    waiting.start()
    time.sleep(0.05)
    grant = intake.admit("m", 3)
    assert grant.hungry
    send(intake, items(4))
    waiting.join()


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"limit": 0}, {"max_staleness": -1}])
def test_impossible_settings(wrong):
    with pytest.raises(ConfigError, match="wanted a batch of 1 or more"):
        Intake(**{"batch_size": 2} | wrong)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans()), max_size=12), st.integers(1, 7))
def test_samples_are_conserved(messages, batch_size):
    """Whatever arrives in whatever order, also lost credits and early ends: accepted = trained + left."""
    intake, accepted, trained = Intake(batch_size=batch_size, limit=3), 0, 0
    for seq, (maker, rows, lost) in enumerate(messages):
        grant = intake.admit(maker, rows)
        if not grant.samples:
            while len(intake):
                trained += len(take(intake))
            continue
        if lost:
            intake.end(maker)
            intake.join(maker)
            continue
        accepted += intake.put(maker, seq, _rows(grant.samples), ticket=grant.ticket).accepted
        assert intake.outstanding <= max(3 * batch_size, batch_size + 4)
    for maker in "abc":
        intake.end(maker)
    while (batch := take(intake)) is not None:
        trained += len(batch)
    assert accepted == trained == intake.trained == intake.accepted.total()
    assert intake.outstanding == 0


def _rows(count):
    length = torch.full((count,), 3)
    mask = torch.tensor([[False, True, True]] * count)
    tensors = {
        "input_ids": torch.ones(count, 3, dtype=torch.int64),
        "prompt_length": torch.ones(count, dtype=torch.int64),
        "length": length,
        "sample": torch.zeros(count, dtype=torch.int64),
        "response_mask": mask,
        "rollout_logprobs": torch.zeros(count, 3),
        "version": torch.where(mask, 0, -1).int(),
        "truncated": torch.zeros(count, dtype=torch.bool),
        "score": torch.zeros(count),
    }
    return DataProto.from_dict(tensors, {"uid": [str(i) for i in range(count)], "row": [{}] * count})


# --- the maker's side: which trainer a sample goes to ------------------------------------------------------


def test_round_robin_goes_on_where_the_last_batch_stopped():
    router = Router(["a", "b", "c"], route="round_robin")
    assert router.deal(4, 1) == ["a", "b", "c", "a"]
    assert router.deal(4, 1) == ["a", "b", "c", "a"]  # nothing went out yet
    router.done(4, 1)
    assert router.deal(4, 1) == ["b", "c", "a", "b"]


def test_groups_go_to_one_trainer():
    router = Router(["a", "b"], route="groups")
    assert router.deal(3, 2) == ["a", "a", "b", "b", "a", "a"]
    router.done(6, 2)
    assert router.deal(1, 2) == ["b", "b"]


def test_least_loaded():
    router = Router(["a", "b"], route="least_loaded")
    assert router.deal(2, 1, load={"a": 3, "b": 1}) == ["b", "b"]
    assert router.deal(2, 1, load={"a": 1, "b": 1}) == ["a", "a"]


@pytest.mark.parametrize(("gone", "then"), [("a", ["c", "b"]), ("b", ["c", "a"]), ("c", ["a", "b"])])
def test_the_turn_of_a_trainer_that_has_ended_goes_to_the_next(gone, then):
    router = Router(["a", "b", "c"], route="round_robin")
    router.done(2, 1)  # it is c's turn
    router.drop(gone)
    assert router.deal(2, 1) == then


def test_an_unknown_route():
    with pytest.raises(ConfigError, match="route='random' is unknown; known are round_robin, groups, least_loaded"):
        Router(["a"], route="random")
