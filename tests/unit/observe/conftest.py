"""A made-up run folder with the shape of a real one: two makers feed one trainer, the reward rises."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.observe.metrics import MetricsWriter
from hocket.observe.trace import Span, TraceFile

MakeRun = Callable[..., Path]
_STARTED = 1_780_000_000
_CONFIG = """\
task: sums
model: chars-2M
trainer:
  max_steps: 150
placement:
  kind: detached
  makers: 2
  trainers: 1
  edges: null
algo: grpo
"""


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A function `(steps=150) -> folder` that writes a run folder."""

    def make(steps: int = 150) -> Path:
        folder = tmp_path / "sums--chars-2M--7"
        write_run(folder, steps)
        return folder

    return make


def write_run(folder: Path, steps: int) -> None:
    noise = random.Random(7)
    (folder / "samples").mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text(_CONFIG)
    (folder / "env.json").write_text(json.dumps({"python": "3.11.7", "cores": 2, "packages": {"torch": "2.13"}}))
    with MetricsWriter(folder / "metrics.jsonl") as metrics, TraceFile(folder / "trace.json") as trace:
        for step in range(1, steps + 1):
            record = _record(step, steps, noise)
            metrics.write(record)
            trace.add(_spans(step, record))
            if step % 50 == 0 or step == 1:
                lines = [json.dumps(_sample(step, row, record, noise)) for row in range(12)]
                (folder / f"samples/step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")


def _record(step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    learned = 1 / (1 + math.exp(-(step - 55) / 14))
    reward = 0.06 + 0.88 * learned + noise.gauss(0, 0.03)
    generate, wait = 0.22 + noise.random() * 0.05, 0.05 + noise.random() * 0.08
    record: dict[str, Any] = {
        "step": step,
        "time": _STARTED + 0.47 * step,
        "reward/mean": reward,
        "reward/std": 0.08 + 0.3 * math.sqrt(max(reward * (1 - reward), 0)),
        "group/zero_std_frac": 0.2 + 0.5 * learned,
        "kl/ref": 0.9 * learned + abs(noise.gauss(0, 0.02)),
        "kl/proximal": abs(noise.gauss(0.002, 0.001)),
        "mismatch/abs_mean": 3e-6,
        "grad_norm": 0.5,
        "len/response_mean": 9 - 4 * learned + noise.gauss(0, 0.2),
        "len/response_max": 16 - round(4 * learned),
        "len/truncated_frac": 0.4 * (1 - learned),
        "staleness/mean": 0.6 + 0.4 * noise.random(),
        "staleness/max": 1 if step > 1 else 0,
        "time/generate": generate,
        "time/reward": 0.02,
        "time/train": 0.19,
        "time/sync": 0.03,
        "time/wait_experience": wait,
        "time/step": 0.22 + wait,
        "tokens_per_s": 380 + 60 * noise.random() - 40 * learned,
        "ledger/trained": 64 * step,
        "ledger/filtered": 8 * step,
        "ledger/stale": 0,
        "ledger/failed": 2,
        "ledger/buffered": 16,
        "ledger/in_flight": 32,
        "ledger/produced": 72 * step + 50,
    }
    return record | ({"eval/accuracy": learned} if step % 50 == 0 or step in (1, steps) else {})


def _spans(step: int, record: dict[str, Any]) -> list[Span]:
    at = _STARTED + 0.47 * step
    rows = [("driver", "wait", 0.0, 0.45, 0)] if step % 2 else []
    rows += [("trainer-0", "wait", 0.0, record["time/wait_experience"], 0)]
    rows += [
        ("trainer-0", "train", record["time/wait_experience"], 0.31, 0),
        ("trainer-0", "sync", 0.43, 0.03, 0),
    ]
    for maker in (0, 1):
        begin = 0.05 * maker
        for unit in (0, 1):
            rows += [
                (f"maker-{maker}", "generate", begin, 0.15, unit),
                (f"maker-{maker}", "reward", begin + 0.15, 0.02, unit),
            ]
            begin += 0.19
        rows += [(f"maker-{maker}", "sync", begin, 0.02, 0)]
    return [
        Span(role, name, round((at + begin) * 1e9), round(seconds * 1e9), {"step": step, "unit": unit})
        for role, name, begin, seconds, unit in rows
    ]


def _sample(step: int, row: int, record: dict[str, Any], noise: random.Random) -> dict[str, Any]:
    a, b = noise.randrange(100), noise.randrange(100)
    right = noise.random() < record["reward/mean"]
    return {
        "step": step,
        "uid": f"sums.csv:{step * 8 + row // 4}",
        "sample": row % 4,
        "prompt": f"Add the two numbers and answer with the sum alone.\n{a} + {b} = ",
        "completion": str(a + b) if right else f"<script>alert({a})</script>",
        "answer": str(a + b),
        "score": 1.0 if right else 0.0,
        "version": step - 1,
    }
