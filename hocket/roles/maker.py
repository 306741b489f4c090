"""The Maker: prompts in, experience out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hocket.data.chat import prompt_text
from hocket.data.proto import DataProto
from hocket.data.schema import EXPERIENCE, check
from hocket.models.pieces import Weight
from hocket.models.policy import copy_weights, frozen, token_logprobs, wanted_shapes
from hocket.models.scalar import state_values
from hocket.observe.trace import Span, Tracer
from hocket.rewards.adapters import Reward
from hocket.rewards.model import ModelReward, TokenReward
from hocket.rollout.engine import Refresh, RolloutEngine, Sampling
from hocket.weights.manifest import Manifest
from hocket.weights.receiver import Receiver
from hocket.weights.transport import Transport

Sample = dict[str, Any]
CRITIC = "critic/"  # before the names of the critic's tensors, where they travel with the policy's


@dataclass
class Report:
    """What a role tells the controller between steps: finished spans, and samples for people to read."""

    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Maker:
    """Generates answers with its copy of the policy, scores them, and adds reference log-probs and values.

    Plain Python: no Ray, no process. With a `critic` it adds `values`, and the critic's weights are to come with the
    policy's. A `TokenReward` needs no tokenizer. `swap_timeout` is how long `make` waits for weights it was promised;
    `started` is the version that the engine begins with, -1 when it is to wait for the first. With `in_flight` a unit
    takes a newer version every so many decode steps, if one is there; else its version is fixed when it begins.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase | None,
        reward: Reward | ModelReward | TokenReward,
        *,
        sampling: Sampling,
        group_size: int,
        seed: int,
        transport: Transport,
        reference: PreTrainedModel | None = None,
        critic: PreTrainedModel | None = None,
        name: str = "maker-0",
        threads: int = 1,
        swap_timeout: float = 600.0,
        started: int = 0,
        arbitrate: str | None = None,
        in_flight: int | None = None,
    ) -> None:
        self.engine = engine
        self.engine.version = started
        self.tracer = Tracer(name)
        self._tokenizer = tokenizer
        self._reward = reward
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed
        self._transport = transport
        self._reference = frozen(reference) if reference is not None else None
        self._critic = frozen(critic) if critic is not None else None
        self._threads = threads
        self._swap_timeout = swap_timeout
        self._refresh = Refresh(in_flight, self._swap_now) if in_flight is not None else None
        self.receiver = Receiver(self._expects(), name=name, arbitrate=arbitrate)
        self._samples: list[Sample] = []
        self._timeline = 0

    def make(
        self,
        unit: DataProto,
        *,
        at_least: int = 0,
        timeline: int = 0,
        stop: Callable[[], None] = lambda: None,
        refresh: Refresh | None = None,
    ) -> DataProto:
        """PROMPTS of one unit -> EXPERIENCE of all its samples, made with weights version `at_least` or newer.

        Weights of a later `timeline` of the trainer are newer, whatever their version. `refresh` is done on the way, in
        the place of the maker's own. Raises RewardError for a
        broken reward, WeightSyncError when the version does not arrive; `stop` is asked during that wait, and may
        raise.
        """
        torch.set_num_threads(self._threads)  # a thread's own setting: the first act of any thread that computes
        facts = {"step": unit.meta_info["step"] + 1, "unit": unit.meta_info["unit"]}
        self._swap(at_least, timeline=timeline, stop=stop)
        with self.tracer.span("generate", **facts, version=self.engine.version):
            rollouts = self.engine.generate(
                unit, self._sampling, samples=self._group_size, seed=self._seed, refresh=refresh or self._refresh
            )
        with self.tracer.span("reward", **facts):
            experience = self._score(rollouts)
        if self._reference is not None:
            with self.tracer.span("reference", **facts), torch.no_grad():
                experience = experience.union(self._reference_logprobs(experience, self._reference))
        if self._critic is not None:
            with self.tracer.span("values", **facts), torch.no_grad():
                experience = experience.union(_values(experience, self._critic))
        return check(experience, EXPERIENCE, "experience")

    def evaluate(self, unit: DataProto, *, at_least: int = 0, timeline: int = 0) -> dict[str, list[float]]:
        """Score and metrics of one greedy answer per prompt of `unit`, a list of values per name."""
        torch.set_num_threads(self._threads)
        self._swap(at_least, timeline=timeline)
        greedy = Sampling(self._sampling.max_new_tokens, greedy=True)
        with self.tracer.span("eval", unit=unit.meta_info["unit"], version=self.engine.version):
            scored = self._score(self.engine.generate(unit, greedy, samples=1, seed=self._seed))
        names = {"reward": "score"} | {
            key.removeprefix("reward/"): key for key in scored.tensors() if key.startswith("reward/")
        }
        return {name: scored.tensor(key).tolist() for name, key in names.items()}

    def receive(self, manifest: Manifest, handles: Sequence[Any], *, timeout: float = 600.0) -> None:
        """Fetch and commit a version of the weights; `make` puts it into use before its next unit."""
        with self.tracer.span("sync", version=manifest.version):
            self.receiver.begin(manifest)
            try:
                for i, handle in enumerate(handles):
                    self.receiver.chunk(manifest.key, i, self._transport.fetch(handle, timeout))
                self.receiver.commit(manifest.key)
            finally:
                self.receiver.abort(manifest.key)  # of what was not committed, because its sender is gone

    @property
    def has_critic(self) -> bool:
        """Whether it computes values, and so wants the critic's weights with the policy's."""
        return self._critic is not None

    def report(self) -> Report:
        """What happened since the last report."""
        samples, self._samples = self._samples, []
        return Report(self.tracer.drain(), samples)

    def _swap(self, at_least: int, *, timeline: int = 0, stop: Callable[[], None] = lambda: None) -> None:
        wanted, current = (timeline, at_least), (self._timeline, self.engine.version)
        with self.tracer.span("wait" if current < wanted else "sync"):
            new = self.receiver.swap(
                self._load, at_least=wanted, current=current, timeout=self._swap_timeout, stop=stop
            )
        if new is not None:
            self._timeline = new[0]

    def _swap_now(self) -> None:
        """Put a newer version into use if one is committed, in the midst of a unit; wait for none."""
        current = (self._timeline, self.engine.version)
        new = self.receiver.swap(self._load_traced, at_least=current, current=current, timeout=0)
        if new is not None:
            self._timeline = new[0]

    def _load_traced(self, weights: Iterable[tuple[str, Weight]], version: int) -> None:
        with self.tracer.span("sync", version=version):
            self._load(weights, version)

    def _expects(self) -> dict[str, tuple[int, ...]] | None:
        own, values = self.engine.expects(), wanted_shapes(self._critic) if self._critic is not None else {}
        if own is None or values is None:
            return None
        return {**own, **{CRITIC + name: shape for name, shape in values.items()}}

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, Weight]], version: int) -> None:
        """Put a version into use: the policy's tensors into the engine, those under "critic/" into the critic."""
        by_name = dict(weights)
        values = {name.removeprefix(CRITIC): by_name.pop(name) for name in list(by_name) if name.startswith(CRITIC)}
        self.engine.load(by_name.items(), version)
        if self._critic is not None:
            copy_weights(self._critic, values, what=f"the critic's weights version {version}")

    def _score(self, rollouts: DataProto) -> DataProto:
        completions = self._decode(rollouts)
        if isinstance(self._reward, TokenReward):
            scores = self._reward(rollouts)
        else:
            rows = [dict(row) for row in rollouts.non_tensor_batch["row"]]
            prompts = [prompt_text(row["prompt"]) for row in rows]
            scores = self._reward(prompts, completions, rows, [str(uid) for uid in rollouts.non_tensor_batch["uid"]])
        self._keep_samples(rollouts, completions, scores.values)
        metrics = {f"reward/{name}": torch.tensor(v).float() for name, v in scores.metrics.items()}
        return rollouts.union(DataProto.from_dict({"score": torch.tensor(scores.values).float()} | metrics))

    def _decode(self, rollouts: DataProto) -> list[str]:
        spans = zip(
            rollouts.tensor("input_ids").tolist(),
            rollouts.tensor("prompt_length").tolist(),
            rollouts.tensor("length").tolist(),
            strict=True,
        )
        if self._tokenizer is None:
            return [str(ids[a:b]) for ids, a, b in spans]
        return [str(self._tokenizer.decode(ids[a:b], skip_special_tokens=True)) for ids, a, b in spans]

    def _keep_samples(self, rollouts: DataProto, completions: list[str], scores: list[float]) -> None:
        """Remember as many of the unit's samples as the controller asked for in its meta_info."""
        for i in range(min(int(rollouts.meta_info.get("samples", 0)), len(rollouts))):
            row, start = rollouts.non_tensor_batch["row"][i], int(rollouts.tensor("prompt_length")[i])
            self._samples.append(
                {
                    "step": rollouts.meta_info["step"] + 1,
                    "uid": str(rollouts.non_tensor_batch["uid"][i]),
                    "sample": int(rollouts.tensor("sample")[i]),
                    "prompt": row.get("prompt"),
                    "completion": completions[i],
                    "answer": row.get("answer"),
                    "score": scores[i],
                    "version": int(rollouts.tensor("version")[i, start]),
                }
            )

    def _reference_logprobs(self, experience: DataProto, reference: PreTrainedModel) -> DataProto:
        logprobs: Tensor = token_logprobs(
            reference,
            experience.tensor("input_ids").to(reference.device),
            experience.tensor("length").to(reference.device),
            temperature=self._sampling.temperature,
        )["logprobs"]
        return DataProto.from_dict({"reference_logprobs": logprobs.cpu()})


def _values(experience: DataProto, critic: PreTrainedModel) -> DataProto:
    ids, length = experience.tensor("input_ids"), experience.tensor("length")
    values = state_values(critic, ids.to(critic.device), length.to(critic.device)).cpu()
    return DataProto.from_dict({"values": torch.where(experience.tensor("response_mask"), values, 0.0)})
