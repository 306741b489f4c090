"""From a config to everything that is decided before the first step; all bad input is found here, on the driver."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hocket.algorithms.presets import PRESETS, Algorithm, build
from hocket.config import RunConfig
from hocket.data.chat import describe_template, stop_ids
from hocket.data.prompts import PromptTable, read_prompts
from hocket.data.schedule import Prompt, PromptSchedule, tokenize
from hocket.data.userfile import load_file
from hocket.errors import ConfigError
from hocket.models.load import ModelSpec, check_model_folder, load_causal_lm, load_tokenizer, named_stop_ids, save_hf
from hocket.rewards.adapters import Reward, load_reward
from hocket.rewards.builtin import BUILTIN
from hocket.roles.build import Blueprint
from hocket.roles.warm_start import warm_start

RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: how to build its roles, its prompts, and lines for the header."""

    blueprint: Blueprint
    schedule: PromptSchedule
    held_out: PromptSchedule | None
    facts: list[str]


def prepare(config: RunConfig, folder: Path, say: Callable[[str], None]) -> Prepared:
    """Read data, reward, algorithm and model; warm-start a fresh model into `folder`/init.

    Raises ConfigError or DataError for whatever is wrong with the input.
    """
    torch.set_num_threads(config.placement.threads_per_worker)
    config = _with_absolute_paths(config)
    table = _table(config, config.data.path)
    held_out = _table(config, config.eval.path) if config.eval.path else None
    reward = _reward(config, table)
    algorithm = build_algorithm(config)
    if config.model.name:
        check_model_folder(config.model.name)
    tokenizer: Any = load_tokenizer(config.model.tokenizer, model=config.model.name)
    prompts, overlong = _tokenize(config, table, tokenizer)
    model, stop = _start_model(config, tokenizer, prompts, folder, say)
    facts = [
        table.notice + (f"; dropped {overlong} overlong prompts" if overlong else ""),
        f"prompts: {describe_template(tokenizer, config.data.template)}; a response ends at token {list(stop)}",
        config.arithmetic(),
    ]
    return Prepared(
        Blueprint(config=config, model=model, algorithm=algorithm, reward=reward, stop_ids=stop),
        PromptSchedule(
            prompts,
            seed=config.seed,
            prompts_per_step=config.trainer.prompts_per_step,
            prompts_per_unit=config.rollout.unit_prompts,
            shuffle=config.data.shuffle,
        ),
        _held_out(config, held_out, tokenizer),
        facts,
    )


def build_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm that `config.algo` names: a preset, or a class in a file. Raises ConfigError."""
    algo = config.algo
    settings = algo.chosen()
    if ".py:" in algo.name:
        algorithm = _from_file(algo.name, settings)
    else:
        settings |= {} if algo.name == "ppo" else {"max_length": config.rollout.max_new_tokens}
        algorithm = build(algo.name, settings)
    if algorithm.group_baseline and config.rollout.group_size < 2:
        raise ConfigError(
            f"algo.name={algo.name} compares the answers to one prompt, but rollout.group_size="
            f"{config.rollout.group_size}; use 2 or more, or algo.name=ppo"
        )
    return algorithm


def _from_file(name: str, settings: dict[str, Any]) -> Algorithm:
    path, _, attribute = name.partition(":")
    module = load_file(Path(path), what="algorithm")
    kind: Callable[..., Algorithm] | None = getattr(module, attribute, None)
    if kind is None:
        raise ConfigError(f"algo.name={name}: {path} has no {attribute!r}; built in are {sorted(PRESETS)}")
    try:
        return kind(**settings)
    except TypeError as error:
        raise ConfigError(f"algo.name={name} cannot be made with {settings}: {error}") from error


def _table(config: RunConfig, path: str) -> PromptTable:
    name = path.removeprefix("recipe:")
    if path != name and not (RECIPES / name).is_file():
        near = difflib.get_close_matches(name, [p.name for p in RECIPES.glob("*.csv")], n=1)
        raise ConfigError(f"no bundled prompt file {name!r}" + (f"; did you mean recipe:{near[0]}?" if near else ""))
    data = config.data
    return read_prompts(
        RECIPES / name if path != name else Path(path),
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        on_bad_row=data.on_bad_row,
    )


def _reward(config: RunConfig, table: PromptTable) -> Reward | str:
    name = config.reward
    if name not in BUILTIN and (Path(name) / "config.json").is_file():
        check_model_folder(name)
        return str(Path(name).resolve())
    reward = load_reward(name)
    reward.check(table.columns)
    return reward


def _tokenize(config: RunConfig, table: PromptTable, tokenizer: Any) -> tuple[list[Prompt], int]:
    data = config.data
    return tokenize(table, tokenizer, template=data.template, system=data.system, max_tokens=data.max_prompt_tokens)


def _held_out(config: RunConfig, table: PromptTable | None, tokenizer: Any) -> PromptSchedule | None:
    if table is None:
        return None
    prompts = _tokenize(config, table, tokenizer)[0][: config.eval.prompts]
    return PromptSchedule(prompts, seed=config.seed, prompts_per_step=len(prompts), prompts_per_unit=32, shuffle=False)


def _start_model(
    config: RunConfig, tokenizer: Any, prompts: list[Prompt], folder: Path, say: Callable[[str], None]
) -> tuple[str, tuple[int, ...]]:
    """Folder or id of the model that the run starts from, and its stop tokens."""
    section, trust = config.model, config.model.trust_remote_code
    stop = stop_ids(tokenizer, named_stop_ids(section.name, trust_remote_code=trust) if section.name else None)
    if section.name and not section.warm_start.steps:
        return section.name, stop
    spec = ModelSpec(section.name, section.config, seed=config.seed, trust_remote_code=trust)
    if section.config:
        sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        sizes |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        spec = replace(spec, config=sizes | section.config)
    model = load_causal_lm(spec)
    if section.warm_start.steps:
        loss = warm_start(
            model, tokenizer, prompts, section.warm_start, stop_id=tokenizer.eos_token_id, seed=config.seed
        )
        say(f"warm start: {section.warm_start.steps} supervised steps, last loss {loss:.3f} nats per token")
    save_hf(folder / "init", model, tokenizer, stop)
    return str(folder / "init"), stop


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Model folders by their full paths, since a worker's current folder is another."""
    section = config.model
    names = {key: _absolute(getattr(section, key)) for key in ("name", "tokenizer", "critic")}
    return config.model_copy(update={"model": section.model_copy(update=names)})


def _absolute(name: str | None) -> str | None:
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name
