"""The programs: the same parts, in one process, in one worker, or in many."""

from __future__ import annotations

from functools import partial
from typing import Any

from hocket.config import Colocated, Detached, Local
from hocket.roles.build import build_maker, build_trainer
from hocket.roles.experience_buffer import ExperienceBuffer
from hocket.run.admission import Admission
from hocket.run.cluster import cluster
from hocket.run.session import Session
from hocket.run.supervise import Supervisor
from hocket.single_controller.future import future_of
from hocket.weights.transport import InProcess
from hocket.workers.topology import target_trainers


def run_program(session: Session) -> None:
    """Run to the end. The only place that looks at which placement it is."""
    placement = session.config.placement
    match placement:
        case Local():
            transport = InProcess()
            lockstep(session, build_maker(session.blueprint, transport), build_trainer(session.blueprint, transport))
        case Colocated():
            from hocket.run.start import start_colocated

            with cluster(session.config.ray.address, placement.bundles) as where:
                session.console.header([where])
                lockstep(session, *start_colocated(session, placement))
        case Detached():
            from hocket.run.start import start_detached

            with cluster(session.config.ray.address, placement.bundles) as where:
                session.console.header([where])
                supervisor = Supervisor()
                detached(session, placement, *start_detached(session, placement, supervisor.check), supervisor)


def lockstep(session: Session, maker: Any, trainer: Any) -> None:
    """One pool: make, train, swap, in turn. `maker` and `trainer` are the roles or groups that hold them."""
    maker.receive(*trainer.publish(0))
    session.evaluate(lambda units: [maker.evaluate(unit) for unit in units], version=0)
    for step in session.steps:
        units = session.units(step)
        session.ledger.started(sum(map(session.samples_of, units)))
        experience = [maker.make(unit, at_least=step) for unit in units]
        metrics = trainer.train(experience, step=step)
        session.ledger.made(int(metrics["samples"]))
        maker.receive(*trainer.publish(step + 1))
        session.record(step, metrics, [maker.report(), trainer.report()])
        session.checkpoint(step + 1, trainer.save, trainer.sha256)
    last = len(session.steps)
    session.evaluate(lambda units: [maker.evaluate(unit, at_least=last) for unit in units], version=last)
    session.finish([maker.report(), trainer.report()])


def detached(session: Session, placement: Detached, makers: list[Any], trainer: Any, supervisor: Supervisor) -> None:
    """Makers and trainer at work at the same time; admission bounds how far apart they may be.

    The rank that trains a unit is decided by the unit's number; a maker makes units of the ranks that it feeds.
    """
    admission = Admission(session.units, steps=session.steps, max_staleness=placement.max_staleness)
    # a maker that takes too long is found by its own deadline; this one is for what nobody foresaw
    buffer = ExperienceBuffer(units_per_step=session.units_per_step, timeout=2 * session.config.ray.call_timeout)

    def make(maker: Any, ranks: list[int]) -> None:
        def fits(unit: Any) -> bool:
            return unit.meta_info["unit"] % placement.trainers in ranks

        while (unit := admission.next(fits, stop=supervisor.check)) is not None:
            session.ledger.started(session.samples_of(unit))
            experience, rows = maker.send("make_unit", unit, at_least=admission.oldest(unit))
            with session.ledger.failing(session.samples_of(unit)):
                session.ledger.made(maker.get(rows, what=_name(unit)))
            buffer.put(unit.meta_info["step"], unit.meta_info["unit"], future_of(experience))

    def publish(version: int) -> None:
        manifest, handles = trainer.call("publish", version)
        for maker, done in [(maker, maker.send("receive", manifest, handles)) for maker in makers]:
            maker.get(done, what=f"receive weights version {version}")
        admission.advance(version)

    def train() -> None:
        for step in session.steps:
            with session.tracer.span("wait", step=step + 1):
                experience = buffer.take(step, stop=supervisor.check)
            metrics = trainer.train(experience, step=step)
            publish(step + 1)
            session.record(step, metrics, [m.call("report") for m in (*makers, trainer)], queue_depth=buffer.depth)
            session.checkpoint(step + 1, partial(trainer.call, "save"), partial(trainer.call, "sha256"))

    publish(0)
    session.evaluate(partial(_evaluate, makers, 0), version=0)
    loops = {
        f"loop of {maker.name}": partial(make, maker, feeds)
        for maker, feeds in zip(makers, edges(placement), strict=True)
    }
    supervisor.together(loops, main=train)
    session.evaluate(partial(_evaluate, makers, len(session.steps)), version=len(session.steps))
    session.finish([m.call("report") for m in (*makers, trainer)])


def edges(placement: Detached) -> list[list[int]]:
    """The ranks that each maker feeds: as the placement says, or by the rule of `get_receivers_per_sender`."""
    sizes = placement.makers, placement.trainers
    return placement.edges or [target_trainers(i, *sizes) for i in range(placement.makers)]


def _evaluate(makers: list[Any], version: int, units: list[Any]) -> list[dict[str, list[float]]]:
    """Held-out units over all makers in turn; answers come back in unit order."""
    jobs = [(makers[i % len(makers)], unit) for i, unit in enumerate(units)]
    refs = [(maker, maker.send("evaluate", unit, at_least=version)) for maker, unit in jobs]
    return [maker.get(ref, what="evaluate") for maker, ref in refs]


def _name(unit: Any) -> str:
    return f"make unit {unit.meta_info['unit']} of step {unit.meta_info['step'] + 1}"
