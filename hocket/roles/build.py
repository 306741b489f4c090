"""From the settings of a run to its maker and trainer, in whatever process they are to live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from transformers import PreTrainedTokenizerBase

from hocket.algorithms.presets import Algorithm
from hocket.config import RunConfig
from hocket.models.load import ModelSpec, Trust, load_causal_lm, load_scalar_model, load_tokenizer, pad_token_id
from hocket.models.policy import frozen
from hocket.parallel.strategy import Strategy
from hocket.rewards.adapters import Reward
from hocket.rewards.model import ModelReward
from hocket.roles.maker import Maker
from hocket.roles.trainer import Trainer
from hocket.rollout.engine import Sampling
from hocket.rollout.native import NativeEngine
from hocket.weights.transport import Transport


@dataclass(frozen=True)
class Blueprint:
    """All that a process needs to build its roles; small and picklable.

    `model` is the folder or id that the run starts from, after the warm start. `reward` is a function, or the
    folder of a reward model.
    """

    config: RunConfig
    model: str
    algorithm: Algorithm
    reward: Reward | str
    stop_ids: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        # The algorithm may come from a user's file, which workers cannot import. Only `cloudpickle` itself knows
        # that it goes by value; the copy inside Ray does not.
        fields = (self.config, self.model, cloudpickle.dumps(self.algorithm), self.reward, self.stop_ids)
        return _unpickle, fields

    @property
    def threads(self) -> int:
        """Torch threads of every computing thread."""
        return self.config.placement.threads_per_worker

    def spec(self, name: str | None = None, *, dtype: str = "float32") -> ModelSpec:
        """How to load the start model, or `name` with the same settings."""
        section = self.config.model
        return ModelSpec(
            name=name or self.model,
            dtype=dtype,
            seed=self.config.seed,
            trust=Trust.of(section, name or self.model),
        )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the config names, or the start model's own."""
        section = self.config.model
        trust = Trust.of(section, section.tokenizer or self.model)
        return load_tokenizer(section.tokenizer, model=self.model, trust=trust)


def _unpickle(
    config: RunConfig, model: str, algorithm: bytes, reward: Reward | str, stop_ids: tuple[int, ...]
) -> Blueprint:
    return Blueprint(config, model, cloudpickle.loads(algorithm), reward, stop_ids)


def build_maker(blueprint: Blueprint, transport: Transport, *, index: int = 0, device: str = "cpu") -> Maker:
    """A maker with its own copy of the start model."""
    torch.set_num_threads(blueprint.threads)
    config, tokenizer = blueprint.config, blueprint.tokenizer()
    rollout, spec = config.rollout, blueprint.spec(dtype=config.model.dtype)
    engine = NativeEngine(
        frozen(load_causal_lm(spec, device=device)), stop_ids=blueprint.stop_ids, pad_id=pad_token_id(tokenizer)
    )
    reward = blueprint.reward
    return Maker(
        engine,
        tokenizer,
        ModelReward.load(reward) if isinstance(reward, str) else reward,
        sampling=Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p),
        group_size=rollout.group_size,
        seed=config.seed,
        transport=transport,
        reference=load_causal_lm(spec, device=device) if "reference" in blueprint.algorithm.needs else None,
        name=f"maker-{index}",
        threads=blueprint.threads,
        swap_timeout=config.ray.call_timeout,
        in_flight=config.sync.in_flight,
    )


def build_trainer(
    blueprint: Blueprint,
    transport: Transport,
    *,
    index: int = 0,
    device: str = "cpu",
    strategy: Strategy | None = None,
) -> Trainer:
    """The trainer, or rank `index` of it, with a critic when the algorithm needs one."""
    torch.set_num_threads(blueprint.threads)
    config = blueprint.config
    critic = None
    if "critic" in blueprint.algorithm.needs:
        critic = load_scalar_model(blueprint.spec(config.model.critic), fresh_head=True, device=device)
    return Trainer(
        load_causal_lm(blueprint.spec(), device=device),
        blueprint.tokenizer(),
        blueprint.algorithm,
        config.trainer,
        transport=transport,
        stop_ids=blueprint.stop_ids,
        critic=critic,
        strategy=strategy,
        name=f"trainer-{index}",
        temperature=config.rollout.temperature,
        chunk_bytes=config.sync.chunk_mib << 20,
        threads=blueprint.threads,
    )
