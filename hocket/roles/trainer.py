"""The Trainer: experience in, new weights out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hocket.algorithms.mismatch import mismatch
from hocket.algorithms.presets import Algorithm
from hocket.algorithms.reduce import Counts
from hocket.config import TrainerSection
from hocket.data.files import write_batch
from hocket.data.proto import DataProto
from hocket.data.schema import EXPERIENCE, TRAIN_BATCH, check, collate
from hocket.errors import ConfigError, HocketError
from hocket.models.load import save_hf
from hocket.models.policy import named_weights, token_logprobs
from hocket.models.scalar import state_values
from hocket.observe.trace import Tracer
from hocket.parallel.strategy import Single, Strategy
from hocket.roles.maker import CRITIC, Report
from hocket.roles.optimizer import Optimizer
from hocket.roles.snapshot import Snapshot, restore
from hocket.roles.statistics import add_up, batch_statistics, staleness_statistics
from hocket.weights.manifest import Manifest, weights_sha256
from hocket.weights.publisher import Publisher
from hocket.weights.transport import Transport

Micro = dict[str, Tensor]


@dataclass
class Pretraining:
    """Text that the policy is not to forget: `coef` is its share of the loss (PPO-ptx, arXiv 2203.02155, eq. 2).

    `batches` gives token ids (B, T), right padded, and lengths (B,), one batch for each optimizer step, for ever.
    """

    coef: float
    batches: Iterator[tuple[Tensor, Tensor]]


class Trainer:
    """Learns from one step's experience at a time. Plain Python: no Ray, no process.

    `critic` is there when the algorithm needs one; set `critic_travels` when the makers
    have one too. `temperature` is the one that the makers sample with.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        algorithm: Algorithm,
        settings: TrainerSection,
        *,
        transport: Transport,
        stop_ids: tuple[int, ...],
        critic: PreTrainedModel | None = None,
        strategy: Strategy | None = None,
        pretraining: Pretraining | None = None,
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
        self._strategy = strategy or Single()
        self.critic_travels = False
        self._pretraining = pretraining
        self._snapshot: Snapshot | None = None
        self._publisher = Publisher(name, chunk_bytes=chunk_bytes)
        self._optimizers = {"policy": Optimizer(policy, settings, lr=settings.lr)}
        if critic is not None:
            lr = settings.critic_lr or 5 * settings.lr
            self._optimizers["value"] = Optimizer(critic, settings, lr=lr)
        if self._strategy.world_size > 1:
            self._demand_one_start(name)

    def train(self, units: Sequence[DataProto], *, step: int) -> dict[str, float]:
        """One training step (from 0) on this rank's EXPERIENCE units, in prompt order; returns metrics of all ranks.

        Proximal log-probs, values and advantages come from the weights as they are at the start of the step. A rank
        may have no units as long as another has some. Raises HocketError at the first loss or gradient that is not
        finite.
        """
        with self.tracer.span("train", step=step + 1):
            return self.learn(self.prepare(units, step=step), step=step)

    @torch.no_grad()
    def prepare(self, units: Sequence[DataProto], *, step: int) -> DataProto:
        """What the start of the step decides: EXPERIENCE units -> this rank's rows of the TRAIN_BATCH.

        Its meta_info carries the step's `facts`, which are metrics over all ranks.
        """
        torch.set_num_threads(self._threads)  # a thread's own setting: the first act of any thread that computes
        own = self._forward_all(self._own_rows(units, step=step))
        parts = self._strategy.gather(own)
        whole = collate([part for part in parts if part is not None])
        first = sum(len(part) for part in parts[: self._strategy.rank] if part is not None)
        ready, facts = self._credit(whole)
        facts |= batch_statistics(ready, version=step)
        facts |= staleness_statistics(ready, version=step, algorithm=self._algorithm)
        ready.meta_info = {"facts": facts}
        return ready[first : first + (len(own) if own is not None else 0)]

    def learn(self, batch: DataProto, *, step: int) -> dict[str, float]:
        """All optimizer steps on a prepared batch; returns its metrics. It may be called again for another pass."""
        torch.set_num_threads(self._threads)
        plan, counts = self._plan(batch), self._counts(batch)
        parts = [
            self._optimizer_step([self._micro(batch, rows) for rows in minibatch], counts[m], step=step)
            for _ in range(self._settings.epochs)
            for m, minibatch in enumerate(plan)
        ]
        learned = {key: _over_steps(key, [part[key] for part in parts]) for key in parts[0]}
        return learned | batch.meta_info.get("facts", {})

    def use(self, algorithm: Algorithm) -> None:
        """Learn by this algorithm from now on. Raises ConfigError when it needs a critic and there is none."""
        if "critic" in algorithm.needs and self.critic is None:
            raise ConfigError(f"{type(algorithm).__name__} needs a critic, but there is none; give one, or use GRPO")
        self._algorithm = algorithm

    def publish(self, version: int, timeline: int = 0) -> tuple[Manifest, list[Any]]:
        """Send the policy, and a critic that makers share, as `version`; returns what a maker's `receive` takes.

        A trainer that went back to a checkpoint publishes in a new `timeline`.
        """
        with self.tracer.span("sync", version=version):
            weights = named_weights(self.policy)
            if self.critic_travels and self.critic is not None:
                weights |= {CRITIC + name: tensor for name, tensor in named_weights(self.critic).items()}
            return self._publisher.send(weights, version, self._transport, timeline=timeline)

    def forget(self) -> None:
        """Let go of what was published last: every maker has fetched it."""
        self._transport.clear()

    def snapshot(self) -> None:
        """Keep a copy of all state as it is between two steps, for `save` to write while training goes on."""
        with self.tracer.span("checkpoint"):
            self._snapshot = Snapshot.of(self._models, self._optimizers)

    def save(self, folder: str, names: Sequence[str] = (), units: Sequence[DataProto] = ()) -> dict[str, str]:
        """Write the snapshot: `folder`/hf and, with a critic, `folder`/critic, each loadable by transformers as it is,
        and in `folder`/state the optimizers, and experience that waits, a file named by `names` for each of `units`.
        Returns the SHA-256 of the policy's weights and of all optimizer state.
        """
        with self.tracer.span("checkpoint"):
            snapshot = self._snapshot or Snapshot.of(self._models, self._optimizers)
            for name, model in self._models.items():
                place = Path(folder) / ("hf" if name == "policy" else "critic")
                save_hf(place, model, self._tokenizer, self._stop_ids, weights=snapshot.weights[name])
            facts = snapshot.save(Path(folder) / "state")
            for name, unit in zip(names, units, strict=True):
                write_batch(Path(folder) / "state" / name, unit)
            self._snapshot = None
            return facts

    def restore(self, folder: str) -> None:
        """Go on from what `save` wrote. Raises CheckpointError when it is of another model or algorithm."""
        with self.tracer.span("checkpoint"):
            restore(Path(folder), self._models, self._optimizers)

    @property
    def _models(self) -> dict[str, PreTrainedModel]:
        return {"policy": self.policy} | ({"value": self.critic} if self.critic is not None else {})

    def save_policy(self, folder: str) -> None:
        """Write the policy as a folder that transformers loads, with its tokenizer where there is one."""
        save_hf(Path(folder), self.policy, self._tokenizer, self._stop_ids)

    def save_critic(self, folder: str) -> None:
        """Write the critic likewise. Raises ConfigError when there is none."""
        if self.critic is None:
            raise ConfigError("there is no critic to save: the algorithm has none, or model_fn gave None")
        save_hf(Path(folder), self.critic, self._tokenizer, self._stop_ids)

    def save_optimizer(self, name: str, path: str) -> None:
        """Write the state of the optimizer of "policy" or "value" as a file that `torch.load` reads."""
        if name not in self._optimizers:
            raise ConfigError(f"there is no optimizer of {name!r}; there is one of {', '.join(self._optimizers)}")
        torch.save(self._optimizers[name].adam.state_dict(), path)

    def sha256(self) -> str:
        """SHA-256 of the policy's weights, for people to compare runs by."""
        return weights_sha256(named_weights(self.policy))

    def report(self) -> Report:
        """What happened since the last report."""
        return Report(self.tracer.drain())

    def _demand_one_start(self, name: str) -> None:
        starts = self._strategy.gather(self.sha256())
        if len(set(starts)) > 1:
            raise ConfigError(f"the {len(starts)} ranks of {name} start from different weights; load one checkpoint")

    def _own_rows(self, units: Sequence[DataProto], *, step: int) -> DataProto | None:
        """This rank's rows with the number of their `minibatch`; None when it has no units.

        A minibatch is whole groups, cut from the groups of all ranks in prompt order.
        """
        rank = self._strategy.rank
        keys = [(unit.meta_info.get("unit", i), rank, str(uid)) for i, unit in enumerate(units) for uid in _uids(unit)]
        groups = list(dict.fromkeys(sorted((key for part in self._strategy.gather(keys) for key in part), key=_place)))
        if not groups:
            raise HocketError(f"step {step + 1} has no experience on any rank; a step needs at least one unit")
        size = len(groups) // self._settings.minibatches
        if size * self._settings.minibatches != len(groups):
            raise HocketError(
                f"{len(groups)} groups do not divide into trainer.minibatches={self._settings.minibatches}; "
                "change one of the two"
            )
        if not units:
            return None
        batch = check(collate(units), EXPERIENCE, f"experience of step {step + 1}").select(None, ["uid"], [])
        number = {key: i // size for i, key in enumerate(groups)}
        return batch.union(DataProto.from_dict({"minibatch": torch.tensor([number[key] for key in keys])}))

    def _plan(self, batch: DataProto) -> list[list[slice]]:
        """Rows of each micro-batch of each minibatch, in prompt order: cut by content alone.

        A micro-batch holds at most `micro_batch_tokens` padded tokens, or one row.
        """
        lengths, budget = batch.tensor("length").tolist(), self._settings.micro_batch_tokens
        ends = torch.bincount(batch.tensor("minibatch"), minlength=self._settings.minibatches).cumsum(0).tolist()
        return [_cut(lengths, first, last, budget) for first, last in pairwise([0, *ends])]

    def _counts(self, batch: DataProto) -> list[Counts]:
        """Tokens and sequences of each minibatch, over all ranks."""
        mask, number = batch.tensor("response_mask"), batch.tensor("minibatch")
        own = [Counts.of(mask[number == m]) for m in range(self._settings.minibatches)]
        ranks = self._strategy.gather(own)
        return [
            Counts(tokens=sum(part.tokens for part in parts), sequences=sum(part.sequences for part in parts))
            for parts in zip(*ranks, strict=True)
        ]

    def _forward_all(self, own: DataProto | None) -> DataProto | None:
        """Add proximal log-probs, entropy and, unless the maker gave them, values."""
        if own is None:
            return None
        width = own.tensor("input_ids").shape[1]
        plan = [rows for minibatch in self._plan(own) for rows in minibatch]
        values = "values" not in own.keys()  # noqa: SIM118  (DataProto iterates rows)
        found = [self._forward(self._micro(own, rows), entropy=True, values=values) for rows in plan]
        start = {key: torch.cat([_pad(new[key], width) for new in found]).cpu() for key in found[0]}
        start["proximal_logprobs"] = start.pop("logprobs")
        return DataProto.from_dict(start | own.tensors(), own.non_tensor_batch)

    def _credit(self, whole: DataProto) -> tuple[DataProto, dict[str, float]]:
        """The rows of all ranks with groups and what the algorithm credits them with, and the step's facts."""
        codes = {uid: i for i, uid in enumerate(dict.fromkeys(whole.non_tensor_batch["uid"]))}
        tensors = whole.tensors() | {"group": torch.tensor([codes[uid] for uid in whole.non_tensor_batch["uid"]])}
        entropy = tensors.pop("entropy")
        tensors |= self._algorithm.credit(tensors)
        mask = tensors["response_mask"]
        counts = Counts.of(mask)
        facts = mismatch(tensors["proximal_logprobs"], tensors["rollout_logprobs"], mask=mask, counts=counts)
        facts["entropy"] = torch.where(mask, entropy, 0.0).sum() / max(counts.tokens, 1)
        ready = DataProto.from_dict(tensors, whole.non_tensor_batch)
        return check(ready, TRAIN_BATCH, "training batch"), {k: float(v) for k, v in facts.items()}

    def _optimizer_step(self, minibatch: list[Micro], counts: Counts, *, step: int) -> dict[str, float]:
        """Accumulate gradients over micro-batches and ranks, then one step of each optimizer."""
        metrics: dict[str, float] = {}
        broken: list[str] = []
        for micro in minibatch:
            losses, facts = self._algorithm.loss(self._forward(micro), micro, counts)
            if self._pretraining is not None:
                losses["policy"] = (1.0 - self._pretraining.coef) * losses["policy"]
            for name, loss in losses.items():
                if not math.isfinite(value := float(loss.detach())):
                    broken.append(f"the {name} loss is {value}")
                loss.backward()
            add_up(metrics, {k: float(v) for k, v in facts.items()})
        if self._pretraining is not None:
            metrics["ptx/loss"] = self._pretrain(self._pretraining)
        told = self._strategy.gather((broken, metrics))  # every rank stops when one does
        metrics = {}
        for reasons, part in told:
            _demand(not reasons, " and ".join(reasons), step)
            add_up(metrics, part)
        for name, optimizer in self._optimizers.items():
            self._strategy.sum_gradients(optimizer.parameters)
            norm, lr = optimizer.step()
            _demand(math.isfinite(norm), f"the gradient norm of the {name} model is {norm}", step)
            suffix = "" if name == "policy" else f"/{name}"
            metrics |= {f"grad_norm{suffix}": norm, f"lr{suffix}": lr}
        return metrics

    def _pretrain(self, pretraining: Pretraining) -> float:
        """Add the gradient of this rank's share of the language-model loss, nats per token over all ranks."""
        ids, length = (tensor.to(self.policy.device) for tensor in next(pretraining.batches))
        logprobs = token_logprobs(self.policy, ids, length)["logprobs"]
        tokens = sum(self._strategy.gather(int((length - 1).sum())))  # nothing predicts a row's first token
        loss = -logprobs.sum() / max(tokens, 1)
        (pretraining.coef * loss).backward()
        return float(loss.detach())

    def _micro(self, batch: DataProto, rows: slice) -> Micro:
        """Those rows without the columns that are padding in all of them, where the policy is."""
        micro = batch[rows].tensors()
        width, device = int(micro["length"].max()), self.policy.device
        return {key: (t[:, :width] if t.dim() == 2 else t).to(device) for key, t in micro.items()}

    def _forward(self, micro: Mapping[str, Tensor], *, entropy: bool = False, values: bool = True) -> Micro:
        """Log-probs (and values, entropy) of one micro-batch under the current weights."""
        ids, length = micro["input_ids"], micro["length"]
        entropy = entropy or bool(getattr(self._algorithm, "entropy_coef", 0.0))
        new = token_logprobs(self.policy, ids, length, temperature=self._temperature, entropy=entropy)
        if self.critic is not None and values:
            new["values"] = state_values(self.critic, ids, length)
        return new


def _uids(batch: DataProto) -> list[str]:
    return list(batch.non_tensor_batch["uid"])


def _place(key: tuple[int, int, str]) -> tuple[int, int]:
    """Where a group stands in the step: by its unit, then by rank; `sorted` keeps the order inside a unit."""
    return key[:2]


def _cut(lengths: Sequence[int], first: int, last: int, budget: int) -> list[slice]:
    cuts, start, width = list[slice](), first, 0
    for i in range(first, last):
        width = max(width, lengths[i])
        if i > start and (i + 1 - start) * width > budget:
            cuts.append(slice(start, i))
            start, width = i, lengths[i]
    return [*cuts, slice(start, last)] if last > first else []


def _over_steps(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("/max") else sum(values) / len(values)


def _pad(tensor: Tensor, width: int) -> Tensor:
    return nn.functional.pad(tensor, (0, width - tensor.shape[1]))


def _demand(finite: bool, what: str, step: int) -> None:
    if not finite:
        raise HocketError(
            f"step {step + 1}: {what}; nothing was updated with it. Lower trainer.lr, or look at the "
            "scores and samples of this step"
        )
