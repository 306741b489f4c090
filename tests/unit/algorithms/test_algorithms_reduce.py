import numpy as np
import pytest
import torch
from algorithms_oracle import MASK, NEW, PROXIMAL, SIGNS
from algorithms_oracle import aggregate as expected_aggregate
from algorithms_oracle import whiten as expected_whiten
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.algorithms.losses import ppo_loss
from hocket.algorithms.reduce import AGGREGATIONS, Counts, aggregate, masked_max, masked_sum, whiten
from hocket.errors import BatchError, ConfigError

NAN = float("nan")


def random_rows(seed: int, *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(6, 9, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(6, 9, generator=generator) < 0.6
    mask[2] = False  # an answer without tokens
    mask[3, 0] = True
    return values, mask


def test_counts_are_tokens_and_sequences_that_have_one() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]], dtype=torch.bool)
    assert Counts.of(mask) == Counts(tokens=3, sequences=2)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("token_mean", 0.111426477), ("seq_mean_token_mean", 0.298842253), ("const_norm", 0.048749084)],
)
def test_aggregations_of_the_golden_ppo_loss(mode: str, wanted: float) -> None:
    loss, _ = ppo_loss(NEW, PROXIMAL, advantages=SIGNS, clip_low=0.2, clip_high=0.2)
    got = aggregate(loss, MASK, mode=mode, counts=Counts.of(MASK), max_length=8)
    assert got.item() == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 6))
@settings(max_examples=10, deadline=None)
def test_parts_of_any_size_add_up_to_the_whole(mode: str, seed: int, size: int) -> None:
    loss, mask = random_rows(seed)
    counts = Counts.of(mask)
    parts = [
        aggregate(loss[i : i + size], mask[i : i + size], mode=mode, counts=counts, max_length=12)
        for i in range(0, 6, size)
    ]
    wanted = expected_aggregate(loss.numpy(), mask.numpy(), mode, 12)
    assert sum(parts).item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_padding_of_any_content_changes_nothing(mode: str) -> None:
    loss, mask = random_rows(1)
    wide = torch.cat([loss, torch.full((6, 5), NAN)], dim=1).requires_grad_()
    wide_mask = torch.cat([mask, torch.zeros(6, 5, dtype=torch.bool)], dim=1)
    counts = Counts.of(mask)
    got = aggregate(wide, wide_mask, mode=mode, counts=counts, max_length=12)
    got.backward()
    assert got.item() == pytest.approx(aggregate(loss, mask, mode=mode, counts=counts, max_length=12).item(), abs=1e-12)
    assert wide.grad is not None
    assert torch.equal(wide.grad != 0, wide_mask)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_tokens_give_zero_with_a_zero_gradient(mode: str) -> None:
    loss = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    got = aggregate(loss, mask, mode=mode, counts=Counts.of(mask), max_length=4)
    got.backward()
    assert got.item() == 0
    assert loss.grad is not None
    assert torch.equal(loss.grad, torch.zeros(2, 3))


def test_const_norm_needs_the_length_of_the_run() -> None:
    loss, mask = random_rows(0)
    with pytest.raises(ConfigError, match="max_length"):
        aggregate(loss, mask, mode="const_norm", counts=Counts.of(mask))


def test_an_unknown_aggregation_lists_the_known_ones() -> None:
    loss, mask = random_rows(0)
    with pytest.raises(ConfigError) as caught:
        aggregate(loss, mask, mode="mean", counts=Counts.of(mask))
    assert all(mode in caught.value.message for mode in AGGREGATIONS)


def test_a_float_mask_and_another_shape_are_refused() -> None:
    values, mask = random_rows(0)
    with pytest.raises(TypeError, match=r"mask is a torch\.float32"):
        masked_sum(values, mask.float())
    with pytest.raises(BatchError, match="one shape"):
        masked_sum(values[:, :1], mask)


def test_masked_max_of_nothing_is_zero() -> None:
    assert masked_max(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).item() == 0
    assert masked_max(torch.tensor([1.0, NAN]), torch.tensor([True, False])).item() == 1


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_whiten_is_over_all_tokens_of_the_step(seed: int) -> None:
    values, mask = random_rows(seed, dtype=torch.float32)
    wanted = expected_whiten(values.double().numpy(), mask.numpy())
    np.testing.assert_allclose(whiten(values, mask).numpy(), wanted, atol=1e-5)


def test_whiten_ignores_padding_in_mean_and_variance() -> None:
    values = torch.tensor([[1.0, 2.0, NAN, 9e9], [3.0, 4.0, 5.0, 6.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    white = whiten(values, mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert white[mask].std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert torch.equal(white[~mask], torch.zeros(2))


@pytest.mark.parametrize("constant", [0.7, 123.456, -1000.1])
def test_whiten_of_a_constant_is_zero(constant: float) -> None:
    values, mask = torch.full((7, 11), constant), torch.ones(7, 11, dtype=torch.bool)
    assert whiten(values, mask).abs().max().item() < 1e-5


def test_whiten_of_nothing_is_zeros() -> None:
    values, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    assert torch.equal(whiten(values, mask), torch.zeros(2, 3))
