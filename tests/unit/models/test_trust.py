"""What a model's files may do: their code runs only when the config says so, and weights are tensors."""

import json
import logging
import os
import shutil

import pytest
import torch

from hocket.errors import ConfigError, DataError
from hocket.models.load import (
    ModelSpec,
    Trust,
    check_model_folder,
    load_causal_lm,
    load_tokenizer,
    named_positions,
    named_stop_ids,
    save_hf,
)
from hocket.read_config import parse_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def folder(tiny, tokenizer, tmp_path):
    save_hf(tmp_path / "m", tiny(), tokenizer, (1,))
    return tmp_path / "m"


@pytest.fixture
def pickled(folder):
    """The same model with its weights in a pickle."""
    model = load_causal_lm(ModelSpec(str(folder)))
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder, model


@pytest.fixture
def coded(folder):
    """A model whose config names Python files of its own; they leave a mark when they run."""
    mark = folder.parent / "mark"
    (folder / "own.py").write_text(
        f"import os; os.makedirs({str(mark)!r}, exist_ok=True)\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": auto}))
    return folder, mark


def test_weights_in_a_pickle_need_the_setting(pickled):
    folder, model = pickled
    with pytest.raises(DataError, match=r"only in pickles, \['pytorch_model.bin'\].*model.allow_pickle_weights=true"):
        load_causal_lm(ModelSpec(str(folder)))
    again = load_causal_lm(ModelSpec(str(folder), trust=Trust(pickle_weights=True)))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_a_pickle_that_holds_more_than_tensors_is_refused_and_not_run(pickled, tmp_path):
    folder, _ = pickled
    torch.save({"lm_head.weight": Bomb(str(tmp_path / "mark"))}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="cannot load model"):
        load_causal_lm(ModelSpec(str(folder), trust=Trust(pickle_weights=True)))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "load",
    [
        lambda name: load_causal_lm(ModelSpec(name)),
        named_positions,
        lambda name: load_tokenizer(None, model=name),
    ],
)
def test_a_models_own_code_does_not_run(coded, load):
    folder, mark = coded
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError):
        load(str(folder))
    assert not mark.exists()


def test_a_models_own_code_runs_when_the_config_says_so_and_that_is_said(coded, caplog):
    folder, mark = coded
    trust = Trust(remote_code=True)
    with caplog.at_level(logging.WARNING, "hocket"):
        model = load_causal_lm(ModelSpec(str(folder), trust=trust))
    assert type(model).__name__ == "OwnModel"
    assert mark.exists()
    assert f"Python files of {str(folder)!r} run with all your rights" in caplog.text
    assert named_stop_ids(str(folder), trust=trust) == [1]
    assert named_positions(str(folder), trust=trust)


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:12]])
def test_the_code_of_an_id_needs_its_commit(revision):
    with pytest.raises(ConfigError, match=rf"'some/model', found model.revision={revision!r}; wanted the commit"):
        Trust(revision, remote_code=True).options("some/model")
    assert Trust(COMMIT, remote_code=True).options("some/model") == {"trust_remote_code": True, "revision": COMMIT}


def test_trust_is_for_the_model_that_is_named_and_for_folders_here(folder):
    settings = {"model": {"name": "some/model", "revision": COMMIT, "trust_remote_code": "true"}}
    section = parse_config(settings | {"data": {"path": "p.csv"}, "reward": "exact"}).model
    assert Trust.of(section, "some/model") == Trust(COMMIT, remote_code=True)
    assert Trust.of(section, "other/critic") == Trust()
    assert Trust.of(section, str(folder)).options(str(folder)) == {"trust_remote_code": True}
    assert Trust(COMMIT).options("some/model") == {"trust_remote_code": False, "revision": COMMIT}


@pytest.mark.parametrize("damage", ["cut", "header", "huge", "json", "shard"])
def test_damaged_files_are_one_error_that_names_the_model(folder, damage):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[: len(whole) // 2])
    elif damage == "header":
        weights.write_bytes(whole[:8] + b"x" + whole[9:])
    elif damage == "huge":
        weights.write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    elif damage == "json":
        (folder / "config.json").write_text("{")
    else:
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.unlink()
    with pytest.raises(DataError, match=str(folder)):
        load_causal_lm(ModelSpec(str(folder)))


def test_a_folder_without_any_weights_is_no_pickle_folder(folder):
    shutil.copy(folder / "config.json", folder / "config.bak")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="has no weights"):
        check_model_folder(str(folder), Trust(pickle_weights=True))
