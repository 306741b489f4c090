from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithms_oracle import MASK, NEW, PROXIMAL, ROLLOUT, SIGNS
from algorithms_oracle import corrected as expected
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.algorithms.correction import CORRECTIONS, Bounds, Corrected, bounds_of, correct
from hocket.algorithms.losses import ppo_loss
from hocket.algorithms.presets import GRPO, PPO, ClippedPolicy, describe_correction
from hocket.algorithms.reduce import Counts
from hocket.errors import ConfigError

NAN, INFINITE = float("nan"), float("inf")
GOLDEN: dict[str, tuple[dict[str, float], list[list[float]], float]] = {
    "none": ({}, [[1, 1, 1, 1], [1, 1, 1, 0]], 0.111426477),
    "token_tis": ({}, [[1.1, 0.9, 0.977777778, 2.0], [0.966666667, 1.033333333, 0.4, 0]], -0.246984127),
    "icepop": ({}, [[1.1, 0.9, 0.977777778, 2.0], [0.966666667, 1.033333333, 0, 0]], -0.418412698),
    "seq_tis": ({"cap": 1.5}, [[1.5] * 4, [0.399555556] * 3 + [0]], -0.592521934),
    "seq_mis": ({"high": 1.5}, [[0] * 4, [0.399555556] * 3 + [0]], 0.275822222),
    "geo_mask": ({"low": 0.8, "high": 1.2}, [[1.1, 0.9, 0.977777778, 2.0], [0] * 4], -0.681269841),
}
PPO_GRADIENT = torch.tensor([[-1.090909091, 0, -1.011363636, -0.75], [0, 1.032258065, 3.0, 0]], dtype=torch.float64)
WIDE = {"icepop": {"low": 1e-3, "high": 1e3}, "geo_mask": {"low": 1e-3, "high": 1e3}, "seq_mis": {"high": 1e3}}


def batch(**changes: Tensor) -> dict[str, Tensor]:
    tensors = {"response_mask": MASK, "proximal_logprobs": PROXIMAL, "rollout_logprobs": ROLLOUT, "advantages": SIGNS}
    return tensors | changes


def found(kind: str, new: Tensor = NEW, *, bounds: dict[str, Any] | None = None, **changes: Tensor) -> Corrected:
    return correct(kind, batch(**changes), new=new, bounds=bounds_of(kind, **(bounds or {})))


def algorithm(kind: str, **bounds: float) -> GRPO:
    named = {f"correction_{name}": value for name, value in bounds.items()}
    return GRPO(clip_high=0.2, dual_clip=None, correction=kind, **named)


def loss_and_gradient(algorithm: ClippedPolicy, **changes: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    new, tensors = NEW.clone().requires_grad_(), batch(**changes)
    loss, metrics = algorithm.policy_loss({"logprobs": new}, tensors, counts=Counts.of(tensors["response_mask"]))
    return loss, torch.autograd.grad(loss, new)[0], metrics


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_weights_losses_and_gradients(kind: str) -> None:
    """The gradient of a dropped token is 0, of a kept one w times PPO's, over all tokens, dropped ones too."""
    bounds, weights, value = GOLDEN[kind]
    wanted = torch.tensor(weights, dtype=torch.float64)
    got = found(kind, bounds=bounds)
    torch.testing.assert_close(torch.where(got.keep, got.weight, 0.0), wanted, atol=1e-8, rtol=0)
    assert torch.equal(got.anchor, torch.where(MASK, PROXIMAL, 0.0))
    loss, gradient, metrics = loss_and_gradient(algorithm(kind, **bounds))
    assert loss.item() == pytest.approx(value, abs=1e-8)
    torch.testing.assert_close(gradient, wanted * PPO_GRADIENT / 7, atol=1e-8, rtol=0)
    assert metrics["correction/kept"].item() == pytest.approx((wanted > 0).double().sum().item() / 7)


def test_golden_dppo() -> None:
    """By hand: e^new - e^rollout is .10, .10, -.01, .05 of good tokens and -.10, .04, .01 of bad ones."""
    ratio = torch.tensor([[1.2, 1.5, 0.988888889, 1.5], [0.666666667, 1.066666667, 1.2, 0]], dtype=torch.float64)
    for bounds, kept in (
        ({}, [[1, 1, 1, 1], [1, 1, 1, 0]]),
        ({"high": 0.06}, [[0, 0, 1, 1], [1, 1, 1, 0]]),
        ({"low": 0.05}, [[1, 1, 1, 1], [0, 1, 1, 0]]),
    ):
        loss, gradient, metrics = loss_and_gradient(algorithm("dppo", **bounds))
        keep = torch.tensor(kept, dtype=torch.float64)
        assert loss.item() == pytest.approx(-(keep * ratio * SIGNS).sum().item() / 7, abs=1e-8)
        torch.testing.assert_close(gradient, -keep * ratio * SIGNS / 7, atol=1e-8, rtol=0)
        assert metrics["clip/low"].item() == metrics["clip/high"].item() == 0
        assert metrics["correction/kept"].item() == pytest.approx(keep.sum().item() / 7)


def test_golden_opsm() -> None:
    """By hand: the second answer's mean of rollout - new is log(.30 .60 .05 / (.20 .64 .06)) / 3 = 0.0528."""
    assert torch.equal(found("opsm", bounds={"high": 0.0529}).keep, MASK)
    got = found("opsm", bounds={"high": 0.0527})
    assert got.keep.tolist() == [[True] * 4, [False] * 4]
    assert torch.equal(got.weight, found("token_tis").weight)
    assert found("opsm", bounds={"high": 0.0527}, advantages=-SIGNS).keep[1].tolist() == [True] * 3 + [False]


def test_bypass_is_ppo_on_the_makers_policy() -> None:
    """P22: its ratio is the importance ratio, so it takes no other weight."""
    got = loss_and_gradient(algorithm("bypass"))
    wanted = loss_and_gradient(algorithm("none"), proximal_logprobs=ROLLOUT)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], wanted[:2], strict=True))
    with pytest.raises(ConfigError, match=r"bypass has no correction_cap: .*count it twice"):
        algorithm("bypass", cap=2.0)


@pytest.mark.parametrize("kind", CORRECTIONS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_every_kind_equals_the_formula_row_by_row(kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)
    new, proximal, rollout = (-(0.4 * draw[i] + 1).abs() for i in range(3))
    mask = torch.rand(5, 6, generator=generator) < 0.7
    mask[0], draw[3][:, 2] = False, 0.0
    bounds = {"cap": 1.4, "low": 0.15 if kind == "dppo" else 0.7, "high": 0.15 if kind in ("dppo", "opsm") else 1.3}
    own = {name: value for name, value in bounds.items() if getattr(CORRECTIONS[kind].bounds, name) is not None}
    got = found(
        kind,
        new,
        bounds=own,
        response_mask=mask,
        proximal_logprobs=proximal,
        rollout_logprobs=rollout,
        advantages=draw[3],
    )
    assert not got.weight[~mask].any()
    assert not got.keep[~mask].any()
    named = {"new": new, "proximal": proximal, "rollout": rollout, "advantages": draw[3]}
    for i in range(1, 5):
        if mask[i].any():
            row = {name: tensor[i][mask[i]].tolist() for name, tensor in named.items()}
            weight, keep = expected(kind, row, **bounds)
            assert got.weight[i][mask[i]].tolist() == pytest.approx(weight)
            assert got.keep[i][mask[i]].tolist() == keep


@pytest.mark.parametrize("kind", [kind for kind in CORRECTIONS if kind != "dppo"])
def test_equal_policies_are_ppo_exactly(kind: str) -> None:
    """Decoupled PPO collapses to PPO, bit by bit, when the makers had the trainer's weights."""
    got = loss_and_gradient(algorithm(kind), rollout_logprobs=PROXIMAL)
    wanted = loss_and_gradient(algorithm("none"), rollout_logprobs=PROXIMAL)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], wanted[:2], strict=True))
    assert got[2]["correction/kept"] == 1
    assert got[2]["correction/truncated"] == 0


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_nothing_flows_through_the_correction(kind: str) -> None:
    """P22: the weight is a constant; and the current log-probs move the loss through the ratio alone."""
    got = found(kind, NEW.clone().requires_grad_(), proximal_logprobs=PROXIMAL.clone().requires_grad_())
    assert not any(t.requires_grad for t in (got.anchor, got.weight, got.keep, got.truncated))


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_values_that_are_not_finite_count_as_equal(kind: str) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0]], dtype=torch.bool)
    proximal, new = torch.full((1, 5), -1.0), torch.full((1, 5), -1.0, requires_grad=True)
    rollout = torch.tensor([[-1.0, NAN, -INFINITE, -1.0, NAN]])
    tensors = batch(
        response_mask=mask, proximal_logprobs=proximal, rollout_logprobs=rollout, advantages=torch.ones(1, 5)
    )
    loss, metrics = algorithm(kind).policy_loss({"logprobs": new}, tensors, counts=Counts.of(mask))
    assert loss.item() == -1
    assert torch.equal(torch.autograd.grad(loss, new)[0], torch.where(mask, -0.25, 0.0))
    assert metrics["correction/kept"] == 1


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_policies_far_apart_overflow_nothing(kind: str, sign: float) -> None:
    """P23: a product over 2,000 tokens, and one token of probability e^-10000."""
    mask, far = torch.ones(1, 2000, dtype=torch.bool), torch.full((1, 2000), -3.0)
    far[0, 0] = -1e4
    near = torch.full((1, 2000), -1.0)
    proximal, rollout = (near, far) if sign > 0 else (far, near)
    tensors = batch(response_mask=mask, proximal_logprobs=proximal, rollout_logprobs=rollout, advantages=-near)
    new = proximal.clone().requires_grad_()
    loss, metrics = algorithm(kind).policy_loss({"logprobs": new}, tensors, counts=Counts.of(mask))
    assert torch.isfinite(torch.autograd.grad(loss, new)[0]).all()
    assert all(torch.isfinite(value) for value in (loss, *metrics.values()))


def test_dropped_tokens_stay_in_the_denominator() -> None:
    """Half of the tokens dropped is half of the step, and not a step that counts the rest double."""
    mask = torch.ones(2, 4, dtype=torch.bool)
    same, apart = torch.full((1, 4), -1.0), torch.full((1, 4), -3.0)
    tensors = {
        "response_mask": mask,
        "proximal_logprobs": torch.cat([same, same]),
        "rollout_logprobs": torch.cat([same, apart]),
        "advantages": torch.ones(2, 4),
    }
    new = torch.cat([same, same]).requires_grad_()
    for mode, wanted in (("token_mean", -1 / 8), ("seq_mean_token_mean", -1 / 8), ("seq_mean_token_sum", -1 / 2)):
        plan = replace(algorithm("geo_mask"), aggregation=mode)
        loss, _ = plan.policy_loss({"logprobs": new}, tensors, counts=Counts.of(mask))
        gradient = torch.autograd.grad(loss, new)[0]
        assert gradient.tolist() == [[pytest.approx(wanted)] * 4, [0] * 4]


def test_truncated_are_the_kept_tokens_at_the_cap() -> None:
    assert found("token_tis", bounds={"cap": 1.5}).truncated.tolist() == [[False, False, False, True], [False] * 4]
    assert found("seq_tis", bounds={"cap": 1.5}).truncated.tolist() == [[True] * 4, [False] * 4]
    assert not found("geo_mask", bounds={"low": 0.5, "high": 0.9}).truncated.any()
    assert not found("icepop").truncated.any()


@pytest.mark.parametrize("cap", [1.0, 1.5])
def test_the_cap_truncates_above_only(cap: float) -> None:
    free = torch.where(MASK, (PROXIMAL - ROLLOUT).exp(), 0.0)
    torch.testing.assert_close(found("token_tis", bounds={"cap": cap}).weight, free.clamp(max=cap))


def test_bounds_are_the_usual_ones_unless_given() -> None:
    assert bounds_of("geo_mask", high=1.5) == Bounds(cap=2.0, low=0.99, high=1.5)
    assert bounds_of("none") == Bounds()


@pytest.mark.parametrize(
    ("kind", "bounds", "message"),
    [
        ("tis", {}, "none, token_tis, icepop"),
        ("token_tis", {"low": 0.5}, r"token_tis has no correction_low; .*it has correction_cap"),
        ("none", {"cap": 2.0}, r"none has no correction_cap; leave it out \(it has no bounds\)"),
        ("icepop", {"low": 5.0}, "keeps nothing: correction_low=5.0 must be below correction_high=5.0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(kind: str, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bounds_of(kind, **bounds)
    with pytest.raises(ConfigError, match=message):
        algorithm(kind, **bounds)


def test_an_unknown_kind_and_a_float_mask_are_refused() -> None:
    with pytest.raises(ConfigError, match="none, token_tis"):
        correct("tis", batch(), new=NEW, bounds=Bounds())
    with pytest.raises(TypeError, match="mask"):
        found("none", response_mask=MASK.float())


class Own:
    """An algorithm of a user's, which may correct in a way of its own."""

    needs: frozenset[str] = frozenset()
    group_baseline = False

    def credit(self, batch: Any) -> dict[str, Tensor]:
        return {}

    def loss(self, new: Any, batch: Any, counts: Counts) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {}, {}


def test_one_sentence_says_what_corrects_and_why() -> None:
    said = describe_correction(PPO(correction_cap=3.0), max_staleness=2)
    assert said == (
        "off-policy correction token_tis: a token weighs e^d, at most 3; samples may be 2 versions old when they are "
        "trained"
    )
    assert "hardly act" in describe_correction(GRPO(), max_staleness=0)
    assert describe_correction(GRPO(correction="none"), max_staleness=1).startswith(
        "warning: algo.correction=none, but samples may be 1 version old"
    )
    assert not describe_correction(GRPO(correction="none"), max_staleness=0).startswith("warning")
    assert "up to Own, hocket adds none; samples may be 1 version old" in describe_correction(Own(), max_staleness=1)
    for kind in CORRECTIONS:
        assert "{" not in describe_correction(GRPO(correction=kind), max_staleness=1)


def test_a_surrogate_without_clip_is_the_plain_ratio() -> None:
    loss, ratio = ppo_loss(NEW, ROLLOUT, advantages=SIGNS, clip_low=INFINITE, clip_high=INFINITE)
    assert torch.equal(loss, -ratio * SIGNS)
