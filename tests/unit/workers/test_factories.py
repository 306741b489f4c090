"""Models and tokenizers under their old names, and the rank environment."""

import os

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from hocket.errors import ConfigError, DataError
from hocket.models.load import load_tokenizer, save_hf
from hocket.workers.factories import (
    get_actor_from_args,
    get_critic_from_args,
    get_model_numel,
    get_rank,
    get_reward_model_from_args,
    get_tokenizer_from_args,
    get_world_size,
    is_rank_0,
    set_dist_env,
)


@pytest.fixture(scope="module")
def saved(tiny, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_hf(folder, tiny(), tokenizer, (1,))
    return str(folder)


def same(a, b):
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "opt", "llama"])
def test_fresh_models_of_a_config(tiny_config, kind):
    settings = tiny_config(kind)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    actor, again = get_actor_from_args(kind, config=config), get_actor_from_args(kind, config=settings)
    assert actor.config.model_type == kind
    assert same(actor, again)  # a config object or a dict, with or without its model_type: every process has the same
    critic, reward = get_critic_from_args(kind, config=config), get_reward_model_from_args(kind, None, config)
    assert not bool(critic.score.weight.any())
    assert bool(reward.score.weight.any())
    assert critic.score.weight.shape == reward.score.weight.shape == (1, 16)
    assert same(critic.base_model, actor.base_model)
    assert not any(model.training for model in (actor, critic, reward))


def test_another_architecture_of_transformers_by_its_name(tiny_config):
    settings = tiny_config("llama")
    del settings["model_type"]
    assert get_actor_from_args("qwen2", config={**settings, "num_key_value_heads": 2}).config.model_type == "qwen2"


@pytest.mark.parametrize("arguments", [("llama", "{}"), ("{}",), ("{}", "{}")])
def test_saved_models(saved, tiny, arguments):
    arguments = [text.format(saved) for text in arguments]
    assert same(get_actor_from_args(*arguments), tiny())
    critic = get_critic_from_args(*arguments)
    assert not bool(critic.score.weight.any())
    assert torch.equal(critic.model.embed_tokens.weight, tiny().model.embed_tokens.weight)
    with pytest.raises(DataError, match="has no score head"):
        get_reward_model_from_args(*arguments)


def test_a_trained_reward_model_keeps_its_head(saved, tokenizer, tmp_path):
    critic = get_critic_from_args("llama", saved)
    torch.nn.init.ones_(critic.score.weight)
    save_hf(tmp_path, critic, tokenizer, (1,))
    assert bool((get_reward_model_from_args("llama", str(tmp_path)).score.weight == 1).all())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("gpt2", "{}"), r"is a llama model, but `model` says 'gpt2'"),
        (("{}/x", "{}"), r"is a llama model, but `model` says"),
        (("llama", "{}", {"hidden_size": 8}), r"found pretrained=.* and a config; give the one"),
        (("gpt2", None, {"model_type": "opt"}), r"the config is of opt, but `model` says 'gpt2'"),
        (("gpt2", None, 7), r"config is a int; wanted a transformers config or a dict"),
        (("gtp2", None, {}), r"'gtp2' is no causal language model of transformers; did you mean 'gpt2'"),
        (("gpt2", None, {"n_layr": 2}), r"n_layr is no setting of gpt2; did you mean n_layer"),
    ],
)
def test_arguments_that_contradict_each_other(saved, arguments, text):
    arguments = [value.format(saved) if isinstance(value, str) else value for value in arguments]
    for get in (get_actor_from_args, get_critic_from_args, get_reward_model_from_args):
        with pytest.raises(ConfigError, match=text):
            get(*arguments)


def test_lora_is_refused_until_it_is_there(saved):
    for get in (get_actor_from_args, get_critic_from_args):
        with pytest.raises(ConfigError, match="lora_rank=8: LoRA is not there yet"):
            get("llama", saved, lora_rank=8)


def test_a_folder_that_is_not_there(saved):
    with pytest.raises(DataError, match="does not exist; did you mean"):
        get_actor_from_args("llama", saved.replace("tiny", "tinny"))


def test_tokenizers(saved, tokenizer):
    for found in (get_tokenizer_from_args("llama", pretrain=saved), get_tokenizer_from_args(saved)):
        assert found.encode("12") == tokenizer.encode("12")
    assert get_tokenizer_from_args("gpt2", pretrain="chars").encode("1") == load_tokenizer("chars").encode("1")
    with pytest.raises(ConfigError, match="llama models have no usual tokenizer; give pretrain="):
        get_tokenizer_from_args("llama")
    with pytest.raises(ConfigError, match=r"found \['pretrained'\] for the tokenizer of 'gpt2'"):
        get_tokenizer_from_args("gpt2", pretrained=saved)


def test_numel_counts_tied_parameters_once(tiny):
    tied, untied = tiny(tie_word_embeddings=True), tiny(tie_word_embeddings=False)
    head = untied.lm_head.weight.numel()
    assert get_model_numel(untied) - get_model_numel(tied) == head > 0


ENV = {"local_rank": "0", "rank": "1", "world_size": "2", "master_port": "29500", "master_addr": "127.0.0.1"}


def test_a_process_alone_is_rank_0_and_a_member_has_its_rank():
    assert (get_rank(), get_world_size(), is_rank_0()) == (0, 1, True)
    # torch's own world of one process: ranks and sizes are real, collectives do nothing
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        assert (get_rank(), get_world_size(), is_rank_0()) == (1, 2, False)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def own_environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("own_environment")
def test_the_rank_environment_is_exported():
    set_dist_env(ENV)
    assert {key: os.environ[key.upper()] for key in ENV} == ENV


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rank": None}, r"lacks \['rank'\]"),
        ({"master_adr": "x"}, r"unknown \['master_adr'\]"),
        ({"rank": 1}, r"env_info\['rank'\] is 1; wanted a string"),
        ({"rank": "one"}, r"env_info\['rank'\] is 'one'; wanted a number"),
        ({"rank": "2"}, r"env_info\['rank'\] is 2; wanted one below world_size 2"),
        ({"local_rank": "-1"}, r"env_info\['local_rank'\] is '-1'"),
        ({"world_size": "0"}, r"env_info\['world_size'\] is '0'; wanted a number from 1"),
        ({"master_port": "70000"}, r"env_info\['master_port'\] is '70000'; wanted a number from 1 to 65535"),
        ({"master_addr": "auto"}, r"env_info\['master_addr'\] is 'auto'; wanted the address of rank 0"),
    ],
)
@pytest.mark.usefixtures("own_environment")
def test_a_malformed_environment_is_refused_whole(change, text):
    for key in ENV:
        os.environ.pop(key.upper(), None)
    with pytest.raises(ConfigError, match=text):
        set_dist_env({key: value for key, value in (ENV | change).items() if value is not None})
    assert not any(key.upper() in os.environ for key in ENV)
