"""What must not stand in the code: unpickling, running text, shells, open ports, trust without being asked (B19).

Python is read as a tree, so that a comment or a message may name what code may not do. Other files are read as text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hocket

ROOT = Path(hocket.__file__).parent.parent
LOOKED_AT = ("hocket", "examples", "benchmarks")

# (file, rule): why it may stand there. A line that no longer needs its exception fails the test.
ALLOWED = {
    ("hocket/rewards/adapters.py", "unpickle"): "the bytes are in our own object, which pickle is already reading",
    ("hocket/roles/build.py", "unpickle"): "the bytes are in our own object, which pickle is already reading",
    ("benchmarks/side.py", "unpickle"): "its own bytes, made in the same line, to measure how long that takes",
    ("hocket/data/userfile.py", "run text"): "the one place that runs a Python file, which the config names",
}

_UNPICKLERS = {"load", "loads", "Unpickler", "read_pickle"}
_PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "_pickle"}
_WORDS = {"shell": "shell", "trust_remote_code": "trust"}
_TEXT = [
    ("open port", re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")),
    ("kill by name", re.compile(r"\bray stop\b|\bpkill\b|\bkillall\b")),
    ("trust", re.compile(r"trust_remote_code\s*[:=]\s*(true|yes|on)\b", re.IGNORECASE)),
]


def faults(source: str) -> list[tuple[int, str]]:
    """(line, rule) of everything in Python source that must not be there."""
    tree = ast.parse(source)
    came = {a.asname or a.name: (n.module, a.name) for n in _imports(tree) for a in n.names}
    found = [(node.lineno, rule) for node in ast.walk(tree) for rule in _of(node, came)]
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for node in texts:
        rules = [] if id(node) in docs else [rule for rule, pattern in _TEXT if pattern.search(str(node.value))]
        found += [(node.lineno, rule) for rule in rules]
    return sorted(found)


def faults_of_text(text: str) -> list[tuple[int, str]]:
    """The same for files that are no Python: recipes, shell, settings."""
    lines = enumerate(text.splitlines(), start=1)
    return [(i, rule) for i, line in lines for rule, pattern in _TEXT if pattern.search(line.split("#")[0])]


def _imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))


def _of(node: ast.AST, came: dict[str, tuple[str | None, str]]) -> Iterator[str]:
    if isinstance(node, ast.keyword) and node.arg in _WORDS and ast.unparse(node.value) == "True":
        yield _WORDS[node.arg]
    if isinstance(node, ast.Attribute) and node.attr == "cancel" and ast.unparse(node.value) == "ray":
        yield "cancel"
    if not isinstance(node, ast.Call):
        return
    place, _, name = ast.unparse(node.func).rpartition(".")
    if not place and name in came:
        place, name = came[name][0] or "", came[name][1]
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if (place.split(".")[0] in _PICKLES and name in _UNPICKLERS) or name == "read_pickle":
        yield "unpickle"
    if place == "torch" and name == "load" and given.get("weights_only") != "True":
        yield "torch.load"
    if (place == "numpy" or place == "np") and name == "load" and given.get("allow_pickle", "False") != "False":
        yield "unpickle"
    if ((not place or place == "builtins") and name in ("eval", "exec")) or name == "exec_module":
        yield "run text"
    if place == "os" and name in ("system", "popen"):
        yield "shell"
    if place == "yaml" and name in ("load", "load_all", "unsafe_load", "full_load"):
        yield "yaml"
    if place == "ray" and name == "cancel" and isinstance(node.func, ast.Name):
        yield "cancel"


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ("import pickle\npickle.loads(b'')", ["unpickle"]),
        ("from pickle import loads as read\nread(b'')", ["unpickle"]),
        ("import cloudpickle\ncloudpickle.load(f)", ["unpickle"]),
        ("pickle.Unpickler(f)", ["unpickle"]),
        ("pandas.read_pickle('f')", ["unpickle"]),
        ("np.load('f', allow_pickle=True)", ["unpickle"]),
        ("np.load('f')", []),
        ("pickle.dumps(1)", []),
        ("json.loads('1')", []),
        ("torch.load('f')", ["torch.load"]),
        ("torch.load('f', weights_only=False)", ["torch.load"]),
        ("torch.load('f', weights_only=True)", []),
        ("from torch import load\nload('f')", ["torch.load"]),
        ("eval('1')", ["run text"]),
        ("exec(code)", ["run text"]),
        ("model.eval()", []),
        ("spec.loader.exec_module(m)", ["run text"]),
        ("run('x', shell=True)", ["shell"]),
        ("run('x', shell=False)", []),
        ("os.system('x')", ["shell"]),
        ("yaml.load(f)", ["yaml"]),
        ("yaml.safe_load(f)", []),
        ("from yaml import load\nload(f)", ["yaml"]),
        ("serve(host='0.0.0.0')", ["open port"]),
        ("version = '10.0.0.0.1'", []),
        ("load(name, trust_remote_code=True)", ["trust"]),
        ("load(name, trust_remote_code=section.trust_remote_code)", []),
        ("words = ['trust_remote_code=true']", ["trust"]),
        ("ray.cancel(ref)", ["cancel"]),
        ("from ray import cancel\ncancel(ref)", ["cancel"]),
        ("stop = ray.cancel", ["cancel"]),
        ("task.cancel()", []),
        ("run('ray stop')", ["kill by name"]),
        ("run(['pkill', name])", ["kill by name"]),
        ("'''One may say pkill in a docstring.'''\n# and in a comment: eval(x)", []),
    ],
)
def test_the_rules_themselves(source, rules):
    assert [rule for _, rule in faults(source)] == rules


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("model:\n  trust_remote_code: true", ["trust"]),
        ("model:\n  trust_remote_code: false", []),
        ("host: 0.0.0.0", ["open port"]),
        ("ray stop --force", ["kill by name"]),
        ("# never ray stop", []),
    ],
)
def test_the_rules_for_other_files(text, rules):
    assert [rule for _, rule in faults_of_text(text)] == rules


def test_none_of_it_stands_in_our_files():
    found: dict[tuple[str, str], list[int]] = {}
    files = [path for folder in LOOKED_AT for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    for path in files:
        if path.suffix not in (".py", ".yaml", ".yml", ".sh", ".toml"):
            continue
        look = faults if path.suffix == ".py" else faults_of_text
        for line, rule in look(path.read_text(encoding="utf-8")):
            found.setdefault((path.relative_to(ROOT).as_posix(), rule), []).append(line)
    new = [f"{name}:{lines}: {rule}" for (name, rule), lines in found.items() if (name, rule) not in ALLOWED]
    assert not new, "\n".join(new)
    assert ALLOWED.keys() == found.keys(), f"no longer needed: {ALLOWED.keys() - found.keys()}"
    assert all(len(lines) == 1 for lines in found.values()), f"each exception is for one line: {found}"
