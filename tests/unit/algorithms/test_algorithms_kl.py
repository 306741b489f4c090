import pytest
import torch
from algorithms_oracle import MASK, NEW, ROLLOUT
from torch import Tensor

from hocket.algorithms.kl import KL_KINDS, kl_estimate, kl_loss
from hocket.algorithms.reduce import Counts, token_mean
from hocket.errors import ConfigError


@pytest.mark.parametrize(("kind", "wanted"), [("k1", 0.117639063), ("k2", 0.040284159), ("k3", 0.038887057)])
def test_golden_values(kind: str, wanted: float) -> None:
    got = token_mean(kl_estimate(NEW, ROLLOUT, kind=kind), MASK, counts=Counts.of(MASK))
    assert got.item() == pytest.approx(wanted, abs=1e-8)


class Softmax:
    """Every expectation over six actions is a sum, so gradients can be compared exactly."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
        self.reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)

    def gradient(self, expectation: Tensor) -> Tensor:
        return torch.autograd.grad(expectation, self.logits)[0]

    @property
    def logprobs(self) -> Tensor:
        return self.logits.log_softmax(0)

    def of_loss(self, kind: str) -> Tensor:
        """Mean gradient of the estimate as a loss, over samples of the policy."""
        logprobs = self.logprobs
        return self.gradient((logprobs.exp().detach() * kl_estimate(logprobs, self.reference, kind=kind)).sum())

    @property
    def reverse(self) -> Tensor:
        logprobs = self.logprobs
        return self.gradient((logprobs.exp() * (logprobs - self.reference)).sum())

    @property
    def forward(self) -> Tensor:
        return self.gradient((self.reference.exp() * (self.reference - self.logprobs)).sum())


def test_gradient_that_each_kind_really_gives() -> None:
    policy = Softmax()
    assert policy.reverse.abs().max() > 0.05
    assert policy.of_loss("k1").abs().max() < 1e-12
    torch.testing.assert_close(policy.of_loss("k2"), policy.reverse, atol=1e-12, rtol=0)
    torch.testing.assert_close(policy.of_loss("k3"), policy.forward, atol=1e-12, rtol=0)
    assert (policy.of_loss("k3") - policy.reverse).abs().max() > 0.02


def test_k1_in_the_reward_has_the_reverse_gradient() -> None:
    policy = Softmax()
    logprobs = policy.logprobs
    penalty = kl_estimate(logprobs, policy.reference, kind="k1").detach()
    score_function = policy.gradient((logprobs.exp().detach() * penalty * logprobs).sum())
    torch.testing.assert_close(score_function, policy.reverse, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_equal_policies_have_zero_kl(kind: str) -> None:
    logprobs = torch.randn(3, 5)
    assert torch.equal(kl_estimate(logprobs, logprobs, kind=kind), torch.zeros(3, 5))


def test_small_k3_keeps_its_digits_in_float32() -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-4, -1e-4])
    got = kl_estimate(d, torch.zeros(4), kind="k3")
    torch.testing.assert_close(got, d.square() / 2, rtol=1e-2, atol=0)


def test_k3_is_finite_and_never_pushes_the_wrong_way() -> None:
    d = torch.tensor([-1e4, -30.0, 30.0, 1e4], requires_grad=True)
    k3 = kl_estimate(d, torch.zeros(4), kind="k3")
    k3.sum().backward()
    assert torch.isfinite(k3).all()
    assert d.grad is not None
    assert (d.grad * d.detach().sign() >= 0).all()


def test_bfloat16_logprobs_are_subtracted_in_float32() -> None:
    logprobs, reference = torch.tensor([-3.0, -0.0078125]).bfloat16()
    assert kl_estimate(logprobs, reference, kind="k1").item() == -2.9921875


def test_a_loss_refuses_k1_and_learns_from_k2() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    with pytest.raises(ConfigError, match="gradient zero"):
        kl_loss(logprobs, torch.zeros(2), kind="k1")
    assert torch.equal(kl_loss(logprobs, torch.zeros(2)), torch.tensor([0.5, 2.0]))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k4")
