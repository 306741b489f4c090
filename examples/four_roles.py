"""PPO by hand: actor, critic, reference and reward model as four roles on one pool, driven by this process.

usage: python examples/four_roles.py [--steps 240] [--workers 2] [--seed 0] [--separate]

The task is that of the digits recipe. All four roles live in one process per worker (`WorkerDict`); with
`--separate` each role has processes of its own, and the weights come out the same. `train` is the algorithm.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from hocket import PPO, DataProto, NativeEngine, Sampling, load_config
from hocket.algorithms.kl import kl_estimate
from hocket.algorithms.losses import value_loss
from hocket.algorithms.reduce import Counts, masked, token_mean
from hocket.data.schedule import PromptSchedule
from hocket.models.load import ModelSpec, load_causal_lm, load_scalar_model, load_tokenizer, pad_token_id
from hocket.models.policy import token_logprobs
from hocket.models.scalar import state_values
from hocket.rewards.adapters import Reward
from hocket.roles.build import Blueprint
from hocket.roles.optimizer import Optimizer
from hocket.run.cluster import cluster
from hocket.run.prepare import RECIPES, check_input, prepare
from hocket.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    get_nccl_backend,
    register,
)
from hocket.weights.manifest import weights_sha256

Tensors = dict[str, Tensor]


# --- the algorithm: what the driver does -------------------------------------------------------------------


def train(roles: dict[str, RayWorkerGroup], schedule: PromptSchedule, algorithm: PPO, steps: int) -> list[float]:
    """PPO, step by step; the mean score of each step. Axes: B answers, T tokens.

    `rollouts` is a future: the tokens and the rows of the prompt file stay with the workers. What comes here are
    (B,) and (B,T) numbers, of which advantages are made.
    """
    actor, critic, ref, rm = (roles[name] for name in ("actor", "critic", "ref", "rm"))
    means = []
    for step in range(steps):
        (prompts,) = schedule.units(step)
        rollouts = actor.generate(prompts)  # returns at once, as do the next four: all of them are under way
        views = [actor.outline(rollouts), ref.logprobs(rollouts), critic.values(rollouts), rm.score(rollouts)]
        seen = {name: tensor for view in views for name, tensor in view.get().tensors().items()}
        credit = DataProto.from_dict(seen | algorithm.credit(seen))  # token rewards, returns, advantages
        value_losses = critic.update(rollouts, credit)
        actor.update(rollouts, credit)
        means.append(float(seen["score"].mean()))
        report(step, seen, value_losses)
    return means


def report(step: int, seen: Tensors, value_losses: Sequence[float]) -> None:
    """One line for every tenth step; `value_losses` are the ranks' shares."""
    if step % 10 == 0:
        mask = seen["response_mask"]
        kl = kl_estimate(seen["proximal_logprobs"], seen["reference_logprobs"], kind="k3")
        far, score = token_mean(kl, mask, counts=Counts.of(mask)), seen["score"].mean()
        print(f"step {step + 1:3d}  score {score:.3f}  KL {far:.3f}  value loss {sum(value_losses):.4f}", flush=True)


# --- the roles: what lives in the workers ------------------------------------------------------------------


class Learner(Worker):
    """A model that learns, data parallel: every rank has all the weights and learns from its own rows."""

    def __init__(self, model: torch.nn.Module, blueprint: Blueprint, *, lr: float) -> None:
        super().__init__()
        torch.set_num_threads(blueprint.threads)
        self._meet_the_other_ranks()
        self.model = model
        self.algorithm: Any = blueprint.algorithm
        self.minibatches = blueprint.config.trainer.minibatches
        self.optimizer = Optimizer(model, blueprint.config.trainer, lr=lr)

    def _meet_the_other_ranks(self) -> None:
        if self.world_size > 1 and not dist.is_initialized():  # once per process: the roles in it share the group
            dist.init_process_group(get_nccl_backend())

    def learn(self, data: DataProto, loss: Callable[[Tensors, Counts], Tensor]) -> float:
        """An optimizer step per minibatch; the mean of this rank's share of the losses."""
        total = 0.0
        for rows in data.chunk(self.minibatches):
            share = loss(rows.tensors(), self._count(rows.tensor("response_mask")))
            share.backward()
            self._add_up_gradients()
            self.optimizer.step()
            total += float(share.detach()) / self.minibatches
        return total

    def _count(self, mask: Tensor) -> Counts:
        """What all ranks together learn from: the denominators of the losses, so that gradients add up."""
        own = Counts.of(mask)
        both = torch.tensor([own.tokens, own.sequences])
        if self.world_size > 1:
            dist.all_reduce(both)
        return Counts(*both.tolist())

    def _add_up_gradients(self) -> None:
        if self.world_size > 1:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            flat = parameters_to_vector(gradients)
            dist.all_reduce(flat)
            vector_to_parameters(flat, gradients)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sha256(self) -> str:
        """The weights in one number, for comparing runs."""
        return weights_sha256(dict(self.model.named_parameters()))


class Actor(Learner):
    """The policy. It samples with the very weights that it trains, so there is nothing to synchronise."""

    def __init__(self, blueprint: Blueprint, *, lr: float) -> None:
        super().__init__(load_causal_lm(blueprint.spec()), blueprint, lr=lr)
        rollout, tokenizer = blueprint.config.rollout, load_tokenizer(blueprint.config.model.tokenizer)
        self.engine = NativeEngine(self.model, stop_ids=blueprint.stop_ids, pad_id=pad_token_id(tokenizer))
        self.sampling = Sampling(rollout.max_new_tokens, rollout.temperature)
        self.samples, self.seed = rollout.group_size, blueprint.config.seed

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate(self, prompts: DataProto) -> DataProto:
        """Prompts -> answers, all of one width, so that the ranks' rows fit together."""
        rollouts = self.engine.generate(prompts, self.sampling, samples=self.samples, seed=self.seed)
        width = prompts.tensor("input_ids").shape[1] + self.sampling.max_new_tokens
        tensors = {
            name: pad(tensor, (0, width - tensor.shape[1])) if tensor.dim() == 2 else tensor
            for name, tensor in rollouts.tensors().items()
        }
        return DataProto.from_dict(tensors, rollouts.non_tensor_batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def outline(self, rollouts: DataProto) -> DataProto:
        """The masks and log-probs of the answers. This step's weights sampled them, so they are proximal too."""
        mask, logprobs = rollouts.tensor("response_mask"), rollouts.tensor("rollout_logprobs")
        return DataProto.from_dict({"response_mask": mask, "proximal_logprobs": logprobs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, rollouts: DataProto, credit: DataProto) -> float:
        """Learn from the advantages (PPO's clipped surrogate)."""
        return self.learn(rollouts.union(credit), self._loss)

    def _loss(self, rows: Tensors, counts: Counts) -> Tensor:
        new = token_logprobs(self.model, rows["input_ids"], rows["length"], temperature=self.sampling.temperature)
        return self.algorithm.policy_loss(new, rows, counts=counts)[0]


class Critic(Learner):
    """Values of the states in which tokens were chosen; begins with the policy's backbone and a zero head."""

    def __init__(self, blueprint: Blueprint, *, lr: float) -> None:
        super().__init__(load_scalar_model(blueprint.spec(), fresh_head=True), blueprint, lr=lr)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    @torch.no_grad()
    def values(self, rollouts: DataProto) -> DataProto:
        """values (B,T)."""
        values = state_values(self.model, rollouts.tensor("input_ids"), rollouts.tensor("length"))
        return DataProto.from_dict({"values": values})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, rollouts: DataProto, credit: DataProto) -> float:
        """Learn the returns."""
        return self.learn(rollouts.union(credit), self._loss)

    def _loss(self, rows: Tensors, counts: Counts) -> Tensor:
        mask = rows["response_mask"]
        new = masked(state_values(self.model, rows["input_ids"], rows["length"]), mask)
        errors = value_loss(new, rows["values"], returns=rows["returns"], clip=self.algorithm.value_clip)
        return self.algorithm.reduce(errors, mask, counts=counts)


class Reference(Worker):
    """The policy as it was at the start."""

    def __init__(self, spec: ModelSpec, *, temperature: float) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = load_causal_lm(spec)
        self.temperature = temperature

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    @torch.no_grad()
    def logprobs(self, rollouts: DataProto) -> DataProto:
        """reference_logprobs (B,T)."""
        ids, length = rollouts.tensor("input_ids"), rollouts.tensor("length")
        found = token_logprobs(self.model, ids, length, temperature=self.temperature)
        return DataProto.from_dict({"reference_logprobs": found["logprobs"]})


class RewardModel(Worker):
    """Here a rule; a learned one would have the same method."""

    def __init__(self, reward: Reward, *, tokenizer: str) -> None:
        super().__init__()
        self.reward = reward
        self.tokenizer = load_tokenizer(tokenizer)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score(self, rollouts: DataProto) -> DataProto:
        """score (B,)."""
        ids, mask = rollouts.tensor("input_ids"), rollouts.tensor("response_mask")
        tokens = [row[own] for row, own in zip(ids, mask, strict=True)]
        answers = [self.tokenizer.decode(own, skip_special_tokens=True) for own in tokens]
        rows, uids = rollouts.non_tensor_batch["row"].tolist(), rollouts.non_tensor_batch["uid"].tolist()
        scores = self.reward([row["prompt"] for row in rows], answers, rows, uids)
        return DataProto.from_dict({"score": torch.tensor(scores.values)})


# --- the placement: which role lives where -----------------------------------------------------------------


def specs(blueprint: Blueprint) -> dict[str, RayClassWithInitArgs]:
    """Each role with the arguments of its own constructor."""
    settings = blueprint.config
    return {
        "actor": RayClassWithInitArgs(Actor, blueprint, lr=settings.trainer.lr),
        "critic": RayClassWithInitArgs(Critic, blueprint, lr=settings.trainer.critic_lr),
        "ref": RayClassWithInitArgs(Reference, blueprint.spec(), temperature=settings.rollout.temperature),
        "rm": RayClassWithInitArgs(RewardModel, blueprint.reward, tokenizer=settings.model.tokenizer),
    }


def place(roles: dict[str, RayClassWithInitArgs], workers: int, *, separate: bool) -> dict[str, RayWorkerGroup]:
    """A group per role on one pool: views of the same `workers` processes, or `workers` processes for each role."""
    global_pool = RayResourcePool([workers])
    if separate:
        return {name: RayWorkerGroup(global_pool, role) for name, role in roles.items()}
    return RayWorkerGroup(global_pool, create_colocated_worker_cls(roles)).spawn(set(roles))


def main(*, steps: int, workers: int, seed: int, separate: bool) -> None:
    """Train the digits task; print the rise of the score and the digest of the weights."""
    settings = [f"seed={seed}", f"trainer.max_steps={steps}", "algo.kl_coef=0.01", "rollout.prompts_per_unit=32"]
    config = load_config(RECIPES / "digits.yaml", settings)
    bundles = [{"CPU": 1.0, "GPU": 0.0}] * workers
    with tempfile.TemporaryDirectory() as folder, cluster(None, bundles) as where:
        print(where)
        ready = prepare(check_input(config), Path(folder), print)
        roles = place(specs(ready.blueprint), workers, separate=separate)
        means = train(roles, ready.schedule, ready.blueprint.algorithm, steps)
        tenth = max(1, steps // 10)
        first, last = (sum(part) / tenth for part in (means[:tenth], means[-tenth:]))
        print(f"mean score: first tenth {first:.3f}, last tenth {last:.3f}")
        for name in ("actor", "critic"):
            print(f"weights of the {name}: {roles[name].sha256()[0]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--separate", action="store_true")
    main(**vars(parser.parse_args()))
