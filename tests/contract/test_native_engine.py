"""The decode loop against `model.generate` and a plain forward, for four architectures."""

import numpy as np
import pytest
import torch

from hocket.data.proto import DataProto
from hocket.data.schema import ROLLOUTS, check
from hocket.errors import DataError, WeightSyncError
from hocket.models.load import ModelSpec, load_causal_lm
from hocket.models.policy import named_weights, token_logprobs
from hocket.rollout.engine import Sampling
from hocket.rollout.native import NativeEngine

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
CONFIGS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}


@pytest.fixture(params=CONFIGS, scope="module")
def model(request):
    torch.set_num_threads(1)
    spec = ModelSpec(config={"model_type": request.param, **SMALL, **CONFIGS[request.param]}, seed=3)
    model = load_causal_lm(spec)
    # random weights this small make nearly flat distributions; sharpen them so that greedy choices differ
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model


def prompts(lengths=(3, 7, 5), seed=0):
    rng = np.random.default_rng(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for i, length in enumerate(lengths):
        ids[i, :length] = torch.from_numpy(rng.integers(2, VOCABULARY, length))
    return DataProto.from_dict(
        {"input_ids": ids, "prompt_length": torch.tensor(lengths)},
        {"uid": [f"p:{i}:0" for i in range(len(lengths))], "row": [{"answer": ""} for _ in lengths]},
    )


def engine(model, stop_ids=(1,)):
    return NativeEngine(model, stop_ids=stop_ids, pad_id=0)


def response(data, i):
    start, end = int(data.tensor("prompt_length")[i]), int(data.tensor("length")[i])
    return data.tensor("input_ids")[i, start:end].tolist()


def test_greedy_equals_generate(model):
    stop = tuple(range(1, 12))
    out = engine(model, stop).generate(prompts(), Sampling(12, greedy=True), samples=1, seed=0)
    for i, prompt in enumerate(prompts().split(1)):
        ids = prompt.tensor("input_ids")[:, : int(prompt.tensor("prompt_length"))]
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(stop),
            pad_token_id=0,
        )
        assert response(out, i) == wanted[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_plain_forward(model, temperature):
    sampling = Sampling(10, temperature=temperature)
    out = engine(model, (1, 2, 3)).generate(prompts(), sampling, samples=4, seed=7)
    forward = token_logprobs(model, out.tensor("input_ids"), out.tensor("length"), temperature=temperature)
    mask = out.tensor("response_mask")
    error = (forward["logprobs"] - out.tensor("rollout_logprobs"))[mask].abs().max()
    assert error < 1e-5
    assert bool((out.tensor("rollout_logprobs")[~mask] == 0).all())


def test_a_row_does_not_depend_on_its_batch(model):
    whole = engine(model).generate(prompts(), Sampling(8), samples=3, seed=5)
    alone = engine(model).generate(prompts()[1:2], Sampling(8), samples=3, seed=5)
    assert [response(whole, 3 + i) for i in range(3)] == [response(alone, i) for i in range(3)]


def test_rows_end_at_any_stop_token_and_masks_come_from_lengths(model):
    stop = tuple(range(1, 30))
    out = check(engine(model, stop).generate(prompts(), Sampling(16), samples=8, seed=1), ROLLOUTS, "test")
    ended = 0
    for i in range(len(out)):
        ids, truncated = response(out, i), bool(out.tensor("truncated")[i])
        assert all(token not in stop for token in ids[:-1])
        assert truncated == (ids[-1] not in stop)
        assert int(out.tensor("response_mask")[i].sum()) == len(ids)
        ended += not truncated
    assert ended > 0


def test_samples_of_a_group_differ_and_repeat_with_the_seed(model):
    first = engine(model).generate(prompts(), Sampling(8), samples=4, seed=1)
    again = engine(model).generate(prompts(), Sampling(8), samples=4, seed=1)
    other = engine(model).generate(prompts(), Sampling(8), samples=4, seed=2)
    assert torch.equal(first.tensor("input_ids"), again.tensor("input_ids"))
    assert len({tuple(response(first, i)) for i in range(4)}) > 1
    assert [response(first, i) for i in range(12)] != [response(other, i) for i in range(12)]


def test_load_takes_exactly_its_own_names(model):
    target = engine(model)
    weights = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    target.load(weights.items(), 5)
    assert target.version == 5
    name = next(iter(weights))
    with pytest.raises(WeightSyncError, match=r"1 are unknown, e.g. \['renamed'\]"):
        target.load({("renamed" if k == name else k): v for k, v in weights.items()}.items(), 6)
    with pytest.raises(WeightSyncError, match="1 tensors are missing"):
        target.load([(k, v) for k, v in weights.items() if k != name], 6)
    with pytest.raises(WeightSyncError, match="shape"):
        target.load([(k, v if k != name else torch.zeros(2, 2)) for k, v in weights.items()], 6)
    assert target.version == 5
    assert all(torch.equal(tensor, named_weights(model)[k]) for k, tensor in weights.items()), "nothing was copied"


def test_too_long_for_the_model_is_an_error_before_generation(model):
    if getattr(model.config, "max_position_embeddings", None) is None:
        out = engine(model).generate(prompts(), Sampling(80), samples=1, seed=0)
        assert int(out.tensor("length").max()) <= 87  # alibi has no position limit
        return
    with pytest.raises(DataError, match="64 positions"):
        engine(model).generate(prompts(), Sampling(60), samples=1, seed=0)
