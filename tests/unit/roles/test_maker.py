"""The Maker: prompts in, experience out."""

import pytest
import torch

from hocket.data.schema import EXPERIENCE, check, swap_points
from hocket.errors import RewardError, WeightSyncError
from hocket.models.policy import token_logprobs


def test_make_scores_what_was_sampled(make_maker, units, tokenizer):
    made = check(make_maker().make(units()[0]), EXPERIENCE, "here")
    assert len(made) == 8
    ids, start, end = (made.tensor(key).tolist() for key in ("input_ids", "prompt_length", "length"))
    for i in range(8):
        text = tokenizer.decode(ids[i][start[i] : end[i]], skip_special_tokens=True)
        assert float(made.tensor("score")[i]) == pytest.approx(sum(map(ord, text)) % 7 / 7)
        assert float(made.tensor("reward/long")[i]) == float(len(text) > 3)
        assert tokenizer.decode(ids[i][: start[i]]) == made.non_tensor_batch["row"][i]["prompt"]


def test_experience_depends_on_the_unit_alone(make_maker, units):
    """Another maker, another order, after other work: the same bits."""
    first, second = units()
    one, other = make_maker(), make_maker(name="maker-1")
    other.make(second)
    a, b = one.make(first), other.make(first)
    assert all(torch.equal(a.tensor(key), b.tensor(key)) for key in a.tensors())


def test_the_reward_sees_prompt_answer_and_columns(make_maker, units):
    seen = []

    def reward(completions, prompts, answer):
        seen.extend(zip(prompts, answer, strict=True))
        return [0.0] * len(completions)

    make_maker(reward=reward, group_size=2).make(units()[0])
    rows = [unit for unit in units()[0].non_tensor_batch["row"] for _ in range(2)]
    assert seen == [(row["prompt"], row["answer"]) for row in rows]


def test_a_broken_reward_is_an_error(make_maker, units):
    def reward(completion):
        return float("nan")

    with pytest.raises(RewardError, match=r"on sample sums\.csv:"):
        make_maker(reward=reward).make(units()[0])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reference_logprobs_are_the_trainers_own_at_version_0(tiny, make_maker, make_trainer, units, temperature):
    policy = tiny()
    maker = make_maker(policy=policy, reference=tiny(), temperature=temperature)
    trainer = make_trainer(policy=policy, temperature=temperature, options={"kl_coef": 0.1})
    made = [maker.make(unit) for unit in units()]
    with torch.no_grad():
        wanted = token_logprobs(policy, made[0].tensor("input_ids"), made[0].tensor("length"), temperature=temperature)[
            "logprobs"
        ]
    assert torch.equal(made[0].tensor("reference_logprobs"), wanted)
    mask = made[0].tensor("response_mask")
    assert torch.allclose(wanted[mask], made[0].tensor("rollout_logprobs")[mask], atol=1e-5)
    assert trainer.train(made, step=0)["kl/ref"] == pytest.approx(0.0, abs=1e-6)


def test_the_reference_stays_when_weights_arrive(tiny, make_maker, make_trainer, units):
    reference = tiny()
    maker = make_maker(policy=tiny(), reference=reference)
    before = reference.lm_head.weight.clone()
    maker.receive(*make_trainer(policy=tiny(seed=9)).publish(1))
    made = maker.make(units()[0], at_least=1)
    assert torch.equal(reference.lm_head.weight, before)
    mask = made.tensor("response_mask")
    assert float((made.tensor("reference_logprobs") - made.tensor("rollout_logprobs"))[mask].abs().mean()) > 0.1


def test_evaluate_is_greedy_once_per_prompt_and_repeatable(make_maker, units, tokenizer):
    maker = make_maker()
    unit = units()[0]
    found = maker.evaluate(unit)
    assert found.keys() == {"reward", "long"}
    assert len(found["reward"]) == len(unit)
    texts = []
    for i in range(len(unit)):
        ids = unit.tensor("input_ids")[i : i + 1, : int(unit.tensor("prompt_length")[i])]
        out = maker.engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=list(range(1, 12)),
            pad_token_id=0,
        )
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert found["reward"] == pytest.approx([sum(map(ord, text)) % 7 / 7 for text in texts])
    maker.make(units()[1])
    assert maker.evaluate(unit) == found


@pytest.mark.parametrize("asked", [0, 3, 99])
def test_as_many_samples_are_kept_as_asked(make_maker, units, asked):
    maker = make_maker()
    unit = units()[0]
    unit.meta_info["samples"] = asked
    made = maker.make(unit)
    samples = maker.report().samples
    assert len(samples) == min(asked, 8)
    for i, sample in enumerate(samples):
        assert sample["step"] == 1
        assert sample["uid"] == made.non_tensor_batch["uid"][i]
        assert sample["sample"] == i % 4
        assert sample["prompt"] == made.non_tensor_batch["row"][i]["prompt"]
        assert sample["answer"] == made.non_tensor_batch["row"][i]["answer"]
        assert sample["score"] == pytest.approx(float(made.tensor("score")[i]))
        assert sample["version"] == 0
    assert maker.report().samples == []


def test_no_samples_unless_asked(make_maker, units):
    maker = make_maker()
    maker.make(units()[0])
    assert maker.report().samples == []


def test_report_has_a_span_for_each_phase(tiny, make_maker, units):
    maker = make_maker(reference=tiny(), name="maker-3")
    maker.make(units(2)[1])
    spans = [(span.name, span.args) for span in maker.report().spans if span.args]
    place = {"step": 3, "unit": 1}
    assert spans == [("generate", {**place, "version": 0}), ("reward", place), ("reference", place)]
    assert maker.report().spans == []


def test_a_promised_version_that_does_not_come(make_maker, units):
    maker = make_maker(swap_timeout=0.05)
    with pytest.raises(WeightSyncError, match="weights version 1; newest committed is -1, in use is 0"):
        maker.make(units()[0], at_least=1)
    assert "wait" in [span.name for span in maker.report().spans]


def test_weights_of_another_model_are_refused(tiny, make_maker, make_trainer, units):
    """L61: names and shapes match exactly, or the version is not used."""
    maker = make_maker(policy=tiny(num_hidden_layers=3))
    with pytest.raises(WeightSyncError, match=r"version 1 .*\d+ tensors are missing, e.g. \['model.layers.2"):
        maker.receive(*make_trainer(policy=tiny()).publish(1))
    maker.make(units()[0])
    assert maker.engine.version == 0


def decoding_with(maker, receive):
    """Let `receive` be called once, at the fourth forward of the engine's model: in the midst of a unit."""
    forwards = []

    def before(module, args, kwargs):
        forwards.append(1)
        if len(forwards) == 4:
            receive()

    return maker.engine.model.register_forward_pre_hook(before, with_kwargs=True)


@pytest.mark.parametrize(("in_flight", "swaps"), [(None, [(0, 0)]), (2, [(0, 0), (4, 1)]), (3, [(0, 0), (6, 1)])])
def test_weights_that_arrive_in_the_midst_of_a_unit(tiny, make_maker, make_trainer, units, in_flight, swaps):
    """Committed after the third token: in use at the next look in flight, or else with the next unit."""
    maker = make_maker(in_flight=in_flight, stop_ids=(1,))
    published = make_trainer(policy=tiny(seed=9)).publish(1)
    hook = decoding_with(maker, lambda: maker.receive(*published))
    unit = units()[0]
    unit.meta_info["samples"] = 8
    made = maker.make(unit)
    hook.remove()
    assert swap_points(made) == swaps
    assert {sample["version"] for sample in maker.report().samples} == {0}
    assert swap_points(maker.make(units()[1])) == [(0, 1)]


def test_an_evaluation_keeps_its_version_in_flight(tiny, make_maker, make_trainer, units):
    """P28: its scores are of the version that it was asked for."""
    maker = make_maker(in_flight=1, stop_ids=(1,))
    wanted = make_maker(stop_ids=(1,)).evaluate(units()[0])
    published = make_trainer(policy=tiny(seed=9)).publish(1)
    hook = decoding_with(maker, lambda: maker.receive(*published))
    assert maker.evaluate(units()[0]) == wanted
    hook.remove()
    assert maker.evaluate(units()[0]) != wanted
