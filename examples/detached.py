"""Makers and trainers that drive themselves: 1 maker : N trainers, M : N, any numbers.

usage: python examples/detached.py [--num_makers 1] [--num_trainers 1] [--prompt_path FILE.csv --reward digits]

The options are those of the older scripts for detached PPO. Prompts are the column `prompt` of a CSV file, dealt
over the makers, or else random token ids. Without --pretrain, actor and critic are tiny models of their
architecture, and without --reward the reward model is one too, with random weights: enough to see everything move.
Several trainers are the ranks of one data-parallel group. Options for quantized models follow in a later version.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
import torch
from older_cli import parser, positive, pretrained, run, tiny
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler

from hocket.data.prompts import PromptTable, read_prompts
from hocket.data.schedule import Prompt, tokenize
from hocket.errors import ConfigError
from hocket.models.load import CHARS, check_room, load_tokenizer, named_positions
from hocket.parallel.strategy import NAMES, OLD_NAMES
from hocket.rewards.adapters import Reward, load_reward
from hocket.run.cluster import cluster
from hocket.waiting import Waiter
from hocket.workers import (
    DetachedPPOTrainer,
    ExperienceMakerHolder,
    MakerReport,
    TrainerReport,
    balance,
    check_topology,
    env_info,
    get_actor_from_args,
    get_critic_from_args,
    get_reward_model_from_args,
    get_strategy_from_args,
    target_makers,
    target_trainers,
)
from hocket.workers.factories import ARCHITECTURES

DUMMY_TOKENS = 32  # of a random prompt
Edges = dict[str, list[str]]


def main(args: argparse.Namespace) -> None:
    """Check and print the plan; set up makers, set up trainers, launch, wait; report."""
    args.pretrain = pretrained(args.model, args.pretrain)
    tokenizer = load_tokenizer(args.pretrain or CHARS)
    table = read_prompts(args.prompt_path, prompt_key="prompt") if args.prompt_path else None
    loader_fn = prompts(args, table, tokenizer)
    maker_models, trainer_models = models(args, rule(args, table), vocabulary=len(tokenizer))
    print(table.notice if table else f"prompts: {DUMMY_TOKENS} random token ids each")
    feeds, serves = edges(args.num_makers, args.num_trainers)
    total_steps = plan(args, feeds, serves)
    bundles = [{"CPU": 1.0, "GPU": 0.0}] * (args.num_makers + args.num_trainers)
    with cluster(args.address, bundles) as where:
        print(where, flush=True)
        makers, trainers = set_up_makers(args, feeds, maker_models), set_up_trainers(args, serves, trainer_models)
        there = [actor.ping.remote() for actor in [*makers, *trainers]]
        Waiter(timeout=600).gather(there, who=[*feeds, *serves], what="start")
        began = time.monotonic()
        loops = [maker.workingloop.remote(loader_fn, num_steps=args.experience_steps) for maker in makers]
        fits = [trainer.fit.remote(total_steps, args.update_steps, args.train_epochs) for trainer in trainers]
        trained, made = ray.get(fits), ray.get(loops)  # where a trainer fails, the makers only say that it is gone
        report(made, trained, seconds=time.monotonic() - began, debug=args.debug)
        if args.save_path:
            ray.get(trainers[0].strategy_save_actor.remote(args.save_path))
            print(f"the actor is in {args.save_path}")


# --- the plan ----------------------------------------------------------------------------------------------


def edges(num_makers: int, num_trainers: int) -> tuple[Edges, Edges]:
    """Each maker with the trainers that get its experience, each trainer with the makers that get its weights."""
    makers, trainers = range(num_makers), range(num_trainers)
    feeds = {f"maker_{i}": [f"trainer_{x}" for x in target_trainers(i, num_makers, num_trainers)] for i in makers}
    serves = {f"trainer_{i}": [f"maker_{x}" for x in target_makers(i, num_trainers, num_makers)] for i in trainers}
    return feeds, serves


def plan(args: argparse.Namespace, feeds: Edges, serves: Edges) -> int:
    """Print who feeds whom; returns the steps that the trainer with the most samples needs, a last short one included.

    The trainers step together: one that has fewer samples adds nothing to the last steps.
    """
    if args.num_trainers > 1 and get_strategy_from_args(args.trainer_strategy).name != "ddp":
        raise ConfigError(
            f"{args.num_trainers} trainers are one group of --trainer_strategy ddp; give it, or 1 trainer"
        )
    get_strategy_from_args(args.maker_strategy).check_maker(args.num_makers)
    each = args.experience_steps * args.experience_batch_size
    print(*check_topology(feeds, serves, groups=dict.fromkeys(serves, "all"), samples_per_maker=each), sep="\n")
    shares = Counter(targets[i % len(targets)] for targets in feeds.values() for i in range(each))
    total_steps = -(-max(shares.values()) // args.train_batch_size)
    print(f"total_steps {total_steps}: each takes up to {args.train_batch_size} samples for every trainer")
    return total_steps


def rule(args: argparse.Namespace, table: PromptTable | None) -> Reward | None:
    """The rule that --reward names, checked against what the prompts have; None for a random reward model."""
    if args.reward:
        reward = load_reward(args.reward)
        reward.check(table.columns if table else (), answers=table is not None and table.answer_key is not None)
        return reward
    if args.pretrain:
        raise ConfigError("a reward model with random weights teaches a pretrained model nothing; give a --reward")
    return None


def models(args: argparse.Namespace, reward: Reward | None, *, vocabulary: int) -> tuple[Callable[[], Any], ...]:
    """The `model_fn` of the makers and that of the trainers."""
    special = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}

    def source(model: str, name: str | None) -> tuple[str, str | None, dict[str, Any] | None]:
        return model, name, None if name else tiny(model) | special

    critic_model = args.critic_model or args.model
    start = pretrained(critic_model, args.critic_pretrain) or (args.pretrain if critic_model == args.model else None)
    if args.pretrain and not start:
        raise ConfigError(f"a tiny {critic_model} critic lacks the vocabulary of --pretrain; give --critic_pretrain")
    actor = partial(get_actor_from_args, *source(args.model, args.pretrain), lora_rank=args.lora_rank)
    critic = partial(get_critic_from_args, *source(critic_model, start), lora_rank=args.lora_rank)
    fresh = partial(get_reward_model_from_args, *source(args.model, None))
    return lambda: (actor(), critic(), reward.function if reward else fresh(), actor()), lambda: (actor(), critic())


# --- the prompts -------------------------------------------------------------------------------------------


def prompts(args: argparse.Namespace, table: PromptTable | None, tokenizer: Any) -> Callable[[int, int], DataLoader]:
    """What makes the loader inside each maker: full batches without end of its own share of the prompts."""
    asked = tokenize(table, tokenizer, template="auto", system=None, max_tokens=None)[0] if table else []
    if table and len(asked) < args.num_makers:
        raise ConfigError(f"found {len(asked)} prompts for {args.num_makers} makers; each needs one at least")
    longest = max((len(prompt.ids) for prompt in asked), default=DUMMY_TOKENS)
    positions = named_positions(args.pretrain) if args.pretrain else tiny(args.model).get("max_position_embeddings")
    check_room(longest, args.max_new_tokens, positions)
    size, steps, vocabulary = args.experience_batch_size, args.experience_steps, len(tokenizer)

    def collate(batch: Sequence[Prompt]) -> dict[str, Any]:
        rows = [torch.tensor(prompt.ids) for prompt in batch]
        columns = {key: [prompt.row[key] for prompt in batch] for key in batch[0].row}
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return {"input_ids": pad_sequence(rows, batch_first=True), "attention_mask": mask, **columns}

    def load(rank: int, makers: int) -> DataLoader:
        rows: Any = asked[rank::makers] or torch.randint(vocabulary, (4 * size, DUMMY_TOKENS))
        sampler = RandomSampler(rows, num_samples=steps * size)  # each maker's torch has a seed of its own
        return DataLoader(rows, size, sampler=sampler, collate_fn=collate if asked else None)

    return load


# --- makers and trainers -----------------------------------------------------------------------------------


def set_up_makers(args: argparse.Namespace, feeds: Edges, model_fn: Callable[[], Any]) -> list[Any]:
    """A named actor for each maker."""
    return [
        ExperienceMakerHolder.options(name=name, num_cpus=1, max_concurrency=2).remote(
            detached_trainer_name_list=targets,
            strategy_fn=partial(get_strategy_from_args, args.maker_strategy),
            model_fn=model_fn,
            env_info=info,
            sync_models_from_trainers=True,
            kl_coef=args.kl_coef,
            debug=args.debug,
            tokenizer=args.pretrain or CHARS,
            seed=args.seed,
            max_new_tokens=args.max_new_tokens,
        )
        for (name, targets), info in zip(feeds.items(), env_info(len(feeds)), strict=True)
    ]


def set_up_trainers(args: argparse.Namespace, serves: Edges, model_fn: Callable[[], Any]) -> list[Any]:
    """A named actor for each trainer."""
    return [
        DetachedPPOTrainer.options(name=name, num_cpus=1, max_concurrency=2).remote(
            experience_maker_holder_name_list=targets,
            strategy_fn=partial(get_strategy_from_args, args.trainer_strategy),
            model_fn=model_fn,
            env_info=info,
            train_batch_size=args.train_batch_size,
            debug=args.debug,
            actor_lr=args.actor_lr,
            critic_lr=args.critic_lr,
            tokenizer=args.pretrain or CHARS,
            seed=args.seed,
        )
        for (name, targets), info in zip(serves.items(), env_info(len(serves)), strict=True)
    ]


# --- the report --------------------------------------------------------------------------------------------


def report(made: list[MakerReport], trained: list[TrainerReport], *, seconds: float, debug: bool) -> None:
    """A table of what each did, and the ledger over all of them."""
    print(f"{'maker':12} {'made':>7} {'batches':>7}  ended because")
    for maker in made:
        print(f"{maker.name:12} {maker.made:7} {maker.batches:7}  {maker.ended_by}")
    print(f"{'trainer':12} {'trained':>7} {'steps':>7} {'version':>7} {'reward':>8}  ended because")
    for trainer in trained:
        rewards = [step["reward/mean"] for step in trainer.metrics if "reward/mean" in step]
        mean = sum(rewards) / max(len(rewards), 1)
        numbers = f"{trainer.trained:7} {trainer.steps:7} {trainer.version:7} {mean:8.3f}"
        print(f"{trainer.name:12} {numbers}  {trainer.ended_by}")
    for step in trained[0].metrics if debug else ():  # which are those of all trainers together
        print("  ".join(f"{name} {value:.4g}" for name, value in sorted(step.items())))
    ledger = balance([*made, *trained])
    print("ledger: made {made} = trained {trained} + refused {refused} + left {left}".format(**ledger))
    for reason in (name for name in ledger if ":" in name):
        print(f"  {reason}: {ledger[reason]}")
    print(f"{ledger['made'] / seconds:.1f} samples/s")


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--num_makers", type=positive, default=1)
    made.add_argument("--num_trainers", type=positive, default=1)
    known = [*NAMES, *OLD_NAMES]
    made.add_argument("--trainer_strategy", choices=known, metavar="NAME", default="ddp", help=", ".join(known))
    made.add_argument("--maker_strategy", choices=known, metavar="NAME", default="single", help="likewise")
    made.add_argument("--critic_model", choices=ARCHITECTURES, help="architecture (default: that of the actor)")
    made.add_argument("--critic_pretrain", help="folder or id; without it, the actor's, or a tiny fresh model")
    made.add_argument("--experience_steps", type=positive, default=4, help="batches that each maker makes")
    made.add_argument("--train_epochs", type=positive, default=1, help="passes over the samples between two updates")
    made.add_argument("--update_steps", type=positive, default=2, help="training steps between two sets of new weights")
    made.add_argument("--train_batch_size", type=positive, default=8, help="samples of each trainer's step")
    made.add_argument("--lora_rank", type=int, choices=[0], default=0, help="0: LoRA follows in a later version")
    made.add_argument("--prompt_path", help="CSV file with a column `prompt` (default: random token ids)")
    made.add_argument("--debug", action="store_true", help="print the metrics of every step at the end")
    return made


if __name__ == "__main__":
    run(main, options())
