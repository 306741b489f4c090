"""A folder with its final name is always whole."""

import json
from pathlib import Path

import pytest

from hocket.errors import CheckpointError
from hocket.run.checkpoint import write_checkpoint


def save(folder):
    (Path(folder) / "hf").mkdir()
    (Path(folder) / "hf" / "model.safetensors").write_text("weights")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_written_marked_and_found_as_latest(tmp_path):
    folder = tmp_path / "checkpoints"
    path = write_checkpoint(folder, 7, save, sha256="abc")
    assert path == folder / "step_000007"
    assert names(path) == ["COMPLETE", "hf"]
    assert json.loads((path / "COMPLETE").read_text()) == {"step": 7, "weights_sha256": "abc"}
    write_checkpoint(folder, 12, save, sha256="def")
    assert names(folder) == ["latest", "step_000007", "step_000012"]
    assert (folder / "latest").resolve() == (folder / "step_000012").resolve()
    assert not Path((folder / "latest").readlink()).is_absolute()  # the run folder may move


@pytest.mark.parametrize(("error", "raised"), [(OSError("disk full"), CheckpointError), (ValueError("x"), ValueError)])
def test_a_save_that_raises_leaves_no_final_folder(tmp_path, error, raised):
    write_checkpoint(tmp_path, 1, save, sha256="abc")

    def torn(folder):
        save(folder)
        raise error

    with pytest.raises(raised) as caught:
        write_checkpoint(tmp_path, 2, torn, sha256="def")
    if raised is CheckpointError:
        assert "step_000002': disk full; free space or set run.dir" in caught.value.message
    assert not (tmp_path / "step_000002").exists()
    assert (tmp_path / "latest").resolve().name == "step_000001"
    assert write_checkpoint(tmp_path, 2, save, sha256="def").name == "step_000002"  # the torn one is cleared away
    assert names(tmp_path) == ["latest", "step_000001", "step_000002"]


def test_the_same_step_again_replaces_it(tmp_path):
    write_checkpoint(tmp_path, 1, save, sha256="abc")
    path = write_checkpoint(tmp_path, 1, lambda folder: None, sha256="def")
    assert names(path) == ["COMPLETE"]


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        write_checkpoint(tmp_path / "file", 1, save, sha256="abc")
