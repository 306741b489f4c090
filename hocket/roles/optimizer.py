"""AdamW with gradient clipping and a learning-rate schedule over optimizer steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hocket.config import TrainerSection


class Optimizer:
    """The optimizer of one model. `trainer.max_steps` x passes x minibatches is its whole schedule."""

    def __init__(self, model: nn.Module, settings: TrainerSection, *, lr: float) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._max_norm = settings.max_grad_norm
        self.adam = torch.optim.AdamW(self.parameters, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay)
        total = settings.max_steps * settings.epochs * settings.minibatches
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.adam,
            lambda n: lr_factor(n, kind=settings.schedule, warmup=settings.warmup_steps, total=total),
        )

    def step(self) -> tuple[float, float]:
        """Clip, update, clear the gradients; returns the gradient's norm before clipping and the rate used.

        A norm that is not finite updates nothing.
        """
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self._max_norm))
        lr = float(self.adam.param_groups[0]["lr"])
        if math.isfinite(norm):
            self.adam.step()
            self._schedule.step()
        self.adam.zero_grad(set_to_none=True)
        return norm, lr

    def state(self) -> dict[str, Any]:
        """What the next step depends on, beside the parameters."""
        return {"adam": self.adam.state_dict(), "schedule": self._schedule.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.adam.load_state_dict(state["adam"])
        self._schedule.load_state_dict(state["schedule"])


def lr_factor(step: int, *, kind: str, warmup: int, total: int) -> float:
    """Share of the learning rate at optimizer step `step` (from 0): linear warm-up, then the chosen decay to 0."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if kind == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0
