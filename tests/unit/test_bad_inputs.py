"""Bad recipes and bad scores: one error of ours that names the key, at once, and nothing in the file runs."""

from pathlib import Path

import pytest

from hocket.errors import ConfigError, RewardError
from hocket.read_config import load_config
from hocket.rewards.adapters import load_reward

BASE = "model: {name: m}\ndata: {path: p.csv}\nreward: exact\n"
BOMB = "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else '*a'] * 10)}]\n" for i in range(9))

RECIPES = {
    "empty": ("", "model is not set"),
    "list": ("[1, 2]", "`section: settings` pairs"),
    "broken": ("{a: [", "is not valid YAML"),
    "not text": (b"\xff\xfe\x00", "is not valid YAML"),
    "python tag": (BASE + "seed: !!python/object/apply:os.mkdir ['mark']", "could not determine a constructor"),
    "aliases": (BASE + BOMB, "is not valid YAML: YAML node expansion"),
    "key twice": (BASE + "seed: 1\nseed: 2", "duplicate key seed"),
    "unknown key": (BASE + "trainer: {max_step: 1}", "did you mean trainer.max_steps"),
    "null section": (BASE + "trainer: null", "trainer=None"),
    "true for a number": (BASE + "trainer: {max_steps: true}", "max_steps wants a number, not true"),
    "false for a number or null": (BASE + "checkpoint: {every: false}", "every wants a number, not false"),
    "infinite": (BASE + "trainer: {lr: .inf}", "trainer.lr=inf"),
    "too large": (BASE + "trainer: {lr: 1e400}", "trainer.lr="),
    "nan": (BASE + "trainer: {lr: .nan}", "trainer.lr=nan"),
    "refers to itself": (BASE + "run: {name: '${run.name}'}", "run.name"),
    "undefined variable": (BASE + "run: {name: '${oc.env:NO_SUCH_VARIABLE}'}", "NO_SUCH_VARIABLE"),
    "nul in a name": (BASE + 'run: {name: "a\\0b"}', "run.name='a\\x00b': the name must be that of one folder"),
    "line break in a name": (BASE + 'run: {name: "a\\nb"}', "run.name="),
    "upwards": (BASE + "run: {name: ../x}", "run.name='../x'"),
    "dots": (BASE + "run: {name: ..}", "run.name='..'"),
    "no name": (BASE + "run: {name: ''}", "run.name=''"),
    "long name": (BASE + f"run: {{name: {'x' * 300}}}", "1 to 200 bytes"),
    "nul in a path": (BASE + 'run: {dir: "a\\0b"}', "run.dir='a\\x00b'"),
    "no path": (BASE + "run: {dir: ''}", "run.dir=''"),
    "nul in data": (BASE.replace("p.csv", '"a\\0b"'), "data.path="),
    "buffer": (BASE + "placement: {kind: detached, max_staleness: -1}", "placement.max_staleness=-1"),
    "negative GPUs": (BASE + "placement: {kind: detached, gpus_per_maker: -1}", "placement.gpus_per_maker=-1"),
    "timeout": (BASE + "ray: {call_timeout: 0}", "ray.call_timeout=0"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_recipe(tmp_path, name):
    content, message = RECIPES[name]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in caught.value.message
    assert not Path("mark").exists()


@pytest.mark.parametrize("name", ["a b", "größe-1", "7", "x" * 200])
def test_names_that_are_unusual_and_good(tmp_path, name):
    (tmp_path / "recipe.yaml").write_text(BASE + f"run: {{name: '{name}'}}", encoding="utf-8")
    assert load_config(tmp_path / "recipe.yaml").run.name == name


@pytest.mark.parametrize(
    "result",
    [float("nan"), float("-inf"), None, "0.5", b"1", 1j, [1.0, 2.0], 1e10, -1e300, 10**400, {"score": 1e10}, {"x": 1}],
)
def test_a_bad_score(result):
    with pytest.raises(RewardError, match="sample u0"):
        load_reward(lambda completion: result)(["p"], ["c"], [{"answer": ""}], ["u0"])
