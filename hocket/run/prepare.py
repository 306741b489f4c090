"""From a config to everything that is decided before the first step; all bad input is found here, on the driver."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hocket.algorithms.presets import PRESETS, Algorithm, build, describe_correction
from hocket.config import RunConfig
from hocket.data.chat import describe_template, stop_ids
from hocket.data.prompts import PromptTable, read_prompts
from hocket.data.schedule import Prompt, PromptSchedule, tokenize
from hocket.data.userfile import load_file
from hocket.errors import ConfigError
from hocket.models.load import (
    ModelSpec,
    Trust,
    check_model_folder,
    check_room,
    load_causal_lm,
    load_tokenizer,
    named_positions,
    named_stop_ids,
    save_hf,
)
from hocket.rewards.adapters import Reward, load_reward
from hocket.rewards.builtin import BUILTIN
from hocket.roles.build import Blueprint
from hocket.roles.warm_start import warm_start

RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Checked:
    """The input of a run, read and found right; nothing is made yet."""

    config: RunConfig
    algorithm: Algorithm
    reward: Reward | str
    tokenizer: Any
    prompts: list[Prompt]
    held_out: list[Prompt]
    stop_ids: tuple[int, ...]
    facts: list[str]


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: how to build its roles, and its prompts."""

    blueprint: Blueprint
    schedule: PromptSchedule
    held_out: PromptSchedule | None


def check_input(config: RunConfig) -> Checked:
    """Read data, reward, algorithm and tokenizer, and whatever of the model can be seen without its weights.

    Raises ConfigError or DataError for whatever is wrong with the input.
    """
    config = _with_absolute_paths(config)
    table = _table(config, config.data.path)
    held_out = _table(config, config.eval.path) if config.eval.path else None
    reward, algorithm, section = _reward(config, table), build_algorithm(config), config.model
    for name in (section.name, section.critic):
        if name:
            check_model_folder(name, Trust.of(section, name))
    trust = Trust.of(section, section.tokenizer or section.name)
    tokenizer: Any = load_tokenizer(section.tokenizer, model=section.name, trust=trust)
    prompts, overlong = _tokenize(config, table, tokenizer)
    trust = Trust.of(section, section.name)
    stop = stop_ids(tokenizer, named_stop_ids(section.name, trust=trust) if section.name else None)
    _check_sizes(config, prompts, len(tokenizer))
    facts = [
        table.notice + (f"; dropped {overlong} overlong prompts" if overlong else ""),
        f"prompts: {describe_template(tokenizer, config.data.template)}; a response ends at token {list(stop)}",
        config.arithmetic(),
        describe_correction(algorithm, max_staleness=config.placement.max_staleness),
    ]
    evaluated = _tokenize(config, held_out, tokenizer)[0][: config.eval.prompts] if held_out else []
    return Checked(config, algorithm, reward, tokenizer, prompts, evaluated, stop, facts)


def prepare(checked: Checked, folder: Path, say: Callable[[str], None]) -> Prepared:
    """Make the model that the run starts from, where it is not there already: fresh or warm-started, in
    `folder`/init."""
    config, held_out = checked.config, checked.held_out
    torch.set_num_threads(config.placement.threads_per_worker)
    model = _start_model(checked, folder, say)
    return Prepared(
        Blueprint(
            config=config,
            model=model,
            algorithm=checked.algorithm,
            reward=checked.reward,
            stop_ids=checked.stop_ids,
        ),
        PromptSchedule(
            checked.prompts,
            seed=config.seed,
            prompts_per_step=config.trainer.prompts_per_step,
            prompts_per_unit=config.rollout.unit_prompts,
            shuffle=config.data.shuffle,
        ),
        PromptSchedule(held_out, seed=config.seed, prompts_per_step=len(held_out), prompts_per_unit=32, shuffle=False)
        if held_out
        else None,
    )


def build_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm that `config.algo` names: a preset, or a class in a file. Raises ConfigError."""
    algo = config.algo
    settings = algo.chosen()
    if algo.name.endswith(".py"):
        raise ConfigError(f"algo.name={algo.name} names a file; write {algo.name}:Class")
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
    reward.check(table.columns, answers=table.answer_key is not None)
    return reward


def _tokenize(config: RunConfig, table: PromptTable, tokenizer: Any) -> tuple[list[Prompt], int]:
    data = config.data
    return tokenize(table, tokenizer, template=data.template, system=data.system, max_tokens=data.max_prompt_tokens)


def _check_sizes(config: RunConfig, prompts: list[Prompt], vocabulary: int) -> None:
    """Prompt and answer must fit the positions of the model, and its vocabulary the tokenizer's."""
    section = config.model
    named = named_positions(section.name, trust=Trust.of(section, section.name)) if section.name else None
    positions = named or section.config.get("max_position_embeddings")
    check_room(max(len(prompt.ids) for prompt in prompts), config.rollout.max_new_tokens, positions)
    if (found := section.config.get("vocab_size", vocabulary)) < vocabulary:
        raise ConfigError(
            f"model.config.vocab_size={found} is smaller than the tokenizer's {vocabulary} tokens; leave it out"
        )


def _start_model(checked: Checked, folder: Path, say: Callable[[str], None]) -> str:
    """Folder or id of the model that the run starts from."""
    config, section, tokenizer = checked.config, checked.config.model, checked.tokenizer
    if section.name and not section.warm_start.steps:
        return section.name
    init = folder / "init"
    if init.is_dir():  # of an earlier attempt: whole, since it was renamed
        return str(init)
    spec = ModelSpec(section.name, section.config, seed=config.seed, trust=Trust.of(section, section.name))
    if section.config:
        sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        sizes |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        spec = replace(spec, config=sizes | section.config)
    model = load_causal_lm(spec)
    if section.warm_start.steps:
        loss = warm_start(
            model,
            tokenizer,
            checked.prompts,
            section.warm_start,
            stop_id=tokenizer.eos_token_id,
            seed=config.seed,
        )
        say(f"warm start: {section.warm_start.steps} supervised steps, last loss {loss:.3f} nats per token")
    aside = folder / "init.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    save_hf(aside, model, tokenizer, checked.stop_ids)
    aside.rename(init)
    return str(init)


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Model folders by their full paths, since a worker's current folder is another."""
    section = config.model
    names = {key: _absolute(getattr(section, key)) for key in ("name", "tokenizer", "critic")}
    return config.model_copy(update={"model": section.model_copy(update=names)})


def _absolute(name: str | None) -> str | None:
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name
