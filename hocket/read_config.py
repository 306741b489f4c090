"""From a recipe and `key=value` words to a RunConfig, and what is said about each mistake in them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from hocket.config import PLACEMENTS, RunConfig
from hocket.errors import ConfigError


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML recipe and apply `key=value` overrides (also `--key value`, `--key=value`).

    Raises ConfigError for a missing file, broken YAML, an unknown key (with the nearest name), a bad value.
    """
    path = Path(recipe)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise ConfigError(f"recipe {str(recipe)!r} does not exist{hint}")
    try:
        settings = OmegaConf.create(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise ConfigError(f"recipe {str(recipe)!r} is not valid YAML: {error}") from error
    if not OmegaConf.is_dict(settings):
        raise ConfigError(
            f"recipe {str(recipe)!r} must hold `section: settings` pairs, found {type(settings).__name__}"
        )
    merged = _as_dict(settings)
    for key, value in _pairs(overrides):
        _assign(merged, key, value)
    return parse_config(merged)


def parse_config(settings: Mapping[str, Any]) -> RunConfig:
    """Check plain settings and make a RunConfig of them; ConfigError lists everything that is wrong."""
    settings = dict(settings)
    settings["placement"] = _expand_placement(settings.get("placement", {"kind": "detached"}))
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(line for problem in error.errors() for line in _say(problem))) from error


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """All dotted keys that a config may have, placement settings included."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        kind: Any = info.annotation
        if name == "placement":
            keys += [prefix + name, *(k for p in PLACEMENTS.values() for k in known_keys(p, prefix + name + "."))]
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += known_keys(kind, prefix + name + ".")
        else:
            keys.append(prefix + name)
    return list(dict.fromkeys(keys))


def _pairs(overrides: Sequence[str]) -> Iterable[tuple[str, Any]]:
    words = list(overrides)
    while words:
        word = words.pop(0)
        dashed = word.startswith("--")
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals and dashed and words and not re.match(r"--|[\w.-]+=", words[0]):
            value, equals = words.pop(0), "="
        elif not equals and dashed:
            value, equals = "true", "="
        if not equals:
            raise ConfigError(f"cannot read {word!r}; write key=value, for example trainer.max_steps=100")
        key = key.replace("-", "_") if dashed else key
        if key == "resume":  # `--resume` alone is the newest checkpoint
            key, value = "run.resume", "latest" if value == "true" else value
        yield key, _value(key, value)


def _value(key: str, text: str) -> Any:
    if text.lower() == "none" and key != "algo.correction":  # there it is a name, and null is the default
        return None
    if key == "placement" and not text.startswith("{"):
        return text
    try:
        return _as_dict(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(f"cannot read the value of {key}={text} as YAML; quote it if it is text: {error}") from error


def _assign(settings: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    section = settings
    for name in path:
        if name == "placement":
            section[name] = _expand_placement(section.get(name, "detached"))
        inner = section[name] = {} if section.get(name) is None else section[name]
        if not isinstance(inner, dict):
            raise ConfigError(f"cannot set {key}: {name} is {inner!r}, not a section")
        section = cast(dict[str, Any], inner)
    section[last] = value


def _expand_placement(value: Any) -> Any:
    """`detached(makers=2)` -> {kind: detached, makers: 2}."""
    if isinstance(value, dict):
        return {"kind": "detached"} | cast(dict[str, Any], value)
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", str(value))
    if not match:
        raise ConfigError(f"cannot read placement {value!r}; write local, colocated, or detached(makers=2)")
    settings = re.findall(r"(?:[^,\s\[]|\[[^=]*\])+", match[2] or "")  # a comma inside brackets separates no settings
    return {"kind": match[1]} | dict(_pairs(settings))


def _as_dict(node: Any) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot resolve the recipe: {error}") from error


def _say(problem: Any) -> list[str]:
    if problem["type"] == "extra_forbidden" and isinstance(problem["input"], dict) and problem["input"]:
        inner = cast(dict[str, Any], problem["input"])  # a misspelt section: judge its keys one by one
        return [_unknown(".".join([*map(str, problem["loc"]), key])) for key in inner]
    return [_say_one(problem)]


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.5)
    return f"unknown key {key}; " + (f"did you mean {near[0]}?" if near else "see `hocket config` for all keys")


def _say_one(problem: Any) -> str:
    # pydantic puts the tag of the chosen placement into the location: placement.detached.makers
    parts = [str(p) for i, p in enumerate(problem["loc"]) if not (i == 1 and problem["loc"][0] == "placement")]
    key = ".".join(parts)
    kind = problem["type"]
    if kind == "extra_forbidden":
        if parts[0] == "placement" and key in known_keys():
            return f"{key} is no setting of placement {problem['loc'][1]!r}; it has {_settings_of(problem['loc'][1])}"
        return _unknown(key)
    if kind == "missing":
        return f"{key} is not set; give it in the recipe or as {key}=..."
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"placement {problem['ctx'].get('tag', '?')!r} is not known; use local, colocated or detached(makers=2)"
    text = str(problem["msg"]).removeprefix("Value error, ")
    whole = kind == "value_error" and isinstance(problem["input"], dict)  # a rule of a section names its keys itself
    return f"{key}={problem['input']!r}: {text}" if key and not whole else text


def _settings_of(kind: str) -> list[str]:
    return [name for name in PLACEMENTS[kind].model_fields if name != "kind"]
