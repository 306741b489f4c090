"""Starts the processes of a placement on Ray, each with its log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import ray

from hocket.config import Colocated, Detached, RaySection
from hocket.parallel.strategy import make_strategy
from hocket.roles.build import Blueprint, build_maker, build_trainer
from hocket.roles.trainer import Trainer
from hocket.run.cluster import check_fits
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
from hocket.workers.trainer_worker import STEP_GROUPS, TrainerWorker


class OneProcess:
    """A maker and a trainer in one worker process: a group for each of the two, started again when it died."""

    def __init__(self, session: Session, placement: Colocated) -> None:
        self._session, self._placement = session, placement
        self._pool: RayResourcePool | None = None

    def __call__(self) -> tuple[RayWorkerGroup, RayWorkerGroup]:
        """Start the process, and end the one before."""
        session, placement = self._session, self._placement
        if self._pool is not None:
            self._pool.close()
        log, device = session.folder.log("worker-0"), _device(placement.gpus_per_worker)
        maker = partial(build_maker, session.blueprint, InProcess(), device=device)
        trainer = partial(build_trainer, session.blueprint, InProcess(), device=device)
        history = session.folder.history
        bound = create_colocated_worker_cls(
            {
                "maker": RayClassWithInitArgs(MakerWorker, maker, log=log, history=history("maker-0")),
                "trainer": RayClassWithInitArgs(TrainerWorker, trainer, log=log, history=history("trainer-0")),
            }
        )
        self._pool = RayResourcePool(
            [1], cpus_per_worker=placement.cpus_per_worker, gpus_per_worker=placement.gpus_per_worker
        )
        limit = session.config.ray.start_timeout
        group = RayWorkerGroup(
            self._pool, bound, waiter=_waiter(session), name="worker-0", ray_wait_register_center_timeout=limit
        )
        roles = group.spawn({"maker", "trainer"})
        return roles["maker"], roles["trainer"]


class ManyProcesses:
    """Makers and the ranks of a trainer, each an actor of its own; `stop` may raise to end every wait on them."""

    def __init__(self, session: Session, placement: Detached, stop: Callable[[], None]) -> None:
        self._session, self._placement = session, placement
        self._waiter = _waiter(session, stop)

    def maker(self, index: int, *, late: bool = False) -> Remote:
        """See Workshop. Of the CPUs of a private cluster, which are a number only, a late one takes none."""
        gpus, cpus, blueprint = self._placement.gpus_per_maker, self._placement.cpus_per_worker, self._session.blueprint
        cpus = 0 if late and self._session.config.ray.address is None else cpus
        if late:
            check_fits([{"CPU": cpus, "GPU": gpus}], ray.available_resources(), where="what the cluster has left")
        build = partial(build_maker, blueprint, ObjectStore(), index=index, device=_device(gpus))
        return self._start(MakerWorker, build, f"maker-{index}", gpus=gpus, groups=MAKER_GROUPS, cpus=cpus)

    def trainer(self) -> Ranks:
        """See Workshop."""
        infos = env_info(self._placement.trainers)
        return Ranks([self._rank(i, info) for i, info in enumerate(infos)], waiter=self._waiter)

    def ready(self, *roles: Remote, check: Callable[[], None] = lambda: None) -> None:
        """See Workshop."""
        limit = self._session.config.ray.start_timeout
        for role in roles:
            self._waiter.watch(*role.get(role.send("__ray_call__", where), what="start", timeout=limit, check=check))

    def _rank(self, index: int, info: dict[str, str]) -> Remote:
        gpus, blueprint, limits = self._placement.gpus_per_trainer, self._session.blueprint, self._session.config.ray
        build = partial(_build_rank, info, blueprint, ObjectStore(), limits, index=index, device=_device(gpus))
        return self._start(TrainerWorker, build, f"trainer-{index}", gpus=gpus, groups=STEP_GROUPS)

    def _start(
        self,
        cls: type,
        build: Callable[[], Any],
        name: str,
        *,
        gpus: float,
        groups: dict[str, int],
        cpus: float | None = None,
    ) -> Remote:
        # Ray's own restarts and retries would reset the state and reorder calls
        made = cast(Any, ray.remote)(concurrency_groups=groups, max_restarts=0, max_task_retries=0)(cls).options(
            num_cpus=self._placement.cpus_per_worker if cpus is None else cpus, num_gpus=gpus
        )
        folder = self._session.folder
        actor = made.remote(build, log=folder.log(name), history=folder.history(name))
        return Remote(actor, name=name, waiter=self._waiter)


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
