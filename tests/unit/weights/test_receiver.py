"""The receiving end accepts a version whole or not at all, and swaps when the generation loop asks."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from hocket.errors import WeightSyncError
from hocket.models.pieces import whole
from hocket.weights.manifest import Chunk
from hocket.weights.publisher import Publisher
from hocket.weights.receiver import Receiver

S = "trainer-0"


class Direct:
    """Hands over copies."""

    def clear(self):
        pass

    def send(self, chunks):
        return [chunk.copy() for chunk in chunks]


def zeros(size):
    return Chunk((np.zeros(size, np.uint8),))


def snapshot(version, value=None):
    tensors = {"a": torch.full((50,), float(version if value is None else value)), "b": torch.arange(3)}
    return Publisher(S, chunk_bytes=64).send(tensors, version, Direct())


def send(receiver, version, *, order=None):
    manifest, chunks = snapshot(version)
    receiver.begin(manifest)
    for i in order or range(len(chunks)):
        receiver.chunk((S, 0, version), i, chunks[i])
    receiver.commit((S, 0, version))


class Engine:
    """Keeps what was loaded."""

    def __init__(self):
        self.version, self.weights, self.loads = 0, {}, 0

    def load(self, weights, version):
        self.weights = {name: whole(weight).clone() for name, weight in weights}
        self.version, self.loads = version, self.loads + 1


def swap(receiver, engine, at_least=0, timeout=0.01):
    return receiver.swap(engine.load, at_least=(0, at_least), current=(0, engine.version), timeout=timeout)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 2, 1, 3, 3]])
def test_chunks_in_any_order_and_twice(order):
    receiver, engine = Receiver(), Engine()
    send(receiver, 5, order=order)
    assert swap(receiver, engine)
    assert (engine.version, engine.weights["a"][0].item(), engine.weights["b"].tolist()) == (5, 5.0, [0, 1, 2])
    assert not swap(receiver, engine)  # once is enough
    assert engine.loads == 1


def refuse(receiver, act, text):
    with pytest.raises(WeightSyncError) as caught:
        act(receiver)
    assert text in caught.value.message
    engine = Engine()
    assert not swap(receiver, engine)
    assert engine.loads == 0


def test_an_incomplete_version_is_not_committed_but_can_be_completed():
    receiver = Receiver()
    manifest, chunks = snapshot(1)
    receiver.begin(manifest)
    for i in (0, 2):
        receiver.chunk((S, 0, 1), i, chunks[i])
    refuse(receiver, lambda r: r.commit((S, 0, 1)), "cannot commit version 1: chunks [1, 3] did not arrive")
    for i in (1, 3):
        receiver.chunk((S, 0, 1), i, chunks[i])
    receiver.commit((S, 0, 1))
    assert swap(receiver, Engine())


def test_damaged_bytes_are_refused_and_the_version_may_come_again():
    receiver = Receiver()
    manifest, chunks = snapshot(1)
    receiver.begin(manifest)
    for i, chunk in enumerate(chunks):
        receiver.chunk((S, 0, 1), i, Chunk(tuple(part + (i == 2) for part in chunk.parts)))
    refuse(receiver, lambda r: r.commit((S, 0, 1)), "the bytes changed on the way")
    refuse(receiver, lambda r: r.commit((S, 0, 1)), "not announced")
    send(receiver, 1)
    assert swap(receiver, Engine())


@pytest.mark.parametrize(
    ("index", "size", "text"),
    [(0, 63, "wanted 64 bytes"), (4, 64, "wanted an index below 4"), (-1, 64, "wanted an index below 4")],
)
def test_wrong_sizes_and_places(index, size, text):
    receiver = Receiver()
    receiver.begin(snapshot(1)[0])
    refuse(receiver, lambda r: r.chunk((S, 0, 1), index, zeros(size)), text)


def test_what_was_not_announced():
    receiver = Receiver()
    refuse(receiver, lambda r: r.chunk((S, 0, 1), 0, zeros(64)), "version 1 was not announced; arriving is none")
    receiver.begin(snapshot(2)[0])
    refuse(receiver, lambda r: r.chunk((S, 0, 1), 0, zeros(64)), "arriving is 2: call begin first")
    refuse(receiver, lambda r: r.commit((S, 0, 1)), "version 1 was not announced")


@pytest.mark.parametrize("version", [3, 2])
def test_older_and_equal_versions_are_refused(version):
    receiver, engine = Receiver(), Engine()
    send(receiver, 3)
    with pytest.raises(
        WeightSyncError, match=f"version {version} of trainer-0 is not newer than the committed version 3"
    ):
        receiver.begin(snapshot(version)[0])
    assert swap(receiver, engine)
    assert engine.version == 3


def test_a_later_timeline_is_newer_and_fences_the_one_before():
    """A trainer that was replaced, and was only slow, may not bring old weights back (I3, I9)."""
    receiver, engine = Receiver(), Engine()
    send(receiver, 7)
    assert swap(receiver, engine)
    manifest, chunks = snapshot(3)
    later = replace(manifest, timeline=1)
    receiver.begin(later)
    for i, chunk in enumerate(chunks):
        receiver.chunk(later.key, i, chunk)
    receiver.commit(later.key)
    with pytest.raises(WeightSyncError, match="version 8 of trainer-0 is of timeline 0, and this is timeline 1"):
        receiver.begin(snapshot(8)[0])
    age = receiver.swap(engine.load, at_least=(0, 7), current=(0, 7), timeout=0.01)
    assert age == (1, 3)
    assert engine.version == 3


def test_a_new_begin_replaces_what_was_left_unfinished():
    receiver, engine = Receiver(), Engine()
    manifest, chunks = snapshot(1)
    receiver.begin(manifest)
    receiver.chunk((S, 0, 1), 0, chunks[0])
    send(receiver, 2)
    assert swap(receiver, engine)
    assert engine.version == 2
    refuse(receiver, lambda r: r.commit((S, 0, 1)), "not announced")


def test_a_sender_that_died_leaves_nothing_behind():
    receiver, engine = Receiver(), Engine()
    manifest, chunks = snapshot(1)
    dead = replace(manifest, sender="trainer-dead")
    receiver.begin(dead)
    receiver.chunk(dead.key, 0, chunks[0])
    receiver.abort(dead.key)
    receiver.abort(("nobody", 0, 1))
    refuse(receiver, lambda r: r.commit(dead.key), "version 1 was not announced")
    send(receiver, 1)
    assert swap(receiver, engine)


def test_two_sources_that_are_not_one_group_are_refused():
    receiver = Receiver(name="maker_0")
    receiver.claim(S)
    receiver.claim(S)
    with pytest.raises(WeightSyncError, match=r"maker_0 would get weights from trainer-0 and from trainer-1, .*latest"):
        receiver.claim("trainer-1")
    with pytest.raises(WeightSyncError, match="maker_0 gets its weights from trainer-0, not from trainer-1"):
        receiver.begin(replace(snapshot(1)[0], sender="trainer-1"))


def test_with_arbitrate_latest_the_newest_commit_wins():
    """D1, the old trap: the second trainer's begin waited for a lock that only the first one's end would free."""
    receiver, engine = Receiver(arbitrate="latest"), Engine()
    first, second = snapshot(7, 1.0), snapshot(3, 2.0)
    both = [first, (replace(second[0], sender="trainer-1"), second[1])]
    for manifest, _ in both:
        receiver.claim(manifest.sender)
        receiver.begin(manifest)
    for i in range(4):  # their chunks arrive in turn
        for manifest, chunks in both:
            receiver.chunk(manifest.key, i, chunks[i])
    for manifest, _ in both:
        receiver.commit(manifest.key)
    assert swap(receiver, engine)
    assert (engine.version, engine.weights["a"][0].item(), engine.loads) == (3, 2.0, 1)
    with pytest.raises(WeightSyncError, match="arbitrate='newest' is unknown"):
        Receiver(arbitrate="newest")


@pytest.mark.parametrize(
    ("expect", "text"),
    [
        (
            {"a": (50,), "c": (3,)},
            r"do not fit maker_0: 1 tensors are missing, e.g. \['c'\], 1 are unknown, e.g. \['b'\]",
        ),
        ({"a": (50,), "b": (3,), "c": ()}, r"1 tensors are missing, e.g. \['c'\], 0 are unknown"),
        ({"a": (5, 10), "b": (3,)}, r"have other shapes than maker_0 \(sent, own\): {'a': \(\(50,\), \(5, 10\)\)}"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_when_it_is_announced(expect, text):
    """D18."""
    with pytest.raises(WeightSyncError, match=rf"weights version 1 of trainer-0 .*{text}"):
        Receiver(expect, name="maker_0").begin(snapshot(1)[0])


def test_only_the_newest_committed_version_is_loaded():
    receiver, engine = Receiver(), Engine()
    send(receiver, 1)
    send(receiver, 2)
    assert swap(receiver, engine)
    assert (engine.version, engine.loads) == (2, 1)


def test_arriving_weights_do_not_touch_the_committed_ones():
    receiver, engine = Receiver(), Engine()
    send(receiver, 1)
    manifest, chunks = snapshot(2)
    receiver.begin(manifest)
    receiver.chunk((S, 0, 2), 0, chunks[0])
    assert swap(receiver, engine)
    assert (engine.version, set(engine.weights["a"].tolist())) == (1, {1.0})


def test_a_wait_ends_with_what_is_missing():
    receiver, engine = Receiver(), Engine()
    send(receiver, 1)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"weights version 2; newest committed is 1, in use is 0"):
        swap(receiver, engine, at_least=2, timeout=0.05)
    assert 0.04 < time.monotonic() - began < 2
    assert engine.loads == 0


def test_no_wait_for_a_version_in_use():
    receiver, engine = Receiver(), Engine()
    engine.version = 3
    assert not swap(receiver, engine, at_least=3, timeout=0.0)


def test_a_commit_from_another_thread_ends_the_wait():
    receiver, engine = Receiver(), Engine()
    sender = threading.Thread(target=lambda: [time.sleep(0.05), send(receiver, 1), send(receiver, 2)])
    began = time.monotonic()
    sender.start()
    assert swap(receiver, engine, at_least=2, timeout=10)
    assert time.monotonic() - began < 5
    sender.join()
    assert engine.version == 2


def test_every_load_is_whole_while_versions_keep_coming():
    receiver, engine = Receiver(), Engine()
    sender = threading.Thread(target=lambda: [send(receiver, version) for version in range(1, 40)])
    sender.start()
    seen = []
    while engine.version < 39:
        swap(receiver, engine, at_least=engine.version + 1, timeout=10)
        assert set(engine.weights["a"].tolist()) == {float(engine.version)}
        seen.append(engine.version)
    sender.join()
    assert seen == sorted(set(seen))
