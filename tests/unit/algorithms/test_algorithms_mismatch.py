import pytest
import torch
from algorithms_oracle import MASK, NEW, PROXIMAL, ROLLOUT, SIGNS

from hocket.algorithms.correction import bounds_of, correct
from hocket.algorithms.mismatch import by_staleness, mismatch
from hocket.algorithms.reduce import Counts

NAN, INFINITE = float("nan"), float("inf")
BATCH = {
    "response_mask": MASK,
    "proximal_logprobs": PROXIMAL,
    "rollout_logprobs": ROLLOUT,
    "advantages": SIGNS,
}
STALE = torch.tensor([[2, 2, 0, 0], [1, 1, 0, 99]])  # several versions in one answer; padding holds nonsense


def test_mismatch_of_the_golden_policies() -> None:
    d = (PROXIMAL - ROLLOUT)[MASK]
    found = mismatch(PROXIMAL, ROLLOUT, mask=MASK, counts=Counts.of(MASK))
    assert found["mismatch/abs_mean"].item() == pytest.approx(d.abs().mean().item())
    assert found["mismatch/abs/max"].item() == pytest.approx(d.abs().max().item())
    assert found["mismatch/k1"].item() == pytest.approx(-d.mean().item())
    assert found["mismatch/k3"].item() == pytest.approx((d.exp() - 1 - d).mean().item())
    assert found["mismatch/ratio_mean"].item() == pytest.approx(d.exp().mean().item())
    assert found["mismatch/nonfinite"].item() == 0


def test_values_that_are_not_finite_are_counted() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0]], dtype=torch.bool)
    proximal = torch.tensor([[-1.0, NAN, -1.0, -1.0, NAN]])
    rollout = torch.tensor([[-1.0, -1.0, -INFINITE, -1.5, NAN]])
    found = mismatch(proximal, rollout, mask=mask, counts=Counts.of(mask))
    assert found["mismatch/nonfinite"].item() == 0.5
    assert found["mismatch/abs_mean"].item() == pytest.approx(0.125)
    tensors = {"response_mask": mask, "proximal_logprobs": proximal, "rollout_logprobs": rollout}
    assert all(value.isfinite() for value in by_staleness(tensors, stale=torch.zeros(1, 5).int()).values())


def test_mismatch_adds_up_over_micro_batches() -> None:
    counts = Counts.of(MASK)
    whole = mismatch(PROXIMAL, ROLLOUT, mask=MASK, counts=counts)
    rows = [mismatch(PROXIMAL[i : i + 1], ROLLOUT[i : i + 1], mask=MASK[i : i + 1], counts=counts) for i in (0, 1)]
    for name, value in whole.items():
        pair = torch.stack([row[name] for row in rows])
        torch.testing.assert_close(pair.max() if name.endswith("/max") else pair.sum(), value)


def test_mismatch_identities_by_enumeration() -> None:
    """Under samples of the rollout policy the mean of e^d is 1, and k1 and k3 are its KL divergence."""
    generator = torch.Generator().manual_seed(0)
    rollout, proximal = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    draws = (rollout.exp() * 4e5).round().long()
    ids = torch.arange(5).repeat_interleave(draws)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    found = mismatch(proximal[ids], rollout[ids], mask=mask, counts=Counts.of(mask))
    assert found["mismatch/ratio_mean"].item() == pytest.approx(1, abs=1e-4)
    kl = (rollout.exp() * (rollout - proximal)).sum().item()
    assert found["mismatch/k1"].item() == pytest.approx(kl, abs=1e-4)
    assert found["mismatch/k3"].item() == pytest.approx(kl, abs=1e-4)


def test_tokens_of_each_staleness_by_hand() -> None:
    corrected = correct("icepop", BATCH, new=NEW, bounds=bounds_of("icepop", low=0.95, high=5.0))
    found = {name: value.item() for name, value in by_staleness(BATCH, stale=STALE, corrected=corrected).items()}
    groups = {"0": [0.88 / 0.90, 2.0, 0.4], "1": [0.29 / 0.30, 0.62 / 0.60], "2": [1.1, 0.9]}
    names = {name.rpartition("/")[2] for name in found} - {"prob_p99"}
    assert names == set(groups)
    for age, ratios in groups.items():
        r = torch.tensor(ratios, dtype=torch.float64)
        assert found[f"staleness/tokens/{age}"] == pytest.approx(len(r) / 7)
        assert found[f"mismatch/k1/{age}"] == pytest.approx(-r.log().mean().item())
        assert found[f"mismatch/k3/{age}"] == pytest.approx((r - 1 - r.log()).mean().item())
        assert found[f"mismatch/ratio_mean/{age}"] == pytest.approx(r.mean().item())
        assert found[f"mismatch/ratio_error/{age}"] == pytest.approx(r.std().item() / len(r) ** 0.5)
        kept = r[(r >= 0.95) & (r <= 5)]
        assert found[f"correction/kept/{age}"] == pytest.approx(len(kept) / len(r))
        assert found[f"correction/truncated/{age}"] == 0
        ess = kept.sum() ** 2 / (len(r) * kept.square().sum())
        assert found[f"correction/ess/{age}"] == pytest.approx(ess.item())
    assert found["mismatch/prob_p99"] == pytest.approx(0.10)


def test_the_order_of_rows_and_padding_change_nothing() -> None:
    wide = {name: torch.nn.functional.pad(t, (0, 3), value=1) for name, t in BATCH.items()}
    wide["response_mask"] = torch.nn.functional.pad(MASK, (0, 3))
    turned = {name: t.flip(0) for name, t in wide.items()}
    stale = torch.nn.functional.pad(STALE, (0, 3), value=-5).flip(0)
    got, wanted = by_staleness(turned, stale=stale), by_staleness(BATCH, stale=STALE)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].item() == pytest.approx(value.item()), name


def test_the_oldest_tokens_are_counted_together() -> None:
    found = by_staleness(BATCH, stale=torch.full_like(STALE, 8) + STALE)
    assert {name.rpartition("/")[2] for name in found} == {"8+", "prob_p99"}
    assert found["staleness/tokens/8+"] == 1


def test_one_token_has_no_standard_error_and_no_tokens_no_facts() -> None:
    mask = torch.zeros_like(MASK)
    assert by_staleness(BATCH | {"response_mask": mask}, stale=STALE).keys() == {"mismatch/prob_p99"}
    mask[0, 0] = True
    assert by_staleness(BATCH | {"response_mask": mask}, stale=STALE)["mismatch/ratio_error/2"].isnan()
