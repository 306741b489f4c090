"""The numbers that people watch, by hand."""

import pytest
import torch

from hocket.algorithms.presets import GRPO
from hocket.data.proto import DataProto
from hocket.roles.statistics import add_up, batch_statistics, staleness_statistics

MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]]).bool()


def batch(**more):
    tensors = {
        "score": torch.tensor([1.0, 1.0, 0.0, 2.0]),
        "group": torch.tensor([0, 0, 1, 1]),
        "response_mask": MASK,
        "version": torch.where(MASK, torch.tensor([[5], [4], [5], [3]]), -1).int(),
        "advantages": torch.where(MASK, torch.tensor([[1.0], [0.0], [-1.0], [2.0]]), 99.0),
        "truncated": torch.tensor([False, False, True, False]),
        "length": torch.tensor([3, 2, 4, 3]),
    }
    return DataProto.from_dict(tensors | more, {"uid": list("aabb")})


def test_by_hand():
    stats = batch_statistics(batch(**{"reward/accuracy": torch.tensor([1.0, 0.0, 0.0, 0.0])}), version=5)
    assert stats == pytest.approx(
        {
            "reward/mean": 1.0,
            "reward/std": 0.5**0.5,
            "group/zero_std_frac": 0.5,
            "len/response_mean": 2.0,
            "len/response_max": 3.0,
            "len/truncated_frac": 0.25,
            "staleness/mean": (0 * 2 + 1 + 0 * 3 + 2 * 2) / 8,
            "staleness/max": 2.0,
            "adv/mean": (2 - 3 + 4) / 8,
            "adv/std": ((2 + 3 + 8) / 8 - (3 / 8) ** 2) ** 0.5,
            "tokens": 12.0,
            "samples": 4.0,
            "reward/accuracy/mean": 0.25,
        }
    )


@pytest.mark.parametrize(
    ("offset", "scale", "wanted"), [(0.0, 1.0, 1.0), (7.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.0, 0.5, 0.75)]
)
def test_explained_variance(offset, scale, wanted):
    returns = torch.arange(16.0).reshape(4, 4)
    stats = batch_statistics(batch(returns=returns, values=returns * scale + offset), version=5)
    assert stats["value/explained_var"] == pytest.approx(wanted, abs=1e-5)


def test_metrics_of_micro_batches_join():
    total = {}
    add_up(total, {"loss": 1.0, "ratio/max": -3.0})
    add_up(total, {"loss": 2.0, "ratio/max": -4.0})
    assert total == {"loss": 3.0, "ratio/max": -3.0}


def test_tokens_of_several_versions_in_one_answer():
    versions = torch.tensor([[-1, 5, 4, -1], [-1, 5, -1, -1], [-1, 3, 4, 5], [-1, 4, 4, -1]]).int()
    logprobs = torch.where(MASK, -1.0, 0.0)
    older = torch.where(versions == 3, -3.0, logprobs)
    mixed = batch(version=versions, proximal_logprobs=logprobs, rollout_logprobs=older)
    stats = batch_statistics(mixed, version=5)
    assert stats["staleness/mean"] == pytest.approx((0 * 3 + 1 * 4 + 2) / 8)
    assert stats["staleness/max"] == 2.0
    found = staleness_statistics(mixed, version=5, algorithm=GRPO(correction="icepop"))
    assert [found[f"staleness/tokens/{age}"] for age in range(3)] == pytest.approx([3 / 8, 4 / 8, 1 / 8])
    assert [found[f"correction/kept/{age}"] for age in range(3)] == [1, 1, 0], "e^2 is outside 0.5 .. 5"
    assert [found[f"mismatch/k1/{age}"] for age in range(3)] == [0, 0, -2]
    assert "correction/kept/0" not in staleness_statistics(mixed, version=5, algorithm=Plain())


class Plain:
    """An algorithm that is none of hocket's."""

    needs = frozenset()
    group_baseline = False

    def credit(self, batch):
        return {}

    def loss(self, new, batch, counts):
        return {}, {}
