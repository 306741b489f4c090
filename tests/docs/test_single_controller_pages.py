"""The tables of the single controller: each import gives what the old name stands for, and no mode is left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "coming-from-verl.md", ROOT / "docs" / "zh" / "coming-from-verl.md"]
# The old line on the left, the new one on the right.
ROW = re.compile(r"^\| `((?:from|import) verl[^`]*)` \| `((?:from|import) hocket[^`]*)` \|$", re.MULTILINE)


def rows(page: Path) -> list[tuple[str, str]]:
    return ROW.findall(page.read_text(encoding="utf-8"))


def test_both_languages_have_one_table() -> None:
    assert rows(PAGES[0]) == rows(PAGES[1])


def test_every_new_name_exists() -> None:
    assert len(rows(PAGES[0])) >= 10
    for _, new in rows(PAGES[0]):
        exec(new, {})


COMPARE = """
import sys
for old, new in eval(sys.stdin.read()):
    before, after = {}, {}
    exec(old, before)
    exec(new, after)
    names = set(before) - {"__builtins__"}
    assert names == set(after) - {"__builtins__"}, old
    for name in names:
        home = getattr(before[name], "__module__", getattr(before[name], "__name__", ""))
        assert before[name] is after[name] or "verl" in home, (old, name)
"""


def test_old_and_new_names_are_the_same_objects() -> None:
    """`tests/peer_alias` has the old names; what it makes itself (a module, a wrapper) need not be the same object."""
    ran = subprocess.run(
        [sys.executable, "-c", COMPARE],
        input=repr(rows(PAGES[0])),
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "peer_alias"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_the_table_of_modes_is_complete(folder: str) -> None:
    page = (ROOT / folder / "worker-groups.md").read_text(encoding="utf-8")
    # in a process of its own: other tests register modes of theirs
    tell = "from hocket.single_controller import Dispatch; print(*Dispatch.names())"
    names = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(re.findall(r"^\| `Dispatch\.(\w+)`", page, re.MULTILINE)) == sorted(names)
