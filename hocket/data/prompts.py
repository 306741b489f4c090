"""Prompt files read into rows that keep every cell as it was written.

The raw rows of a file (`readers`) -> columns chosen by name -> `PromptRow`s. All rows that cannot be used
stop the reading together, with one error; with `on_bad_row="drop"` they are counted by cause.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from hocket.data.readers import BadRow, RawRow, RawTable, did_you_mean, read_table, shorten
from hocket.errors import ConfigError, DataError

Message: TypeAlias = dict[str, Any]
"""One turn of a conversation: `role` and `content` are text, other keys stay as the file has them."""

PROMPT_NAMES = ("prompt", "question", "problem", "messages", "instruction", "input", "text")
ANSWER_NAMES = (
    *("answer", "ground_truth", "label", "labels", "solution", "target", "final_answer"),
    *("reward_model.ground_truth", "reward_spec.ground_truth"),
)
_ROLES = {"human": "user", "gpt": "assistant"}
_SHOWN_FAULTS = 5


@dataclass(frozen=True)
class PromptRow:
    """One prompt. `row` counts the data rows of the file from 0, dropped ones included, so it stays the same
    whatever is dropped; `columns` has every column under its own name, as the file has it."""

    row: int
    prompt: str | list[Message]
    answer: str
    columns: dict[str, object]

    @property
    def reward_columns(self) -> dict[str, object]:
        """What a reward function may ask for: all columns, the chosen prompt and answer under those names."""
        return {**self.columns, "prompt": self.prompt, "answer": self.answer}


@dataclass(frozen=True)
class PromptTable:
    """The usable rows of one file, how they were read (`notice`), and what was left out (`dropped`)."""

    source: str
    rows: tuple[PromptRow, ...]
    columns: tuple[str, ...]
    prompt_key: str
    answer_key: str | None
    dropped: dict[str, int]
    notice: str


def read_prompts(
    path: str | Path,
    *,
    prompt_key: str | None = None,
    answer_key: str | None = None,
    on_bad_row: Literal["error", "drop"] = "error",
) -> PromptTable:
    """Read a .csv, .tsv or .jsonl file of prompts.

    A key that is not given is found by name (`PROMPT_NAMES`, `ANSWER_NAMES`); an only column is the prompt.
    In JSONL a key may be a dotted path. CSV cells stay text exactly; a JSON number that is an answer keeps
    its spelling. A prompt is text or a list of messages (role and content, or from and value). An assistant
    turn at its end is never sent to the model: it is the answer when the file has no answer column.

    Raises `DataError`, with file and line, when the file or a row of it cannot be used or no row is left, and
    `ConfigError` for an unknown `on_bad_row`.
    """
    if on_bad_row not in ("error", "drop"):
        raise ConfigError(f"data.on_bad_row is {on_bad_row!r}; it must be 'error' or 'drop'")
    raw = read_table(Path(path))
    if not raw.rows:
        _settle(raw, raw.faults, 0, on_bad_row)
    prompt_key = _prompt_column(raw, prompt_key)
    answer_key = _answer_column(raw, answer_key, prompt_key)
    rows, faults = _build_rows(raw, prompt_key, answer_key)
    dropped = _settle(raw, raw.faults + faults, len(rows), on_bad_row)
    notice = _notice(raw.path.name, prompt_key, answer_key or _turn_or_none(rows), len(rows), dropped)
    return PromptTable(raw.path.name, tuple(rows), raw.columns, prompt_key, answer_key, dropped, notice)


def _lookup(columns: Mapping[str, object], key: str) -> object:
    """The value under a key or a dotted path; None when there is none."""
    if key in columns:
        return columns[key]
    value: object = columns
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _has(raw: RawTable, key: str) -> bool:
    return key in raw.columns or any(_lookup(row.columns, key) is not None for row in raw.rows)


def _asked(raw: RawTable, key: str, setting: str) -> str:
    if _has(raw, key):
        return key
    hint = did_you_mean(key, raw.columns)
    raise DataError(f"{raw.path}, line 1: no column {key!r}, which {setting} asks for; found {_names(raw)}{hint}")


def _prompt_column(raw: RawTable, key: str | None) -> str:
    if key is not None:
        return _asked(raw, key, "data.prompt_key")
    known = [name for name in PROMPT_NAMES if name in raw.columns]
    if known or len(raw.columns) == 1:
        return (known or raw.columns)[0]
    raise DataError(
        f"{raw.path}, line 1: which column is the prompt? Found {_names(raw)}; looked for "
        f"{', '.join(PROMPT_NAMES)}. First row: {shorten(raw.rows[0].columns)}. Set data.prompt_key to the "
        f"prompt's column, and data.answer_key to the answer's"
    )


def _answer_column(raw: RawTable, key: str | None, prompt_key: str) -> str | None:
    if key is not None:
        return _asked(raw, key, "data.answer_key")
    return next((name for name in ANSWER_NAMES if name != prompt_key and _has(raw, name)), None)


def _names(raw: RawTable) -> str:
    return ", ".join(repr(name) for name in raw.columns) or "no columns"


def _build_rows(raw: RawTable, prompt_key: str, answer_key: str | None) -> tuple[list[PromptRow], list[BadRow]]:
    rows: list[PromptRow] = []
    faults: list[BadRow] = []
    for source in raw.rows:
        try:
            prompt, last_turn = _prompt(_lookup(source.columns, prompt_key), prompt_key)
            answer = last_turn if answer_key is None else _answer(source, answer_key)
            rows.append(PromptRow(source.row, prompt, answer, source.columns))
        except BadRow as fault:
            faults.append(BadRow(fault.cause, fault.detail, source.line))
    return rows, faults


def _prompt(value: object, key: str) -> tuple[str | list[Message], str]:
    """The prompt without an assistant turn at its end, and the text of that turn."""
    if isinstance(value, str) and value.strip():
        return value, ""
    if isinstance(value, list) and value:
        messages = [_message(item, index) for index, item in enumerate(value)]
        last_turn = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        if any(message["content"].strip() for message in messages):
            return messages, last_turn
        raise BadRow("empty_prompt", f"{key} has no text that the model could answer")
    if not value or isinstance(value, str):
        raise BadRow("empty_prompt", f"{key} is empty ({shorten(value)})")
    raise BadRow("bad_prompt", f"{key} is {shorten(value)}, wanted text or a list of messages")


def _message(value: object, index: int) -> Message:
    if not isinstance(value, dict):
        raise BadRow("bad_message", f"message {index} is {shorten(value)}, wanted an object with role and content")
    message = dict(cast("Message", value))
    if "role" not in message:
        names = {"from": "role", "value": "content"}
        message = {names.get(name, name): item for name, item in message.items()}
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise BadRow("bad_message", f"message {index} has no text as {name}: {shorten(value)}")
    message["role"] = _ROLES.get(message["role"], message["role"])
    return message


def _answer(source: RawRow, key: str) -> str:
    value = _lookup(source.columns, key)
    if value is None:
        raise BadRow("missing_answer", f"{key} is null or absent")
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):  # 1.0 and 1e5 as the file spells them
        return str(_lookup(json.loads(source.text, parse_int=str, parse_float=str), key))
    return json.dumps(value, ensure_ascii=False)


def _settle(raw: RawTable, faults: list[BadRow], kept: int, on_bad_row: str) -> dict[str, int]:
    """Counts of the faults by cause, or the error that names their lines."""
    dropped = dict(Counter(fault.cause for fault in faults))
    if faults and on_bad_row == "error":
        first = sorted(faults, key=lambda fault: fault.line)[:_SHOWN_FAULTS]
        lines = "; ".join(f"line {fault.line}: {fault.detail}" for fault in first)
        more = f"; and {len(faults) - len(first)} more" if len(faults) > len(first) else ""
        raise DataError(
            f"{raw.path} has unusable rows ({len(faults)} of {len(faults) + kept}): {lines}{more}. "
            f"Mend them, or set data.on_bad_row=drop to leave them out and count them"
        )
    if not kept:
        raise DataError(f"nothing is left of {raw.path}: dropped {_counts(dropped)}; data.on_bad_row=error shows where")
    return dropped


def _counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in dropped.items())


def _turn_or_none(rows: list[PromptRow]) -> str:
    return "(the last assistant turn)" if any(row.answer for row in rows) else "(none)"


def _notice(name: str, prompt_key: str, answer: str, kept: int, dropped: dict[str, int]) -> str:
    lost = f", dropped: {_counts(dropped)}" if dropped else ""
    return (
        f"read {name} as prompt={prompt_key}, answer={answer}, rows={kept}{lost}; "
        f"override with data.prompt_key / data.answer_key"
    )
