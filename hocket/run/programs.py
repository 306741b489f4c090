"""The programs: the same parts, in one process, in one worker, or in many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any

from hocket.config import Colocated, Detached, Local
from hocket.errors import DataError, DataLost, PlacementError, RewardError, WorkerDied
from hocket.models.policy import named_weights
from hocket.roles.build import build_maker, build_trainer
from hocket.rollout.engine import Refresh
from hocket.run.cluster import cluster
from hocket.run.crew import Crew, Member, Retired
from hocket.run.flow import Key, Lease, Versions, unit_key
from hocket.run.session import Draining, Session
from hocket.run.supervise import Restarts, Supervisor
from hocket.single_controller.future import DataProtoFuture
from hocket.weights.transport import InProcess
from hocket.workers.topology import target_trainers


def run_program(session: Session) -> None:
    """Run to the end. The only place that looks at which placement it is."""
    placement = session.config.placement
    match placement:
        case Local():
            build = partial(_build_both, session)
            lockstep(session, build)
        case Colocated():
            from hocket.run.start import OneProcess

            with _cluster(session) as where:
                session.console.header([where])
                lockstep(session, OneProcess(session, placement))
        case Detached():
            from hocket.run.start import ManyProcesses

            with _cluster(session) as where:
                session.console.header([where])
                supervisor = Supervisor()
                workshop = ManyProcesses(session, placement, supervisor.check)
                crew = Crew(
                    workshop,
                    session.config.supervise,
                    supervisor,
                    makers=placement.makers,
                    say=session.console.note,
                )
                detached(session, placement, crew, supervisor)


def _cluster(session: Session) -> AbstractContextManager[str]:
    ray = session.config.ray
    insecure, bundles = ray.allow_insecure_cluster, session.config.placement.bundles
    return cluster(ray.address, bundles, insecure=insecure, variables=ray.worker_env)


def lockstep(session: Session, start: Callable[[], tuple[Any, Any]]) -> None:
    """One pool: make, train, swap, in turn. `start` makes the two roles, or groups that hold them, also once more."""
    flow, restarts = session.flow, Restarts.of(session.config.supervise, "trainer")
    maker, trainer = start()
    session.restore(trainer.restore)

    def publish() -> None:
        maker.receive(*trainer.publish(flow.step, flow.timeline))
        flow.advance(flow.step)

    def evaluate(units: list[Any]) -> list[dict[str, list[float]]]:
        return [maker.evaluate(unit, at_least=flow.step, timeline=flow.timeline) for unit in units]

    def make(lease: Lease) -> None:
        try:
            experience = maker.make(lease.unit, at_least=lease.at_least, timeline=lease.timeline)
            if session.config.supervise.failed_units and isinstance(experience, DataProtoFuture):
                experience.get()  # whether it failed; else the trainer finds out, and the run ends
            flow.made(lease, experience, lease.samples, versions=[(0, flow.step)])
        except RewardError as error:
            session.give_up(lease, error)

    def one_step() -> None:
        for lease in flow.offer_step("worker-0"):
            make(lease)
        metrics = trainer.train(flow.take(flow.step, timeout=0), step=flow.step)
        books = flow.trained(flow.step)
        publish()
        session.record(books, metrics, [maker.report(), trainer.report()])
        session.checkpoint(books, trainer, metrics)

    publish()
    session.evaluate(evaluate, first=True)
    while not session.saved_all:
        try:
            one_step() if session.going else session.save_last(trainer)
        except WorkerDied as error:
            session.console.note(f"{error.message.splitlines()[0]}; a new one takes its place")
            restarts.spend(error)
            maker, trainer = start()
            session.rewind(trainer.restore)
            publish()
    session.conclude(evaluate, lambda: [maker.report(), trainer.report()])


def replayed(session: Session, recorded: Mapping[Key, Versions], *, until: int) -> None:
    """What a recorded run did, again, in this process: each unit is made with the weights that it had.

    `recorded` gives the (decode step, weights version) pairs of each unit; it is made as soon as the last one is there.
    """
    flow, placement = session.flow, session.config.placement
    maker, trainer = _build_both(session)
    session.restore(trainer.restore)
    kept: dict[int, dict[str, Any]] = {}
    due: dict[int, list[Key]] = {}
    for key, versions in sorted(recorded.items()):
        due.setdefault(versions[-1][1], []).append(key)

    def publish() -> None:
        kept[flow.step] = {name: tensor.clone() for name, tensor in named_weights(trainer.policy).items()}
        kept.pop(flow.step - placement.max_staleness - 1, None)
        load(flow.step)
        flow.advance(flow.step)

    def load(version: int) -> None:
        maker.engine.load(kept[version].items(), version)

    def make(key: Key, versions: Versions) -> None:
        lease = flow.offer("replay", lambda unit: unit_key(unit) == key)
        if lease is None:
            raise DataError(
                f"unit {key[1]} of step {key[0] + 1} cannot be made with version {flow.step} of the weights"
            )
        swaps, step = dict(versions), count(1)

        def look() -> None:
            if (version := swaps.get(next(step))) is not None:
                load(version)

        load(versions[0][1])
        experience = maker.make(lease.unit, refresh=Refresh(1, look))
        flow.made(lease, experience, lease.samples, versions=versions)

    def evaluate(units: list[Any]) -> list[dict[str, list[float]]]:
        load(flow.step)
        return [maker.evaluate(unit) for unit in units]

    publish()
    session.evaluate(evaluate, first=True)
    while flow.step < until:
        for key in due.get(flow.step, ()):
            make(key, recorded[key])
        metrics = trainer.train(flow.take(flow.step, timeout=0), step=flow.step)
        books = flow.trained(flow.step)
        publish()
        session.record(books, metrics, [maker.report(), trainer.report()])
    session.save_last(trainer)
    session.conclude(evaluate, lambda: [maker.report(), trainer.report()])


def detached(session: Session, placement: Detached, crew: Crew, supervisor: Supervisor) -> None:
    """Makers and trainer at work at the same time; the flow bounds how far apart they may be.

    The rank that trains a unit is decided by the unit's number; a maker makes units of the ranks that it feeds.
    """
    flow = session.flow

    def make(maker: Member) -> None:
        def fits(unit: Any) -> bool:
            return unit_key(unit)[1] % placement.trainers in feeds(placement, crew.makers.index(maker), crew)

        lease: Lease | None = None
        while True:
            try:
                if (lease := flow.next(maker.name, fits=fits, stop=maker.check)) is None:
                    return
                experience, facts = maker.make(lease)
                flow.made(lease, experience, facts.rows, versions=facts.versions)
            except RewardError as error:
                session.give_up(lease, error)
            except WorkerDied as error:
                if lease is not None:
                    flow.lost(lease, error.message)
                if not crew.replace_maker(maker, error, wanted=lambda: not flow.closed):
                    return
            except Retired:
                crew.dismiss(maker)
                return
            lease = None

    def publish() -> None:
        crew.publish(flow.step, flow.timeline)
        flow.advance(flow.step)

    def one_step() -> None:
        step = flow.step
        with session.tracer.span("wait", step=step + 1):
            experience = flow.take(step, timeout=session.patience, stop=stop)
        try:
            metrics = crew.trainer.now.train(experience, step=step)
        except DataLost:
            flow.again(step)
            return
        books = flow.trained(step)
        publish()
        session.record(books, metrics, crew.reports(), queue_depth=flow.depth)
        session.checkpoint(books, crew.trainer.now, metrics)

    def stop() -> None:
        supervisor.check()
        session.check()
        crew.trainer.check()

    def train() -> None:
        while not session.saved_all:
            try:
                one_step() if session.going else session.save_last(crew.trainer.now)
            except Draining:
                continue
            except WorkerDied as error:
                recover(error)
        flow.close()

    def recover(error: WorkerDied) -> None:
        while True:
            crew.replace_trainer(error)
            try:
                session.rewind(crew.trainer.now.restore)
                publish()
                return
            except WorkerDied as another:
                error = another

    def evaluate(units: list[Any]) -> list[dict[str, list[float]]]:
        return crew.evaluate(units, version=flow.step, timeline=flow.timeline)

    def scale() -> None:
        while True:
            if (wanted := session.wanted_makers()) is not None:
                try:
                    for maker in crew.scale(wanted):
                        supervisor.spawn(f"loop of {maker.name}", partial(make, maker))
                    session.scaled(f"{wanted} makers now, as asked")
                except (PlacementError, WorkerDied) as error:
                    session.scaled(f"not {wanted} makers: {error.message}")
            supervisor.pause(session.config.supervise.heartbeat)

    try:
        session.restore(crew.trainer.now.restore)
        publish()
        supervisor.beside("watchdog", crew.watch)
        session.evaluate(evaluate, first=True)
        supervisor.beside("scaling", scale)
        supervisor.together({f"loop of {maker.name}": partial(make, maker) for maker in crew.makers}, main=train)
        session.conclude(evaluate, partial(crew.reports, last=True))
    finally:
        supervisor.end()


def feeds(placement: Detached, index: int, crew: Crew) -> list[int]:
    """The ranks that a maker feeds: as the placement says, or by the rule of `get_receivers_per_sender`."""
    return placement.edges[index] if placement.edges else target_trainers(index, len(crew.makers), placement.trainers)


def _build_both(session: Session) -> tuple[Any, Any]:
    transport = InProcess()
    return build_maker(session.blueprint, transport), build_trainer(session.blueprint, transport)
