"""A maker's side of the credits: wait until trainers want samples, and which of them gets which."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.errors import WorkerDied
from hocket.roles.intake import Grant
from hocket.roles.routing import Router
from hocket.workers.naming import Patience
from hocket.workers.peers import Connect
from hocket.workers.reports import FAILED, death

_LOG = logging.getLogger("hocket")
_PATIENCE = 0.2  # seconds that a full trainer is waited for while another one has nothing to do


@dataclass
class Admitted:
    """What may be made now: the first `prompts` prompts, the trainer of each of their samples, and the credits."""

    prompts: int
    deal: list[str]
    grants: dict[str, Grant]

    @property
    def at_least(self) -> int:
        """The weights version that the samples must be made with, or a newer one."""
        return max(grant.at_least for grant in self.grants.values())


class Credits:
    """Gets credits from the trainers of one maker before samples are made, and gives back what is not used.

    `ended` are the trainers that take no more, and why.
    """

    def __init__(self, maker: str, router: Router, connect: Connect, *, group_size: int, timeout: float) -> None:
        self._maker = maker
        self._router = router
        self._connect = connect
        self._group_size = group_size
        self._timeout = timeout
        self.ended: dict[str, str] = {}

    def get(self, prompts: int, *, lost: Mapping[str, str]) -> Admitted | None:
        """Wait until trainers want samples of some of the prompts; None when no trainer is left.

        `lost` are trainers that are known to be dead. Raises WorkerDied at the deadline, saying who does not take.
        """
        began, pause, patience = time.monotonic(), 0.005, Patience()
        while self._some_left(lost):
            deal = self._router.deal(prompts, self._group_size, load=self._load())
            grants = self._ask(deal)
            if any(grant.ended for grant in grants.values()):
                self._give_back(grants, {})
                for trainer in [name for name, grant in grants.items() if grant.ended]:
                    self._drop(trainer)
                continue
            hungry = [name for name, grant in grants.items() if grant.hungry]
            if hungry and time.monotonic() - began > _PATIENCE and not all(g.samples for g in grants.values()):
                # else a group of trainers that step together could wait for this one, and this maker for the others
                self._give_back(grants, {})
                deal = [hungry[0]] * len(deal)
                grants = self._ask(deal)
            if fit := self._prefix(deal, grants):
                deal = deal[: fit * self._group_size]
                self._give_back(grants, Counter(deal))
                self._router.done(len(deal), self._group_size)
                return Admitted(fit, deal, {name: grants[name] for name in dict.fromkeys(deal)})
            self._give_back(grants, {})
            waiting = tuple(grants)
            patience.tell(lambda names=waiting: f"{self._maker} waits until samples are taken: {self._states(names)}")
            if (waited := time.monotonic() - began) > self._timeout:
                raise WorkerDied(
                    f"{self._maker} waited {waited:.0f} s until samples are taken: {self._states(waiting)}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return None

    def _call(self, trainer: str, method: str, *args: Any, otherwise: Any) -> Any:
        """The trainer's answer; one that is dead, which the next round finds out, has answered `otherwise`."""
        try:
            return self._connect(trainer).call(method, *args)
        except WorkerDied as error:
            _LOG.warning("%s goes on without %s: %s", self._maker, trainer, error.message)
            self.ended[trainer] = death(error.message)
            return otherwise

    def _drop(self, trainer: str) -> None:
        """Deal it no more; it says itself why."""
        if trainer not in self.ended:
            why = self._call(trainer, "closed", otherwise=None)
            self.ended.setdefault(trainer, why or "it has ended")
            if (why or "").startswith(FAILED):
                _LOG.warning("%s goes on without %s: %s", self._maker, trainer, why)
        self._router.drop(trainer)

    def _ask(self, deal: Sequence[str]) -> dict[str, Grant]:
        shares = Counter(deal)
        multiple = self._group_size if len(shares) == 1 or self._router.route == "groups" else 1
        return {
            trainer: self._call(trainer, "admit", self._maker, samples, multiple, otherwise=Grant(0, ended=True))
            for trainer, samples in shares.items()
        }

    def _give_back(self, grants: Mapping[str, Grant], used: Mapping[str, int]) -> None:
        for trainer, grant in grants.items():
            if spare := grant.samples - used.get(trainer, 0):
                self._call(trainer, "release", self._maker, grant.ticket + grant.samples - spare, spare, otherwise=None)

    def _prefix(self, deal: Sequence[str], grants: Mapping[str, Grant]) -> int:
        """How many prompts from the first on have credits for all their samples."""
        used: Counter[str] = Counter()
        for sample, trainer in enumerate(deal):
            used[trainer] += 1
            if used[trainer] > grants[trainer].samples:
                return sample // self._group_size
        return len(deal) // self._group_size

    def _load(self) -> dict[str, int]:
        """Samples that each trainer has outstanding, where that decides."""
        if self._router.route != "least_loaded":
            return {}
        return {name: self._call(name, "outstanding", otherwise=0) for name in self._router.targets}

    def _some_left(self, lost: Mapping[str, str]) -> bool:
        for trainer in list(self._router.targets):
            if (why := lost.get(trainer) or self._connect(trainer).lost()) is not None:
                _LOG.warning("%s goes on without %s: %s", self._maker, trainer, why)
                self.ended[trainer] = death(why)
                self._router.drop(trainer)
        return bool(self._router.targets)

    def _states(self, trainers: Iterable[str]) -> str:
        return "; ".join(self._call(name, "state", otherwise=f"{name} is dead") for name in trainers)
