import pytest
import torch
from algorithms_oracle import MASK, NEW, PROXIMAL, ROLLOUT, SIGNS

from hocket.algorithms.correction import correction_weight, mismatch
from hocket.algorithms.losses import ppo_loss
from hocket.algorithms.reduce import Counts, aggregate
from hocket.errors import ConfigError

NAN, INFINITE = float("nan"), float("inf")


def test_token_tis_golden_weights() -> None:
    got = correction_weight(PROXIMAL, ROLLOUT, mask=MASK, kind="token_tis", cap=2.0)
    wanted = torch.tensor([[1.1, 0.9, 0.977777778, 2.0], [0.966666667, 1.033333333, 0.4, 0]])
    torch.testing.assert_close(got.float(), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cap", [1.0, 1.5])
def test_token_tis_is_truncated_above_only(cap: float) -> None:
    free = torch.where(MASK, (PROXIMAL - ROLLOUT).exp(), 0.0)
    got = correction_weight(PROXIMAL, ROLLOUT, mask=MASK, kind="token_tis", cap=cap)
    torch.testing.assert_close(got, free.clamp(max=cap))


def test_decoupled_loss_golden_value_and_no_gradient_through_the_weight() -> None:
    proximal = PROXIMAL.clone().requires_grad_()
    weight = correction_weight(proximal, ROLLOUT, mask=MASK, kind="token_tis")
    loss, _ = ppo_loss(NEW, PROXIMAL, advantages=SIGNS, clip_low=0.2, clip_high=0.2)
    got = aggregate(weight * loss, MASK, mode="token_mean", counts=Counts.of(MASK))
    assert got.item() == pytest.approx(-0.246984127, abs=1e-8)
    assert not weight.requires_grad


@pytest.mark.parametrize("kind", ["none", "token_tis"])
def test_equal_policies_weigh_one(kind: str) -> None:
    got = correction_weight(PROXIMAL, PROXIMAL, mask=MASK, kind=kind)
    assert torch.equal(got, MASK.double())


def test_none_weighs_one_however_far_apart_they_are() -> None:
    assert torch.equal(correction_weight(PROXIMAL, ROLLOUT, mask=MASK, kind="none"), MASK.double())


def test_values_that_are_not_finite_weigh_one_and_are_counted() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0]], dtype=torch.bool)
    proximal = torch.tensor([[-1.0, NAN, -1.0, -1.0, NAN]])
    rollout = torch.tensor([[-1.0, -1.0, -INFINITE, -1.5, NAN]])
    weight = correction_weight(proximal, rollout, mask=mask, kind="token_tis")
    torch.testing.assert_close(weight, torch.tensor([[1, 1, 1, 1.6487213, 0]]))
    found = mismatch(proximal, rollout, mask=mask, counts=Counts.of(mask))
    assert found["mismatch/nonfinite"].item() == 0.5
    assert found["mismatch/abs_mean"].item() == pytest.approx(0.125)


def test_mismatch_of_the_golden_policies() -> None:
    d = (PROXIMAL - ROLLOUT)[MASK]
    found = mismatch(PROXIMAL, ROLLOUT, mask=MASK, counts=Counts.of(MASK))
    assert found["mismatch/abs_mean"].item() == pytest.approx(d.abs().mean().item())
    assert found["mismatch/abs/max"].item() == pytest.approx(d.abs().max().item())
    assert found["mismatch/k1"].item() == pytest.approx(-d.mean().item())
    assert found["mismatch/ratio_mean"].item() == pytest.approx(d.exp().mean().item())
    assert found["mismatch/nonfinite"].item() == 0


def test_mismatch_adds_up_over_micro_batches() -> None:
    counts = Counts.of(MASK)
    whole = mismatch(PROXIMAL, ROLLOUT, mask=MASK, counts=counts)
    rows = [mismatch(PROXIMAL[i : i + 1], ROLLOUT[i : i + 1], mask=MASK[i : i + 1], counts=counts) for i in (0, 1)]
    for name, value in whole.items():
        pair = torch.stack([row[name] for row in rows])
        torch.testing.assert_close(pair.max() if name.endswith("/max") else pair.sum(), value)


def test_mismatch_identities_by_enumeration() -> None:
    """Under samples of the rollout policy the mean of e^d is 1 and k1 is its KL divergence."""
    generator = torch.Generator().manual_seed(0)
    rollout, proximal = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    draws = (rollout.exp() * 4e5).round().long()
    ids = torch.arange(5).repeat_interleave(draws)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    found = mismatch(proximal[ids], rollout[ids], mask=mask, counts=Counts.of(mask))
    assert found["mismatch/ratio_mean"].item() == pytest.approx(1, abs=1e-4)
    kl = (rollout.exp() * (rollout - proximal)).sum().item()
    assert found["mismatch/k1"].item() == pytest.approx(kl, abs=1e-4)


def test_an_unknown_kind_and_a_float_mask_are_refused() -> None:
    with pytest.raises(ConfigError, match="none, token_tis"):
        correction_weight(PROXIMAL, ROLLOUT, mask=MASK, kind="tis")
    with pytest.raises(TypeError, match="mask"):
        correction_weight(PROXIMAL, ROLLOUT, mask=MASK.float(), kind="none")
