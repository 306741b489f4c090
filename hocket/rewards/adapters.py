"""Reward functions as users write them, behind one call: prompts, completions, rows, uids -> `Scores`.

The names of the parameters say how a function is called. `completion`: once per sample. `completions`: once
per batch, with lists (the form that TRL uses). `prompt` or `prompts` is the text of the prompt; every other
name is a column of the prompt file, where `answer` always exists.
"""

import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from hocket.data.readers import did_you_mean
from hocket.data.userfile import load_file
from hocket.errors import ConfigError, RewardError
from hocket.rewards.builtin import BUILTIN

FUNCTION_NAMES = ("reward_func", "compute_score", "reward_fn", "reward")
LARGEST_SCORE = 1e9  # beyond, differences between scores of a few units are lost in float32
_STYLES = """write it in one of two ways:
  def reward(completion, answer): ...     one sample; returns a number, or a dict with 'score' and metrics
  def reward(completions, answer): ...    a batch, all arguments are lists; returns a list of those"""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Row = Mapping[str, object]


@dataclass(frozen=True)
class Scores:
    """One finite score per completion, and per metric one finite number per completion."""

    values: list[float]
    metrics: dict[str, list[float]]


class Reward:
    """A reward function with its style known, its columns checkable, and its results checked.

    It pickles by value (the function travels inside it as cloudpickle bytes), so it reaches a process that
    cannot import the function's file. Raises `ConfigError` when the signature fits no style.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self._parameters = _named_parameters(function, self.name)
        self._per_batch = "completions" in self._parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())

    def check(self, columns: Iterable[str], *, answers: bool = True) -> None:
        """Raise `ConfigError` when the function requires a column that is not among `columns`, or the answer
        although there are no `answers`."""
        found = list(columns)
        if not answers and "answer" in self._required():
            raise ConfigError(
                f"reward {self.name} needs answers, but none of the columns {', '.join(found)} is known as one; "
                f"name it with data.answer_key"
            )
        missing = [name for name in self._required() if name not in {"answer", *self._given, *found}]
        if missing:
            raise ConfigError(
                f"reward {self.name} needs column {', '.join(missing)}; the file has {', '.join(found)}. "
                f"Add the column, rename the parameter, or give it a default"
            )

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row], uids: Sequence[str]
    ) -> Scores:
        """Score B completions; all four sequences have length B. A row maps column to value.

        Raises `RewardError` when the function raises, a row lacks a required column, or the function gives
        anything but one finite number (or dict of them, with the same keys throughout) per completion.
        """
        samples = list(zip(prompts, completions, rows, uids, strict=True))
        if not samples:
            return Scores([], {})
        if self._per_batch:
            results = self._batch_results(prompts, completions, rows, uids)
        else:
            results = [self._sample_result(*sample) for sample in samples]
        pairs = zip(results, uids, completions, strict=True)
        return self._joined([self._numbers(result, self._where(u, c)) for result, u, c in pairs])

    def __reduce__(self) -> tuple[Callable[..., "Reward"], tuple[bytes, str]]:
        return _unpickled, (cloudpickle.dumps(self.function), self.name)

    @property
    def _given(self) -> tuple[str, str]:
        return ("prompts", "completions") if self._per_batch else ("prompt", "completion")

    def _required(self) -> list[str]:
        return [name for name, p in self._parameters.items() if p.default is p.empty]

    def _where(self, uid: str, completion: str) -> str:
        return f"reward {self.name} on sample {uid} (completion {completion[:200]!r})"

    def _sample_result(self, prompt: str, completion: str, row: Row, uid: str) -> object:
        where = self._where(uid, completion)
        self._require_columns(row, where)
        columns = {name: value for name, value in row.items() if self._wants(name)}
        return self._run(where, {**columns, "prompt": prompt, "completion": completion})

    def _batch_results(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row], uids: Sequence[str]
    ) -> list[object]:
        for row, uid, completion in zip(rows, uids, completions, strict=True):
            self._require_columns(row, self._where(uid, completion))
        names = dict.fromkeys(name for row in rows for name in row if self._wants(name))
        columns = {name: [row.get(name) for row in rows] for name in names}
        where = f"{self._where(uids[0], completions[0])} and the {len(uids) - 1} samples after it"
        result = self._run(where, {**columns, "prompts": list(prompts), "completions": list(completions)})
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            raise RewardError(f"{where} returned {_show(result)}; wanted a list of {len(uids)} scores")
        results = list(result)
        if len(results) != len(uids):
            raise RewardError(f"{where} returned {len(results)} scores for {len(uids)} completions; wanted as many")
        return results

    def _wants(self, column: str) -> bool:
        return self._takes_all or column in self._parameters

    def _require_columns(self, row: Row, where: str) -> None:
        for name in self._required():
            if name not in row and name not in self._given:
                found = ", ".join(row)
                raise RewardError(f"{where}: the row has no column {name}, only {found}; add it to every row")

    def _run(self, where: str, arguments: dict[str, object]) -> object:
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._parameters}
        try:
            return self.function(**arguments)
        except (Exception, SystemExit) as error:
            raise RewardError(f"{where} raised {type(error).__name__}{self._line(error)}: {error}") from error

    def _line(self, error: BaseException) -> str:
        """Where in the function's own file; inside a worker the file has no name, but its lines have numbers."""
        file = getattr(getattr(self.function, "__code__", None), "co_filename", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f" in line {lines[-1]}" if lines else ""

    def _numbers(self, result: object, where: str) -> dict[str, float]:
        """The result of one sample as finite numbers by name, `score` among them."""
        by_name = result if isinstance(result, Mapping) else {"score": result}
        if "reward" in by_name:
            raise RewardError(f"{where} returned a metric named 'reward', which is the score's own; rename it")
        if "score" not in by_name:
            raise RewardError(f"{where} returned {_show(result)}; a dict must have the key 'score'")
        numbers = {str(name): _finite(value, f"{where} returned {name}") for name, value in by_name.items()}
        if abs(numbers["score"]) > LARGEST_SCORE:
            raise RewardError(f"{where} returned the score {numbers['score']:g}; wanted at most {LARGEST_SCORE:g}")
        return numbers

    def _joined(self, samples: list[dict[str, float]]) -> Scores:
        names = list(samples[0])
        for sample in samples:
            if set(sample) != set(names):
                found = f"{sorted(names)} and {sorted(sample)}"
                raise RewardError(f"reward {self.name} returned the keys {found}; return the same for every sample")
        columns = {name: [sample[name] for sample in samples] for name in names}
        return Scores(columns.pop("score"), columns)


def load_reward(spec: str | Callable[..., Any]) -> Reward:
    """A reward by its name (built-in, `file.py`, `file.py:function`, `module:function`) or from a callable.

    A file without a function name gives the first of `FUNCTION_NAMES` that it has. Raises `ConfigError` when
    there is no such file, module or function, when the file raises, or when the signature fits no style.
    """
    if isinstance(spec, Reward):
        return spec
    if not isinstance(spec, str):
        return Reward(spec)
    if spec in BUILTIN:
        return Reward(BUILTIN[spec], name=spec)
    place, _, name = (spec, "", "") if spec.endswith(".py") else spec.rpartition(":")
    if place.endswith(".py"):
        return Reward(_function(load_file(Path(place), what="reward"), place, name))
    if place and name:
        return Reward(_function(_load_module(place), place, name))
    raise ConfigError(
        f"no reward {spec!r}{did_you_mean(spec, BUILTIN)}; wanted a built-in name ({', '.join(BUILTIN)}), "
        f"file.py, file.py:function or module:function"
    )


def _unpickled(function: bytes, name: str) -> Reward:
    return Reward(cloudpickle.loads(function), name=name)


def _named_parameters(function: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name}: Python cannot tell its parameters; {_STYLES}") from error
    named = {p.name: p for p in signature.parameters.values() if p.kind in _NAMED}
    if ("completion" in named) == ("completions" in named) or inspect.iscoroutinefunction(function):
        kind = "async def" if inspect.iscoroutinefunction(function) else "def"
        raise ConfigError(f"reward {name} is `{kind} {name}{signature}`; {_STYLES}")
    return named


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"the reward module {name} cannot be imported ({what}); for a file write file.py:f"
        ) from error


def _function(module: ModuleType, place: str, name: str) -> Callable[..., Any]:
    wanted = (name,) if name else FUNCTION_NAMES
    found = next((vars(module)[one] for one in wanted if callable(vars(module).get(one))), None)
    if found is None:
        own = [key for key, value in vars(module).items() if _is_own_function(value, module)]
        raise ConfigError(
            f"{place} has no function {' or '.join(wanted)}; it has {', '.join(own) or 'none'}"
            f"{did_you_mean(name, own)}. Name one as {place}:function"
        )
    return found


def _is_own_function(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _finite(value: Any, what: str) -> float:
    """A number, numpy number or 0-d tensor as a float. Text is no number here, however it looks."""
    try:
        number = float("nan") if value is None or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(f"{what} {_show(value)}; wanted one finite number") from error
    if not math.isfinite(number):
        raise RewardError(f"{what} {_show(value)}; wanted one finite number")
    return number


def _show(value: object) -> str:
    return f"{value!r:.200} ({type(value).__name__})"
