"""A trainer that drives itself: it takes batches from its makers, learns, and sends them new weights."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch

from hocket.data.experience import Experience, make_experience_batch, split_experience_batch
from hocket.data.proto import DataProto
from hocket.errors import BatchError, PlacementError, WorkerDied
from hocket.roles.intake import DEFAULT_LIMIT, Ack, Grant, Intake
from hocket.single_controller.decorator import concurrency
from hocket.workers.callbacks import TrainerCallback, notify
from hocket.workers.checks import SHARED, Wanted, check_options, choice, instances, names, optional, whole
from hocket.workers.naming import Patience, actor_name, connector, speak
from hocket.workers.peers import Connect, Peer
from hocket.workers.reports import FAILED, TrainerReport, death, failure, with_failed

_LOG = logging.getLogger("hocket")
TRAINER_GROUPS = {"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "model_io": 1, "compute": 1}
REPLAYS = ("batches", "rows")
TRAINER_OPTIONS = SHARED | {
    "experience_maker_holder_name_list": names(least=0),
    "train_batch_size": whole(1),
    "buffer_limit": optional(whole(0)),
    "callbacks": instances(TrainerCallback),
    "max_staleness": optional(whole(0)),
    "replay": choice(REPLAYS),
}
_COUNTS: dict[str, Wanted] = dict.fromkeys(("total_steps", "update_steps", "train_epochs"), whole(1))


class DetachedTrainer(ABC):
    """The loop of a trainer without its mathematics: subclass it with `training_step` and `_update_remote_makers`.

    It needs no Ray: makers are called through `connect`, and a test may put experience in by `buffer_extend`.

    `buffer_limit` bounds what its makers may have outstanding, in batches; 0 is the default bound, None no bound.
    With `max_staleness`, no sample is trained more than so many versions after the weights that made it. `replay`
    says what is reshuffled in the epochs after the first: the order of the batches, or the rows over them.
    `join_timeout` is how many seconds a maker that is named may not be there, or no maker send anything.
    `dataloader_pin_memory` is accepted and does nothing: there is no loader between the buffer and the step.
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        train_batch_size: int = 8,
        buffer_limit: int | None = 0,
        dataloader_pin_memory: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
        debug: bool = False,
        *,
        max_staleness: int | None = None,
        whole_groups: bool = False,
        replay: str = "batches",
        seed: int = 0,
        timeout: float = 3600.0,
        join_timeout: float = 60.0,
        name: str | None = None,
        namespace: str | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.check_arguments(locals())
        self.name = name or actor_name("trainer")
        speak()
        self.version = 0
        self.callbacks = list(callbacks)
        if buffer_limit == 0:
            _LOG.info("%s: buffer_limit=0 is %d batches here; None is no limit", self.name, DEFAULT_LIMIT)
        self.buffer = Intake(
            batch_size=train_batch_size,
            limit=DEFAULT_LIMIT if buffer_limit == 0 else buffer_limit,
            max_staleness=max_staleness,
            whole_groups=whole_groups,
            name=self.name,
        )
        self._maker_names = list(experience_maker_holder_name_list)
        self._connect = connect or connector(namespace, timeout, join_timeout=join_timeout)
        self._replay = replay
        self._shuffle = torch.Generator().manual_seed(seed)
        self._timeout = timeout
        self._join_timeout = join_timeout
        self._own_messages = count(1)
        if debug:
            _LOG.setLevel(logging.DEBUG)

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        """What can be found wrong before an actor starts; see ActorClass.remote. Raises ConfigError."""
        check_options(arguments, TRAINER_OPTIONS)

    # --- to be written by a subclass -----------------------------------------------------------------------

    @abstractmethod
    def training_step(self, experience: Experience) -> dict[str, float]:
        """Learn from one batch; returns metrics."""

    @abstractmethod
    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:
        """Send the weights, as version `self.version`, to the makers."""

    def _prepare(self, experience: Experience) -> Experience:
        """What is decided when a batch is taken, once for all its epochs."""
        return experience

    def _next(self) -> Experience | None:
        """The next batch; None at the end of all streams."""
        patience, began = Patience(), time.monotonic()

        def meanwhile() -> None:
            self._note_lost()
            self._demand_feeder(time.monotonic() - began)
            patience.tell(lambda: f"{self.name} waits for experience: {self.buffer.state()}")

        batch = self.buffer.take(timeout=self._timeout, stop=meanwhile)
        return None if batch is None else Experience.of(batch)

    def _begin(self) -> None:
        """Before the first step of `fit`: connect to the makers."""
        feeds = self._ask(self.update_target_holder_list(), "sends_to", self.name)
        self.buffer.expect([name for name, does in feeds.items() if does])
        makers, feeders = (", ".join(some) or "nobody" for some in (self._maker_names, self.buffer.unfinished()))
        _LOG.info("%s sends weights to %s; experience comes, so far, from %s", self.name, makers, feeders)

    def _finish(self) -> None:  # noqa: B027  a subclass may need it
        """After the last step of `fit`."""

    def _close(self) -> None:  # noqa: B027  a subclass may need it
        """At the end of `fit`, however it ended."""

    # --- what makers call ----------------------------------------------------------------------------------

    @concurrency("buffer_length")
    def ping(self) -> str:
        """Answer."""
        return self.name

    @concurrency("buffer_length")
    def closed(self) -> str | None:
        """Why it takes no more, None while it does."""
        return self.buffer.closed

    @concurrency("buffer_length")
    def serves(self, maker: str) -> bool:
        """Whether that maker gets weights from this trainer."""
        return maker in self._maker_names

    @concurrency("buffer_length")
    def join(self, maker: str) -> None:
        """See Intake."""
        self.buffer.join(maker)

    @concurrency("buffer_length")
    def admit(self, maker: str, samples: int, multiple: int = 1) -> Grant:
        """See Intake."""
        return self.buffer.admit(maker, samples, multiple=multiple)

    @concurrency("buffer_length")
    def release(self, maker: str, ticket: int, samples: int) -> None:
        """See Intake."""
        self.buffer.release(maker, ticket, samples)

    @concurrency("buffer_append")
    def buffer_put(self, maker: str, seq: int, items: DataProto, ticket: int) -> Ack:
        """See Intake."""
        return self.buffer.put(maker, seq, items, ticket=ticket)

    @concurrency("buffer_append")
    def end(self, maker: str, why: str) -> None:
        """See Intake."""
        if why.startswith(FAILED):
            _LOG.warning("%s goes on without %s: %s", self.name, maker, why)
        self.buffer.end(maker, why)

    # --- what users call -----------------------------------------------------------------------------------

    @concurrency("buffer_length")
    def buffer_get_length(self) -> int:
        """Batches that are ready."""
        return len(self.buffer)

    @concurrency("buffer_length")
    def outstanding(self) -> int:
        """Samples that are being made, on their way, or waiting."""
        return self.buffer.outstanding

    @concurrency("buffer_length")
    def state(self) -> str:
        """What it has and whom it waits for, in words."""
        return f"{self.name}: {self.buffer.state()}"

    @concurrency("buffer_append")
    def buffer_append(self, experience: DataProto) -> Ack:
        """Put a batch of samples in; see `buffer_extend`."""
        return self.buffer.put("buffer_extend", next(self._own_messages), experience)

    @concurrency("buffer_append")
    def buffer_extend(self, items: Sequence[DataProto]) -> Ack:
        """Put samples in, by hand. A bad one is refused alone; what is returned says how many, and why."""
        ack = Ack()
        for item in items:
            one = self.buffer.put("buffer_extend", next(self._own_messages), item)
            ack.accepted, ack.left = ack.accepted + one.accepted, ack.left + one.left
            ack.refused += one.refused
        return ack

    @concurrency("buffer_sample")
    def _buffer_sample(self) -> Experience:
        """The next batch, waiting for it."""
        batch = self._next()
        if batch is None:
            raise BatchError(f"{self.name} has no more batches: {self.buffer.state()}")
        return batch

    @concurrency("model_io")
    def sync_models_to_remote_makers(self, **kwargs: Any) -> None:
        """Send all weights to all makers, and wait until they have them."""
        self._update_remote_makers(fully_update=True, **kwargs)

    @concurrency("compute")
    def fit(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> TrainerReport:
        """`total_steps` steps, in episodes of `update_steps`, after each of which the makers get new weights.

        A step takes one batch as soon as it is there. With `train_epochs` above 1, the batches of an episode are
        trained again so many times in all. The last episode may be shorter; fewer steps are made only when all makers
        have ended and nothing is left, not even a batch that is not full. What is returned says why it ended. However
        it ends, the makers learn why. Raises ConfigError for a count below 1.

        It may be called again, before the makers' next loops: until then it says to them that it has ended.
        """
        report = TrainerReport(self.name)
        try:
            if self.buffer.closed:  # by a fit before this one
                self.buffer = self.buffer.fresh()
            counts = {"total_steps": total_steps, "update_steps": update_steps, "train_epochs": train_epochs}
            check_options(counts, _COUNTS)
            self.buffer.plan(update_steps * self.buffer.batch_size, version=self.version)
            notify(self.callbacks, "on_fit_start")
            self._begin()
            self._run_episodes(total_steps, update_steps, train_epochs, report=report)
            self._finish()
            notify(self.callbacks, "on_fit_end")
        except BaseException as error:
            report.ended_by = failure(error)
            raise
        finally:
            self._conclude(report)
        return report

    def _run_episodes(self, total_steps: int, update_steps: int, train_epochs: int, *, report: TrainerReport) -> None:
        for episode in count():
            wanted = min(update_steps, total_steps - report.steps)
            notify(self.callbacks, "on_episode_start", episode)
            made = self._learn(wanted, train_epochs, report)
            if made:
                notify(self.callbacks, "on_update_start")
                self.version += 1
                self._update_remote_makers()
                self.buffer.advance(self.version)
                notify(self.callbacks, "on_update_end")
            notify(self.callbacks, "on_episode_end", episode)
            if made < wanted:
                report.ended_by = "all its makers have ended"
            if made < wanted or report.steps == total_steps:
                return

    def _conclude(self, report: TrainerReport) -> None:
        """Take no more, tell the makers why, and complete the report."""
        report.ended_by = with_failed(report.ended_by, dict(self.buffer.ended))
        if left := self.buffer.close(report.ended_by):
            report.left[f"in the buffer when {self.name} ended"] += left
        report.version = self.version
        report.trained, report.refused = self.buffer.trained, self.buffer.refused
        report.accepted = self.buffer.accepted
        _LOG.info("%s made %d steps on %d samples: %s", self.name, report.steps, report.trained, report.ended_by)
        self._close()

    def update_target_holder_list(self) -> list[Peer]:
        """The makers that get weights from here."""
        return [self._connect(name) for name in self._maker_names]

    def _ask(self, makers: Sequence[Peer], method: str, *args: Any) -> dict[str, Any]:
        """What each of them answers; one that died is passed over."""
        answers: dict[str, Any] = {}
        for maker in makers:
            try:
                answers[maker.name] = maker.call(method, *args)
            except WorkerDied as error:
                if maker.lost() is None:
                    raise
                _LOG.warning("%s goes on without %s", self.name, error.message)
        return answers

    def _learn(self, update_steps: int, train_epochs: int, report: TrainerReport) -> int:
        """One episode; returns how many batches it took. Its first epoch trains each batch as soon as it is there."""
        notify(self.callbacks, "on_epoch_start", 0)
        seen: list[Experience] = []
        for _ in range(update_steps):
            if (batch := self._next()) is None:
                break
            batch = self._prepare(batch)
            seen.append(batch)
            self._train(batch, report)
            report.steps += 1
        notify(self.callbacks, "on_epoch_end", 0)
        for epoch in range(1, train_epochs if seen else 1):
            notify(self.callbacks, "on_epoch_start", epoch)
            for batch in self._again(seen):
                self._train(batch, report)
            notify(self.callbacks, "on_epoch_end", epoch)
        return len(seen)

    def _train(self, batch: Experience, report: TrainerReport) -> None:
        notify(self.callbacks, "on_batch_start")
        metrics: Mapping[str, float] = self.training_step(batch)
        report.metrics.append(dict(metrics))
        notify(self.callbacks, "on_batch_end", metrics, batch)

    def _again(self, seen: Sequence[Experience]) -> list[Experience]:
        """The batches of an episode for another epoch."""
        if self._replay == "batches":
            return [seen[i] for i in torch.randperm(len(seen), generator=self._shuffle).tolist()]
        rows = [row for batch in seen for row in split_experience_batch(batch.select(meta_info_keys=[]))]
        order = [rows[i] for i in torch.randperm(len(rows), generator=self._shuffle).tolist()]
        size = self.buffer.batch_size
        return [make_experience_batch(order[i : i + size]) for i in range(0, len(order), size)]

    def _demand_feeder(self, waited: float) -> None:
        """A trainer that no maker names would wait for its deadline."""
        if waited > self._join_timeout and not self.buffer.feeders and not self.buffer.accepted:
            raise PlacementError(
                f"{self.name} starves: no maker has joined within {waited:.0f} s, and none of those that it sends "
                f"weights to ({', '.join(self._maker_names) or 'nobody'}) feeds it; name it in a maker's "
                "detached_trainer_name_list, and start that maker's workingloop"
            )

    def _note_lost(self) -> None:
        """A maker that died sends no more; the others do."""
        for name in self.buffer.unfinished():
            if (why := self._connect(name).lost()) is not None:
                _LOG.warning("%s goes on without %s: %s", self.name, name, why)
                self.buffer.end(name, death(why))
