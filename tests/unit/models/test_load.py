"""Loading models and tokenizers, and what is said when a folder is not what it should be."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hocket.errors import ConfigError, DataError
from hocket.models.load import (
    ModelSpec,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    named_stop_ids,
    pad_token_id,
    save_hf,
)

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="session")
def saved(tiny, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_hf(folder, tiny(), tokenizer, (1, 7))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "tiny")
    return tmp_path / "tiny"


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def say(spec, load=load_causal_lm, **options):
    with pytest.raises((DataError, ConfigError)) as caught:
        load(spec, **options)
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bloom", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_saved_models_load_with_equal_logits(tiny, tokenizer, tmp_path, kind, tied):
    model = tiny(kind, tie_word_embeddings=tied)
    save_hf(tmp_path, model, tokenizer, (1, 7))
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path).eval(), load_causal_lm(ModelSpec(str(tmp_path)))):
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied
    assert named_stop_ids(str(tmp_path)) == [1, 7]
    assert AutoTokenizer.from_pretrained(tmp_path).encode("12") == tokenizer.encode("12")


def test_a_fresh_model_depends_on_its_seed_alone(tiny_config):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (load_causal_lm(ModelSpec(config=tiny_config(), seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's noise is used up
    assert torch.equal(one(IDS).logits, same(IDS).logits)
    assert not torch.equal(one(IDS).logits, other(IDS).logits)


def test_models_come_without_dropout_and_in_the_asked_dtype(tiny_config, saved):
    assert not load_causal_lm(ModelSpec(config=tiny_config("gpt2"))).training
    for spec in (ModelSpec(str(saved), dtype="bfloat16"), ModelSpec(config=tiny_config(), dtype="bfloat16")):
        assert {p.dtype for p in load_causal_lm(spec).parameters()} == {torch.bfloat16}


def test_end_tokens_without_a_generation_config_are_the_configs(copy):
    (copy / "generation_config.json").unlink()
    assert named_stop_ids(str(copy)) == 1
    (copy / "config.json").write_text("{")
    with pytest.raises(DataError, match="cannot load model"):
        named_stop_ids(str(copy))


def test_missing_folder(saved):
    message = say(ModelSpec(str(saved.parent / "tinny")))
    assert "does not exist; did you mean" in message
    assert message.endswith("tiny'?")
    assert "does not exist" in say(ModelSpec("/nowhere/at/all"))


def test_a_file_is_no_folder(saved):
    assert "is a file; wanted a folder" in say(ModelSpec(str(saved / "config.json")))


def test_no_config(copy):
    (copy / "config.json").unlink()
    assert "has no config.json" in say(ModelSpec(str(copy)))


def test_no_weights(copy):
    (copy / "model.safetensors").unlink()
    assert "has no weights: wanted *.safetensors, found ['config.json'" in say(ModelSpec(str(copy)))


def test_only_a_bin_file(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    message = say(ModelSpec(str(copy)))
    assert "'pytorch_model.bin'" in message
    assert "model.allow_pickle_weights=true" in message


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: rewrite(f, model_type="lamma"), "cannot load model"),
        (lambda f: rewrite(f, model_type="t5"), "cannot load model"),
        (lambda f: rewrite(f, hidden_size=32), "its config.json wants (99, 32)"),
        (lambda f: (f / "config.json").write_text("{"), "not a valid JSON file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"xx"), "header too small"),
    ],
)
def test_damaged_folders(copy, damage, text):
    damage(copy)
    message = say(ModelSpec(str(copy)))
    assert text in message
    assert repr(str(copy)) in message


def test_missing_weights_are_never_filled_at_random(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "no weights for 1 tensors of LlamaForCausalLM, e.g. ['model.layers.1.mlp" in say(ModelSpec(str(copy)))
    message = say(ModelSpec(str(copy)), load_scalar_model, fresh_head=True)
    assert "no weights for 1 tensors of LlamaForSequenceClassification" in message


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "lama"}, "'lama' is no causal language model of transformers; did you mean 'llama'?"),
        ({"model_type": "vit"}, "'vit' is no causal language model"),
        ({"hidden_size": 8}, "model_type None"),
        ({"model_type": "llama", "hidden_sise": 8}, "hidden_sise is no setting of llama; did you mean hidden_size?"),
        ({"model_type": "llama", "hidden_size": 15, "num_attention_heads": 2}, "makes no llama model"),
    ],
)
def test_configs_that_make_no_model(config, text):
    assert text in say(ModelSpec(config=config))


def test_a_new_critic_values_every_state_with_zero(saved, tiny):
    critic = load_scalar_model(ModelSpec(str(saved)), fresh_head=True)
    assert not critic.training
    assert not bool(critic.score.weight.any())
    assert torch.equal(critic.model.embed_tokens.weight, tiny().model.embed_tokens.weight)


def test_a_trained_head_is_kept(saved, tokenizer, tmp_path):
    critic = load_scalar_model(ModelSpec(str(saved)), fresh_head=True)
    torch.nn.init.ones_(critic.score.weight)
    save_hf(tmp_path, critic, tokenizer, (1,))
    for fresh in (True, False):
        assert bool((load_scalar_model(ModelSpec(str(tmp_path)), fresh_head=fresh).score.weight == 1).all())
    assert "lm_head.weight" in say(ModelSpec(str(tmp_path)))  # a critic is no policy


def test_a_policy_is_no_reward_model(saved):
    message = say(ModelSpec(str(saved)), load_scalar_model, fresh_head=False)
    assert "['LlamaForCausalLM'], which has no score head" in message


def test_a_reward_model_has_one_label(tiny_config, tmp_path):
    settings = tiny_config()
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    assert "scores 3 labels" in say(ModelSpec(str(tmp_path)), load_scalar_model, fresh_head=False)


@torch.no_grad()
def test_a_critic_or_reward_model_from_a_bare_config(tiny_config, tiny):
    spec = ModelSpec(config=tiny_config())
    critic, reward, again = (load_scalar_model(spec, fresh_head=fresh) for fresh in (True, False, False))
    assert not bool(critic.score.weight.any())
    assert bool(reward.score.weight.any())
    assert torch.equal(reward.score.weight, again.score.weight)  # it depends on the seed alone
    policy = tiny(sharp=1.0).model(IDS).last_hidden_state
    assert torch.equal(critic.model(IDS).last_hidden_state, policy)  # the backbone of a policy of the same seed


def test_an_architecture_without_a_score_head():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = ModelSpec(config={"model_type": "bert", "vocab_size": 30, **sizes})
    assert "BertForSequenceClassification has no `score` head" in say(bert, load_scalar_model, fresh_head=True)


def test_tokenizers(saved, copy):
    assert load_tokenizer("chars").encode("1") == load_tokenizer(None, model=str(saved)).encode("1")
    assert load_tokenizer("chars", model=str(saved)).name_or_path == ""
    with pytest.raises(ConfigError, match=r"needs model.tokenizer: a folder, an id, or 'chars'"):
        load_tokenizer(None)
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(DataError, match=r"no tokenizer in .*; set model.tokenizer"):
        load_tokenizer(None, model=str(copy))


def test_a_tokenizer_without_padding_pads_with_its_end_token(tokenizer, copy):
    path = copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in settings.items() if k != "pad_token"}))
    assert pad_token_id(load_tokenizer(str(copy))) == tokenizer.eos_token_id
    path.write_text(json.dumps({k: v for k, v in settings.items() if k not in ("pad_token", "eos_token")}))
    assert pad_token_id(load_tokenizer(str(copy))) == 0


def test_an_encoder_is_no_causal_model():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = {"model_type": "bert", "vocab_size": 30, **sizes}
    with pytest.raises(ConfigError, match=r"looks at later tokens.*is_decoder: true"):
        load_causal_lm(ModelSpec(config=bert))
    load_causal_lm(ModelSpec(config={**bert, "is_decoder": True}))
