"""Makers and trainers in processes of their own. Names load when they are used."""

from importlib import import_module
from typing import Any

_HOMES = {
    "actors": ("ActorClass",),
    "callbacks": ("MakerCallback", "TrainerCallback"),
    "detached_trainer": ("DetachedTrainer",),
    "evaluators": ("ExperienceMakerPerformanceEvaluator", "TrainerPerformanceEvaluator"),
    "experience_maker": ("ExperienceMaker", "ExperienceMakerHolder"),
    "factories": (
        "get_actor_from_args",
        "get_critic_from_args",
        "get_model_numel",
        "get_rank",
        "get_reward_model_from_args",
        "get_tokenizer_from_args",
        "get_world_size",
        "is_rank_0",
        "set_dist_env",
    ),
    "meeting": ("env_info",),
    "ppo_trainer": ("DetachedPPOTrainer", "PPOTrainer"),
    "reports": ("MakerReport", "TrainerReport", "balance"),
    "strategies": ("DDPStrategy", "GeminiStrategy", "LowLevelZeroStrategy", "StrategyChoice", "get_strategy_from_args"),
    "topology": ("check_topology", "get_receivers_per_sender", "target_makers", "target_trainers"),
}
_HOME = {name: f"hocket.workers.{home}" for home, names in _HOMES.items() for name in names} | {
    "Experience": "hocket.data.experience",
    "make_experience_batch": "hocket.data.experience",
    "split_experience_batch": "hocket.data.experience",
    "register_weight_loader": "hocket.models.policy",
}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"hocket.workers has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
