"""One batch has one loss and one gradient, however it is cut, padded or ordered: to 1e-6 in relative norm."""

import pytest
import torch

from hocket.data.proto import DataProto

ALGORITHMS = {
    "ppo": {"kl_coef": 0.05, "entropy_coef": 0.01},
    "grpo": {"kl_coef": 0.05, "entropy_coef": 0.01},
    "dr_grpo": {"kl_coef": 0.05, "entropy_coef": 0.01},
}
LENGTHS = [12, 7, 9] * 4  # three groups of four; with 36 tokens a micro-batch cuts through the groups
BUDGETS = {"one row": 1, "three rows": 36, "all": 10_000}


@pytest.fixture(params=ALGORITHMS)
def learn(request, make_trainer):
    """Losses and gradients of one optimizer step over units, in any cut."""

    def learn(units, *, budget=10_000, **settings):
        trainer = make_trainer(
            request.param,
            options=ALGORITHMS[request.param],
            micro_batch_tokens=budget,
            max_grad_norm=1e9,
            betas=(0.5, 0.95),
            **settings,
        )
        metrics = trainer.train(units, step=0)
        # Adam's first moment after its first step is (1 - beta1) times the gradient
        gradients = {
            name: torch.cat([state["exp_avg"].flatten() for state in optimizer.adam.state.values()]) / 0.5
            for name, optimizer in trainer._optimizers.items()
        }
        return metrics, gradients

    return learn


def assert_equal(one, other):
    (metrics, gradients), (more, others) = one, other
    assert metrics.keys() == more.keys()
    for name in metrics:
        assert more[name] == pytest.approx(metrics[name], rel=2e-6, abs=1e-6), name
    for name, gradient in gradients.items():
        assert float(gradient.norm()) > 1e-4
        assert float((gradient - others[name]).norm() / gradient.norm()) < 1e-6, name


@pytest.fixture
def whole(learn, experience):
    return learn([experience(LENGTHS)])


@pytest.mark.parametrize(("budget", "rows"), [(1, 1), (36, 3), (10_000, 12)], ids=BUDGETS)
def test_micro_batches(learn, experience, make_trainer, whole, budget, rows):
    trainer = make_trainer(micro_batch_tokens=budget)
    plan = trainer._plan(trainer._own_rows([experience(LENGTHS)], step=0))
    assert [[part.stop - part.start for part in minibatch] for minibatch in plan] == [[rows] * (12 // rows)]
    assert_equal(whole, learn([experience(LENGTHS)], budget=budget))


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_padding(learn, experience, whole, budget):
    assert_equal(whole, learn([experience(LENGTHS, extra=5)], budget=budget))


def test_units_of_different_width(learn, experience, whole):
    batch = experience(LENGTHS)
    parts = []
    for unit in batch.split(4):
        width = int(unit.tensor("length").max())
        narrow = {key: t[:, :width] if t.dim() == 2 else t for key, t in unit.tensors().items()}
        parts.append(DataProto.from_dict(narrow, unit.non_tensor_batch, unit.meta_info))
    assert_equal(whole, learn(parts))


def test_row_order_within_groups(learn, experience, whole):
    order = [3, 1, 0, 2, 4, 7, 6, 5, 10, 11, 8, 9]
    assert_equal(whole, learn([experience(LENGTHS)[order]], budget=36))


def test_order_of_groups(learn, experience, whole):
    order = [*range(8, 12), *range(4), *range(4, 8)]
    assert_equal(whole, learn([experience(LENGTHS)[order]], budget=36))
