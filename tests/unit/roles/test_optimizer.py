"""AdamW, its clipping and its schedule."""

import math

import pytest
import torch
from torch import nn

from hocket.config import TrainerSection
from hocket.roles.optimizer import Optimizer, lr_factor


def test_schedules_by_hand():
    def rates(kind, warmup, total=8):
        return [lr_factor(n, kind=kind, warmup=warmup, total=total) for n in range(total + 2)]

    assert rates("constant", 0) == [1.0] * 10
    assert rates("constant", 4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates("linear", 4) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = [0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(5)]
    assert rates("cosine", 4) == pytest.approx([0.25, 0.5, 0.75, 1.0, *cosine, 0.0])
    assert rates("linear", 8) == [(n + 1) / 8 for n in range(8)] + [1.0, 0.0]


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def optimizer(net, **settings):
    section = TrainerSection(**{"max_steps": 2, "epochs": 2, "minibatches": 2, "prompts_per_step": 4} | settings)
    return Optimizer(net, section, lr=0.1)


def test_the_schedule_counts_optimizer_steps():
    """L50: two training steps of two passes of two minibatches are eight optimizer steps."""
    net = model()
    tool = optimizer(net, schedule="linear", warmup_steps=2)
    rates = []
    for _ in range(8):
        net(torch.ones(1, 4)).sum().backward()
        rates.append(tool.step()[1])
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1 * 5 / 6, 0.1 * 4 / 6, 0.1 * 3 / 6, 0.1 * 2 / 6, 0.1 / 6])


@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_clipping_bounds_what_is_used_and_reports_what_was_there(limit):
    net = model()
    tool = optimizer(net, max_grad_norm=limit, betas=(0.5, 0.9))
    net(torch.ones(2, 4)).pow(2).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
    norm, _ = tool.step()
    used = torch.cat([state["exp_avg"].flatten() for state in tool.adam.state.values()]) / 0.5
    assert norm == pytest.approx(float(gradient.norm()))
    assert float(used.norm()) == pytest.approx(min(limit, norm), rel=1e-4)
    assert all(p.grad is None for p in net.parameters())


def test_a_gradient_that_is_not_finite_changes_nothing():
    net = model()
    tool = optimizer(net)
    before = [p.detach().clone() for p in net.parameters()]
    (net(torch.ones(1, 4)).sum() * math.inf).backward()
    norm, lr = tool.step()
    assert not math.isfinite(norm)
    assert lr == 0.1
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    assert all(p.grad is None for p in net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    tool.step()
    assert not torch.equal(next(net.parameters()), before[0])


def test_frozen_parameters_stay():
    net = model()
    net.bias.requires_grad_(False)
    before = net.bias.clone()
    tool = optimizer(net, weight_decay=0.1)
    net(torch.ones(1, 4)).sum().backward()
    tool.step()
    assert torch.equal(net.bias, before)
