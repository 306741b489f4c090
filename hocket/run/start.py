"""Starts the processes of a placement on Ray, each with its log, and waits until they are ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import ray

from hocket.config import Colocated, Detached
from hocket.run.remote import Remote
from hocket.run.session import Session
from hocket.single_controller.colocate import create_colocated_worker_cls
from hocket.single_controller.ray_class import RayClassWithInitArgs
from hocket.single_controller.resource_pool import RayResourcePool
from hocket.single_controller.worker_group import RayWorkerGroup
from hocket.waiting import Waiter
from hocket.weights.object_store import ObjectStore
from hocket.weights.transport import InProcess
from hocket.workers.maker_worker import MAKER_GROUPS, MakerWorker
from hocket.workers.process import where
from hocket.workers.trainer_worker import TrainerWorker


def start_colocated(session: Session, placement: Colocated) -> tuple[RayWorkerGroup, RayWorkerGroup]:
    """One process that holds a maker and a trainer: a group for each of the two."""
    common = {"log": session.folder.log("worker-0"), "device": _device(placement.gpus_per_worker)}
    bound = create_colocated_worker_cls(
        {
            "maker": RayClassWithInitArgs(MakerWorker, session.blueprint, InProcess(), **common),
            "trainer": RayClassWithInitArgs(TrainerWorker, session.blueprint, InProcess(), **common),
        }
    )
    pool = RayResourcePool([1], cpus_per_worker=placement.cpus_per_worker, gpus_per_worker=placement.gpus_per_worker)
    waiter = _waiter(session)
    limit = session.config.ray.start_timeout
    group = RayWorkerGroup(pool, bound, waiter=waiter, name="worker-0", ray_wait_register_center_timeout=limit)
    roles = group.spawn({"maker", "trainer"})
    return roles["maker"], roles["trainer"]


def start_detached(session: Session, placement: Detached, stop: Callable[[], None]) -> tuple[list[Remote], Remote]:
    """All makers and the trainer, each an actor of its own; `stop` may raise to end every wait on them."""
    waiter = _waiter(session, stop)

    def actor(cls: type, name: str, *, gpus: float, groups: dict[str, int], **kwargs: Any) -> Remote:
        made = cast(Any, ray.remote)(concurrency_groups=groups, max_restarts=0)(cls).options(
            num_cpus=placement.cpus_per_worker, num_gpus=gpus
        )
        handle = made.remote(
            session.blueprint, ObjectStore(), device=_device(gpus), log=session.folder.log(name), **kwargs
        )
        return Remote(handle, name=name, waiter=waiter)

    makers = [
        actor(MakerWorker, f"maker-{i}", gpus=placement.gpus_per_maker, groups=MAKER_GROUPS, index=i)
        for i in range(placement.makers)
    ]
    trainer = actor(TrainerWorker, "trainer-0", gpus=placement.gpus_per_trainer, groups={"compute": 1})
    for role in (*makers, trainer):
        waiter.watch(
            *role.get(role.send("__ray_call__", where), what="start", timeout=session.config.ray.start_timeout)
        )
    return makers, trainer


def _waiter(session: Session, stop: Callable[[], None] = lambda: None) -> Waiter:
    return Waiter(
        timeout=session.config.ray.call_timeout, logs=session.folder.logs, say=session.console.note, stop=stop
    )


def _device(gpus: float) -> str:
    return "cuda" if gpus else "cpu"
