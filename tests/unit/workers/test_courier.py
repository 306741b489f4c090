"""A version of the weights is kept until every maker has it, and no longer."""

import inspect
import threading

import ray

from hocket.workers.actors import _signatures_kept
from hocket.workers.courier import Courier
from hocket.workers.peers import LocalPeer


class Maker:
    """Notes the versions that it is told to fetch; it fetches when `may` is set."""

    def __init__(self):
        self.seen, self.may = [], threading.Event()

    def receive(self, manifest, handles):
        assert self.may.wait(5)
        self.seen.append(manifest)


def test_a_version_is_let_go_when_all_have_it_and_put_out_again_for_a_late_maker():
    released, makers = [], [Maker() for _ in range(3)]
    courier = Courier(lambda: released.append(courier.version))
    courier.add(LocalPeer("m0", makers[0]))
    courier.add(LocalPeer("m1", makers[1]))
    makers[0].may.set()
    courier.push(1, lambda: (1, []))
    assert not released
    makers[1].may.set()
    courier.flush(5)
    assert released == [1]
    makers[2].may.set()
    courier.add(LocalPeer("m2", makers[2]))
    assert courier.version < 1  # it was let go: who wants to be up to date pushes it once more
    courier.push(1, lambda: (1, []))
    courier.flush(5)
    assert [maker.seen for maker in makers] == [[1], [1], [1]]


class Plain:
    """For Ray to look at."""

    def method(self, value):
        return value


def test_ray_leaves_the_signatures_of_a_plain_class_as_they_are():
    with _signatures_kept(Plain):
        ray.remote(Plain)
    assert str(inspect.signature(Plain.method)) == "(self, value)"
