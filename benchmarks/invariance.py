"""Trains in every placement and writes the SHA-256 of weights and optimizers into the table of README.md.

usage: python benchmarks/invariance.py [--steps 5]

PPO and GRPO on the digits recipe, rewarded by the rule and by a learned reward model (the critic of a short run), at
staleness 0, through the command line, in temporary run folders. Then two trainer ranks against one, on the same
recorded experience. Exits with 1 when two placements end with different bits, or the ranks differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hocket.models.load import ModelSpec, load_causal_lm
from hocket.models.policy import named_weights
from hocket.observe.console import make_console
from hocket.read_config import load_config
from hocket.roles.build import build_maker, build_trainer
from hocket.run.cluster import cluster
from hocket.run.folder import RunFolder
from hocket.run.prepare import check_input, prepare
from hocket.run.session import Session
from hocket.run.start import ManyProcesses
from hocket.weights.transport import InProcess

HOCKET = str(Path(sys.executable).parent / "hocket")
ROOT = Path(__file__).resolve().parent.parent
README, RECIPE = ROOT / "README.md", ROOT / "hocket" / "recipes" / "digits.yaml"
PLACEMENTS = ("local", "colocated", "detached(makers=1)", "detached(makers=2)", "detached(makers=3)")
RANK_STEPS = 10
_BLOCK = re.compile(r"(?<=<!-- invariance -->\n).*?(?=<!-- /invariance -->)", re.DOTALL)


def main(steps: int) -> None:
    """Run, rewrite the table, and fail when the promise does not hold."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train(folder / "judge", ["placement=local", "trainer.max_steps=20"])
        judge = f"reward={folder / 'judge' / 'checkpoints' / 'latest' / 'critic'}"
        columns = {
            "PPO, rule": ["algo.name=ppo"],
            "GRPO, rule": ["algo.name=grpo"],
            "PPO, reward model": ["algo.name=ppo", judge],
            "GRPO, reward model": ["algo.name=grpo", judge],
        }
        found = {
            placement: [
                train(folder / f"{i}-{j}", [f"placement={placement}", f"trainer.max_steps={steps}", *settings])
                for j, settings in enumerate(columns.values())
            ]
            for i, placement in enumerate(PLACEMENTS)
        }
        distance = two_ranks(folder / "ranks")
    text = table(list(columns), found, steps, distance)
    README.write_text(rewritten(README.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(text)
    if len(set(map(tuple, found.values()))) != 1 or distance > 1e-5:
        raise SystemExit("the placements do not agree")


def train(folder: Path, settings: list[str]) -> str:
    """The first digits of the SHA-256 of weights and optimizers that a run ends with."""
    command = [HOCKET, "train", "seed=0", "checkpoint.every=null", "eval.path=null", f"run.dir={folder}", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return f"{summary['weights_sha256'][:8]} {summary['optimizer_sha256'][:8]}"


def two_ranks(folder: Path) -> float:
    """How far two ranks are from one after ten steps on the same experience: norm of the difference by the norm."""
    settings = [
        "placement=detached(trainers=2)",
        f"run.dir={folder}",
        "eval.path=null",
        "trainer.micro_batch_tokens=500",
        f"trainer.max_steps={RANK_STEPS}",
    ]
    config = load_config(RECIPE, settings)
    run = RunFolder(config)
    with make_console(title="ranks", total_steps=RANK_STEPS) as console:
        session = Session(config, run, prepare(check_input(config), run.path, print), console)
        maker, one = build_maker(session.blueprint, InProcess()), build_trainer(session.blueprint, InProcess())
        recorded: list[Any] = []
        for step in range(RANK_STEPS):
            maker.receive(*one.publish(step))
            recorded.append([maker.make(unit, at_least=step) for unit in session.units(step)])
            one.train(recorded[-1], step=step)
        with cluster(None, config.placement.bundles):
            shop = ManyProcesses(session, config.placement, lambda: None)  # pyright: ignore[reportArgumentType]
            ranks = shop.trainer()
            shop.ready(*ranks.parts)
            for step, experience in enumerate(recorded):
                ranks.train(experience, step=step)
            ranks.save(str(folder / "two"))
    first, second = (flat(model) for model in (one.policy, load_causal_lm(ModelSpec(str(folder / "two" / "hf")))))
    return float((first - second).norm() / first.norm())


def flat(model: Any) -> torch.Tensor:
    """All weights as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in named_weights(model).values()])


def table(columns: list[str], found: dict[str, list[str]], steps: int, distance: float) -> str:
    """The table in markdown, with the libraries that the bits depend on."""
    rows = [f"| `placement={place}` | " + " | ".join(f"`{d}`" for d in row) + " |" for place, row in found.items()]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return "\n".join(
        [
            f"| {steps} steps, seed 0 | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
            *rows,
            "",
            "First digits of the SHA-256 of the weights, and of all optimizer state. Two trainer ranks differ from",
            f"one by {distance:.1e} in relative norm after {RANK_STEPS} steps on the same experience. Written by",
            f"`benchmarks/invariance.py` on {platform.system()} {platform.machine()} with {versions}.",
            "",
        ]
    )


def rewritten(page: str, text: str) -> str:
    """`page` with `text` between the marks of the table."""
    if not _BLOCK.search(page):
        raise SystemExit(f"{README.name} has no <!-- invariance --> ... <!-- /invariance --> block to write into")
    return _BLOCK.sub(lambda _: text, page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    main(parser.parse_args().steps)
