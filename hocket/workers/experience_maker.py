"""A maker that drives itself: it takes prompts from a loader and sends experience to trainers by their names."""

from __future__ import annotations

import inspect
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hocket.algorithms.presets import Algorithm
from hocket.data.experience import Experience
from hocket.data.proto import DataProto
from hocket.data.schema import PROMPTS, check
from hocket.errors import ConfigError, PlacementError, WorkerDied
from hocket.models.load import end_tokens, generation_source, load_tokenizer
from hocket.models.policy import frozen
from hocket.rewards.adapters import load_reward
from hocket.rewards.model import TokenReward
from hocket.roles.maker import Maker
from hocket.roles.outbox import Outbox
from hocket.roles.routing import ROUTES, Router
from hocket.rollout.engine import Sampling
from hocket.rollout.native import NativeEngine
from hocket.single_controller.decorator import concurrency
from hocket.weights.object_store import ObjectStore
from hocket.weights.transport import Transport
from hocket.workers.actors import ActorClass
from hocket.workers.callbacks import MakerCallback, notify
from hocket.workers.checks import (
    FUNCTION,
    NOT_NEGATIVE,
    ROLE,
    SHARED,
    check_options,
    choice,
    instances,
    names,
    optional,
    whole,
)
from hocket.workers.credits import Credits
from hocket.workers.evaluators import ExperienceMakerPerformanceEvaluator
from hocket.workers.factories import get_model_numel
from hocket.workers.generation import generation_settings
from hocket.workers.loaders import batches, right_padded, token_ids
from hocket.workers.maker_worker import MAKER_GROUPS, MakerWorker
from hocket.workers.naming import actor_name, connector, speak
from hocket.workers.peers import Connect
from hocket.workers.record import RunRecord
from hocket.workers.reports import MakerReport, death, failure, with_failed
from hocket.workers.strategies import StrategyChoice

_LOG = logging.getLogger("hocket")
MAKER_OPTIONS = (
    SHARED
    | ROLE
    | {
        "detached_trainer_name_list": names(least=1),
        "kl_coef": optional(NOT_NEGATIVE),
        "callbacks": instances(MakerCallback),
        "group_size": whole(1),
        "route": optional(choice(ROUTES)),
        "arbitrate": optional(choice(["latest"])),
    }
)
_COUNTS = {"dataloader_fn": FUNCTION, "num_epochs": whole(1), "num_steps": whole(0)}


@dataclass(frozen=True)
class Wants:
    """What a maker wants of its source of weights: a first version before it begins, and the critic's weights too."""

    first_version: bool
    critic: bool


class ExperienceMaker(MakerWorker):
    """See `ExperienceMakerHolder`, which is this class as a Ray actor.

    `model_fn` returns (actor, critic, reward_model, initial_model): the critic may be None, the initial model too when
    `kl_coef` is 0, and the reward model may be a function or a built-in name, which need the `tokenizer`. Experience is
    always sent from the CPU's memory: `buffer_cpu_offload` is accepted and does nothing. `join_timeout` is how many
    seconds a trainer that is named may not be there, or no trainer send the first weights.
    """

    def __init__(
        self,
        detached_trainer_name_list: Sequence[str],
        strategy_fn: Callable[[], StrategyChoice],
        model_fn: Callable[[], tuple[Any, Any, Any, Any]],
        env_info: Mapping[str, str] | None = None,
        sync_models_from_trainers: bool = False,
        buffer_cpu_offload: bool = True,
        kl_coef: float | None = None,
        callbacks: Sequence[MakerCallback] = (),
        eval_performance: bool = False,
        debug: bool = False,
        update_lora_weights: bool = False,
        *,
        algorithm: Algorithm | None = None,
        tokenizer: Any = None,
        group_size: int = 1,
        route: str | None = None,
        arbitrate: str | None = None,
        seed: int = 0,
        timeout: float = 3600.0,
        join_timeout: float = 60.0,
        threads: int = 1,
        run_dir: str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        connect: Connect | None = None,
        transport: Transport | None = None,
        **generate_kwargs: Any,
    ) -> None:
        self.check_arguments(locals())
        self.name = name or actor_name("maker")
        speak()
        self._trainers = list(detached_trainer_name_list)
        self._place = int((env_info or {}).get("rank", "0")), int((env_info or {}).get("world_size", "1"))
        self._wants_weights = sync_models_from_trainers
        self._kl_coef = _kl_coef(kl_coef, algorithm)
        self._group_size = group_size
        self._timeout = timeout
        self._join_timeout = join_timeout
        self._threads = threads
        self._connect = connect or connector(namespace, timeout, join_timeout=join_timeout)
        grouped = algorithm is not None and algorithm.group_baseline
        self._callbacks = list(callbacks)
        self._record = RunRecord(run_dir, self.name) if run_dir is not None else None
        self._route = route or ("groups" if grouped else "round_robin")
        self._seen = 0  # batches of all loops: what is drawn for a prompt depends on its number
        strategy_fn().check_maker(self._place[1])
        seed += self._place[0]
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(seed)
        settings = generation_settings(generate_kwargs, others=())

        def build() -> Maker:
            torch.set_num_threads(threads)
            models = _four(model_fn())
            numbers = [get_model_numel(model) if isinstance(model, nn.Module) else 0 for model in models]
            if eval_performance:
                actor, critic, reward, initial = numbers
                self._callbacks.append(
                    ExperienceMakerPerformanceEvaluator(
                        actor, critic, initial, reward, kv_cache=True, world_size=self._place[1], say=_LOG.info
                    )
                )
            return self._make_maker(models, settings, tokenizer, seed=seed, arbitrate=arbitrate, transport=transport)

        super().__init__(build)
        if debug:
            _LOG.setLevel(logging.DEBUG)

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        """What can be found wrong before an actor starts; see ActorClass.remote. Raises ConfigError."""
        check_options(arguments, MAKER_OPTIONS)
        _kl_coef(arguments.get("kl_coef"), arguments.get("algorithm"))
        others = inspect.signature(cls.__init__).parameters
        generation_settings(arguments.get("generate_kwargs", {}), others=others)

    # --- what others call ----------------------------------------------------------------------------------

    @concurrency("experience_io")
    def ping(self) -> None:
        """Answer."""

    @concurrency("experience_io")
    def sends_to(self, trainer: str) -> bool:
        """Whether that trainer gets experience from this maker."""
        return trainer in self._trainers

    @concurrency("model_io")
    def claim(self, sender: str) -> Wants:
        """`sender` will be the source of weights; returns what this maker wants of it.

        Raises WeightSyncError when there is another source already, naming both.
        """
        self.maker.receiver.claim(sender)
        self._source = sender
        return Wants(first_version=self._wants_weights, critic=self.maker.has_critic)

    @concurrency("compute")
    def workingloop(self, dataloader_fn: Callable[..., Any], num_epochs: int = 1, num_steps: int = 0) -> MakerReport:
        """Make and send experience of `num_steps` batches (the loader begins again when it is through), or of
        `num_epochs` passes.

        `dataloader_fn` is called here, with (rank, number of makers) when it takes two arguments. It returns an
        iterable of batches: token ids (B, P) without padding; a dict with `input_ids` and `attention_mask`, whose
        further columns go to the reward; or PROMPTS. It ends early when all trainers have ended. However it ends, the
        trainers learn why. Raises ConfigError for a count that is no whole number, or too low.
        """
        torch.set_num_threads(self._threads)
        report = MakerReport(self.name)
        router = Router(self._trainers, route=self._route)
        credits = Credits(self.name, router, self._connect, group_size=self._group_size, timeout=self._timeout)
        outbox = Outbox(self._deliver)
        try:
            check_options({"dataloader_fn": dataloader_fn, "num_epochs": num_epochs, "num_steps": num_steps}, _COUNTS)
            for trainer in self._trainers:
                self._connect(trainer).call("join", self.name)
            _LOG.info("%s sends experience to %s", self.name, ", ".join(self._trainers))
            notify(self._callbacks, "on_loop_start")
            for batch in batches(dataloader_fn, self._place, num_epochs=num_epochs, num_steps=num_steps):
                if not self._do_batch(batch, credits, outbox, report):
                    report.ended_by = "all its trainers have ended"
                    break
            outbox.close()
            notify(self._callbacks, "on_loop_end")
        except BaseException as error:
            report.ended_by = failure(error)
            raise
        finally:
            outbox.stop()
            self._conclude(report, credits.ended | {name: death(why) for name, why in outbox.lost.items()})
        report.sent, report.refused, report.left = outbox.sent, outbox.refused, outbox.left
        return report

    def _conclude(self, report: MakerReport, ended: Mapping[str, str]) -> None:
        """Tell the trainers why it ends; `ended` are those that have ended before, and why."""
        report.ended_by = with_failed(report.ended_by, ended)
        _LOG.info("%s made %d samples: %s", self.name, report.made, report.ended_by)
        self._end(report.ended_by)
        if self._record is not None:
            self._record.close(self.maker.report())

    # --- one batch -----------------------------------------------------------------------------------------

    def _do_batch(self, batch: Any, credits: Credits, outbox: Outbox, report: MakerReport) -> bool:
        """One batch of the loader with its callbacks and record; False when all trainers have ended."""
        notify(self._callbacks, "on_batch_start")
        if not self._work(self._unit(batch, self._seen), credits, outbox, report):
            return False
        report.batches += 1
        self._seen += 1
        if self._record is not None:
            self._record.role(self.maker.report())
        notify(self._callbacks, "on_batch_end")
        return True

    def _work(self, unit: DataProto, credits: Credits, outbox: Outbox, report: MakerReport) -> bool:
        """Make and send one batch, in parts when the trainers admit only parts; False when all have ended."""
        while len(unit):
            if (admitted := credits.get(len(unit), lost=outbox.lost)) is None:
                return False
            part, unit = unit[: admitted.prompts], unit[admitted.prompts :]
            shown = 2 if self._record is not None and report.batches % 10 == 0 else 0
            part.meta_info |= {"step": report.batches, "unit": 0, "samples": shown}
            notify(self._callbacks, "on_make_experience_start")
            made = self.maker.make(
                part, at_least=admitted.at_least, stop=partial(self._demand_source, time.monotonic())
            )
            report.made += len(made)
            made.meta_info["kl_coef"] = self._kl_coef
            notify(self._callbacks, "on_make_experience_end", Experience.of(made))
            notify(self._callbacks, "on_send_start")
            for trainer, grant in admitted.grants.items():
                rows = [row for row, target in enumerate(admitted.deal) if target == trainer]
                outbox.put(trainer, made[rows].select(meta_info_keys=["kl_coef"]), grant.ticket)
            notify(self._callbacks, "on_send_end")
        return True

    def _deliver(self, trainer: str, seq: int, rows: DataProto, ticket: int) -> Any:
        return self._connect(trainer).call("buffer_put", self.name, seq, rows, ticket)

    def _end(self, why: str) -> None:
        for trainer in self._trainers:
            try:
                self._connect(trainer).call("end", self.name, why)
            except WorkerDied as error:
                _LOG.info("%s could not tell its end to %s: %s", self.name, trainer, error.message)

    def _demand_source(self, began: float) -> None:
        """End a wait for weights that will not come."""
        if self._source is None:
            waited = time.monotonic() - began
            if waited > self._join_timeout and not any(
                self._connect(name).call("serves", self.name) for name in self._trainers
            ):
                raise PlacementError(
                    f"{self.name} waits for its first weights since {waited:.0f} s, and no trainer sends it any: none "
                    f"of {', '.join(self._trainers)} names it; name it in a trainer's "
                    "experience_maker_holder_name_list, or leave sync_models_from_trainers=False"
                )
            return
        why = self._connect(self._source).lost() or self._connect(self._source).call("closed")
        if why is not None:
            raise WorkerDied(f"{self.name} waits for weights, but their source {self._source} is gone: {why}")

    def _unit(self, batch: Any, index: int) -> DataProto:
        """A batch of the loader as PROMPTS."""
        if isinstance(batch, DataProto):
            return check(batch, PROMPTS, "a batch of the loader")
        ids, length = right_padded(*token_ids(batch))
        columns = (
            {k: v for k, v in batch.items() if k not in ("input_ids", "attention_mask")}
            if isinstance(batch, Mapping)
            else {}
        )
        rows = [{"prompt": "", **{key: _item(column[i]) for key, column in columns.items()}} for i in range(len(ids))]
        return DataProto.from_dict(
            {"input_ids": ids, "prompt_length": length},
            {"uid": [f"{self.name}:{index}:{i}" for i in range(len(ids))], "row": rows},
        )

    # --- set-up --------------------------------------------------------------------------------------------

    def _make_maker(
        self,
        models: tuple[Any, Any, Any, Any],
        settings: dict[str, Any],
        tokenizer: Any,
        *,
        seed: int,
        arbitrate: str | None,
        transport: Transport | None,
    ) -> Maker:
        actor, critic, reward, initial = models
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if initial is None and self._kl_coef:
            raise ConfigError(f"kl_coef={self._kl_coef} needs an initial_model from model_fn; give one, or kl_coef=0")
        if not isinstance(reward, nn.Module) and tokenizer is None:
            raise ConfigError("a reward function reads text: give the maker its tokenizer=, an object or a folder")
        pad = settings["pad_token_id"]
        if pad is None:
            pad = getattr(generation_source(actor), "pad_token_id", None)
        self._source: str | None = None
        return Maker(
            NativeEngine(frozen(actor), stop_ids=end_tokens(actor, settings["eos_token_id"]), pad_id=pad or 0),
            tokenizer,
            TokenReward(cast(Any, reward)) if isinstance(reward, nn.Module) else load_reward(reward),
            sampling=Sampling(
                settings["max_new_tokens"],
                settings["temperature"],
                settings["top_k"],
                settings["top_p"],
                greedy=not settings["do_sample"],
                max_length=settings["max_length"],
            ),
            group_size=self._group_size,
            seed=seed,
            transport=transport or ObjectStore(),
            reference=initial,
            critic=critic,
            name=self.name,
            threads=self._threads,
            swap_timeout=self._timeout,
            started=-1 if self._wants_weights else 0,
            arbitrate=arbitrate,
        )


def _kl_coef(kl_coef: float | None, algorithm: Algorithm | None) -> float:
    """The penalty that the trainer is to use: the algorithm's own, or the one given, by default 0.1."""
    own = getattr(algorithm, "kl_coef", None)
    if own is None:
        return 0.1 if kl_coef is None else kl_coef
    if kl_coef not in (None, own):
        raise ConfigError(f"kl_coef={kl_coef}, but the algorithm has kl_coef={own}; give it in one place")
    return own


def _four(models: Any) -> tuple[Any, Any, Any, Any]:
    if not isinstance(models, tuple) or len(models) != 4:
        raise ConfigError("model_fn of a maker must return (actor, critic, reward_model, initial_model); None for none")
    return models


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


ExperienceMakerHolder = ActorClass(ExperienceMaker, MAKER_GROUPS, name="ExperienceMakerHolder")
