"""The Trainer: whole groups, honest log-probs, a critic that learns, errors that name the step."""

import copy
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hocket.data.proto import DataProto
from hocket.errors import BatchError, HocketError
from hocket.models.policy import named_weights, token_logprobs
from hocket.observe.metrics import diagnose
from hocket.weights.manifest import weights_sha256


def sha(model):
    return weights_sha256(named_weights(model))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dr_grpo"])
def test_on_policy_the_ratio_is_one(tiny, make_trainer, make_maker, units, kind, temperature, algorithm):
    """L28 and P20: sampling temperature and dropout (GPT-2's default is 0.1) must not show in the ratio."""
    policy = tiny(kind)
    maker = make_maker(policy=policy, temperature=temperature)
    trainer = make_trainer(algorithm, policy=policy, temperature=temperature)
    metrics = trainer.train([maker.make(unit) for unit in units()], step=0)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/abs_mean"] < 1e-5
    assert metrics["mismatch/abs/max"] < 1e-4
    assert metrics["staleness/max"] == 0
    assert metrics["samples"] == 16


def test_a_wrong_temperature_shows(tiny, make_trainer, make_maker, units):
    policy = tiny()
    maker, trainer = make_maker(policy=policy, temperature=0.6), make_trainer(policy=policy, temperature=1.0)
    assert trainer.train([maker.make(unit) for unit in units()], step=0)["mismatch/abs_mean"] > 0.1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dr_grpo"])
def test_the_kl_coefficient_reaches_the_parameters(make_trainer, experience, algorithm):
    """L43."""
    hashes, losses = set(), []
    for coef in (0.0, 10.0):
        trainer = make_trainer(algorithm, options={"kl_coef": coef})
        metrics = trainer.train([experience([8] * 8)], step=0)
        losses.append(metrics["policy/loss"])
        hashes.add(trainer.sha256())
        assert ("kl/ref" in metrics) == (coef > 0)
    assert len(hashes) == 2
    assert losses[0] != losses[1]


def test_minibatches_are_whole_groups(make_trainer, experience):
    batch = experience([8, 6, 7, 5] * 4)
    trainer = make_trainer(minibatches=2, micro_batch_tokens=16)
    plan = trainer._plan(trainer._own_rows([batch], step=0))
    assert [(m[0].start, m[-1].stop) for m in plan] == [(0, 8), (8, 16)]
    assert all(a.stop == b.start for m in plan for a, b in itertools.pairwise(m))
    with pytest.raises(HocketError, match=r"4 groups do not divide into trainer.minibatches=3"):
        make_trainer(minibatches=3, prompts_per_step=3).train([batch], step=0)


def test_groups_may_have_different_sizes(make_trainer, experience):
    batch = experience([6] * 12)[[0, 1, 2, 3, 4, 8, 9, 10]]  # groups of 4, 1 and 3
    trainer = make_trainer(minibatches=3, prompts_per_step=3)
    plan = trainer._plan(trainer._own_rows([batch], step=0))
    assert [(m[0].start, m[-1].stop) for m in plan] == [(0, 4), (4, 5), (5, 8)]


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_passes_and_minibatches_are_optimizer_steps(make_trainer, experience, epochs, minibatches):
    trainer = make_trainer("ppo", epochs=epochs, minibatches=minibatches)
    trainer.train([experience([6] * 16)], step=0)
    for optimizer in trainer._optimizers.values():
        assert {int(state["step"]) for state in optimizer.adam.state.values()} == {epochs * minibatches}


def test_maxima_over_optimizer_steps_are_maxima(make_trainer, experience):
    """With the second pass the ratio moves away from 1; its largest value is not averaged away."""
    once, twice = (make_trainer(epochs=n, lr=0.05).train([experience([8] * 8)], step=0)["ratio/max"] for n in (1, 2))
    assert once == pytest.approx(1.0)
    trainer = make_trainer(lr=0.05)
    batch = experience([8] * 8)
    before = token_logprobs(trainer.policy, batch.tensor("input_ids"), batch.tensor("length"))["logprobs"].detach()
    trainer.train([batch], step=0)
    after = token_logprobs(trainer.policy, batch.tensor("input_ids"), batch.tensor("length"))["logprobs"].detach()
    assert twice == pytest.approx(float((after - before)[batch.tensor("response_mask")].exp().max()), rel=1e-4)


def test_what_was_scored_high_becomes_likely(make_trainer, experience):
    trainer, batch = make_trainer("grpo", lr=5e-3), experience([7] * 8)
    best = int(batch.tensor("score").argmax())

    def likelihood():
        logprobs = token_logprobs(trainer.policy, batch.tensor("input_ids"), batch.tensor("length"))["logprobs"]
        return float(logprobs.detach()[best][batch.tensor("response_mask")[best]].sum())

    before = likelihood()
    for step in range(5):
        trainer.train([batch], step=step)
    assert likelihood() > before + 0.1


def test_the_critic_learns_and_grpo_has_none(make_trainer, experience):
    trainer, batch = make_trainer("ppo", critic_lr=0.02, options={"value_clip": None}), experience([8] * 8)
    before = copy.deepcopy(trainer.critic.state_dict())
    rounds = [trainer.train([batch], step=step) for step in range(12)]
    assert rounds[-1]["value/loss"] < 0.3 * rounds[0]["value/loss"]
    assert rounds[-1]["value/explained_var"] > rounds[0]["value/explained_var"]
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.critic.state_dict().items())
    assert rounds[0]["lr/value"] == 0.02
    assert make_trainer("ppo").train([batch], step=0)["lr/value"] == pytest.approx(5e-3)  # 5 x lr
    assert "value/loss" not in make_trainer("grpo").train([batch], step=0)


def test_equal_scores_teach_nothing_and_break_nothing(make_trainer, experience):
    """L41."""
    batch = experience([8] * 8)
    flat = DataProto.from_dict(batch.tensors() | {"score": torch.ones(8)}, batch.non_tensor_batch)
    trainer = make_trainer("grpo")
    before = sha(trainer.policy)
    metrics = trainer.train([flat], step=0)
    assert metrics["group/zero_std_frac"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert sha(trainer.policy) == before


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_loss_that_is_not_finite_names_the_step_and_updates_nothing(make_trainer, experience, algorithm):
    """L47."""
    trainer, batch = make_trainer(algorithm), experience([8] * 8)
    scores = batch.tensor("score").clone()
    scores[3] = torch.inf
    bad = DataProto.from_dict(batch.tensors() | {"score": scores}, batch.non_tensor_batch)
    before = sha(trainer.policy)
    with pytest.raises(
        HocketError, match=r"step 6: the policy loss is nan( and .*)?; nothing was updated .* trainer.lr"
    ):
        trainer.train([bad], step=5)
    assert sha(trainer.policy) == before


def test_a_gradient_that_is_not_finite_names_its_model(make_trainer, experience):
    trainer = make_trainer("grpo", options={"entropy_coef": 3e38})
    before = sha(trainer.policy)
    with pytest.raises(HocketError, match=r"step 1: the (gradient norm of the policy model|policy loss) is"):
        trainer.train([experience([8] * 8)], step=0)
    assert sha(trainer.policy) == before


def test_incomplete_experience_is_refused(make_trainer, experience):
    batch = experience([8] * 8)
    with pytest.raises(BatchError, match=r"experience of step 3: the batch lacks \['score'\]"):
        make_trainer().train([batch.select([k for k in batch.tensors() if k != "score"])], step=2)


def test_published_weights_are_the_makers_after_its_next_unit(tiny, make_trainer, make_maker, units):
    trainer, maker = make_trainer(policy=tiny(seed=1), lr=0.01), make_maker(policy=tiny(seed=2))
    maker.receive(*trainer.publish(0))
    batch = [maker.make(unit) for unit in units()]
    assert sha(maker.engine.model) == trainer.sha256()
    metrics = trainer.train(batch, step=0)
    assert metrics["mismatch/abs_mean"] < 1e-5
    assert sha(maker.engine.model) != trainer.sha256()
    maker.receive(*trainer.publish(1))
    late = maker.make(units(1)[0], at_least=1)
    assert sha(maker.engine.model) == trainer.sha256()
    assert set(late.tensor("version")[late.tensor("response_mask")].tolist()) == {1}


def test_stale_experience_is_counted_and_corrected(make_trainer, experience):
    metrics = make_trainer(minibatches=1).train([experience([8] * 8)], step=2)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2.0, 2.0)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)  # against the step's own start
    assert metrics["mismatch/abs_mean"] > 0.1


@torch.no_grad()
def test_save_writes_what_transformers_loads(make_trainer, experience, tmp_path):
    trainer = make_trainer("ppo")
    with torch.enable_grad():
        trainer.train([experience([8] * 8)], step=0)
    trainer.save(str(tmp_path))
    ids = torch.tensor([[5, 6, 7]])
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    assert torch.equal(policy(ids).logits, trainer.policy(ids).logits)
    assert torch.equal(critic(ids).logits, trainer.critic(ids).logits)
    assert sha(policy) == trainer.sha256()


def test_report_has_the_spans_once(make_trainer, experience, tmp_path):
    trainer = make_trainer()
    trainer.train([experience([6] * 8)], step=4)
    trainer.publish(5)
    trainer.save(str(tmp_path))
    spans = trainer.report().spans
    assert [(span.role, span.name, span.args) for span in spans] == [
        ("trainer-0", "train", {"step": 5}),
        ("trainer-0", "sync", {"version": 5}),
        ("trainer-0", "checkpoint", {}),
    ]
    assert trainer.report().spans == []


@pytest.mark.parametrize(("top_p", "faults"), [(1.0, []), (0.8, ["mismatch/abs_mean", "mismatch/ratio_mean/0"])])
def test_cut_sampling_is_a_fault_that_is_named(make_maker, make_trainer, units, top_p, faults):
    """P12: at equal weights the mean ratio is the mass that was kept, which is a bias and no chance."""
    maker, trainer = make_maker(top_p=top_p), make_trainer()
    metrics = trainer.train([maker.make(unit) for unit in units()], step=0)
    assert metrics["staleness/tokens/0"] == 1.0
    found = [sentence.partition(" ")[0] for sentence in diagnose(metrics)]
    assert [name for name in found if name.startswith("mismatch")] == faults


def test_answers_of_several_versions_are_trained_and_measured(make_maker, make_trainer, units):
    trainer = make_trainer(options={"correction": "geo_mask"})
    made = [make_maker().make(unit) for unit in units()]
    for unit in made:
        mask, start = unit.tensor("response_mask"), unit.tensor("prompt_length")[:, None]
        late = torch.arange(mask.shape[1])[None, :] >= start + 2
        unit.batch["version"] = torch.where(mask, late.int(), -1)
    metrics = trainer.train(made, step=1)
    assert metrics["staleness/tokens/0"] + metrics["staleness/tokens/1"] == pytest.approx(1)
    assert 0 < metrics["staleness/tokens/0"] < 1
    assert metrics["correction/kept"] == pytest.approx(1)
