"""A thousand runs in a hostile world, each decided by its seed; and worlds that must be found broken.

One seed again, with the log of its events: pytest tests/simulation -k seeds --simulated-seed 123
"""

import pytest
from world import Broken, Chance, World

from hocket.errors import HocketError
from hocket.run.flow import Flow
from hocket.weights.receiver import Receiver

SEEDS, BATCH = 1000, 100


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_seeds(first, request):
    asked = request.config.getoption("--simulated-seed")
    seeds = [asked] if asked is not None else range(first, first + BATCH)
    events = 0
    for seed in seeds:
        try:
            world = World(seed).run()
        except Exception as error:
            again = f"pytest tests/simulation -k seeds --simulated-seed {seed}"
            raise AssertionError(f"seed {seed} fails; to see it alone: {again}\n{error}") from error
        events += len(world.log)
    assert events / len(seeds) > 60 or asked is not None


def test_a_seed_gives_the_same_events_each_time():
    assert World(7).run().log == World(7).run().log


def test_much_harm_is_done():
    worlds = [World(seed, chance=Chance(trainers=6, drivers=4)).run() for seed in range(30)]
    assert sum(world.crashes for world in worlds) > 10
    assert sum("the trainer is killed" in line for world in worlds for line in world.log) > 10
    assert sum("is thought dead" in line for world in worlds for line in world.log) > 5


class KeepsLost(Flow):
    """Forgets to give a lost unit back."""

    def lost(self, lease, why):
        before = list(self._waiting)
        super().lost(lease, why)
        self._waiting = before


class TakesAll(Flow):
    """Takes experience of any lease."""

    def _ends(self, lease):
        self._leased.pop(lease.key, None)
        return True


class ForgetsTaken(Flow):
    """Does not count what it takes back."""

    def rewind(self, books):
        before = self.ledger.accounts["rolled_back"]
        lost = super().rewind(books)
        self.ledger.accounts["rolled_back"] = before
        return lost


class KeepsBuffer(Flow):
    """Keeps the experience of the timeline before."""

    def rewind(self, books):
        kept = dict(self._buffered)
        lost = super().rewind(books)
        self.ledger.move("rolled_back", "buffered", sum(n for _, n in kept.values()))
        self._buffered = kept
        return lost


class SameTimeline(Flow):
    """Goes back without a new timeline."""

    def rewind(self, books):
        lost = super().rewind(books)
        self.timeline -= 1
        return lost


class Hasty(Flow):
    """Hands out units a step too early."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._max_staleness += 1


class NoDigest(Receiver):
    """Swaps in what has not the right digest."""

    def commit(self, key):
        staging = self._expected(key)
        if len(staging.chunks) == len(staging.manifest.chunks):
            del self._arriving[key[0]]
            self._committed, self._newest[key[0]] = staging, staging.manifest.age


class NoFence(Receiver):
    """Takes versions of an older timeline."""

    def begin(self, manifest):
        self._newest.pop(manifest.sender, None)
        super().begin(manifest)


@pytest.mark.parametrize(
    ("broken", "invariant"),
    [
        (KeepsLost, "I8"),
        (TakesAll, "I1"),
        (ForgetsTaken, "I1"),
        (KeepsBuffer, "I9"),
        (SameTimeline, "I3"),
        (Hasty, "I5"),
        (NoDigest, "I4"),
        (NoFence, "I3"),
    ],
)
def test_a_broken_protocol_is_found_out(broken, invariant):
    kind = {"flow_class": broken} if issubclass(broken, Flow) else {"receiver_class": broken}
    for seed in range(200):
        if told := noticed(seed, kind):
            assert invariant in told
            return
    raise AssertionError(f"200 seeds, and nobody noticed {broken.__name__}")


def noticed(seed, kind):
    """What the simulation says of a broken protocol; the protocol's own checks speak of the ledger (I1)."""
    try:
        World(seed, **kind).run()
    except Broken as error:
        return str(error)
    except HocketError as error:
        return f"I1: {error}"
    return None
