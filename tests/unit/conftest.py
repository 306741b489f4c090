"""Tiny models and the character tokenizer, for all unit tests."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from hocket.data.proto import DataProto
from hocket.data.schema import positions
from hocket.models.chars import char_tokenizer
from hocket.models.load import ModelSpec, load_causal_lm

SIZES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "opt": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 32,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 16,
    },
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    },
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return char_tokenizer()


@pytest.fixture(scope="session")
def tiny_config(tokenizer) -> Callable[..., dict]:
    """Settings of a model of 2 layers and hidden size 16 for the `chars` tokenizer."""

    def config(kind: str = "llama", **changes) -> dict:
        special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
        return {"model_type": kind, "vocab_size": len(tokenizer), **special, **SIZES[kind], **changes}

    return config


@pytest.fixture(scope="session")
def tiny(tiny_config) -> Callable[..., PreTrainedModel]:
    """A fresh model; `sharp` widens its weights, so that its distributions are not nearly flat."""

    def model(kind: str = "llama", *, seed: int = 0, sharp: float = 4.0, **changes) -> PreTrainedModel:
        built = load_causal_lm(ModelSpec(config=tiny_config(kind, **changes), seed=seed))
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.mul_(sharp if parameter.dim() > 1 else 1.0)
        return built

    return model


@pytest.fixture
def make_critic(tiny_config):
    def critic(seed=5):
        settings = tiny_config()
        config = AutoConfig.for_model(settings.pop("model_type"), **settings, num_labels=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForSequenceClassification.from_config(config).eval()

    return critic


@pytest.fixture
def experience() -> Callable[..., DataProto]:
    """Experience without a maker: `lengths` rows in groups of `group`; padding holds arbitrary tokens."""

    def experience(lengths, *, group=4, extra=0, seed=0) -> DataProto:
        draw = torch.Generator().manual_seed(seed)
        rows, width = len(lengths), max(lengths)
        length, start = torch.tensor(lengths), torch.full((rows,), 3)
        mask = positions(length, width) & ~positions(start, width)
        noise = torch.randn(2, rows, width, generator=draw)
        tensors = {
            "input_ids": torch.randint(3, 99, (rows, width), generator=draw),
            "prompt_length": start,
            "length": length,
            "sample": torch.arange(rows) % group,
            "response_mask": mask,
            "rollout_logprobs": torch.where(mask, -5.0 + 0.5 * noise[0], 0.0),
            "reference_logprobs": torch.where(mask, -5.0 + 0.5 * noise[1], 0.0),
            "version": torch.where(mask, 0, -1).int(),
            "truncated": torch.arange(rows) % 3 == 0,
            "score": torch.rand(rows, generator=draw),
        }
        junk = torch.nn.functional.pad
        wide = {
            key: junk(t, (0, extra), value={"input_ids": 7, "version": -1}.get(key, 0)) if t.dim() == 2 else t
            for key, t in tensors.items()
        }
        columns = {"uid": [f"p:{i // group}:0" for i in range(rows)], "row": [{"answer": ""} for _ in range(rows)]}
        return DataProto.from_dict(wide, columns, {"step": 0, "unit": 0})

    return experience
