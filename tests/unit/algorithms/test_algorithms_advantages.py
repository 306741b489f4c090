import numpy as np
import pytest
import torch
from algorithms_oracle import MASK
from algorithms_oracle import gae as expected_gae
from algorithms_oracle import group_advantages as expected_group_advantages
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.algorithms.advantages import GROUP_KINDS, gae, group_advantages, spread, token_rewards
from hocket.algorithms.reduce import whiten
from hocket.errors import BatchError, ConfigError

NAN = float("nan")
REWARDS = torch.tensor([[0, 0, 0, 1.0], [0, 0, 2.0, 0]])
VALUES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 9.0]])
TOOL_MASK = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
GOLDEN_SCORES = [1.0, 0, 0, 1, 1, 1, 1, 0, 1]
GOLDEN_GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2]
GOLDEN = {
    "grpo": [
        0.866023904,
        -0.866023904,
        -0.866023904,
        0.866023904,
        0.499999,
        0.499999,
        0.499999,
        -1.499997,
        0,
    ],
    "dr_grpo": [0.5, -0.5, -0.5, 0.5, 0.25, 0.25, 0.25, -0.75, 0],
    "rloo": [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3, -1, 0],
}


def test_the_score_stands_on_the_last_action_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    got = token_rewards(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert got.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [3, 0, 0, 0]]


def test_a_row_without_action_tokens_gets_no_reward() -> None:
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    got = token_rewards(torch.tensor([10.0, 0.0]), mask)
    assert torch.equal(got, torch.zeros(2, 3))


def test_the_kl_penalty_stands_on_every_action_token() -> None:
    mask = torch.tensor([[1, 0, 1, 0]], dtype=torch.bool)
    logprobs, reference = torch.tensor([[-1.0, NAN, -2.0, 0.0]]), torch.tensor([[-2.0, 0.0, -1.5, NAN]])
    got = token_rewards(torch.tensor([5.0]), mask, logprobs=logprobs, reference=reference, kl_coef=0.1)
    torch.testing.assert_close(got, torch.tensor([[-0.1, 0.0, 5.05, 0.0]]))


def test_a_kl_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(BatchError, match="reference"):
        token_rewards(torch.zeros(2), MASK, logprobs=torch.zeros(2, 4), kl_coef=0.1)


def test_gae_golden_values_before_and_after_whitening() -> None:
    advantages, returns = gae(REWARDS, VALUES, mask=MASK, gamma=1.0, lam=0.95)
    wanted = torch.tensor([[0.799675, 0.7365, 0.67, 0.6], [1.33925, 1.515, 1.7, 0]])
    torch.testing.assert_close(advantages, wanted, atol=1e-6, rtol=0)
    wanted = torch.tensor([[0.899675, 0.9365, 0.97, 1.0], [1.83925, 1.915, 2.0, 0]])
    torch.testing.assert_close(returns, wanted, atol=1e-6, rtol=0)
    wanted = torch.tensor(
        [[-0.600672846, -0.751369249, -0.909997041, -1.076973665], [0.68641875, 1.105649344, 1.546944706, 0]]
    )
    torch.testing.assert_close(whiten(advantages, MASK), wanted, atol=1e-6, rtol=0)


def test_gae_carries_credit_through_tool_output() -> None:
    rewards = torch.tensor([[0, 0, 0, 0, 0, 1.0]])
    advantages, returns = gae(rewards, torch.zeros(1, 6), mask=TOOL_MASK, gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [[1, 1, 0, 0, 1, 1]]


def test_gae_does_not_see_values_under_the_mask() -> None:
    mask = torch.tensor([[1, 1, 0]], dtype=torch.bool)
    rewards = torch.tensor([[0, 1.0, NAN]])
    for hidden in (100.0, NAN):
        advantages, _ = gae(rewards, torch.tensor([[0, 0, hidden]]), mask=mask, gamma=1.0, lam=0.95)
        torch.testing.assert_close(advantages, torch.tensor([[0.95, 1.0, 0.0]]))


def test_a_truncated_row_bootstraps_from_its_own_last_value() -> None:
    rewards, values = torch.zeros(2, 3), torch.tensor([[0.1, 0.4, 7.0], [0.1, 0.4, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]], dtype=torch.bool)
    cut = torch.tensor([True, False])
    advantages, returns = gae(rewards, values, mask=mask, gamma=0.5, lam=0.0, truncated=cut)
    torch.testing.assert_close(advantages, torch.tensor([[0.1, -0.2, 0.0], [0.1, -0.4, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.2, 0.2, 0.0], [0.2, 0.0, 0.0]]))


@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
@settings(max_examples=15, deadline=None)
def test_gae_equals_the_sum_over_deltas(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 8, generator=generator) < 0.6
    cut = torch.rand(5, generator=generator) < 0.5
    advantages, returns = gae(rewards, values, mask=mask, gamma=gamma, lam=lam, truncated=cut)
    wanted = expected_gae(rewards.numpy(), values.numpy(), mask.numpy(), cut.numpy(), gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), wanted, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), np.where(mask, wanted + values.numpy(), 0), atol=1e-12)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_group_golden_values_in_any_order(kind: str) -> None:
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    scores = torch.tensor(GOLDEN_SCORES, dtype=torch.float64)[order]
    groups = torch.tensor(GOLDEN_GROUPS)[order]
    got = group_advantages(scores, groups, kind=kind)
    wanted = torch.tensor(GOLDEN[kind], dtype=torch.float64)[order]
    torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("grpo", [-1, 0, 1, -0.577350269, -0.577350269, 1.154700538]),
        ("dr_grpo", [-1, 0, 1, -1, -1, 2]),
        ("rloo", [-1.5, 0, 1.5, -1.5, -1.5, 3]),
    ],
)
def test_each_group_has_its_own_mean_and_deviation(kind: str, wanted: list[float]) -> None:
    scores = torch.tensor([[1.0, 2, 3], [0, 0, 3]]).flatten()
    got = group_advantages(scores, torch.tensor([7, 7, 7, -2, -2, -2]), kind=kind)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float32), atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", GROUP_KINDS)
@given(
    scores=st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5]), min_size=1, max_size=12),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=15, deadline=None)
def test_group_advantages_of_random_groups(kind: str, scores: list[float], seed: int) -> None:
    groups = torch.randint(0, 4, (len(scores),), generator=torch.Generator().manual_seed(seed))
    exact = torch.tensor(scores, dtype=torch.float64)
    wanted = expected_group_advantages(exact.numpy(), groups.numpy(), kind)
    np.testing.assert_allclose(group_advantages(exact, groups, kind=kind).numpy(), wanted, atol=1e-9)


def test_a_group_must_be_whole() -> None:
    scores, groups = torch.tensor([1.0, 1, 0, 0]), torch.zeros(4, dtype=torch.int64)
    assert group_advantages(scores, groups, kind="dr_grpo").tolist() == [0.5, 0.5, -0.5, -0.5]
    assert group_advantages(scores[:2], groups[:2], kind="dr_grpo").tolist() == [0, 0]


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize("scores", [[0.7], [0.1] * 3, [1 / 3] * 7, [0.1 + 0.2, 0.3]])
def test_equal_scores_give_exactly_zero_despite_float_noise(kind: str, scores: list[float]) -> None:
    groups = torch.full((len(scores),), 5)
    assert not group_advantages(torch.tensor(scores), groups, kind=kind).any()
    noisy = torch.full((len(scores),), scores[0], dtype=torch.float64)  # 0.1 + 0.1 + 0.1 is not 3 x 0.1
    assert not group_advantages(noisy, groups, kind=kind).any()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="grpo, dr_grpo, rloo"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), kind="ppo")


def test_spread_puts_a_row_on_its_action_tokens() -> None:
    got = spread(torch.tensor([2.0, NAN]), torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.bool))
    assert got.tolist() == [[2, 0, 2], [0, 0, 0]]


def test_float_masks_are_refused_by_name() -> None:
    floats = torch.ones(2, 4)
    with pytest.raises(TypeError, match="mask"):
        token_rewards(torch.zeros(2), floats)
    with pytest.raises(TypeError, match="mask"):
        gae(REWARDS, VALUES, mask=floats, gamma=1.0, lam=1.0)
    with pytest.raises(TypeError, match="truncated"):
        gae(REWARDS, VALUES, mask=MASK, gamma=1.0, lam=1.0, truncated=torch.zeros(2))
    with pytest.raises(TypeError, match="mask"):
        spread(torch.zeros(2), floats)
