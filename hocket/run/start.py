"""Starts the processes of a placement on Ray, each with its log, and waits until they are ready."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import ray

from hocket.config import Colocated, Detached, RaySection
from hocket.parallel.strategy import make_strategy
from hocket.roles.build import Blueprint, build_maker, build_trainer
from hocket.roles.trainer import Trainer
from hocket.run.remote import Ranks, Remote
from hocket.run.session import Session
from hocket.single_controller.colocate import create_colocated_worker_cls
from hocket.single_controller.ray_class import RayClassWithInitArgs
from hocket.single_controller.resource_pool import RayResourcePool
from hocket.single_controller.worker_group import RayWorkerGroup
from hocket.waiting import Waiter
from hocket.weights.object_store import ObjectStore
from hocket.weights.transport import InProcess
from hocket.workers.maker_worker import MAKER_GROUPS, MakerWorker
from hocket.workers.meeting import env_info, meet
from hocket.workers.process import where
from hocket.workers.trainer_worker import TrainerWorker


def start_colocated(session: Session, placement: Colocated) -> tuple[RayWorkerGroup, RayWorkerGroup]:
    """One process that holds a maker and a trainer: a group for each of the two."""
    blueprint, log, device = session.blueprint, session.folder.log("worker-0"), _device(placement.gpus_per_worker)
    maker = partial(build_maker, blueprint, InProcess(), device=device)
    trainer = partial(build_trainer, blueprint, InProcess(), device=device)
    bound = create_colocated_worker_cls(
        {
            "maker": RayClassWithInitArgs(MakerWorker, maker, log=log),
            "trainer": RayClassWithInitArgs(TrainerWorker, trainer, log=log),
        }
    )
    pool = RayResourcePool([1], cpus_per_worker=placement.cpus_per_worker, gpus_per_worker=placement.gpus_per_worker)
    waiter = _waiter(session)
    limit = session.config.ray.start_timeout
    group = RayWorkerGroup(pool, bound, waiter=waiter, name="worker-0", ray_wait_register_center_timeout=limit)
    roles = group.spawn({"maker", "trainer"})
    return roles["maker"], roles["trainer"]


def start_detached(session: Session, placement: Detached, stop: Callable[[], None]) -> tuple[list[Remote], Ranks]:
    """All makers and the ranks of the trainer, each an actor of its own; `stop` may raise to end every wait on them."""
    waiter, blueprint = _waiter(session, stop), session.blueprint

    def actor(cls: type, build: Callable[[], Any], name: str, *, gpus: float, groups: dict[str, int]) -> Remote:
        made = cast(Any, ray.remote)(concurrency_groups=groups, max_restarts=0)(cls).options(
            num_cpus=placement.cpus_per_worker, num_gpus=gpus
        )
        return Remote(made.remote(build, log=session.folder.log(name)), name=name, waiter=waiter)

    def maker(i: int) -> Remote:
        gpus = placement.gpus_per_maker
        build = partial(build_maker, blueprint, ObjectStore(), index=i, device=_device(gpus))
        return actor(MakerWorker, build, f"maker-{i}", gpus=gpus, groups=MAKER_GROUPS)

    def rank(i: int, info: dict[str, str]) -> Remote:
        gpus, ray_settings = placement.gpus_per_trainer, session.config.ray
        build = partial(_build_rank, info, blueprint, ObjectStore(), ray_settings, index=i, device=_device(gpus))
        return actor(TrainerWorker, build, f"trainer-{i}", gpus=gpus, groups={"compute": 1})

    makers = [maker(i) for i in range(placement.makers)]
    ranks = [rank(i, info) for i, info in enumerate(env_info(placement.trainers))]
    for role in (*makers, *ranks):
        waiter.watch(
            *role.get(role.send("__ray_call__", where), what="start", timeout=session.config.ray.start_timeout)
        )
    return makers, Ranks(ranks, waiter=waiter)


def _build_rank(
    info: dict[str, str], blueprint: Blueprint, transport: ObjectStore, limits: RaySection, *, index: int, device: str
) -> Trainer:
    """One rank of the trainer, in its own process."""
    meet(info, namespace=None, timeout=limits.start_timeout)
    strategy = make_strategy("ddp", timeout=limits.call_timeout)
    return build_trainer(blueprint, transport, index=index, device=device, strategy=strategy)


def _waiter(session: Session, stop: Callable[[], None] = lambda: None) -> Waiter:
    return Waiter(
        timeout=session.config.ray.call_timeout, logs=session.folder.logs, say=session.console.note, stop=stop
    )


def _device(gpus: float) -> str:
    return "cuda" if gpus else "cpu"
