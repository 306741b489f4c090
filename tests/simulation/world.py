"""A whole detached run in one thread and in virtual time: the real protocol, and a world that does it harm.

Flow, Ledger, Publisher, Receiver and Restarts are the real ones. Makers, trainer, network, clock and disk are played
here, by a scheduler that a seed drives: it drops, repeats, delays and reorders messages, kills makers, trainer and
driver, and lets a process that was thought dead go on.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.data.proto import DataProto
from hocket.errors import WeightSyncError, WorkerDied
from hocket.models.pieces import whole
from hocket.run.flow import Books, Flow, Key, Lease, unit_key
from hocket.run.supervise import Restarts
from hocket.weights.manifest import Manifest
from hocket.weights.publisher import Publisher
from hocket.weights.receiver import Receiver

SAMPLES, PER_STEP = 2, 3
BASE = {"a": torch.zeros(5), "b": torch.zeros(3)}


def units(step: int) -> list[DataProto]:
    """The units of a step."""
    return [DataProto.from_dict({}, {"uid": [f"p:{step}:{i}"]}, {"step": step, "unit": i}) for i in range(PER_STEP)]


class Broken(AssertionError):
    """An invariant does not hold."""


class Copies:
    """A transport that copies, as every real one does."""

    def send(self, chunks: Any) -> list[Any]:
        return [chunk.copy() for chunk in chunks]

    def clear(self) -> None: ...

    def fetch(self, handle: Any, timeout: float) -> Any:
        return handle


@dataclass
class Experience:
    """What a maker made: of which unit, with which weights."""

    key: Key
    age: tuple[int, int]


@dataclass
class Trainer:
    """One process: its number, the steps in its weights, and the units that it trained them on."""

    number: int
    weights: dict[str, torch.Tensor]
    lineage: list[tuple[int, list[Key]]] = field(default_factory=list)
    busy: bool = False


@dataclass
class MakerProcess:
    """One process of a maker."""

    number: int
    receiver: Receiver
    age: tuple[int, int] = (0, -1)
    content: float = -1.0
    alive: bool = True


@dataclass
class Chance:
    """How often what goes wrong: messages and units by their share, deaths by how many there are at the most."""

    drop: float = 0.05
    repeat: float = 0.05
    hang: float = 0.03
    makers: int = 5
    trainers: int = 3
    drivers: int = 2


class World:
    """One run. `run` plays it to its end and raises Broken, with the log of events, when an invariant does not hold.

    `flow_class` and `receiver_class` may be broken ones, to see that this finds it out.
    """

    def __init__(
        self,
        seed: int,
        *,
        chance: Chance | None = None,
        flow_class: type[Flow] = Flow,
        receiver_class: type[Receiver] = Receiver,
    ) -> None:
        self.random = random.Random(seed)
        self.chance = chance or Chance()
        self.flow_class, self.receiver_class = flow_class, receiver_class
        self.staleness = self.random.choice([0, 0, 1, 2])
        self.steps = self.random.randrange(3, 8)
        self.every = self.random.randrange(1, 4)
        self.now, self.log = 0.0, list[str]()
        self._order, self._events = itertools.count(), list[Any]()
        self.disk: list[tuple[Books, list[tuple[int, list[Key]]]]] = []
        self.fence = 0
        self.restarts = Restarts("maker", limit=10**6, window=1e9, backoff=0.1, clock=lambda: self.now)
        self.begun = Counter[str]()
        self.flow = self._new_flow(None)
        self.makers: dict[str, MakerProcess] = {}
        self.trainer = Trainer(0, dict(BASE))
        self.processes = itertools.count(1)
        self.weights: tuple[Manifest, list[Any]] | None = None
        self.published = (-1, -1)
        self.crashes = 0
        self.harm: list[tuple[float, str, Callable[[], None]]] = []

    # --- the scheduler ------------------------------------------------------------------------------------------

    def at(self, delay: float, what: str, act: Callable[[], None]) -> None:
        """Do `act` after `delay` seconds."""
        heapq.heappush(self._events, (self.now + delay, next(self._order), what, act))

    def send(self, what: str, act: Callable[[], None]) -> None:
        """A message: it may be lost (and then is sent again after a while), come twice, or late."""
        fate = self.random.random()
        if fate < self.chance.drop:
            self.at(3.0, f"{what} (again)", act)
            return
        if fate < self.chance.drop + self.chance.repeat:
            self.at(self.random.uniform(0, 2), f"{what} (twice)", act)
        self.at(self.random.uniform(0, 0.3), what, act)

    def run(self, *, events: int = 4000) -> World:
        """Play it to its end."""
        self._publish()
        self._names = [f"maker-{i}" for i in range(self.random.randrange(1, 4))]
        for name in self._names:
            self._new_maker(name)
        self._look(0.1)
        self._plan_harm()
        for _ in range(events):
            if self.flow.step >= self.steps and not self._writing:
                self._final()
                return self
            if not self._events:
                raise Broken(self._told("nothing is going to happen any more (I8)"))
            self.now, _, what, act = heapq.heappop(self._events)
            self.log.append(f"{self.now:8.2f} {what}")
            act()
            self._invariants()
        raise Broken(self._told(f"not finished after {events} events (I8): step {self.flow.step} of {self.steps}"))

    # --- makers -------------------------------------------------------------------------------------------------

    def _new_maker(self, name: str) -> None:
        maker = MakerProcess(next(self.processes), self.receiver_class(name=name))
        self.makers[name] = maker
        if self.weights is not None:
            self._deliver(maker, *self.weights)
        self.at(0.1, f"{name} asks", lambda: self._ask(name, maker))

    def _ask(self, name: str, maker: MakerProcess) -> None:
        if self.makers.get(name) is not maker:
            return
        lease = self.flow.offer(name)
        if lease is None:
            self.at(0.5, f"{name} asks", lambda: self._ask(name, maker))
            return
        self.begun["leased"] += lease.samples
        self._make(name, maker, lease)

    def _make(self, name: str, maker: MakerProcess, lease: Lease) -> None:
        if not maker.alive:
            return
        self._swap(maker)
        if maker.age < (lease.timeline, lease.at_least):
            self.at(0.2, f"{name} waits for weights", lambda: self._make(name, maker, lease))
            return
        experience = Experience(lease.key, maker.age)
        length = self.random.uniform(0.2, 2.0)
        if self.random.random() < self.chance.hang:
            length = 60.0
            self.at(10.0, f"{name} is thought dead", lambda: self._lost(name, maker))
        self.at(length, f"{name} made {lease.key}", lambda: self._made(name, maker, lease, experience))

    def _made(self, name: str, maker: MakerProcess, lease: Lease, experience: Experience) -> None:
        if not maker.alive:
            return
        flow = self.flow
        self.send(f"{name} delivers {lease.key}", lambda: flow.made(lease, experience, lease.samples))
        self.at(0.3, f"{name} asks", lambda: self._ask(name, maker))

    def _lost(self, name: str, maker: MakerProcess) -> None:
        """The driver learns, or believes, that a maker is gone: its units go back, another process takes its place."""
        if self.makers.get(name) is not maker:
            return
        for lease in [one for one in self.flow._leased.values() if one.worker == name]:
            self.flow.lost(lease, "chance")
        del self.makers[name]
        self.at(self.restarts.spend(WorkerDied("chance")), f"{name} is replaced", lambda: self._new_maker(name))

    def _swap(self, maker: MakerProcess) -> None:
        found: dict[str, torch.Tensor] = {}
        age = maker.receiver.swap(
            lambda weights, version: found.update({name: whole(weight).clone() for name, weight in weights}),
            at_least=maker.age,
            current=maker.age,
            timeout=0,
        )
        if age is None:
            return
        if age < maker.age:
            raise Broken(self._told(f"a maker went back from {maker.age} to {age} (I3)"))
        values = {float(v) for tensor in found.values() for v in tensor}
        if values != {content_of(age)}:
            raise Broken(self._told(f"the weights of {age} are torn: {values} (I4)"))
        maker.age = age

    # --- weights ------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        age = (self.flow.timeline, self.flow.step)
        weights = {name: tensor + content_of(age) for name, tensor in BASE.items()}
        publisher = Publisher("trainer-0", chunk_bytes=8)
        self.weights = publisher.send(weights, age[1], Copies(), timeline=age[0])
        if age <= self.published:
            raise Broken(self._told(f"{age} was published after {self.published} (I3)"))
        self.published = age
        for maker in self.makers.values():
            self._deliver(maker, *self.weights)
        self.flow.advance(self.flow.step)

    def _deliver(self, maker: MakerProcess, manifest: Manifest, handles: list[Any]) -> None:
        """Each message on its own: in any order, twice, late. What the receiver refuses is repeated as a whole."""

        def attempt(act: Callable[[], None]) -> Callable[[], None]:
            def tried() -> None:
                with contextlib.suppress(WeightSyncError):  # `whole` repairs what came in the wrong order
                    act()

            return tried

        def whole() -> None:
            with contextlib.suppress(WeightSyncError):  # older than what it has
                maker.receiver.begin(manifest)
                for i, handle in enumerate(handles):
                    maker.receiver.chunk(manifest.key, i, handle)
                maker.receiver.commit(manifest.key)

        self.send("begin", attempt(lambda: maker.receiver.begin(manifest)))
        for i, handle in enumerate(handles):
            chunk = handle.copy()
            if self.random.random() < 0.02:
                chunk.parts[0][0] ^= 1  # a bit flips on the way
            self.send(f"chunk {i}", attempt(lambda i=i, c=chunk: maker.receiver.chunk(manifest.key, i, c)))
        self.send("commit", attempt(lambda: maker.receiver.commit(manifest.key)))
        self.at(4.0, "weights once more", whole)

    # --- the trainer --------------------------------------------------------------------------------------------

    def _look(self, delay: float) -> None:
        trainer = self.trainer
        self.at(delay, "trainer looks", lambda: self._train(trainer))

    def _train(self, trainer: Trainer) -> None:
        if trainer is not self.trainer or trainer.busy or self.flow.step >= self.steps:
            return
        step = self.flow.step
        experience = self.flow.ready(step)
        if experience is None:
            self._look(0.3)
            return
        self._demand_fresh(step, experience)
        trainer.busy = True
        self.at(
            self.random.uniform(0.2, 1.0), f"step {step} is trained", lambda: self._trained(trainer, step, experience)
        )

    def _trained(self, trainer: Trainer, step: int, experience: list[Experience]) -> None:
        if trainer is not self.trainer:
            return  # its process is gone
        trainer.busy = False
        trainer.lineage.append((step, [one.key for one in experience]))
        books = self.flow.trained(step)
        self._publish()
        if books.step % self.every == 0 or books.step == self.steps:
            self._checkpoint(trainer, books)
        self._look(0.1)

    _writing = 0

    def _checkpoint(self, trainer: Trainer, books: Books) -> None:
        copy = list(trainer.lineage)
        self._writing += 1

        def rename() -> None:
            self._writing -= 1
            if trainer is not self.trainer or books.timeline < self.fence:
                return  # its process is gone, or fenced (I9)
            self.disk.append((books, copy))

        self.at(self.random.uniform(0.1, 2.0), f"checkpoint {books.step} is renamed", rename)

    def _trainer_dies(self) -> None:
        """A new process goes back to the newest checkpoint, in a new timeline."""
        if self.flow.step >= self.steps and not self._writing:
            return  # all is done
        books, lineage = self.disk[-1] if self.disk else (Books(0, 0, {}, {}), [])
        self.trainer = Trainer(next(self.processes), dict(BASE), list(lineage))
        self.flow.rewind(books)
        self.fence = self.flow.timeline
        self._publish()
        self._look(0.2)

    def _driver_dies(self) -> None:
        """Everything is gone but the disk; the run resumes from it."""
        self.crashes += 1
        self._events.clear()
        self._writing = 0
        for maker in self.makers.values():
            maker.alive = False
        self.makers = {}
        books, lineage = self.disk[-1] if self.disk else (Books(0, 0, {}, {}), [])
        self.trainer = Trainer(next(self.processes), dict(BASE), list(lineage))
        self.flow = self._new_flow(books)
        self.fence = self.flow.timeline
        self.weights = None
        self._publish()
        for name in self._names:
            self._new_maker(name)
        for moment, what, act in self.harm:  # what is still to come
            if moment > self.now:
                self.at(moment - self.now, what, act)
        self._look(0.1)

    def _new_flow(self, books: Books | None) -> Flow:
        if books is not None:
            accounts = dict(books.accounts)
            lost = self.begun["leased"] - sum(accounts.values())
            accounts["rolled_back"] = accounts.get("rolled_back", 0) + lost
            books = Books(books.step, self.fence + 1, accounts, {}, books.buffered, books.dropped)
        return self.flow_class(
            units,
            steps=self.steps,
            samples=lambda unit: SAMPLES,
            max_staleness=self.staleness,
            attempts=10**6,
            books=books,
        )

    # --- harm, and what must hold -------------------------------------------------------------------------------

    def _plan_harm(self) -> None:
        for most, what, act in (
            (self.chance.makers, "a maker is killed", self._maker_dies),
            (self.chance.trainers, "the trainer is killed", self._trainer_dies),
            (self.chance.drivers, "the driver is killed", self._driver_dies),
        ):
            for _ in range(self.random.randint(0, most)):
                self.harm.append((self.random.uniform(0, 5.0 * self.steps), what, act))
        for moment, what, act in self.harm:
            self.at(moment - self.now, what, act)

    def _maker_dies(self) -> None:
        if not self.makers:
            return
        name = self.random.choice(sorted(self.makers))
        maker = self.makers[name]
        maker.alive = False
        self.at(0.05, f"{name} is found dead", lambda: self._lost(name, maker))

    def _invariants(self) -> None:
        ledger = self.flow.ledger
        if sum(ledger.accounts.values()) != ledger.produced or min(ledger.accounts.values()) < 0:
            raise Broken(self._told(f"the ledger does not balance: {ledger.accounts}, {ledger.produced} (I1)"))
        if ledger.produced != self.begun["leased"]:
            raise Broken(self._told(f"{self.begun['leased']} samples were begun, {ledger.produced} are counted (I1)"))
        kept = sum(SAMPLES * len(keys) for _, keys in self.trainer.lineage)
        if ledger.accounts["trained"] != kept:
            raise Broken(self._told(f"{ledger.accounts['trained']} samples count as trained, {kept} are (I1)"))

    def _demand_fresh(self, step: int, experience: list[Experience]) -> None:
        if [one.key for one in experience] != [(step, i) for i in range(PER_STEP)]:
            raise Broken(self._told(f"step {step} gets {[one.key for one in experience]}"))
        for one in experience:
            if one.age[0] == self.flow.timeline and step - one.age[1] > self.staleness:
                raise Broken(self._told(f"unit {one.key} of {one.age} is trained in step {step} (I5)"))
            if one.age[0] < self.flow.timeline and one.key not in self._resumed_with():
                raise Broken(
                    self._told(f"unit {one.key} is of timeline {one.age[0]}, now is {self.flow.timeline} (I9)")
                )

    def _resumed_with(self) -> set[Key]:
        """Units that waited in the checkpoint that this run resumed from: they may be of the timeline before."""
        return {key for books, _ in self.disk for key in books.buffered} if self.crashes else set()

    def _final(self) -> None:
        steps = [step for step, _ in self.trainer.lineage]
        twice = [key for key, n in Counter(key for _, keys in self.trainer.lineage for key in keys).items() if n > 1]
        if steps != list(range(self.steps)) or twice:
            raise Broken(self._told(f"the lineage is {steps}, twice: {twice} (I2)"))

    def _told(self, what: str) -> str:
        return "\n".join([what, *self.log[-40:]])


def content_of(age: tuple[int, int]) -> float:
    """The number that all weights of a version hold."""
    return 1000.0 * age[0] + age[1]


__all__ = ["Broken", "Chance", "World", "unit_key"]
