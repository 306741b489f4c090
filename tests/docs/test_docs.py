"""The pages say what is true: every code block runs, every key, metric, error and link in them exists.

The tag behind a block's language says how it is played, page by page, in order, in one empty folder:

* `python` is executed; the blocks of a page share their names, and those of a page that imports Ray have a process of
  their own. `text` is what the block before it printed (`...` stands for anything).
* `yaml` is parsed by `load_config`.
* `bash` holds `hocket` commands. Each is checked as it stands, then run with small settings in this process.
  With `keep-placement` it is run as a process of its own, in its placement; with `no-run` (environments,
  downloads, minutes of work) its make targets, verbs and keys are checked.
* `console` holds `$ hocket ...` lines and their output, which must come out as shown (`...` stands for anything).
* `file=NAME` also writes the block to that file; `csv` and `jsonl` need it.

A translation in `docs/zh/` has the blocks of its original, apart from comments, and is not played a second time.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from play_python import check_text, play_python

import hocket.cli
from hocket.config import RunConfig
from hocket.data.prompts import read_prompts
from hocket.read_config import known_keys, load_config

ROOT = Path(__file__).parents[2]
PAGES = {page: page.relative_to(ROOT).as_posix() for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])}

SMALL = [
    *("trainer.max_steps=2", "trainer.prompts_per_step=4", "rollout.group_size=2"),
    *("model.warm_start.steps=2", "eval.prompts=4"),
]
TAGS = ("no-run", "keep-placement")
QUIET_RAY = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
SET_UP = ("git", "cd", "python3.11", ".venv/bin/pip", "chromium")  # allowed in `no-run`, beside make and hocket
_FENCE = re.compile(r"^```(\S*)[ ]*([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_KEY = re.compile(rf"(?:--)?((?:{'|'.join(RunConfig.model_fields)})\.[a-z_.]+)")
_run_numbers = itertools.count()


class Block(NamedTuple):
    """One fenced block; `file` is the name that it is to be written under."""

    place: str
    language: str
    tag: str
    file: str
    text: str

    def commands(self) -> list[str]:
        """The lines of a shell block, continued ones joined, without comments."""
        lines = [line.strip() for line in self.text.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(name: str, text: str) -> list[Block]:
    """All fenced blocks of a page; an unknown tag or a stray fence fails."""
    found = [_block(f"{name}:{text.count(chr(10), 0, match.start()) + 1}", match) for match in _FENCE.finditer(text)]
    fences = [line for line in text.splitlines() if line.strip().startswith("```")]
    assert len(fences) == 2 * len(found), f"{name} has a fence that is indented or not closed"
    return found


def _block(place: str, match: re.Match[str]) -> Block:
    language, info, body = match.groups()
    files = [word.removeprefix("file=") for word in info.split() if word.startswith("file=")]
    tags = [word for word in info.split() if not word.startswith("file=")]
    assert language in PLAYERS, f"{place}: no test plays {language!r} blocks; known are {', '.join(PLAYERS)}"
    assert all(tag in TAGS for tag in tags), f"{place}: unknown tag in {info!r}; known are {TAGS} and file=NAME"
    assert language == "bash" or not tags, f"{place}: {tags} says nothing about {language}"
    return Block(place, language, (tags or [""])[0], (files or [""])[0], body)


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Plays all blocks of a page in order, once; gives the folder that they ran in."""

    @cache
    def play_page(page: Path) -> Path:
        if page.parent.name == "zh":
            return _play_translation(page)
        here, folder = page_blocks(page), tmp_path_factory.mktemp(page.stem)
        if uses_ray(page):
            _play_apart([block for block in here if block.language in ("python", "text")], folder)
            here = [block for block in here if block.language not in ("python", "text")]
        names: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.chdir(folder), _import_from(folder):
            for block in here:
                if block.file:
                    Path(block.file).write_text(block.text, encoding="utf-8")
                PLAYERS[block.language](block, names)
        return folder

    def _play_translation(page: Path) -> Path:
        original = page.parent.parent / page.name
        same = [_meaning(b) for b in page_blocks(page)] == [_meaning(b) for b in page_blocks(original)]
        assert same, f"{PAGES[page]} must have the blocks of {PAGES[original]}, apart from comments"
        return play_page(original)

    return play_page


def page_blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page of the repository."""
    return blocks(PAGES[page], page.read_text(encoding="utf-8"))


def uses_ray(page: Path) -> bool:
    """Whether a Python block of the page imports Ray."""
    return any(re.search(r"^import ray$", block.text, re.MULTILINE) for block in page_blocks(page))


def _meaning(block: Block) -> tuple[str, ...]:
    """What a translation may not change: everything but comments."""
    text = ast.dump(ast.parse(block.text)) if block.language == "python" else "\n".join(block.commands())
    return block.language, block.tag, block.file, text


def _play_apart(page: list[Block], folder: Path) -> None:
    """Play Python blocks in a process of their own: it ends with its Ray cluster, whose place is short and its own."""
    with tempfile.TemporaryDirectory(prefix="hk-", ignore_cleanup_errors=True) as home:
        ran = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("play_python.py"))],
            input=json.dumps([[block.language, block.place, block.text] for block in page]),
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=230,
            env=os.environ | {"HOME": home, "RAY_TMPDIR": home, "RAY_LOG_TO_DRIVER": "0", **QUIET_RAY},
        )
    assert ran.returncode == 0, ran.stderr[-4000:]


@contextlib.contextmanager
def _import_from(folder: Path) -> Generator[None]:
    """Python finds the modules that a page writes, and forgets them afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if (folder / f"{name}.py").exists():
                del sys.modules[name]


def _python(block: Block, names: dict[str, Any]) -> None:
    play_python(block.file or block.place, block.text, names)


def _text(block: Block, names: dict[str, Any]) -> None:
    check_text(block.place, block.text, names)


def _yaml(block: Block, names: dict[str, Any]) -> None:
    path = Path(block.file or "block.yaml")
    path.write_text(block.text, encoding="utf-8")
    load_config(path)


def _table(block: Block, names: dict[str, Any]) -> None:
    assert block.file.endswith(block.language), f"{block.place}: name the file with file=NAME.{block.language}"
    assert read_prompts(block.file).rows


def _bash(block: Block, names: dict[str, Any]) -> None:
    for line in block.commands():
        program, *words = shlex.split(line, comments=True)
        if program == "hocket":
            _check_hocket(words, block.place)
            if block.tag != "no-run":
                _play_hocket(words, block)
        else:
            assert block.tag == "no-run", f"{block.place}: {line!r} is no hocket command, and is not run; tag it no-run"
            _check_set_up(program, words, block.place)


def _console(block: Block, names: dict[str, Any]) -> None:
    checker = doctest.OutputChecker()
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        program, *words = shlex.split(command)
        assert program == "hocket", f"{block.place}: only hocket commands are run, not {command!r}"
        _, printed = run_hocket(words)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert checker.check_output(wanted, printed, flags), f"{block.place}: {command} printed\n{printed}"


PLAYERS = {
    "python": _python,
    "text": _text,
    "yaml": _yaml,
    "csv": _table,
    "jsonl": _table,
    "bash": _bash,
    "console": _console,
}


def _check_hocket(words: list[str], place: str) -> None:
    """The verb exists, and the settings of `train` and `config` make a config."""
    verbs = {command.name or command.callback.__name__ for command in hocket.cli.app.registered_commands}
    if words[0].startswith("--"):
        return
    assert words[0] in verbs, f"{place}: hocket has no verb {words[0]!r}"
    if words[0] in ("train", "config"):
        settings = [word for word in words[1:] if word != "--dry-run"]
        code, printed = run_hocket(["config", *settings])
        assert code == 0, f"{place}: {printed}"


def _play_hocket(words: list[str], block: Block) -> None:
    if words[0] == "train":
        named = any("run.name" in word or "run.dir" in word for word in words)
        # Two runs of one second would have one name.
        words = [*words, *SMALL, *([] if named else [f"run.name=unnamed-{next(_run_numbers)}"])]
        if block.tag != "keep-placement":
            words = [*words, "placement=local"]
    code, printed = _process(words) if block.tag == "keep-placement" else run_hocket(words)
    assert code == 0, f"{block.place}: hocket {shlex.join(words)} ended with {code}:\n{printed}"


def _check_set_up(program: str, words: list[str], place: str) -> None:
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = [word for word in words if "=" not in word]
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), f"{place}: make {words}"
    elif program == "python":  # an example or benchmark; each has tests of its own
        script, *options = words
        text = (ROOT / script).read_text(encoding="utf-8")
        assert all(word in text for word in options if word.startswith("--")), f"{place}: {script} {options}"
    else:
        assert program in SET_UP, f"{place}: {program} is neither make nor one of {SET_UP}"


def run_hocket(words: list[str]) -> tuple[int, str]:
    """The command line in this process: exit code, and all that it printed."""
    printed, argv, handler = io.StringIO(), sys.argv, signal.getsignal(signal.SIGTERM)
    try:
        sys.argv = ["hocket", *words]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            hocket.cli.main()
        return 0, printed.getvalue()
    except SystemExit as end:
        return int(end.code or 0), printed.getvalue()
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)


def _process(words: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as home:
        ran = subprocess.run(
            [str(Path(sys.executable).parent / "hocket"), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            env=os.environ | {"HOME": home, **QUIET_RAY},
        )
    return ran.returncode, ran.stdout


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.ray] if "keep-placement" in page.read_text(encoding="utf-8") or uses_ray(page) else []


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def code_words(page: Path) -> Iterator[str]:
    """What stands in backticks in the text."""
    return (match[1] for match in re.finditer(r"`([^`\n]+)`", prose(page)))


@pytest.mark.timeout(240)  # one page starts Ray
@pytest.mark.parametrize("page", [pytest.param(page, marks=_marks(page), id=name) for page, name in PAGES.items()])
def test_every_block_runs(page: Path, play: Callable[[Path], Path]) -> None:
    play(page)


@pytest.mark.parametrize("page", PAGES, ids=PAGES.values())
def test_every_config_key_exists(page: Path) -> None:
    keys = known_keys()
    open_ended = ("model.config.", "algo.options.")
    for word in code_words(page):
        match = _KEY.match(word)
        if match is None or re.search(r"\.(py|yaml|csv|jsonl?|html|safetensors|log|png)\b", word):
            continue
        key = match[1].rstrip(".")
        known = any(name == key or name.startswith(f"{key}.") for name in keys) or key.startswith(open_ended)
        assert known, f"{page.name}: `{word}` names no key of the config"


@pytest.mark.parametrize("page", PAGES, ids=PAGES.values())
def test_every_link_stays_in_the_repository_and_resolves(page: Path) -> None:
    html = re.findall(r"(?:src|href)=\"([^\"]+)\"", prose(page))
    for link in [*re.findall(r"\]\(([^)\s]+)\)", prose(page)), *html]:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leads out of the repository"
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert not anchor or anchor in _anchors(target), f"{page.name}: {link} has no such heading"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_metrics_page_names_what_a_run_writes_and_nothing_else(play: Callable[[Path], Path]) -> None:
    page = ROOT / "docs" / "run-folder.md"
    lines = [line for path in play(page).glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
    written = {name for line in lines for name in json.loads(line)}
    rows = re.findall(r"^\| (`[^|]+) \|", prose(page).partition("## Metrics")[2], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == written


def test_the_errors_page_quotes_the_errors_of_the_code() -> None:
    said = [text for path in (ROOT / "hocket").rglob("*.py") for text in _texts(ast.parse(path.read_text()))]
    headings = re.findall(r"^### `(.*)`$", prose(ROOT / "docs" / "errors.md"), re.MULTILINE)
    assert headings
    for heading in headings:
        pieces = [re.escape(piece) for piece in heading.partition(": ")[2].split("…")]
        assert any(re.search(".*".join(pieces), text, re.DOTALL) for text in said), f"no error says {heading!r}"


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every string in a file, an f-string with … for what is put in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```toml\na = 1\n```", "no test plays 'toml' blocks"),
        ("```bash later\nhocket train\n```", "unknown tag"),
        ("  ```bash\n  hocket train\n  ```", "indented or not closed"),
    ],
)
def test_no_block_is_silently_left_out(text: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        blocks("page.md", text + "\n")


@pytest.mark.parametrize("line", ["hocket trian", "hocket train trainer.steps=3", "rm -r runs"])
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:1"):
        _bash(Block("page.md:1", "bash", "no-run", "", line), {})
