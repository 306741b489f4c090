"""Prompt files as raw rows: CSV, TSV and JSONL, each row with the line that it starts on.

A fault of one row is a `BadRow`, collected beside the rows for the caller to judge. A fault of the whole file
(its name, its encoding, its header, a quote that is never closed) is a `DataError` at once.
"""

import csv
import difflib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hocket.errors import DataError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ENDINGS = (*_DELIMITERS, ".jsonl")


class BadRow(Exception):
    """One row cannot be used: a cause to count it under, the cause in words, and the line of the row."""

    def __init__(self, cause: str, detail: str, line: int = 0) -> None:
        super().__init__(cause, detail, line)
        self.cause, self.detail, self.line = cause, detail, line


@dataclass(frozen=True)
class RawRow:
    """A data row as the file has it. `row` counts from 0 and includes bad rows; `line` counts from 1."""

    line: int
    row: int
    columns: dict[str, object]
    text: str = ""  # the JSON of the row, for numbers that must keep their spelling


@dataclass(frozen=True)
class RawTable:
    """What one file holds: the columns in order of first appearance, the rows, and the rows at fault."""

    path: Path
    columns: tuple[str, ...]
    rows: list[RawRow]
    faults: list[BadRow]


def read_table(path: Path) -> RawTable:
    """Read a .csv, .tsv or .jsonl file in UTF-8, with or without BOM. CSV cells stay text exactly.

    Raises `DataError`, with file and line, for a fault of the whole file, and when it holds no rows.
    """
    text, ending = _read_text(path), path.suffix.lower()
    raw = _read_jsonl(path, text) if ending == ".jsonl" else _read_csv(path, text, _DELIMITERS[ending])
    if not raw.rows and not raw.faults:
        raise DataError(f"{path} holds no prompts: it is empty or has only a header; add at least one row")
    return raw


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error message that offers the nearest names, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def shorten(value: object) -> str:
    """A cell or JSON value as the file writes it, cut to a length that suits a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _read_text(path: Path) -> str:
    if path.is_dir():
        inside = sorted(child.name for child in path.iterdir() if child.suffix.lower() in _ENDINGS)
        raise DataError(f"{path} is a directory; name one file of it ({', '.join(inside[:9]) or 'it has none'})")
    if not path.exists():
        raise DataError(f"{path} does not exist{_nearest_file(path)}")
    if path.suffix.lower() not in _ENDINGS:
        raise DataError(f"{path} has the ending {path.suffix!r}; hocket reads {', '.join(_ENDINGS)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"byte {data[error.start]:#04x} at offset {error.start}"
        raise DataError(f"{path}, line {line}: {found} is not UTF-8; save the file as UTF-8") from error


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f", and neither does its folder {path.parent}"
    return did_you_mean(path.name, (child.name for child in path.parent.iterdir()))


def _read_csv(path: Path, text: str, delimiter: str) -> RawTable:
    lines = _csv_lines(path, text, delimiter)
    line, header = next(lines, (1, [""]))
    names = _header(f"{path}, line {line}", header)
    raw = RawTable(path, tuple(names), [], [])
    for row, (line, cells) in enumerate(lines):
        if len(cells) == len(names):
            raw.rows.append(RawRow(line, row, dict(zip(names, cells, strict=True))))
        else:
            detail = f"{len(cells)} cells, where the header has {len(names)}"
            raw.faults.append(BadRow("wrong_cell_count", detail, line))
    return raw


def _csv_lines(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row that is not blank, with the line that the row starts on."""
    # A cell may be longer than csv's limit of 128 KiB; the limit is global, so it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            # csv's words for a quote that is still open at the end of the file are "unexpected end of data".
            cause = "a quote is never closed" if "unexpected end" in str(error) else f"broken quoting ({error})"
            raise DataError(f"{path}, line {line}: {cause} in the row that starts here; close it") from error
        if cells is None:
            return
        if cells:
            yield line, cells


def _header(where: str, header: list[str]) -> list[str]:
    names = [name.strip() for name in header]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{where}: the header has {twice[0]!r} more than once; name each column differently")
    if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
        raise DataError(f"{where}: {names[0]!r} looks like several columns; put commas in .csv, tabs in .tsv")
    return names


def _read_jsonl(path: Path, text: str) -> RawTable:
    rows: list[RawRow] = []
    faults: list[BadRow] = []
    # Not splitlines(): it also splits at characters that JSON allows inside its strings.
    filled = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    for row, (number, line) in enumerate(filled):
        try:
            rows.append(RawRow(number, row, _json_object(line), line))
        except BadRow as fault:
            faults.append(BadRow(fault.cause, fault.detail, number))
    columns = dict.fromkeys(name for row in rows for name in row.columns)
    return RawTable(path, tuple(columns), rows, faults)


def _json_object(line: str) -> dict[str, object]:
    try:
        value: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRow("broken_json", f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise BadRow("broken_json", f"JSON that Python cannot hold: {error}") from error
    if not isinstance(value, dict):
        raise BadRow("not_an_object", f"{shorten(value)} is not a JSON object with named columns")
    return cast("dict[str, object]", value)
