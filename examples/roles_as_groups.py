"""PPO whose roles are groups of processes of their own: actor, critic, initial model, reward model.

usage: python examples/roles_as_groups.py [--num_actor_nodes 2] [--strategy ddp] [--prompt_csv FILE.csv]

The options are those of the older script of this kind. Each role says on how many nodes it is to live; with several
nodes in the cluster, those of one role are different ones. In a time step the actors ask `experience_batch_size`
prompts each; after every `update_timesteps` of them actors and critics learn, at the same time. `train` is the
algorithm. The default prompts are those of the digits recipe; without --reward, a random model scores the answers.
Fresh models are files on this machine: on a cluster of several machines give --reward, and a --pretrain that all of
them can read.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import ray
import torch
from older_cli import parser, positive, pretrained, run, tiny
from torch import Tensor
from torch.nn.functional import pad

from hocket import DataProto, NativeEngine, Sampling
from hocket.algorithms.losses import value_loss
from hocket.algorithms.reduce import Counts, masked
from hocket.data.schedule import PromptSchedule
from hocket.data.schema import collate
from hocket.errors import ConfigError
from hocket.models.load import CHARS, load_causal_lm, load_scalar_model, load_tokenizer, pad_token_id, save_hf
from hocket.models.policy import token_logprobs
from hocket.models.scalar import state_values
from hocket.parallel.strategy import make_strategy
from hocket.read_config import parse_config
from hocket.rewards.model import ModelReward
from hocket.roles.build import Blueprint
from hocket.roles.optimizer import Optimizer
from hocket.run.cluster import cluster
from hocket.run.prepare import Prepared, check_input, prepare
from hocket.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from hocket.single_controller.dispatch import collect_concat, dispatch_one_to_all
from hocket.workers import get_reward_model_from_args

ROLES = ("actor", "critic", "initial", "reward")
Groups = dict[str, RayWorkerGroup]
# Every worker gets the reference to all rows, takes its share of them, and what they answer is joined. Nothing passes
# through the driver, and the shares may be uneven.
SHARED: Any = {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_concat}


# --- the algorithm: what the driver does -------------------------------------------------------------------


def train(groups: Groups, schedule: PromptSchedule, *, timesteps: int, update_timesteps: int) -> None:
    """Collect and learn by turns; the last turn may be shorter. All that comes here are four numbers per update."""
    actor, critic, initial, reward = (groups[role] for role in ROLES)
    pending: list[list[Any]] = []
    for timestep in range(timesteps):
        rollouts = actor.generate(schedule.units(timestep)[0])  # a future, as are the next three: all are under way
        pending.append([rollouts, initial.logprobs(rollouts), critic.values(rollouts), reward.score(rollouts)])
        if len(pending) == update_timesteps or timestep + 1 == timesteps:
            learned = [actor.learn(pending), critic.learn(pending)]  # at the same time
            policy, value = (future.get().tensors() for future in learned)
            print(
                f"timestep {timestep + 1:3d}  score {policy['score'][0]:.3f}  rows {policy['rows'].tolist()}"
                f"  policy loss {policy['loss'].sum():+.4f}  value loss {value['loss'].sum():.4f}",
                flush=True,
            )
            pending = []


# --- the roles: what lives in the workers ------------------------------------------------------------------


class Role(Worker):
    """A model and what it says of this rank's share of the rows."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.blueprint = blueprint
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.temperature = blueprint.config.rollout.temperature

    def share(self, rows: DataProto) -> DataProto:
        """This rank's rows, one block of as many as there are ranks; the ranks' answers in order are those to all."""
        return rows[len(rows) * self.rank // self.world_size : len(rows) * (self.rank + 1) // self.world_size]

    def tokens(self, rows: DataProto) -> tuple[Tensor, Tensor]:
        """input_ids and length of this rank's rows, where the model is."""
        own = self.share(rows)
        return own.tensor("input_ids").to(self.device), own.tensor("length").to(self.device)


class Initial(Role):
    """The actor as it was at the start."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        self.model = load_causal_lm(blueprint.spec(), device=self.device)

    @register(SHARED, blocking=False)
    @torch.no_grad()
    def logprobs(self, rollouts: DataProto) -> DataProto:
        """reference_logprobs (B,T)."""
        found = token_logprobs(self.model, *self.tokens(rollouts), temperature=self.temperature)["logprobs"]
        return DataProto.from_dict({"reference_logprobs": found.cpu()})


class RewardModel(Role):
    """A rule, or a model with a tokenizer of its own."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        self.reward = ModelReward.load(reward) if isinstance(reward := blueprint.reward, str) else reward
        self.tokenizer = load_tokenizer(blueprint.config.model.tokenizer, model=blueprint.model)

    @register(SHARED, blocking=False)
    def score(self, rollouts: DataProto) -> DataProto:
        """score (B,)."""
        own = self.share(rollouts)
        ids, mask = own.tensor("input_ids"), own.tensor("response_mask")
        tokens = [row[spoken] for row, spoken in zip(ids, mask, strict=True)]
        answers = [self.tokenizer.decode(spoken, skip_special_tokens=True) for spoken in tokens]
        rows, uids = own.non_tensor_batch["row"].tolist(), own.non_tensor_batch["uid"].tolist()
        scores = self.reward([row["prompt"] for row in rows], answers, rows, uids)
        return DataProto.from_dict({"score": torch.tensor(scores.values)})


class Learner(Role):
    """A model that learns: every rank has all the weights, and adds up its gradients with the others'."""

    loss: Callable[[dict[str, Tensor], Counts], Tensor]  # of actor and critic: this rank's share of that of all ranks

    def __init__(self, blueprint: Blueprint, model: Any, *, strategy: str, lr: float, batch_size: int) -> None:
        super().__init__(blueprint)
        self.model = model.to(self.device)
        self.strategy = make_strategy(strategy)
        self.optimizer = Optimizer(self.model, blueprint.config.trainer, lr=lr)
        self.algorithm: Any = blueprint.algorithm
        self.batch_size = batch_size

    @register(SHARED, blocking=False)
    def learn(self, timesteps: Sequence[Sequence[DataProto]]) -> DataProto:
        """An optimizer step for every `batch_size` rows of all ranks together; the losses are this rank's share.

        Each rank sees all rows, so all of them credit alike, count alike, and make the same steps, also where one
        has no row in a batch.
        """
        rows = collate([reduce(DataProto.union, views) for views in timesteps])
        tensors = rows.tensors() | {"proximal_logprobs": rows.tensor("rollout_logprobs")}  # by the weights of now
        credited = DataProto.from_dict(tensors | self.algorithm.credit(tensors))
        batches = credited.split(self.batch_size)
        losses = [self._step(batch, Counts.of(batch.tensor("response_mask"))) for batch in batches]
        mean = torch.tensor([sum(losses) / len(losses)])
        seen = sum(len(self.share(batch)) for batch in batches)
        return DataProto.from_dict(
            {"loss": mean, "rows": torch.tensor([seen]), "score": rows.tensor("score").mean()[None]}
        )

    def _step(self, batch: DataProto, counts: Counts) -> float:
        own, loss = self.share(batch), torch.zeros(())
        if len(own):
            loss = self.loss({name: tensor.to(self.device) for name, tensor in own.tensors().items()}, counts)
            loss.backward()
        self.strategy.sum_gradients(self.optimizer.parameters)
        self.optimizer.step()
        return float(loss.detach())

    @register(Dispatch.RANK_ZERO)
    def save_optimizer(self, path: str) -> None:
        """The optimizer's state, for `torch.load`."""
        torch.save(self.optimizer.adam.state_dict(), path)


class Actor(Learner):
    """The policy. It samples with the very weights that it trains, so there is nothing to synchronise."""

    def __init__(self, blueprint: Blueprint, **options: Any) -> None:
        super().__init__(blueprint, load_causal_lm(blueprint.spec()), **options)
        self.tokenizer = load_tokenizer(blueprint.config.model.tokenizer, model=blueprint.model)
        self.engine = NativeEngine(self.model, stop_ids=blueprint.stop_ids, pad_id=pad_token_id(self.tokenizer))
        self.sampling = Sampling(blueprint.config.rollout.max_new_tokens, self.temperature)

    @register(SHARED, blocking=False)
    def generate(self, prompts: DataProto) -> DataProto:
        """Prompts -> answers, all of one width, so that the ranks' rows fit together."""
        rollouts = self.engine.generate(self.share(prompts), self.sampling, samples=1, seed=self.blueprint.config.seed)
        width = prompts.tensor("input_ids").shape[1] + self.sampling.max_new_tokens
        tensors = {
            name: pad(tensor, (0, width - tensor.shape[1])) if tensor.dim() == 2 else tensor
            for name, tensor in rollouts.tensors().items()
        }
        return DataProto.from_dict(tensors, rollouts.non_tensor_batch)

    def loss(self, rows: dict[str, Tensor], counts: Counts) -> Tensor:
        """PPO's clipped surrogate."""
        new = token_logprobs(self.model, rows["input_ids"], rows["length"], temperature=self.temperature)
        return self.algorithm.policy_loss(new, rows, counts=counts)[0]

    @register(Dispatch.RANK_ZERO)
    def save(self, folder: str) -> None:
        """A folder that transformers loads."""
        save_hf(Path(folder), self.model, self.tokenizer, self.blueprint.stop_ids)


class Critic(Learner):
    """Values of the states in which tokens were chosen; begins with the actor's backbone and a zero head."""

    def __init__(self, blueprint: Blueprint, **options: Any) -> None:
        super().__init__(blueprint, load_scalar_model(blueprint.spec(), fresh_head=True), **options)

    @register(SHARED, blocking=False)
    @torch.no_grad()
    def values(self, rollouts: DataProto) -> DataProto:
        """values (B,T)."""
        return DataProto.from_dict({"values": state_values(self.model, *self.tokens(rollouts)).cpu()})

    def loss(self, rows: dict[str, Tensor], counts: Counts) -> Tensor:
        """The distance from the returns, clipped around the old values."""
        mask = rows["response_mask"]
        new = masked(state_values(self.model, rows["input_ids"], rows["length"]), mask)
        errors = value_loss(new, rows["values"], returns=rows["returns"], clip=self.algorithm.value_clip)
        return self.algorithm.reduce(errors, mask, counts=counts)


# --- the placement: which role lives where -----------------------------------------------------------------


def pool(nodes: int, gpus: int) -> RayResourcePool:
    """The places of one role: on each node one for every GPU, or one on a CPU.

    On CPUs, the nodes are different ones if there are several at all. With several GPUs per node, each `gpus` places
    are whole on one node, and different ones where that is all the GPUs of a node.
    """
    places = RayResourcePool([gpus] * nodes if gpus > 1 else [nodes], use_gpu=gpus > 0)
    several = sum(node["Alive"] for node in ray.nodes()) > 1
    places.slots("STRICT_PACK" if gpus > 1 else "STRICT_SPREAD" if several else "PACK")
    return places


def start(args: argparse.Namespace, blueprint: Blueprint) -> Groups:
    """A group for each role, on places of its own."""
    learning = {"strategy": args.strategy, "batch_size": args.train_batch_size}
    specs = {
        "actor": RayClassWithInitArgs(Actor, blueprint, lr=args.actor_lr, **learning),
        "critic": RayClassWithInitArgs(Critic, blueprint, lr=args.critic_lr, **learning),
        "initial": RayClassWithInitArgs(Initial, blueprint),
        "reward": RayClassWithInitArgs(RewardModel, blueprint),
    }
    groups: Groups = {}
    for role, spec in specs.items():
        places = pool(vars(args)[f"num_{role}_nodes"], args.num_gpus_per_node)
        groups[role] = RayWorkerGroup(places, spec, name=role)
        print(f"{role}: {', '.join(slot.address for slot in places.slots())}", flush=True)
    return groups


# --- the start and the end ---------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> None:
    """ConfigError for numbers that cannot work together."""
    per_node = max(1, args.num_gpus_per_node)
    workers = {role: vars(args)[f"num_{role}_nodes"] * per_node for role in ROLES}
    if args.strategy == "single" and max(workers["actor"], workers["critic"]) > 1:
        raise ConfigError(f"--strategy single is for 1 actor and 1 critic, not {workers}; use ddp")
    args.rows = args.experience_batch_size * workers["actor"]
    if max(workers.values()) > args.rows:
        raise ConfigError(f"a time step has {args.rows} prompts, too few for {workers}; raise --experience_batch_size")
    if args.need_optim_ckpt and not args.save_path:
        raise ConfigError("--need_optim_ckpt saves beside the actor; give --save_path too")
    args.pretrain = pretrained(args.model, args.pretrain)


def ready(args: argparse.Namespace, folder: Path) -> Prepared:
    """Start model, prompts, reward and algorithm, checked as for any run; `folder` holds the fresh models."""
    model = {"name": args.pretrain} if args.pretrain else {"config": tiny(args.model), "tokenizer": CHARS}
    if not args.reward:
        fresh = {**tiny(args.model), "vocab_size": len(tokenizer := load_tokenizer(CHARS)), "pad_token_id": 0}
        save_hf(folder / "reward", get_reward_model_from_args(args.model, config=fresh), tokenizer, ())
    settings = {
        "seed": args.seed,
        "model": model,
        "data": {"path": args.prompt_csv, "prompt_key": "prompt"},
        "eval": {"path": None},
        "reward": args.reward or str(folder / "reward"),
        "rollout": {"group_size": 1, "max_new_tokens": args.max_new_tokens, "prompts_per_unit": args.rows},
        "algo": {"name": "ppo", "kl_coef": args.kl_coef},
        "trainer": {"prompts_per_step": args.rows},
    }
    checked = check_input(parse_config(settings))
    print(checked.facts[0])
    return prepare(checked, folder, print)


def main(args: argparse.Namespace) -> None:
    """Start the four groups, train, save."""
    check(args)
    nodes = sum(vars(args)[f"num_{role}_nodes"] for role in ROLES)
    bundles = [{"CPU": float(max(1, args.num_gpus_per_node)), "GPU": float(args.num_gpus_per_node)}] * nodes
    with tempfile.TemporaryDirectory() as folder:
        prepared = ready(args, Path(folder))
        with cluster(args.address, bundles) as where:
            print(where, flush=True)
            groups = start(args, prepared.blueprint)
            timesteps = args.num_episodes * args.max_timesteps
            train(groups, prepared.schedule, timesteps=timesteps, update_timesteps=args.update_timesteps)
            save(args, groups)


def save(args: argparse.Namespace, groups: Groups) -> None:
    """What was asked to be saved, on the node of the actor's first rank."""
    if args.save_path:
        groups["actor"].save(args.save_path)
        print(f"the actor is in {args.save_path}")
    for role in ("actor", "critic") if args.need_optim_ckpt else ():
        groups[role].save_optimizer(str(Path(args.save_path) / f"{role}_optim.pt"))


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--prompt_csv", default="recipe:digits_train.csv", help="CSV file with a column `prompt`")
    made.add_argument("--strategy", choices=["single", "ddp"], default="ddp", help="how several actors learn together")
    made.add_argument("--need_optim_ckpt", action="store_true", help="save the optimizers too")
    made.add_argument("--num_episodes", type=positive, default=10)
    made.add_argument("--max_timesteps", type=positive, default=10, help="time steps of an episode")
    made.add_argument("--update_timesteps", type=positive, default=10, help="time steps between two updates")
    made.add_argument("--train_batch_size", type=positive, default=8, help="rows of an optimizer step, over all ranks")
    for role in ROLES:
        made.add_argument(f"--num_{role}_nodes", type=positive, default=1)
    made.add_argument("--num_gpus_per_node", type=int, default=0, help="0: a process on a CPU for each node")
    return made


if __name__ == "__main__":
    run(main, options())
