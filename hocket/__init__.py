"""hocket: reinforcement-learning post-training of language models, where placement is a value.

The public names load on first use, so that `import hocket` brings in no torch, ray or transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.algorithms.presets import GRPO, PPO, Algorithm, DrGRPO
    from hocket.config import Colocated, Detached, Local, RunConfig
    from hocket.data.proto import DataProto
    from hocket.errors import HocketError
    from hocket.read_config import load_config, parse_config
    from hocket.roles.maker import Maker
    from hocket.roles.trainer import Trainer
    from hocket.rollout.engine import RolloutEngine, Sampling
    from hocket.rollout.native import NativeEngine
    from hocket.run.train import train

__version__ = "0.1.0"

_HOMES = {
    "Algorithm": "hocket.algorithms.presets",
    "Colocated": "hocket.config",
    "DataProto": "hocket.data.proto",
    "Detached": "hocket.config",
    "DrGRPO": "hocket.algorithms.presets",
    "GRPO": "hocket.algorithms.presets",
    "HocketError": "hocket.errors",
    "Local": "hocket.config",
    "Maker": "hocket.roles.maker",
    "NativeEngine": "hocket.rollout.native",
    "PPO": "hocket.algorithms.presets",
    "RolloutEngine": "hocket.rollout.engine",
    "RunConfig": "hocket.config",
    "Sampling": "hocket.rollout.engine",
    "Trainer": "hocket.roles.trainer",
    "load_config": "hocket.read_config",
    "parse_config": "hocket.read_config",
    "train": "hocket.run.train",
}

__all__ = [
    "GRPO",
    "PPO",
    "Algorithm",
    "Colocated",
    "DataProto",
    "Detached",
    "DrGRPO",
    "HocketError",
    "Local",
    "Maker",
    "NativeEngine",
    "RolloutEngine",
    "RunConfig",
    "Sampling",
    "Trainer",
    "load_config",
    "parse_config",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"hocket has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
