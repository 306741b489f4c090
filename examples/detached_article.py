"""The detached flow, step by step: set up makers, set up trainers, launch, wait.

usage: python examples/detached_article.py [--makers 2] [--trainers 1] [--steps 240] [--save FOLDER]

The task is that of the digits recipe. Makers and trainers drive themselves: nobody controls them, they find each
other by name, and each runs until it has done its part.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import ray
from torch.utils.data import DataLoader

from hocket import load_config
from hocket.run.cluster import cluster
from hocket.run.prepare import RECIPES, check_input, prepare
from hocket.workers import (
    DetachedPPOTrainer,
    ExperienceMakerHolder,
    balance,
    env_info,
    get_actor_from_args,
    get_critic_from_args,
    get_strategy_from_args,
    get_tokenizer_from_args,
    target_makers,
    target_trainers,
)

ROWS, SAMPLES = 16, 4  # prompts of a maker's batch, answers to each


def start_model(folder: str) -> str:
    """A small model that has seen the task: the one that `hocket train` would start from."""
    return prepare(check_input(load_config(RECIPES / "digits.yaml")), Path(folder), print).blueprint.model


def loader_fn(pretrain: str):
    """What makes the loader inside each maker: every maker has its own share of the prompts."""

    def load(rank: int, makers: int) -> DataLoader:
        lines = (RECIPES / "digits_train.csv").read_text().split()[1:]
        rows = [line.rsplit(":,", 1) for line in (" ".join(lines)).split("sort ")[1:]]
        tokenizer = get_tokenizer_from_args(pretrain)

        def collate(batch: list[list[str]]) -> dict:
            asked = [f"sort {digits}:" for digits, _ in batch]
            ids = tokenizer(asked, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
            return {**ids, "prompt": asked, "answer": [answer.strip() for _, answer in batch]}

        return DataLoader(rows[rank::makers], batch_size=ROWS, shuffle=True, drop_last=True, collate_fn=collate)

    return load


def main(num_makers: int, num_trainers: int, steps: int, save: str | None, pretrain: str) -> list:
    """Returns what makers and trainers returned."""

    def model_fn() -> tuple:
        return (get_actor_from_args(pretrain), get_critic_from_args(pretrain), "digits", get_actor_from_args(pretrain))

    def trainer_model_fn() -> tuple:
        return get_actor_from_args(pretrain), get_critic_from_args(pretrain)

    makers = [
        ExperienceMakerHolder.options(name=f"maker_{i}", num_cpus=1, max_concurrency=2).remote(
            detached_trainer_name_list=[f"trainer_{x}" for x in target_trainers(i, num_makers, num_trainers)],
            strategy_fn=lambda: get_strategy_from_args("colossalai_zero2"),
            model_fn=model_fn,
            env_info=env_info(num_makers)[i],
            sync_models_from_trainers=True,
            buffer_cpu_offload=True,
            kl_coef=0.0,
            tokenizer=pretrain,
            group_size=SAMPLES,
            max_new_tokens=8,
        )
        for i in range(num_makers)
    ]
    env_info_trainers = env_info(num_trainers)
    trainers = [
        DetachedPPOTrainer.options(name=f"trainer_{i}", num_cpus=1, max_concurrency=2).remote(
            experience_maker_holder_name_list=[f"maker_{x}" for x in target_makers(i, num_trainers, num_makers)],
            strategy_fn=lambda: get_strategy_from_args("ddp"),
            model_fn=trainer_model_fn,
            env_info=env_info_trainers[i],
            train_batch_size=32,
            buffer_limit=0,
            max_staleness=1,
            eps_clip=0.2,
            value_clip=0.4,
            actor_lr=5e-4,
            critic_lr=1e-3,
            tokenizer=pretrain,
        )
        for i in range(num_trainers)
    ]
    experience_steps = steps * num_trainers * 32 // (ROWS * SAMPLES * num_makers)
    reports = ray.get(
        [maker.workingloop.remote(loader_fn(pretrain), num_steps=experience_steps) for maker in makers]
        + [trainer.fit.remote(steps, 4, 1) for trainer in trainers]
    )
    if save:
        ray.get(trainers[0].strategy_save_actor.remote(save))
    return reports


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--makers", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--save", default=None)
    args = parser.parse_args()
    bundles = [{"CPU": 1.0, "GPU": 0.0}] * (args.makers + args.trainers)
    with tempfile.TemporaryDirectory() as folder:
        pretrain = start_model(folder)
        with cluster(None, bundles):
            reports = main(args.makers, args.trainers, args.steps, args.save, pretrain)
        for report in reports:
            rewards = [step["reward/mean"] for step in getattr(report, "metrics", [])]
            tenth = max(1, len(rewards) // 10)
            if rewards:
                print(
                    f"{report.name}: {report.steps} steps, mean reward of the first and the last tenth "
                    f"{sum(rewards[:tenth]) / tenth:.3f} -> {sum(rewards[-tenth:]) / tenth:.3f}; {report.ended_by}"
                )
        print("ledger:", balance(reports))
