"""Log-probs and values of right-padded rows, against one unpadded row at a time."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hocket.errors import ConfigError
from hocket.models.policy import forward_inputs, named_weights, takes, token_logprobs
from hocket.models.scalar import sequence_scores, state_values, token_scores

KINDS = ["gpt2", "opt", "bloom", "llama"]
LENGTHS = [7, 1, 4, 2]


def rows(width, *, padding):
    """The same rows at any width, with any token in their padding."""
    ids = torch.full((len(LENGTHS), width), padding)
    for i, length in enumerate(LENGTHS):
        ids[i, :length] = torch.arange(length) * (i + 3) % 90 + 4
    return ids, torch.tensor(LENGTHS)


def alone(model, ids, length):
    """Logits (length, V) of one row without padding."""
    return model(input_ids=ids[None, :length], use_cache=False).logits[0].double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "padding", "temperature"), [(7, 0, 1.0), (11, 1, 1.0), (9, 50, 0.6)])
@torch.no_grad()
def test_logprobs_and_entropy_equal_single_rows(tiny, kind, width, padding, temperature):
    model = tiny(kind)
    ids, length = rows(width, padding=padding)
    found = token_logprobs(model, ids, length, temperature=temperature, entropy=True)
    for i, n in enumerate(LENGTHS):
        scores = torch.log_softmax(alone(model, ids[i], n) / temperature, -1)
        wanted = [0.0, *(float(scores[t - 1, ids[i, t]]) for t in range(1, n))]
        spread = [0.0, *(float(-(scores[t - 1].exp() * scores[t - 1]).sum()) for t in range(1, n))]
        assert found["logprobs"][i, :n].tolist() == pytest.approx(wanted, abs=1e-5)
        assert found["entropy"][i, :n].tolist() == pytest.approx(spread, abs=1e-5)
        assert not bool(found["logprobs"][i, n:].any() or found["entropy"][i, n:].any())
    assert found["logprobs"].dtype == torch.float32


def test_padding_gets_no_gradient(tiny):
    model = tiny()
    ids, length = rows(9, padding=77)
    token_logprobs(model, ids, length, entropy=True)["entropy"].sum().backward()
    assert not bool(model.get_input_embeddings().weight.grad[77].any())


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_given_where_the_model_takes_them(tiny, kind):
    model = tiny(kind)
    inputs = forward_inputs(model, *rows(9, padding=0))
    assert takes(type(model), "position_ids") == ("position_ids" in inputs) == (kind != "bloom")
    if "position_ids" in inputs:
        assert inputs["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]


def test_a_tied_weight_has_one_name(tiny):
    tied, untied = (set(named_weights(tiny(tie_word_embeddings=tie))) for tie in (True, False))
    assert untied - tied == {"lm_head.weight"}
    model = tiny(tie_word_embeddings=True)
    named_weights(model)["model.embed_tokens.weight"].zero_()
    assert not bool(model.lm_head.weight.any())


@pytest.fixture
def critic(tiny_config):
    def critic(kind):
        torch.manual_seed(5)
        settings = tiny_config(kind)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings, num_labels=1)
        return AutoModelForSequenceClassification.from_config(config).eval()

    return critic


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_values_and_scores_equal_single_rows(critic, kind):
    model = critic(kind)
    ids, length = rows(10, padding=1)
    every, values, scores = (f(model, ids, length) for f in (token_scores, state_values, sequence_scores))
    assert (every.shape, values.shape, scores.shape) == ((4, 10), (4, 10), (4,))
    for i, n in enumerate(LENGTHS):
        single = token_scores(model, ids[i : i + 1, :n], torch.tensor([n]))[0]
        assert every[i, :n].tolist() == pytest.approx(single.tolist(), abs=1e-5)
        # token t was chosen in the state after token t - 1
        assert values[i, :n].tolist() == pytest.approx([0.0, *single[:-1].tolist()], abs=1e-5)
        assert float(scores[i]) == pytest.approx(float(single[-1]), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_sequence_score_is_what_transformers_itself_says(critic, kind):
    model = critic(kind)
    ids, length = rows(8, padding=0)
    wanted = [model(input_ids=ids[i : i + 1, :n]).logits.item() for i, n in enumerate(LENGTHS)]
    assert sequence_scores(model, ids, length).tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_model_without_a_score_head_is_refused(tiny):
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no backbone with a `score` head"):
        token_scores(tiny(), *rows(7, padding=0))
