"""The PPO (or GRPO, ...) trainer that drives itself, alone or as a rank of a data-parallel group."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hocket.algorithms.presets import PPO, Algorithm
from hocket.config import TrainerSection
from hocket.data.experience import Experience
from hocket.errors import ConfigError
from hocket.models.load import end_tokens, load_tokenizer
from hocket.roles.trainer import Pretraining, Trainer
from hocket.single_controller.decorator import concurrency
from hocket.weights.object_store import ObjectStore
from hocket.weights.transport import Transport
from hocket.workers.actors import ActorClass
from hocket.workers.callbacks import TrainerCallback
from hocket.workers.checks import FUNCTION, POSITIVE, ROLE, SHARE, check_options, optional, whole
from hocket.workers.courier import Courier
from hocket.workers.detached_trainer import TRAINER_GROUPS, TRAINER_OPTIONS, DetachedTrainer
from hocket.workers.evaluators import TrainerPerformanceEvaluator
from hocket.workers.factories import get_model_numel
from hocket.workers.loaders import batches, right_padded, token_ids
from hocket.workers.meeting import meet
from hocket.workers.naming import actor_name, speak
from hocket.workers.peers import Connect
from hocket.workers.record import RunRecord
from hocket.workers.strategies import StrategyChoice
from hocket.workers.trainer_worker import TrainerWorker

_LOG = logging.getLogger("hocket")
_CLIPS = {"eps_clip": 0.2, "value_clip": 0.4}
PPO_OPTIONS = (
    TRAINER_OPTIONS
    | ROLE
    | dict.fromkeys((*_CLIPS, "actor_lr", "max_grad_norm", "temperature"), POSITIVE)
    | {
        "critic_lr": optional(POSITIVE),
        "micro_batch_tokens": whole(1),
        "ptx_coef": SHARE,
        "ptx_loader_fn": optional(FUNCTION),
        "chunk_bytes": whole(1),
    }
)


class PPOTrainer(TrainerWorker, DetachedTrainer):
    """See `DetachedPPOTrainer`, which is this class as a Ray actor.

    `model_fn` returns (actor, critic), the critic None for an algorithm without one. `algorithm` is by default PPO
    with `eps_clip`, `value_clip` and the makers' `kl_coef`. With `env_info` of a world of several ranks, the trainers
    with the same port are one data-parallel group: each step is over the batches of all, and rank 0 sends weights to
    all their makers.
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        strategy_fn: Callable[[], StrategyChoice],
        model_fn: Callable[[], tuple[Any, Any]],
        env_info: Mapping[str, str] | None = None,
        train_batch_size: int = 8,
        buffer_limit: int | None = 0,
        eps_clip: float = 0.2,
        value_clip: float = 0.4,
        dataloader_pin_memory: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
        eval_performance: bool = False,
        debug: bool = False,
        update_lora_weights: bool = False,
        *,
        algorithm: Algorithm | None = None,
        actor_lr: float = 1e-6,
        critic_lr: float | None = None,
        micro_batch_tokens: int = 8192,
        max_grad_norm: float = 1.0,
        temperature: float = 1.0,
        ptx_coef: float = 0.0,
        ptx_loader_fn: Callable[..., Any] | None = None,
        tokenizer: Any = None,
        run_dir: str | None = None,
        max_staleness: int | None = None,
        replay: str = "batches",
        chunk_bytes: int = 64 << 20,
        seed: int = 0,
        timeout: float = 3600.0,
        join_timeout: float = 60.0,
        threads: int = 1,
        name: str | None = None,
        namespace: str | None = None,
        connect: Connect | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.check_arguments(locals())
        self.name = name or actor_name("trainer")
        speak()
        torch.set_num_threads(threads)
        if env_info is not None:
            meet(env_info, namespace=namespace, timeout=timeout)
        self.strategy = strategy_fn().connect(timeout=timeout)
        self._default_algorithm = algorithm is None
        self._algorithm: Algorithm = algorithm or PPO(clip_low=eps_clip, clip_high=eps_clip, value_clip=value_clip)
        settings = TrainerSection(
            lr=actor_lr, critic_lr=critic_lr, micro_batch_tokens=micro_batch_tokens, max_grad_norm=max_grad_norm
        )
        rank = self.strategy.rank, self.strategy.world_size
        self._pretraining = Pretraining(ptx_coef, _pretraining(ptx_loader_fn, rank)) if ptx_loader_fn else None
        leads = self.strategy.rank == 0
        self._record = RunRecord(run_dir, self.name) if run_dir is not None and leads else None
        self._temperature = temperature
        self._settings = settings
        self._threads = threads
        self._courier = Courier(lambda: self.trainer.forget())
        callbacks = list(callbacks)

        def build() -> Trainer:
            actor, critic = _two(model_fn())
            if eval_performance:
                numbers = get_model_numel(actor), get_model_numel(critic) if critic is not None else 0
                world = self.strategy.world_size
                callbacks.append(TrainerPerformanceEvaluator(*numbers, world_size=world, say=_LOG.info))
            return self._make_trainer(actor, critic, tokenizer, chunk_bytes=chunk_bytes, transport=transport)

        TrainerWorker.__init__(self, build)
        DetachedTrainer.__init__(
            self,
            experience_maker_holder_name_list,
            train_batch_size,
            buffer_limit,
            dataloader_pin_memory,
            callbacks,
            debug,
            max_staleness=max_staleness,
            whole_groups=self._algorithm.group_baseline,
            replay=replay,
            seed=seed,
            timeout=timeout,
            join_timeout=join_timeout,
            name=self.name,
            namespace=namespace,
            connect=connect,
        )

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        """What can be found wrong before an actor starts; see ActorClass.remote. Raises ConfigError."""
        check_options(arguments, PPO_OPTIONS)
        if arguments.get("algorithm") is not None and any(arguments.get(k, v) != v for k, v in _CLIPS.items()):
            raise ConfigError("found eps_clip or value_clip beside algorithm=; set the clips of the algorithm itself")
        coef, loader_fn = arguments.get("ptx_coef", 0.0), arguments.get("ptx_loader_fn")
        if bool(coef) != (loader_fn is not None):
            raise ConfigError(
                f"found ptx_coef={coef} and {'a' if loader_fn else 'no'} ptx_loader_fn; wanted both or neither"
            )

    # --- the loop's parts ----------------------------------------------------------------------------------

    def training_step(self, experience: Experience) -> dict[str, float]:
        """One optimizer step of each model on a prepared batch."""
        metrics = self.trainer.learn(experience, step=self.version)
        if self._record is not None:
            self._record.step(metrics, self.trainer.report())
        return metrics

    def _next(self) -> Experience | None:
        """This rank's next batch, empty when only others have one; None when no rank has any."""
        own = super()._next()
        sizes = self.strategy.gather(0 if own is None else len(own))
        if not any(sizes):
            return None
        return own if own is not None else Experience()

    def _prepare(self, experience: Experience) -> Experience:
        self._use_makers_kl(experience)
        units = [experience] if len(experience) else []
        return Experience.of(self.trainer.prepare(units, step=self.version))

    def _use_makers_kl(self, experience: Experience) -> None:
        """The default algorithm takes the KL coefficient that came with the experience."""
        if not self._default_algorithm or not isinstance(self._algorithm, PPO):
            return
        told = [one for one in self.strategy.gather(experience.meta_info.get("kl_coef")) if one is not None]
        if len(set(told)) != 1:
            found = sorted(set(told)) or "that differ"
            raise ConfigError(
                f"the makers that feed {self.name} have KL coefficients {found}; give all makers one kl_coef, or the "
                "trainer an algorithm="
            )
        if told[0] != self._algorithm.kl_coef:
            self._algorithm = replace(self._algorithm, kl_coef=told[0])
            self.trainer.use(self._algorithm)

    def _again(self, seen: Sequence[Experience]) -> list[Experience]:
        batches = super()._again(seen)
        most = max(self.strategy.gather(len(batches)))
        return batches + [Experience.of(seen[0][:0])] * (most - len(batches))

    def _begin(self) -> None:
        super()._begin()
        every = [name for names in self.strategy.gather(self._maker_names) for name in names]
        if self.strategy.rank == 0 and self._serve(list(dict.fromkeys(every))) and self._courier.version < 0:
            self._update_remote_makers(fully_update=True)

    def _finish(self) -> None:
        self._courier.flush(self._timeout)

    def _close(self) -> None:
        if self._record is not None:
            self._record.close(self.trainer.report())

    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:
        if kwargs:
            raise ConfigError(f"found {sorted(kwargs)}; the size of the chunks is the trainer's chunk_bytes=")
        if self.strategy.rank != 0:
            return
        if fully_update:
            self._serve(self._maker_names)
        if self._courier.version < self.version:
            self._courier.push(self.version, lambda: self.trainer.publish(self.version))
        if fully_update:
            self._courier.flush(self._timeout)

    def _serve(self, names: Sequence[str]) -> bool:
        """Send weights to these makers from now on; returns whether one of them waits for a first version."""
        peers = [self._connect(name) for name in names]
        wants = self._ask(peers, "claim", self.name)
        if len(with_critic := {want.critic for want in wants.values()}) > 1:
            having = [name for name, want in wants.items() if want.critic]
            raise ConfigError(
                f"of the makers {list(wants)}, only {having} have a critic; the model_fn of all or of none returns one"
            )
        self.trainer.critic_travels = any(with_critic)
        for peer in peers:
            if peer.name in wants:
                self._courier.add(peer)
        return any(want.first_version for want in wants.values())

    # --- saving --------------------------------------------------------------------------------------------

    @concurrency("model_io")
    def strategy_save_actor(self, path: str, only_rank0: bool = False) -> None:
        """Write the policy as a folder that transformers loads. Every rank has the same: rank 0 writes."""
        if self.strategy.rank == 0:
            self.trainer.save_policy(path)

    @concurrency("model_io")
    def strategy_save_critic(self, path: str, only_rank0: bool = False) -> None:
        """Write the critic likewise."""
        if self.strategy.rank == 0:
            self.trainer.save_critic(path)

    @concurrency("model_io")
    def strategy_save_actor_optim(self, path: str, only_rank0: bool = False) -> None:
        """Write the state of the policy's optimizer, for `torch.load`."""
        if self.strategy.rank == 0:
            self.trainer.save_optimizer("policy", path)

    @concurrency("model_io")
    def strategy_save_critic_optim(self, path: str, only_rank0: bool = False) -> None:
        """Write the state of the critic's optimizer, for `torch.load`."""
        if self.strategy.rank == 0:
            self.trainer.save_optimizer("value", path)

    # --- set-up --------------------------------------------------------------------------------------------

    def _make_trainer(
        self, actor: Any, critic: Any, tokenizer: Any, *, chunk_bytes: int, transport: Transport | None
    ) -> Trainer:
        needed = "critic" in self._algorithm.needs
        if needed and critic is None:
            raise ConfigError(
                f"{type(self._algorithm).__name__} needs a critic, but model_fn gave None; return (actor, critic), or "
                "give algorithm=GRPO(...)"
            )
        return Trainer(
            actor.float(),
            load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer,
            self._algorithm,
            self._settings,
            transport=transport or ObjectStore(),
            stop_ids=end_tokens(actor),
            critic=critic.float() if needed else None,
            strategy=self.strategy,
            pretraining=self._pretraining,
            temperature=self._temperature,
            chunk_bytes=chunk_bytes,
            name=self.name,
            threads=self._threads,
        )


def _pretraining(loader_fn: Callable[..., Any], rank: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a loader as right-padded ids and lengths, for ever."""
    for batch in batches(loader_fn, rank, num_epochs=0, num_steps=sys.maxsize):
        ids, mask = token_ids(batch)
        yield right_padded(ids, mask)


def _two(models: Any) -> tuple[Any, Any]:
    if not isinstance(models, tuple) or len(models) != 2:
        raise ConfigError(
            "model_fn of a trainer must return (actor, critic); the critic is None for an algorithm without"
        )
    return models


DetachedPPOTrainer = ActorClass(PPOTrainer, TRAINER_GROUPS, name="DetachedPPOTrainer")
