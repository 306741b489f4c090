"""Bad input gets a clear error, in every placement that meets it, and nothing is lost or left behind."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.errors import ConfigError, DataError, HocketError, PlacementError, RewardError
from hocket.run.train import check, train

REWARDS = {
    "raises": ("def reward(completion, answer):\n    return [][1]\n", "reward.*raised IndexError"),
    "nan": ("def reward(completion, answer):\n    return float('nan')\n", "nan"),
    "count": ("def reward(completions, answer):\n    return [1.0]\n", "1 .*8|8 .*1"),
}


def run(config):
    return train(config, stream=io.StringIO())


@pytest.fixture
def hocket(tmp_path):
    """The command in a process of its own, in an empty folder."""

    def call(*words):
        command = [sys.executable, "-m", "hocket", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    return call


def test_an_unknown_key_exits_with_2_and_the_nearest_name(hocket):
    done = hocket("train", "rolout.group_size=4")
    assert done.returncode == 2
    assert done.stderr.strip() == "ConfigError: unknown key rolout.group_size; did you mean rollout.group_size?"


def test_a_recipe_that_is_not_there_exits_with_2(hocket):
    done = hocket("train", "recipe.yaml")
    assert done.returncode == 2
    assert "'recipe.yaml' does not exist" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"prompts\.csv.*(not exist|no file|not there)"),
        ("", "no prompts|empty"),
        ("prompt,answer\n", "no prompts"),
        ("a,b\n1,2\n", "data.prompt_key"),
        ('prompt,answer\n"open,1\n', "line 2"),
    ],
)
def test_a_prompt_file_that_cannot_be_used(make_config, tmp_path, content, message):
    path = tmp_path / "prompts.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        run(make_config(placement="local", data={"path": str(path)}))


def test_a_column_that_is_missing(make_config):
    with pytest.raises(DataError, match=r"question.*prompt"):
        run(make_config(placement="local", data={"path": "recipe:digits_train.csv", "prompt_key": "question"}))


def test_a_model_folder_without_weights(make_config, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"no weights.*config\.json"):
        run(make_config(placement="local", model={"name": str(folder), "config": {}}))


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", ["local", "colocated", "detached(makers=2)"])
def test_a_broken_reward_is_named_in_every_placement(make_config, ray_address, tmp_path, placement):
    for kind, (source, message) in REWARDS.items():
        path = tmp_path / f"{kind}.py"
        path.write_text(source)
        config = make_config(
            placement=placement, reward=str(path), ray={"address": ray_address}, eval={"path": None, "prompts": None}
        )
        with pytest.raises(RewardError, match=message):
            run(config)
        assert (Path(config.run.dir) / "report.html").exists(), "what there was is written"
        if placement != "local":
            break  # the kinds differ only inside the reward; one shows that the error crosses the process


def test_a_reward_that_needs_a_missing_column_is_found_before_the_start(make_config, tmp_path):
    path = tmp_path / "needs.py"
    path.write_text("def reward(completion, solution):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"needs column solution.*prompt, answer"):
        run(make_config(placement="local", reward=str(path)))


@pytest.mark.ray
@pytest.mark.parametrize("placement", ["colocated(gpus_per_worker=1)", "detached(gpus_per_maker=1)"])
def test_gpus_that_are_not_there(make_config, placement):
    with pytest.raises(PlacementError, match="1 GPUs asked, 0 available"):
        run(make_config(placement=placement))


@pytest.mark.ray
def test_an_attached_cluster_that_is_too_small(make_config, ray_address):
    config = make_config(placement="detached(makers=7)", ray={"address": ray_address})
    with pytest.raises(PlacementError, match="8 CPUs asked, 4 available"):
        run(config)


def test_the_chosen_prompt_reaches_the_reward_whatever_its_column_is_called(make_config, tmp_path):
    (tmp_path / "q.csv").write_text("question,answer,prompt\nsort 21:,12,wrong\nsort 31:,13,wrong\n")
    (tmp_path / "asks.py").write_text("def reward(prompt, completion):\n    return float(prompt.startswith('sort'))\n")
    config = make_config(
        placement="local",
        data={"path": str(tmp_path / "q.csv"), "prompt_key": "question"},
        reward=str(tmp_path / "asks.py"),
        trainer={"max_steps": 1},
        eval={"path": None, "prompts": None},
    )
    assert run(config)["reward_last_tenth"] == 1.0
    sample = json.loads((Path(config.run.dir) / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("sort")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"max_new_tokens": 60}}, "64 positions"),
        ({"model": {"critic": "./none"}}, "does not exist"),
        ({"model": {"config": {"model_type": "llama", "vocab_size": 3}}}, "vocab_size=3 is smaller"),
        ({"algo": {"name": "mine.py"}}, "mine.py:Class"),
    ],
)
def test_what_can_be_seen_before_the_start_leaves_no_folder(make_config, sections, message):
    config = make_config(placement="local", **sections)
    with pytest.raises((ConfigError, DataError), match=message):
        check(config)
    with pytest.raises((ConfigError, DataError), match=message):
        run(config)
    assert not Path(config.run.dir).exists(), "the name is free for the next try"


def test_a_warm_start_without_answers_leaves_no_folder_either(make_config, tmp_path):
    (tmp_path / "p.csv").write_text("prompt\nsort 21:\n")
    (tmp_path / "any.py").write_text("def reward(completion):\n    return 0.0\n")
    config = make_config(
        placement="local",
        data={"path": str(tmp_path / "p.csv")},
        reward=str(tmp_path / "any.py"),
        eval={"path": None, "prompts": None},
    )
    with pytest.raises(DataError, match="answer"):
        run(config)
    assert not Path(config.run.dir).exists()


def test_an_address_where_nobody_answers(make_config):
    with pytest.raises(PlacementError, match="no Ray cluster answers"):
        run(make_config(placement="colocated", ray={"address": "127.0.0.1:1"}))


def test_a_run_name_that_exists(make_config, tmp_path):
    folder = str(tmp_path / "taken")
    run(make_config(placement="local", run={"dir": folder}, trainer={"max_steps": 1}))
    before = (Path(folder) / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"run\.overwrite=true"):
        run(make_config(placement="local", run={"dir": folder}))
    assert (Path(folder) / "metrics.jsonl").read_text() == before
    run(make_config(placement="local", run={"dir": folder, "overwrite": True}, trainer={"max_steps": 1}))


def test_overwrite_never_removes_what_is_no_run(make_config, tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("x")
    with pytest.raises(ConfigError, match="not a run folder"):
        run(make_config(placement="local", run={"dir": str(folder), "overwrite": True}))
    assert (folder / "chapter.tex").exists()


def test_one_sample_per_prompt_cannot_be_compared(make_config):
    with pytest.raises(ConfigError, match=r"rollout\.group_size=1"):
        run(make_config(placement="local", algo={"name": "grpo"}, rollout={"group_size": 1}))


def test_answers_that_cannot_fit_the_model(make_config):
    with pytest.raises(DataError, match="64 positions"):
        run(make_config(placement="local", rollout={"max_new_tokens": 60}))


def test_a_learning_rate_that_explodes_is_stopped_by_name(make_config):
    config = make_config(placement="local", trainer={"lr": 1e12, "max_steps": 20}, algo={"name": "grpo"})
    with pytest.raises(
        HocketError, match=r"(step \d+: .* is (nan|inf))|(logits that are not finite).*lower trainer.lr"
    ):
        run(config)
    shutil.rmtree(config.run.dir)
