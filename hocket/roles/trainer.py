"""The Trainer: experience in, new weights out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hocket.algorithms.correction import mismatch
from hocket.algorithms.presets import Algorithm
from hocket.algorithms.reduce import Counts
from hocket.config import TrainerSection
from hocket.data.proto import DataProto
from hocket.data.schema import EXPERIENCE, TRAIN_BATCH, check, collate
from hocket.errors import HocketError
from hocket.models.load import save_hf
from hocket.models.policy import named_weights, token_logprobs
from hocket.models.scalar import state_values
from hocket.observe.trace import Tracer
from hocket.roles.maker import Report
from hocket.roles.optimizer import Optimizer
from hocket.roles.statistics import add_up, batch_statistics
from hocket.weights.manifest import Manifest, weights_sha256
from hocket.weights.publisher import Publisher
from hocket.weights.transport import Transport

Micro = dict[str, Tensor]


class Trainer:
    """Learns from one step's experience at a time. Plain Python: no Ray, no process.

    `critic` is there when the algorithm needs one; `temperature` is the one that the makers sample with.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        algorithm: Algorithm,
        settings: TrainerSection,
        *,
        transport: Transport,
        stop_ids: tuple[int, ...],
        critic: PreTrainedModel | None = None,
        temperature: float = 1.0,
        chunk_bytes: int = 64 << 20,
        name: str = "trainer-0",
        threads: int = 1,
    ) -> None:
        self.policy = policy
        self.critic = critic
        self.tracer = Tracer(name)
        self._tokenizer = tokenizer
        self._algorithm = algorithm
        self._settings = settings
        self._temperature = temperature
        self._stop_ids = stop_ids
        self._threads = threads
        self._transport = transport
        self._publisher = Publisher(name, chunk_bytes=chunk_bytes)
        self._optimizers = {"policy": Optimizer(policy, settings, lr=settings.lr)}
        if critic is not None:
            lr = settings.critic_lr or 5 * settings.lr
            self._optimizers["value"] = Optimizer(critic, settings, lr=lr)

    def train(self, units: Sequence[DataProto], *, step: int) -> dict[str, float]:
        """One training step (from 0) on the EXPERIENCE of all its units, in prompt order; returns metrics.

        Proximal log-probs, values and advantages come from the weights as they are at the start of the step.
        Raises HocketError at the first loss or gradient that is not finite.
        """
        torch.set_num_threads(self._threads)  # a thread's own setting: the first act of any thread that computes
        with self.tracer.span("train", step=step + 1):
            batch = check(collate(units), EXPERIENCE, f"experience of step {step + 1}")
            plan = self._plan(batch)
            batch, start = self._prepare(batch, plan)
            parts = [
                self._optimizer_step([self._micro(batch, rows) for rows in minibatch], step=step)
                for _ in range(self._settings.epochs)
                for minibatch in plan
            ]
        learned = {key: _over_steps(key, [part[key] for part in parts]) for key in parts[0]}
        return learned | start | batch_statistics(batch, version=step)

    def publish(self, version: int) -> tuple[Manifest, list[Any]]:
        """Snapshot the policy as `version`: what a maker's `receive` takes."""
        with self.tracer.span("sync", version=version):
            manifest, chunks = self._publisher.snapshot(named_weights(self.policy), version)
            return manifest, self._transport.send(chunks)

    def save(self, folder: str) -> None:
        """Write `folder`/hf and, with a critic, `folder`/critic, each loadable by transformers as it is."""
        with self.tracer.span("checkpoint"):
            save_hf(Path(folder) / "hf", self.policy, self._tokenizer, self._stop_ids)
            if self.critic is not None:
                save_hf(Path(folder) / "critic", self.critic, self._tokenizer, self._stop_ids)

    def sha256(self) -> str:
        """SHA-256 of the policy's weights, for people to compare runs by."""
        return weights_sha256(named_weights(self.policy))

    def report(self) -> Report:
        """What happened since the last report."""
        return Report(self.tracer.drain())

    def _plan(self, batch: DataProto) -> list[list[slice]]:
        """Rows of each micro-batch of each minibatch, in prompt order: cut by content alone.

        A minibatch is whole groups; a micro-batch holds at most `micro_batch_tokens` padded tokens, or one row.
        """
        lengths = batch.tensor("length").tolist()
        starts = [i for i, uid in enumerate(batch.non_tensor_batch["uid"]) if i == 0 or uid != _uid(batch, i - 1)]
        groups = len(starts) // self._settings.minibatches
        if groups * self._settings.minibatches != len(starts):
            raise HocketError(
                f"{len(starts)} groups do not divide into trainer.minibatches={self._settings.minibatches}; "
                "change one of the two"
            )
        edges = [starts[i * groups] for i in range(self._settings.minibatches)] + [len(lengths)]
        budget = self._settings.micro_batch_tokens
        return [_cut(lengths, first, last, budget) for first, last in pairwise(edges)]

    @torch.no_grad()
    def _prepare(self, batch: DataProto, plan: list[list[slice]]) -> tuple[DataProto, dict[str, float]]:
        """Add everything that the start of the step decides: EXPERIENCE -> TRAIN_BATCH."""
        width = batch.tensor("input_ids").shape[1]
        found = [self._forward(self._micro(batch, rows), entropy=True) for minibatch in plan for rows in minibatch]
        start = {key: torch.cat([_pad(new[key], width) for new in found]).cpu() for key in found[0]}
        entropy = start.pop("entropy")
        codes = {uid: i for i, uid in enumerate(dict.fromkeys(batch.non_tensor_batch["uid"]))}
        tensors = batch.tensors() | {
            "group": torch.tensor([codes[uid] for uid in batch.non_tensor_batch["uid"]]),
            "proximal_logprobs": start.pop("logprobs"),
            **start,
        }
        tensors |= self._algorithm.credit(tensors)
        mask = tensors["response_mask"]
        counts = Counts.of(mask)
        facts = mismatch(tensors["proximal_logprobs"], tensors["rollout_logprobs"], mask=mask, counts=counts)
        facts["entropy"] = torch.where(mask, entropy, 0.0).sum() / max(counts.tokens, 1)
        ready = DataProto.from_dict(tensors, batch.non_tensor_batch, batch.meta_info)
        return check(ready, TRAIN_BATCH, "training batch"), {k: float(v) for k, v in facts.items()}

    def _optimizer_step(self, minibatch: list[Micro], *, step: int) -> dict[str, float]:
        """Accumulate gradients over micro-batches, then one step of each optimizer."""
        parts = [Counts.of(micro["response_mask"]) for micro in minibatch]
        counts = Counts(tokens=sum(p.tokens for p in parts), sequences=sum(p.sequences for p in parts))
        metrics: dict[str, float] = {}
        for micro in minibatch:
            losses, facts = self._algorithm.loss(self._forward(micro), micro, counts)
            for name, loss in losses.items():
                _demand_finite(f"the {name} loss", float(loss.detach()), step)
                loss.backward()
            add_up(metrics, {k: float(v) for k, v in facts.items()})
        for name, optimizer in self._optimizers.items():
            norm, lr = optimizer.step()
            _demand_finite(f"the gradient norm of the {name} model", norm, step)
            suffix = "" if name == "policy" else f"/{name}"
            metrics |= {f"grad_norm{suffix}": norm, f"lr{suffix}": lr}
        return metrics

    def _micro(self, batch: DataProto, rows: slice) -> Micro:
        """Those rows without the columns that are padding in all of them, where the policy is."""
        micro = batch[rows].tensors()
        width, device = int(micro["length"].max()), self.policy.device
        return {key: (t[:, :width] if t.dim() == 2 else t).to(device) for key, t in micro.items()}

    def _forward(self, micro: Mapping[str, Tensor], *, entropy: bool = False) -> Micro:
        """Log-probs (and values, entropy) of one micro-batch under the current weights."""
        ids, length = micro["input_ids"], micro["length"]
        entropy = entropy or bool(getattr(self._algorithm, "entropy_coef", 0.0))
        new = token_logprobs(self.policy, ids, length, temperature=self._temperature, entropy=entropy)
        if self.critic is not None:
            new["values"] = state_values(self.critic, ids, length)
        return new


def _uid(batch: DataProto, i: int) -> str:
    return batch.non_tensor_batch["uid"][i]


def _cut(lengths: Sequence[int], first: int, last: int, budget: int) -> list[slice]:
    cuts, start, width = list[slice](), first, 0
    for i in range(first, last):
        width = max(width, lengths[i])
        if i > start and (i + 1 - start) * width > budget:
            cuts.append(slice(start, i))
            start, width = i, lengths[i]
    return [*cuts, slice(start, last)]


def _over_steps(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("/max") else sum(values) / len(values)


def _pad(tensor: Tensor, width: int) -> Tensor:
    return nn.functional.pad(tensor, (0, width - tensor.shape[1]))


def _demand_finite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise HocketError(
            f"step {step + 1}: {what} is {value}; nothing was updated with it. Lower trainer.lr, or look at the "
            "scores and samples of this step"
        )
