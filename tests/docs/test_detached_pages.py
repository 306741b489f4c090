"""The pages of the detached flow: imports work, options are the constructors', quoted errors are the code's."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from test_docs import _texts

from hocket.parallel.strategy import OLD_NAMES
from hocket.roles.routing import ROUTES
from hocket.workers import ExperienceMaker, MakerCallback, PPOTrainer, TrainerCallback
from hocket.workers.detached_trainer import TRAINER_GROUPS
from hocket.workers.generation import GENERATION
from hocket.workers.maker_worker import MAKER_GROUPS

ROOT = Path(__file__).parents[2]
FOLDERS = ["docs", "docs/zh"]
IMPORT = re.compile(r"^\| `(from coati[^`]*)` \| `(from hocket[^`]*)` \|$", re.MULTILINE)


def page(folder: str, name: str) -> str:
    return (ROOT / folder / name).read_text(encoding="utf-8")


def imports(folder: str) -> list[tuple[str, str]]:
    return IMPORT.findall(page(folder, "coming-from-colossalchat.md"))


def names(line: str) -> list[str]:
    statement = ast.parse(line).body[0]
    assert isinstance(statement, ast.ImportFrom)
    return [alias.name for alias in statement.names]


def first_column(text: str, heading: str) -> list[str]:
    """What stands in backticks in the first column of the table with this heading cell."""
    table = re.search(rf"^\| `?{re.escape(heading)}`? \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, f"there is no table with the heading {heading}"
    return [re.findall(r"`([^`]+)`", line.split(" | ")[0])[0] for line in table[1].splitlines()]


def options(kind: type) -> list[str]:
    """The parameters of a constructor as the tables write them."""
    found = inspect.signature(kind).parameters.values()
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found if p.kind is not p.VAR_KEYWORD]


def test_both_languages_have_one_table_of_imports() -> None:
    assert imports("docs") == imports("docs/zh")


def test_every_new_import_gives_the_old_names() -> None:
    assert len(imports("docs")) >= 10
    for old, new in imports("docs"):
        exec(new, {})
        assert names(old) == names(new)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    ("heading", "kind"), [("ExperienceMakerHolder", ExperienceMaker), ("DetachedPPOTrainer", PPOTrainer)]
)
def test_the_option_tables_are_those_of_the_constructors(folder: str, heading: str, kind: type) -> None:
    assert first_column(page(folder, "detached.md"), heading) == options(kind)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_table_of_generation_is_complete(folder: str) -> None:
    heading = {"docs": "generation", "docs/zh": "生成"}[folder]
    assert first_column(page(folder, "detached.md"), heading) == [f"{k}={v!r}" for k, v in GENERATION.items()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_routes_and_strategies_are_complete(folder: str) -> None:
    assert first_column(page(folder, "detached.md"), "route=") == list(ROUTES)
    heading = {"docs": "| old name", "docs/zh": "| 旧名"}[folder]
    table = page(folder, "coming-from-colossalchat.md").partition(heading)[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", table, re.MULTILINE))
    assert rows == {**OLD_NAMES, "ddp": "ddp"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_table_of_threads_names_the_groups(folder: str) -> None:
    text = page(folder, "detached.md")
    for kind, groups in ("maker", MAKER_GROUPS), ("trainer", TRAINER_GROUPS):
        rows = "".join(re.findall(rf"^\| {kind} \|.*$", text, re.MULTILINE))
        assert all(f"`{group}`" in rows for group in groups)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("kind", [MakerCallback, TrainerCallback])
def test_the_order_of_hooks_names_every_hook(folder: str, kind: type) -> None:
    hooks = {name.removeprefix("on_") for name in vars(kind) if name.startswith("on_")}
    who = {MakerCallback: "maker", TrainerCallback: "trainer"}[kind]
    rows = [row for row in re.findall(rf"^\| {who} \|(.*)\|$", page(folder, "detached.md"), re.MULTILINE) if "{" in row]
    assert len(rows) == 1
    assert set(re.findall(r"\b\w+_(?:start|end)\b", rows[0])) == hooks


@pytest.mark.parametrize("folder", FOLDERS)
def test_quoted_errors_are_those_of_the_code(folder: str) -> None:
    said = [text for path in (ROOT / "hocket").rglob("*.py") for text in _texts(ast.parse(path.read_text()))]
    quotes = re.findall(r"^> (.*)$", page(folder, "detached.md"), re.MULTILINE)
    assert len(quotes) == 2
    for quote in quotes:
        pieces = [re.escape(piece) for piece in quote.split("…")]
        assert any(re.search(".*".join(pieces), text, re.DOTALL) for text in said), f"no error says {quote!r}"
