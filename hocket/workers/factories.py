"""Models, tokenizers and rank environments under the names of the detached flow; for `model_fn` and strategies.

`model` is "gpt2", "bloom", "opt", "llama" or another architecture of transformers, with `pretrained` (a folder or
Hugging Face id of that architecture) or `config` (a transformers config, or a dict of its settings); or it is such a
folder or id itself. One of the four names alone makes a fresh model of that architecture's default size. Fresh models
are the same in every process: their noise has a seed of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from torch import distributed, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hocket.errors import ConfigError
from hocket.models.load import ModelSpec, load_causal_lm, load_scalar_model, load_tokenizer, named_architecture

ARCHITECTURES = ("gpt2", "bloom", "opt", "llama")
_TOKENIZERS = {"gpt2": "gpt2", "bloom": "bigscience/bloom-560m", "opt": "facebook/opt-350m"}
_NUMBERS = {  # of a rank environment, and what they may be
    "local_rank": range(1 << 20),
    "rank": range(1 << 20),
    "world_size": range(1, 1 << 20),
    "master_port": range(1, 1 << 16),
}
_DIST = (*_NUMBERS, "master_addr")


def get_actor_from_args(
    model: str, pretrained: str | None = None, config: Any | None = None, lora_rank: int = 0
) -> PreTrainedModel:
    """The policy: a causal language model, float32, in evaluation mode.

    Raises ConfigError for arguments that contradict each other, and for `lora_rank`; DataError as `load_causal_lm`.
    """
    return load_causal_lm(_spec(model, pretrained, config, lora_rank))


def get_critic_from_args(
    model: str, pretrained: str | None = None, config: Any | None = None, lora_rank: int = 0
) -> PreTrainedModel:
    """The critic: a score per position. Its head is zero unless `pretrained` has one; errors as for the actor."""
    return load_scalar_model(_spec(model, pretrained, config, lora_rank), fresh_head=True)


def get_reward_model_from_args(model: str, pretrained: str | None = None, config: Any | None = None) -> PreTrainedModel:
    """The reward model: trained with one label, where `pretrained`; random when it is fresh, for dry runs.

    Raises DataError for a `pretrained` without a score head: random scores would pass for rewards.
    """
    return load_scalar_model(_spec(model, pretrained, config), fresh_head=False)


def get_tokenizer_from_args(model: str, **kwargs: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `pretrain=` (a folder or id), or the usual one of `model`; its padding may be its end token.

    gpt2, bloom and opt have a usual one, llama has none. A `model` that is a folder or id brings its own. Raises
    ConfigError for another keyword, or none for llama; DataError where there is no tokenizer.
    """
    if unknown := sorted(kwargs.keys() - {"pretrain"}):
        raise ConfigError(f"found {unknown} for the tokenizer of {model!r}; the only option is `pretrain`")
    if model == "llama" and "pretrain" not in kwargs:
        raise ConfigError("llama models have no usual tokenizer; give pretrain=, a folder or id that has one")
    return load_tokenizer(kwargs.get("pretrain") or _TOKENIZERS.get(model, model))


def _spec(model: str, pretrained: str | None, config: Any | None, lora_rank: int = 0) -> ModelSpec:
    if lora_rank:
        raise ConfigError(f"found lora_rank={lora_rank}: LoRA is not there yet in the detached flow; use 0")
    if pretrained is not None and config is not None:
        raise ConfigError(f"found pretrained={pretrained!r} and a config; give the one that the model is made from")
    if config is not None or (pretrained is None and model in ARCHITECTURES):
        return ModelSpec(config=_settings(model, config))
    if pretrained not in (None, model) and (found := named_architecture(pretrained)) != model:
        raise ConfigError(
            f"pretrained={pretrained!r} is a {found} model, but `model` says {model!r}; make them agree, or give the "
            "folder or id as `model`"
        )
    return ModelSpec(name=pretrained or model)


def _settings(model: str, config: Any | None) -> dict[str, Any]:
    """The config as a dict that names its architecture, which has to be `model`."""
    plain = config if isinstance(config, Mapping | None) else getattr(config, "to_diff_dict", lambda: None)()
    if plain is None and config is not None:
        raise ConfigError(f"config is a {type(config).__name__}; wanted a transformers config or a dict of settings")
    settings = {"model_type": model, **(plain or {})}
    if settings["model_type"] != model:
        raise ConfigError(f"the config is of {settings['model_type']}, but `model` says {model!r}; make them agree")
    return settings


def get_model_numel(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def get_rank() -> int:
    """This process's rank in its torch.distributed world; 0 outside of one."""
    return distributed.get_rank() if _in_group() else 0


def get_world_size() -> int:
    """The number of processes in this process's torch.distributed world; 1 outside of one."""
    return distributed.get_world_size() if _in_group() else 1


def is_rank_0() -> bool:
    """Whether this process is the first of its torch.distributed world, or alone."""
    return get_rank() == 0


def _in_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def set_dist_env(env_info: Mapping[str, str]) -> None:
    """Export RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for torch.distributed.

    `env_info` has exactly these keys, in lower case, all values strings; "auto" as address has to be resolved before.
    Raises ConfigError naming the key, and exports nothing, when one is missing, unknown or malformed.
    """
    missing, unknown = sorted({*_DIST} - env_info.keys()), sorted(env_info.keys() - {*_DIST})
    if missing or unknown:
        raise ConfigError(f"env_info lacks {missing} and has unknown {unknown}; wanted the keys {list(_DIST)}")
    if wrong := [key for key in _DIST if not isinstance(cast(object, env_info[key]), str)]:
        raise ConfigError(f"env_info[{wrong[0]!r}] is {env_info[wrong[0]]!r}; wanted a string")
    for key, fits in _NUMBERS.items():
        if not env_info[key].isdecimal() or int(env_info[key]) not in fits:
            raise ConfigError(f"env_info[{key!r}] is {env_info[key]!r}; wanted a number from {fits[0]} to {fits[-1]}")
    if int(env_info["rank"]) >= int(env_info["world_size"]):
        raise ConfigError(
            f"env_info['rank'] is {env_info['rank']}; wanted one below world_size {env_info['world_size']}"
        )
    if env_info["master_addr"] in ("", "auto"):
        raise ConfigError(f"env_info['master_addr'] is {env_info['master_addr']!r}; wanted the address of rank 0")
    os.environ.update({key.upper(): env_info[key] for key in _DIST})
