import numpy as np
import pytest
import torch
from algorithms_oracle import MASK, NEW, PROXIMAL, SIGNS, clipped
from algorithms_oracle import value_loss as expected_value_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.algorithms.advantages import gae
from hocket.algorithms.kl import kl_loss
from hocket.algorithms.losses import entropy_of, ppo_loss, value_loss
from hocket.algorithms.reduce import Counts, aggregate, masked, token_mean
from hocket.errors import ConfigError


@pytest.mark.parametrize(("dual_clip", "last", "last_gradient"), [(None, 3.0, 3.0), (2.0, 2.0, 0.0)])
def test_ppo_golden_values_and_gradient(dual_clip: float | None, last: float, last_gradient: float) -> None:
    logprobs = NEW.clone().requires_grad_()
    loss, ratio = ppo_loss(logprobs, PROXIMAL, advantages=SIGNS, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
    loss[MASK].sum().backward()
    wanted = torch.tensor([1.090909091, 1.666666667, 1.011363636, 0.75, 0.689655172, 1.032258065, 3.0])
    torch.testing.assert_close(ratio[MASK].float(), wanted, atol=1e-6, rtol=0)
    wanted = torch.tensor([-1.090909091, -1.2, -1.011363636, -0.75, 0.8, 1.032258065, last])
    torch.testing.assert_close(loss[MASK].float(), wanted, atol=1e-6, rtol=0)
    assert logprobs.grad is not None
    wanted = torch.tensor([-1.090909091, 0, -1.011363636, -0.75, 0, 1.032258065, last_gradient])
    torch.testing.assert_close(logprobs.grad[MASK].float(), wanted, atol=1e-6, rtol=0)
    assert not ratio.requires_grad


def test_dual_clip_and_a_higher_upper_bound() -> None:
    loss, _ = ppo_loss(NEW, PROXIMAL, advantages=SIGNS, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    wanted = torch.tensor([-1.090909091, -1.28, -1.011363636, -0.75, 0.8, 1.032258065, 3.0])
    torch.testing.assert_close(loss[MASK].float(), wanted, atol=1e-6, rtol=0)


@given(seed=st.integers(0, 10**6), dual=st.sampled_from([None, 1.5, 3.0]))
@settings(max_examples=15, deadline=None)
def test_ppo_equals_the_formula_token_by_token(seed: int, dual: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64) * 2
    loss, _ = ppo_loss(new, old, advantages=advantages, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    wanted = np.vectorize(clipped)(new.numpy(), old.numpy(), advantages.numpy(), 0.2, 0.28, dual)
    np.testing.assert_allclose(loss.numpy(), wanted, atol=1e-10)


def test_an_exploding_ratio_stays_finite_and_dual_clip_bounds_it() -> None:
    new, old = torch.tensor([0.0], requires_grad=True), torch.tensor([-1e4])
    options = {"advantages": torch.tensor([-1.0]), "clip_low": 0.2, "clip_high": 0.2}
    free, ratio = ppo_loss(new, old, **options)
    assert free.item() == pytest.approx(np.exp(20), rel=1e-4)
    assert torch.isfinite(ratio).all()
    assert ppo_loss(new, old, dual_clip=3.0, **options)[0].item() == 3.0


@pytest.mark.parametrize("dual_clip", [1.0, 0.5])
def test_a_dual_clip_of_one_or_less_is_refused(dual_clip: float) -> None:
    with pytest.raises(ConfigError, match="above 1"):
        ppo_loss(NEW, PROXIMAL, advantages=SIGNS, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)


def test_nan_under_the_mask_reaches_neither_loss_nor_gradient() -> None:
    mask, new = torch.tensor([[True, False]]), torch.zeros(1, 2, requires_grad=True)
    old = torch.tensor([[-0.1, float("nan")]])
    counts = Counts.of(mask)
    kept = masked(new, mask)
    loss, _ = ppo_loss(kept, old, advantages=torch.ones(1, 2), clip_low=0.2, clip_high=0.2)
    total = aggregate(loss + kl_loss(kept, old), mask, mode="token_mean", counts=counts)
    total.backward()
    assert total.item() == pytest.approx(-np.exp(0.1) + 0.1**2 / 2, abs=1e-6)
    assert new.grad is not None
    assert new.grad.tolist() == [[pytest.approx(-np.exp(0.1) + 0.1, abs=1e-6), 0.0]]


def test_arguments_cannot_be_mixed_up_by_position() -> None:
    with pytest.raises(TypeError):
        ppo_loss(NEW, PROXIMAL, SIGNS, clip_low=0.2, clip_high=0.2)  # type: ignore[misc]


def test_value_loss_golden_value() -> None:
    rewards = torch.tensor([[0, 0, 0, 1.0], [0, 0, 2.0, 0]])
    values = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 9.0]])
    _, returns = gae(rewards, values, mask=MASK, gamma=1.0, lam=0.95)
    loss = value_loss(values + 0.5, values, returns=returns, clip=0.2)
    assert token_mean(loss, MASK, counts=Counts.of(MASK)).item() == pytest.approx(0.450389851, abs=1e-6)


@given(seed=st.integers(0, 10**6), clip=st.sampled_from([None, 0.2, 1.0]))
@settings(max_examples=10, deadline=None)
def test_value_loss_equals_the_formula(seed: int, clip: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old, target = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    wanted = np.vectorize(expected_value_loss)(new.numpy(), old.numpy(), target.numpy(), clip)
    np.testing.assert_allclose(value_loss(new, old, returns=target, clip=clip).numpy(), wanted, atol=1e-12)


def test_entropy_of_known_distributions() -> None:
    infinite = float("-inf")
    logits = torch.tensor([[[3.0, 3, 3, 3]], [[0.0, 0.0, infinite, infinite]], [[1e4, 0, 0, 0]]])
    wanted = torch.tensor([[np.log(4)], [np.log(2)], [0.0]], dtype=torch.float32)
    torch.testing.assert_close(entropy_of(logits), wanted, atol=1e-6, rtol=0)


def test_entropy_has_a_finite_gradient_beside_forbidden_tokens() -> None:
    logits = torch.tensor([0.0, 1.0, float("-inf")], dtype=torch.bfloat16, requires_grad=True)
    entropy = entropy_of(logits)
    entropy.backward()
    assert entropy.dtype == torch.float32
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0] > 0 > logits.grad[1]
