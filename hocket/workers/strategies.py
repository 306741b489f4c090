"""Strategies under their old names and as the old classes; what a `strategy_fn` returns."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hocket.errors import ConfigError
from hocket.parallel.strategy import SHARDING_MAKERS, Strategy, canonical_name, make_strategy

_LOG = logging.getLogger("hocket")


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy by name, of a process that may become one of its ranks."""

    name: str

    def connect(self, *, timeout: float) -> Strategy:
        """Join the ranks that the environment names; see `make_strategy`."""
        return make_strategy(self.name, timeout=timeout)

    def check_maker(self, world_size: int) -> None:
        """A maker is a replica of its own unless its strategy shards it, and that is not there yet."""
        if self.name in SHARDING_MAKERS and world_size > 1:
            raise ConfigError(
                f"strategy {self.name!r} of a maker over {world_size} ranks is not there yet; give each maker a world "
                "of its own (env_info=None), or a strategy that does not shard it, such as 'single'"
            )


def get_strategy_from_args(strategy: str) -> StrategyChoice:
    """The strategy of that name: single, ddp, zero2, zero2_cpu, fsdp, fsdp_cpu, tp, or an old name, with a notice.

    In a world of one rank each of them is `single`: sharding over one rank is none. Raises ConfigError for others.
    """
    name = canonical_name(strategy)
    if name != strategy:
        _LOG.info("strategy %r is %r here", strategy, name)
    return StrategyChoice(name)


def DDPStrategy() -> StrategyChoice:
    """Data-parallel ranks."""
    return StrategyChoice("ddp")


def LowLevelZeroStrategy(stage: int = 2, placement_policy: str = "cuda") -> StrategyChoice:
    """Sharded gradients and optimizer (zero2), with "cpu" offloaded. Raises ConfigError for another stage."""
    if stage not in (1, 2):
        raise ConfigError(f"found stage={stage}; LowLevelZeroStrategy has stages 1 and 2 (here both are zero2)")
    return StrategyChoice("zero2_cpu" if _on_cpu(placement_policy) else "zero2")


def GeminiStrategy(
    placement_policy: str = "cuda",
    initial_scale: float | None = None,
    offload_optim_frac: float = 0.0,
    offload_param_frac: float = 0.0,
) -> StrategyChoice:
    """Sharded parameters (fsdp), offloaded for "cpu" or when a fraction is to be offloaded."""
    if initial_scale is not None:
        _LOG.info(
            "initial_scale=%s has no counterpart: there is no fp16 here, whose losses need scaling", initial_scale
        )
    if 0 < max(offload_optim_frac, offload_param_frac) < 1:
        _LOG.info("a fraction cannot be offloaded here: parameters and optimizer are offloaded whole")
    offloaded = _on_cpu(placement_policy) or offload_optim_frac > 0 or offload_param_frac > 0
    return StrategyChoice("fsdp_cpu" if offloaded else "fsdp")


def _on_cpu(policy: str) -> bool:
    if policy not in ("cuda", "cpu", "static", "auto"):
        raise ConfigError(f"found placement_policy={policy!r}; wanted 'cuda', 'cpu', 'static' or 'auto'")
    return policy == "cpu"
