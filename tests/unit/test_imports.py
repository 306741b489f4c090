"""Imports point one way, outside names have one door each, and heavy things load late."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

import hocket

PACKAGE = Path(hocket.__file__).parent

_BASE = {"errors", "config", "observe"}
_MIDDLE = _BASE | {"data", "algorithms", "models"}
_ROLES = _MIDDLE | {"rollout", "rewards", "weights", "parallel"}
_WORKERS = _ROLES | {"roles", "single_controller", "waiting"}

# What each package may import of ours, beside itself. The first folder or file name below hocket/ is the package.
MAY_SEE: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors", "observe"},
    "read_config": {"config", "errors"},
    "observe": {"errors"},
    "algorithms": {"errors"},
    "data": _BASE,
    "models": _MIDDLE - {"models"},
    "rollout": _MIDDLE,
    "rewards": _MIDDLE,
    "weights": _MIDDLE,
    "parallel": _MIDDLE,
    "waiting": {"errors"},
    "single_controller": {"data", "errors", "observe", "waiting"},
    "roles": _ROLES,
    "workers": _WORKERS,
    "run": _WORKERS | {"workers", "read_config"},
    "cli": _WORKERS | {"workers", "run", "read_config"},
    "__main__": {"cli"},
    "recipes": set(),
    "__init__": set(),
}

# Who may import an outside library, as patterns of paths below hocket/.
DOORS: dict[str, tuple[str, ...]] = {
    "ray": (
        *("waiting.py", "single_controller/*", "workers/*"),
        *(
            "run/start.py",
            "run/remote.py",
            "run/cluster.py",
            "run/submit.py",
            "run/job_server.py",
            "weights/object_store.py",
        ),
    ),
    "transformers": ("models/*", "rollout/*", "roles/*", "rewards/model.py", "workers/factories.py"),
    "vllm": ("rollout/vllm.py",),
    "torch": (
        *("algorithms/*", "models/*", "rollout/*", "rewards/*", "weights/*", "parallel/*", "roles/*", "workers/*"),
        *("data/proto.py", "data/wire.py", "data/rows.py", "data/merge.py"),
        *(
            "data/batches.py",
            "data/reshape.py",
            "data/tensordict_utils.py",
            "data/disk.py",
            "data/schema.py",
            "data/schedule.py",
        ),
        "data/experience.py",
        *("run/prepare.py", "run/cluster.py", "single_controller/devices.py"),
    ),
    "typer": ("cli.py",),
    "plotly": ("observe/report.py",),
}
# Parts of `observe` that face the user; the layers below report through metrics and trace.
FACES = {"observe.report", "observe.console"}
# Behind these doors only the names of transformers' types pass: nothing is loaded or built there.
TYPES_ONLY = ("roles/*", "rewards/model.py", "workers/factories.py")
_TYPES = {"PreTrainedModel", "PreTrainedTokenizerBase"}
# What `algorithms` may use at all: it is to be read, and reused, without the rest.
_ALGORITHMS_USE = {"torch", "hocket", *sys.stdlib_module_names}


class Import(NamedTuple):
    """One imported name: `module` as written, `name` what is taken from it, `typing` under TYPE_CHECKING."""

    line: int
    module: str
    name: str
    typing: bool


def imports(tree: ast.AST, *, typing: bool = False) -> Iterator[Import]:
    """Every import in a file, those inside functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, "", typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (Import(node.lineno, module, alias.name, typing) for alias in node.names)
        else:
            inside = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from imports(node, typing=typing or inside)


def violations(package: Path) -> list[str]:
    """`file:line: rule` for each import below `package` that the tables do not allow."""
    return [
        f"{path.relative_to(package)}:{found.line}: {rule}"
        for path in sorted(package.rglob("*.py"))
        for found in imports(ast.parse(path.read_text(encoding="utf-8")))
        if (rule := _broken_rule(path.relative_to(package), found))
    ]


def _broken_rule(path: Path, found: Import) -> str | None:
    package, top = path.parts[0].removesuffix(".py"), found.module.split(".")[0]
    if found.module.startswith("."):
        return f"relative import {found.module}; write hocket.<package>.<module>"
    if package not in MAY_SEE:
        return f"{package} has no row in MAY_SEE; give it one"
    if package == "algorithms" and top not in _ALGORITHMS_USE:
        return f"algorithms may import torch and the standard library, not {top}"
    return _broken_layer(package, found) if top == "hocket" else _broken_door(path, top, found)


def _broken_layer(package: str, found: Import) -> str | None:
    full = f"{found.module}.{found.name}".removeprefix("hocket.")
    below = full.split(".")[0]
    if package == "__init__":
        return None if found.typing else f"hocket/__init__.py must not load {below} on import; use _HOMES"
    if any(full.startswith(face) for face in FACES) and package not in ("observe", "run", "cli"):
        return f"only run and cli may import {full}; use observe.metrics or observe.trace"
    if below in (package, "__version__") or below in MAY_SEE[package]:
        return None
    return f"{package} may not import {below}; it sees {', '.join(sorted(MAY_SEE[package])) or 'nothing of ours'}"


def _broken_door(path: Path, top: str, found: Import) -> str | None:
    if top not in DOORS:
        return None
    if not any(fnmatch(path.as_posix(), door) for door in DOORS[top]):
        return f"{top} may be imported only in {', '.join(DOORS[top])}"
    behind = top == "transformers" and any(fnmatch(path.as_posix(), door) for door in TYPES_ONLY)
    if behind and found.name not in _TYPES:
        return f"of transformers, only {', '.join(sorted(_TYPES))} may be named here, not {found.name or found.module}"
    return None


def test_every_import_of_the_package_is_allowed() -> None:
    assert violations(PACKAGE) == []


def test_every_row_of_the_table_is_a_package_or_a_file() -> None:
    there = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert set(MAY_SEE) <= there
    assert all(any(PACKAGE.glob(door)) for name, doors in DOORS.items() if name != "vllm" for door in doors)


@pytest.mark.parametrize(
    ("path", "code", "rule"),
    [
        ("algorithms/a.py", "import torch\nfrom hocket.config import RunConfig", "a.py:2: algorithms may not import"),
        ("algorithms/a.py", "import numpy", "a.py:1: algorithms may import torch and the standard library"),
        ("data/d.py", "def f():\n    from hocket.models import load", "d.py:2: data may not import models"),
        ("data/d.py", "from hocket import roles", "d.py:1: data may not import roles"),
        ("roles/r.py", "import ray.util", "r.py:1: ray may be imported only in"),
        ("roles/r.py", "from transformers import AutoModel", "r.py:1: of transformers, only"),
        ("observe/o.py", "import torch", "o.py:1: torch may be imported only in"),
        ("rollout/native.py", "import vllm", "native.py:1: vllm may be imported only in rollout/vllm.py"),
        ("roles/r.py", "from hocket.observe.console import RunConsole", "r.py:1: only run and cli may import"),
        ("run/x.py", "from .start import y", "x.py:1: relative import"),
        ("__init__.py", "from hocket.config import RunConfig", "__init__.py:1: hocket/__init__.py must not load"),
        ("extra/e.py", "import os", "e.py:1: extra has no row in MAY_SEE"),
    ],
)
def test_a_forbidden_import_is_named_with_file_line_and_rule(tmp_path: Path, path: str, code: str, rule: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(code)
    (found,) = violations(tmp_path)
    assert found.startswith(file.relative_to(tmp_path).as_posix())
    assert rule in found


@pytest.mark.parametrize(
    "code",
    [
        "import hocket",
        "import sys, hocket.cli\nsys.argv = ['hocket', '--help']\ntry: hocket.cli.main()\nexcept SystemExit: pass",
        "from hocket import load_config, parse_config, HocketError",
        "import hocket.observe.report, hocket.observe.console, hocket.observe.trace",
    ],
    ids=["import", "help", "config", "observe"],
)
def test_what_needs_no_tensors_loads_no_heavy_library(code: str) -> None:
    heavy = "print(sorted({'torch', 'ray', 'transformers', 'numpy', 'tensordict'} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\n{heavy}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_public_names_resolve_and_are_few() -> None:
    assert len(hocket.__all__) <= 25
    for name in hocket.__all__:
        assert getattr(hocket, name).__module__.startswith("hocket."), name
    with pytest.raises(AttributeError, match="no public name 'GROP'"):
        hocket.GROP  # noqa: B018
