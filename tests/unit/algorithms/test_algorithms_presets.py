import dataclasses
import pickle
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from algorithms_oracle import MASK, NEW, PROXIMAL, ROLLOUT, SIGNS
from algorithms_oracle import gae as expected_gae
from algorithms_oracle import group_advantages as expected_group_advantages
from algorithms_oracle import value_loss as expected_value_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.algorithms.losses import entropy_of
from hocket.algorithms.presets import GRPO, PPO, PRESETS, Algorithm, DrGRPO, build
from hocket.algorithms.reduce import Counts
from hocket.errors import ConfigError

VOCABULARY, ROWS, WIDTH = 5, 6, 7
NAN = float("nan")
Tensors = dict[str, Tensor]
VARIANTS: dict[str, Algorithm] = {
    "ppo": PPO(kl_coef=0.05, lam=0.95, entropy_coef=0.01),
    "ppo, own length": PPO(aggregation="seq_mean_token_mean", whiten=False, value_clip=None),
    "grpo": GRPO(kl_coef=0.05, entropy_coef=0.01),
    "grpo, sums": GRPO(advantage="rloo", aggregation="seq_mean_token_sum", correction="none"),
    "dr_grpo": DrGRPO(max_length=16, kl_coef=0.1),
    "icepop": GRPO(correction="icepop", correction_low=0.8, correction_high=1.3),
    "seq_tis": GRPO(correction="seq_tis", correction_cap=1.3, aggregation="seq_mean_token_mean"),
    "seq_mis": PPO(correction="seq_mis", correction_high=1.5),
    "geo_mask": GRPO(correction="geo_mask", correction_low=0.9, correction_high=1.2),
    "opsm": GRPO(correction="opsm", correction_high=0.05),
    "dppo": GRPO(correction="dppo", correction_low=0.05, correction_high=0.05),
    "bypass": PPO(correction="bypass"),
}


class Bigram:
    """A policy and a critic that look at one token: small, with parameters that all rows share."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(VOCABULARY, VOCABULARY + 1, generator=generator, dtype=torch.float64)
        self.table = table.requires_grad_()

    def __call__(self, ids: Tensor) -> Tensors:
        """Entry t belongs to token t of `ids`, read from the token before it."""
        rows = self.table[ids.roll(1, dims=1)]
        logits, values = rows[..., :VOCABULARY], rows[..., VOCABULARY]
        logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return {"logprobs": logprobs, "entropy": entropy_of(logits), "values": values}


def make_batch(policy: Bigram, seed: int, *, noise: float = 0.3) -> Tensors:
    """Two groups of three answers, one answer without action tokens, tool output inside the others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[:, 0] = False
    mask[:, 1] = True
    mask[3] = False
    now = {name: value.detach() for name, value in policy(ids).items()}
    moved = noise * torch.randn(4, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {
        "input_ids": ids,
        "response_mask": mask,
        "score": torch.randn(ROWS, generator=generator, dtype=torch.float64),
        "group": torch.tensor([4, 9, 4, 4, 9, 9]),
        "truncated": torch.rand(ROWS, generator=generator) < 0.3,
        "rollout_logprobs": now["logprobs"] + moved[0],
        "proximal_logprobs": now["logprobs"] + moved[1],
        "reference_logprobs": now["logprobs"] + moved[2],
        "values": now["values"] + moved[3],
    }


def pad(batch: Tensors, columns: int) -> Tensors:
    """More columns, with NaN in all that is a number and nonsense ids."""

    def widened(value: Tensor) -> Tensor:
        if value.ndim == 1:
            return value
        filler = NAN if value.is_floating_point() else 0
        return torch.cat([value, torch.full((len(value), columns), filler).to(value.dtype)], dim=1)

    return {name: widened(value) for name, value in batch.items()}


def poison(tensors: Tensors, mask: Tensor, names: Collection[str]) -> Tensors:
    """NaN added to `names` under a false mask: added, so that it also meets the gradient on its way back."""
    nan = torch.where(mask, 0.0, NAN)
    return {name: value + nan if name in names else value for name, value in tensors.items()}


def learn(
    algorithm: Algorithm, policy: Bigram, batch: Tensors, *, size: int, hidden: Collection[str] = ()
) -> tuple[Tensors, Tensor]:
    """All losses and metrics of one optimizer step over micro-batches of `size` rows, and its gradient."""
    batch = poison(batch, batch["response_mask"], hidden)
    batch = poison(batch | algorithm.credit(batch), batch["response_mask"], hidden)
    counts, joined = Counts.of(batch["response_mask"]), dict[str, Tensor]()
    gradient = torch.zeros_like(policy.table)
    for start in range(0, len(batch["group"]), size):
        part = {name: value[start : start + size] for name, value in batch.items()}
        new = poison(policy(part["input_ids"]), part["response_mask"], hidden)
        losses, metrics = algorithm.loss(new, part, counts)
        gradient += torch.autograd.grad(sum(losses.values(), torch.tensor(0.0)), policy.table)[0]
        for name, value in (losses | metrics).items():
            join = torch.maximum if name.endswith("/max") else torch.add
            joined[name] = join(joined.get(name, torch.zeros_like(value)), value.detach())
    return joined, gradient


def assert_same(got: tuple[Tensors, Tensor], wanted: tuple[Tensors, Tensor]) -> None:
    assert got[0].keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        assert got[0][name].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-7), name
    assert wanted[1].norm() > 0
    assert (got[1] - wanted[1]).norm() <= 1e-6 * wanted[1].norm()


@pytest.mark.parametrize("variant", VARIANTS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=4, deadline=None)
def test_micro_batches_padding_and_row_order_change_nothing(variant: str, seed: int) -> None:
    algorithm, policy = VARIANTS[variant], Bigram()
    batch = make_batch(policy, seed)
    whole = learn(algorithm, policy, batch, size=ROWS)
    for size in (1, 3):
        assert_same(learn(algorithm, policy, batch, size=size), whole)
    assert_same(learn(algorithm, policy, pad(batch, 4), size=ROWS), whole)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    shuffled = {name: value[order] for name, value in batch.items()}
    assert_same(learn(algorithm, policy, shuffled, size=2), whole)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_under_the_mask_changes_nothing(variant: str) -> None:
    algorithm, policy = VARIANTS[variant], Bigram()
    batch = make_batch(policy, 1)
    wanted = learn(algorithm, policy, batch, size=ROWS)
    numbers = {name for name, value in batch.items() if value.ndim == 2 and value.is_floating_point()}
    numbers |= {"logprobs", "entropy", "advantages", "returns"}
    for hidden in (numbers, *({name} for name in sorted(numbers))):
        assert_same(learn(algorithm, policy, batch, size=ROWS, hidden=hidden), wanted)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("name", PRESETS)
def test_the_first_gradient_is_that_of_reinforce(name: str, kl_coef: float) -> None:
    algorithm, policy = build(name, {"max_length": 16, "kl_coef": kl_coef}), Bigram()
    batch = make_batch(policy, 2, noise=0.0)
    batch |= algorithm.credit(batch)
    mask, counts = batch["response_mask"], Counts.of(batch["response_mask"])
    new = policy(batch["input_ids"])
    losses, metrics = algorithm.loss(new, batch, counts)
    got = torch.autograd.grad(losses["policy"], policy.table, retain_graph=True)[0]
    denominator = counts.sequences * 16 if name == "dr_grpo" else counts.tokens
    reinforce = -(batch["advantages"] * new["logprobs"])[mask].sum() / denominator
    wanted = torch.autograd.grad(reinforce, policy.table)[0]
    assert wanted.norm() > 1e-3
    torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)
    assert metrics["ratio/mean"].item() == pytest.approx(1)
    assert metrics["kl/proximal"].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_without_tokens_gives_zero_losses_with_zero_gradients(name: str) -> None:
    algorithm, policy = build(name, {"max_length": 16, "kl_coef": 0.1}), Bigram()
    batch = make_batch(policy, 0)
    batch["response_mask"] = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    joined, gradient = learn(algorithm, policy, batch, size=ROWS)
    assert all(value.item() == 0 for value in joined.values())
    assert torch.equal(gradient, torch.zeros_like(gradient))


def golden_batch() -> Tensors:
    return {
        "response_mask": MASK,
        "rollout_logprobs": ROLLOUT,
        "proximal_logprobs": PROXIMAL,
        "advantages": SIGNS,
    }


def test_decoupled_golden_loss_and_metrics() -> None:
    plain = GRPO(clip_high=0.2, dual_clip=2.0)
    losses, metrics = plain.loss({"logprobs": NEW}, golden_batch(), Counts.of(MASK))
    assert metrics["clip/low"].item() == pytest.approx(1 / 7)
    assert metrics["clip/high"].item() == pytest.approx(1 / 7)
    assert metrics["clip/dual"].item() == pytest.approx(1 / 7)
    ratio = (NEW - PROXIMAL).exp()[MASK]
    assert metrics["ratio/mean"].item() == pytest.approx(ratio.mean().item())
    assert metrics["ratio/max"].item() == pytest.approx(3.0)
    assert metrics["kl/proximal"].item() == pytest.approx((ratio - 1 - ratio.log()).mean().item())
    assert metrics["policy/loss"].item() == losses["policy"].item()
    losses, _ = dataclasses.replace(plain, dual_clip=None).loss({"logprobs": NEW}, golden_batch(), Counts.of(MASK))
    assert losses["policy"].item() == pytest.approx(-0.246984127, abs=1e-8)


@pytest.mark.parametrize("name", PRESETS)
def test_without_correction_the_rollout_logprobs_do_not_matter(name: str) -> None:
    algorithm, policy = build(name, {"max_length": 16, "correction": "none"}), Bigram()
    batch = make_batch(policy, 5)
    other = batch | {"rollout_logprobs": batch["rollout_logprobs"] - 3}
    assert_same(learn(algorithm, policy, other, size=3), learn(algorithm, policy, batch, size=3))


def test_ppo_credits_the_reward_through_the_critic() -> None:
    batch = make_batch(Bigram(), 3)
    raw = PPO(whiten=False, kl_coef=0.1).credit(batch)
    mask = batch["response_mask"]
    penalty = 0.1 * (batch["proximal_logprobs"] - batch["reference_logprobs"])[mask].sum()
    scored = batch["score"][mask.any(-1)].sum()
    assert raw["token_reward"].sum().item() == pytest.approx((scored - penalty).item())
    torch.testing.assert_close(raw["returns"][mask], (raw["advantages"] + batch["values"])[mask])
    white = PPO(kl_coef=0.1).credit(batch)
    assert white["advantages"][mask].mean().item() == pytest.approx(0, abs=1e-9)
    assert white["advantages"][mask].std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert torch.equal(white["returns"], raw["returns"])


def test_ppo_runs_gae_as_it_is_set() -> None:
    batch = make_batch(Bigram(), 7)
    assert batch["truncated"].any()
    for bootstrap in (False, True):
        got = PPO(whiten=False, gamma=0.9, lam=0.8, bootstrap_truncated=bootstrap).credit(batch)
        arrays = [t.numpy() for t in (got["token_reward"], batch["values"], batch["response_mask"])]
        wanted = expected_gae(*arrays, batch["truncated"].numpy() & bootstrap, 0.9, 0.8)
        np.testing.assert_allclose(got["advantages"].numpy(), wanted, atol=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_grpo_credits_each_answer_inside_its_group(kind: str) -> None:
    batch = make_batch(Bigram(), 8)
    got = GRPO(advantage=kind).credit(batch)["advantages"]
    alive = batch["response_mask"].any(-1)
    wanted = torch.zeros(ROWS, dtype=torch.float64)
    scores, groups = batch["score"][alive].numpy(), batch["group"][alive].numpy()
    wanted[alive] = torch.from_numpy(expected_group_advantages(scores, groups, kind))
    torch.testing.assert_close(got, torch.where(batch["response_mask"], wanted[:, None], 0.0))


@pytest.mark.parametrize("clip", [0.2, None])
def test_ppo_value_loss_clips_as_it_is_set(clip: float | None) -> None:
    policy = Bigram()
    batch = make_batch(policy, 6)
    batch |= PPO().credit(batch)
    mask = batch["response_mask"]
    new = policy(batch["input_ids"])
    losses, _ = PPO(value_clip=clip).loss(new, batch, Counts.of(mask))
    rows = [t[mask].tolist() for t in (new["values"], batch["values"], batch["returns"])]
    wanted = [expected_value_loss(*row, clip) for row in zip(*rows, strict=True)]
    assert losses["value"].item() == pytest.approx(sum(wanted) / len(wanted))


@pytest.mark.parametrize("algorithm", [GRPO(kl_coef=0.1), PPO(kl_coef=0.1)])
def test_the_logged_kl_to_the_reference_is_k3(algorithm: Algorithm) -> None:
    policy = Bigram()
    batch = make_batch(policy, 9)
    d = (policy(batch["input_ids"])["logprobs"] - batch["reference_logprobs"])[batch["response_mask"]]
    joined, _ = learn(algorithm, policy, batch, size=3)
    assert joined["kl/ref"].item() == pytest.approx(((-d).exp() - 1 + d).mean().item())


def test_an_answer_without_tokens_does_not_shift_its_group() -> None:
    mask = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    batch = {"response_mask": mask, "score": torch.tensor([10.0, 0.0, 1.0]), "group": torch.zeros(3).long()}
    got = DrGRPO().credit(batch)["advantages"]
    assert got.tolist() == [[0, 0, 0], [-0.5, -0.5, -0.5], [0.5, 0, 0]]
    pair = {name: value[:2] for name, value in batch.items()}
    assert not GRPO().credit(pair)["advantages"].any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_the_kl_coefficient_has_a_gradient(name: str) -> None:
    policy = Bigram()
    batch = make_batch(policy, 4)
    free, held = (
        learn(build(name, {"kl_coef": kl_coef, "max_length": 16}), policy, batch, size=ROWS)[1]
        for kl_coef in (0.0, 10.0)
    )
    assert (free - held).norm() > free.norm()


def test_the_entropy_bonus_rewards_entropy() -> None:
    policy = Bigram()
    batch = make_batch(policy, 4)
    plain, bonus = (learn(GRPO(entropy_coef=c), policy, batch, size=ROWS)[0] for c in (0.0, 0.5))
    wanted = plain["policy"] - 0.5 * plain["entropy"]
    assert bonus["policy"].item() == pytest.approx(wanted.item(), abs=1e-9)
    assert plain["entropy"].item() > 0


def test_value_clip_share_is_measured() -> None:
    policy = Bigram()
    batch = make_batch(policy, 6)
    moved = (policy(batch["input_ids"])["values"] - batch["values"]).abs()[batch["response_mask"]] > 0.2
    share = moved.double().mean().item()
    joined, _ = learn(PPO(), policy, batch, size=2)
    assert 0 < share < 1
    assert joined["value/clipfrac"].item() == pytest.approx(share)
    assert "value/clipfrac" not in learn(PPO(value_clip=None), policy, batch, size=2)[0]


def test_metrics_carry_no_graph() -> None:
    policy = Bigram()
    for algorithm in VARIANTS.values():
        batch = make_batch(policy, 0)
        batch |= algorithm.credit(batch)
        losses, metrics = algorithm.loss(policy(batch["input_ids"]), batch, Counts.of(batch["response_mask"]))
        assert all(loss.requires_grad for loss in losses.values())
        assert not any(value.requires_grad or value.ndim for value in metrics.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_frozen_value_that_travels(name: str) -> None:
    algorithm: Any = build(name, {})
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.clip_low = 0.5


def test_what_each_preset_needs() -> None:
    assert build("ppo", {}).needs == {"critic"}
    assert build("ppo", {"kl_coef": 0.1}).needs == {"critic", "reference"}
    assert build("grpo", {}).needs == frozenset()
    assert build("dr_grpo", {"kl_coef": 1}).needs == {"reference"}
    assert [build(name, {}).group_baseline for name in PRESETS] == [False, True, True]


def test_build_sets_options_and_keeps_defaults() -> None:
    options: dict[str, object] = {"clip_high": 1, "dual_clip": None, "aggregation": "seq_mean_token_mean"}
    assert build("grpo", options) == GRPO(clip_high=1, dual_clip=None, aggregation="seq_mean_token_mean")


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("gppo", {}, ["'gppo'", "ppo, grpo, dr_grpo"]),
        (
            "grpo",
            {"clip_hgih": 0.2},
            ["grpo", "'clip_hgih'", "nearest is 'clip_high'", "kl_coef", "advantage"],
        ),
        ("grpo", {"gamma": 0.9}, ["'gamma'", "correction_cap"]),
        ("ppo", {"advantage": "rloo"}, ["advantage of PPO 'rloo'", "bandit"]),
        ("ppo", {"clip_low": "0.2"}, ["clip_low", "'0.2'", "float"]),
        ("ppo", {"clip_low": True}, ["clip_low", "True", "float"]),
        ("ppo", {"whiten": 1}, ["whiten", "bool"]),
        ("ppo", {"dual_clip": 1.0}, ["dual_clip", "above 1"]),
        ("ppo", {"aggregation": "mean"}, ["aggregation 'mean'", "token_mean", "const_norm"]),
        ("grpo", {"correction": "tis"}, ["correction 'tis'", "token_tis"]),
        ("grpo", {"advantage": "gae"}, ["advantage 'gae'", "rloo"]),
    ],
)
def test_build_refuses_what_it_does_not_know(name: str, options: dict[str, object], wanted: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, options)
    assert [text for text in wanted if text not in caught.value.message] == []


def test_dr_grpo_asks_for_the_length_that_it_divides_by() -> None:
    with pytest.raises(ConfigError, match="max_length"):
        DrGRPO().loss({"logprobs": NEW}, golden_batch(), Counts.of(MASK))


def test_bandit_advantages() -> None:
    """The vectors of the older form, with the right sign of k3: mean KL 0.020740, reward 1 - 0.1 KL = 0.997926."""
    logprobs, reference = torch.tensor([[0.0, -1.0, -2.0, -0.5]]), torch.tensor([[0.0, -1.3, -1.8, -0.5]])
    mask = torch.tensor([[False, True, True, True]])
    batch = {
        "response_mask": mask,
        "score": torch.tensor([1.0]),
        "proximal_logprobs": logprobs,
        "reference_logprobs": reference,
        "values": torch.tensor([[9.0, 0.25, 7.0, 8.0]]),
        "truncated": torch.tensor([False]),
    }
    credit = PPO(kl_coef=0.1, advantage="bandit").credit(batch)
    assert credit["returns"][0].tolist() == pytest.approx([0, *[0.997926] * 3], abs=1e-6)
    assert credit["advantages"][0].tolist() == pytest.approx([0, *[0.747926] * 3], abs=1e-6)
    assert credit["token_reward"][0].tolist() == pytest.approx([0, 0, 0, 0.997926], abs=1e-6)
    with pytest.raises(ConfigError, match="advantage of PPO 'grpo' is unknown"):
        PPO(advantage="grpo")
