"""The run folder: its own, never silently somebody else's."""

import json

import pytest

from hocket.errors import ConfigError
from hocket.read_config import load_config, parse_config
from hocket.run.folder import RunFolder


def config(path, **run):
    return parse_config(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"path": "recipe:digits_train.csv"},
            "reward": "exact",
            "placement": "local",
            "run": {"dir": str(path), **run},
        }
    )


def test_what_is_in_a_new_folder(tmp_path):
    settings = config(tmp_path / "deep" / "run")
    folder = RunFolder(settings)
    assert sorted(p.name for p in folder.path.iterdir()) == [
        *("checkpoints", "config.resolved.yaml", "env.json", "lock", "logs", "samples")
    ]
    assert load_config(folder.path / "config.resolved.yaml") == settings
    facts = json.loads((folder.path / "env.json").read_text())
    assert {"torch", "ray", "hocket"} <= facts["packages"].keys()
    assert (folder.path / "logs" / "latest").resolve() == folder.logs
    assert folder.log("maker-1").endswith("logs/attempt_1/maker-1.log")


def test_samples_and_json(tmp_path):
    folder = RunFolder(config(tmp_path / "run"))
    folder.write_samples(3, [{"completion": "é\n"}])
    folder.write_samples(3, [{"completion": "b"}])
    lines = (folder.samples / "step_000003.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["completion"] for line in lines] == ["é\n", "b"]
    folder.write_json("summary.json", {"steps": 3})
    assert json.loads((folder.path / "summary.json").read_text()) == {"steps": 3}


def test_an_empty_folder_is_taken(tmp_path):
    assert RunFolder(config(tmp_path)).path == tmp_path.resolve()


def test_an_earlier_run_is_refused_and_replaced_only_when_asked(tmp_path):
    folder = RunFolder(config(tmp_path / "run"))
    (folder.path / "metrics.jsonl").write_text("kept")
    with pytest.raises(ConfigError, match=r"holds an earlier run; choose another .* run.overwrite=true"):
        RunFolder(config(tmp_path / "run"))
    assert (folder.path / "metrics.jsonl").read_text() == "kept"
    with pytest.raises(ConfigError, match=r"is in use by process \d+ on .*; wait until that run has ended"):
        RunFolder(config(tmp_path / "run", overwrite=True))
    folder.close()
    again = RunFolder(config(tmp_path / "run", overwrite=True))
    assert not (again.path / "metrics.jsonl").exists()
    assert (again.path / "env.json").exists()


def test_a_folder_of_something_else_is_never_deleted(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        RunFolder(config(tmp_path))
    with pytest.raises(ConfigError, match=r"is not a run folder; run.overwrite only replaces earlier runs"):
        RunFolder(config(tmp_path, overwrite=True))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("")
    for path in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(ConfigError, match=r"cannot make run folder .*; choose another run.dir"):
            RunFolder(config(path))


def test_a_run_without_a_name_is_called_by_task_model_and_time(tmp_path):
    assert RunFolder(config(tmp_path / "run")).name.startswith("digits_train--llama--")


def test_a_folder_that_resumes_keeps_what_belongs_to_its_steps(tmp_path):
    folder = RunFolder(config(tmp_path / "run"))
    folder.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 1, 2, 3, 2)) + '{"ste')
    for step in (1, 3):
        folder.write_samples(step, [{"completion": "a"}])
    folder.close()
    again = RunFolder(config(tmp_path / "run"), again=True)
    again.forget_after(2)
    assert [json.loads(line)["step"] for line in again.metrics.read_text().splitlines()] == [0, 1, 2, 2]
    assert [path.stem for path in again.samples.iterdir()] == ["step_000001"]
    assert again.log("maker-1").endswith("logs/attempt_2/maker-1.log")
    assert (again.path / "logs" / "latest").resolve() == again.logs


def test_a_request_is_taken_once(tmp_path):
    folder = RunFolder(config(tmp_path / "run"))
    assert folder.take_request("makers") is None
    (folder.path / "request.makers").write_text("3")
    assert folder.take_request("makers") == 3
    assert folder.take_request("makers") is None
