"""`make demo-llm` in small: a real language model, its chat template and its end token."""

import io
import json
import runpy
from pathlib import Path

import pytest

from hocket.read_config import load_config
from hocket.run.train import train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct as a plain folder."""
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    runpy.run_path(str(EXAMPLES / "smollm2.py"))["main"](folder)
    return folder


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_smollm2_learns_sums_detached(smollm2, ray_address, tmp_path):
    small = ["trainer.max_steps=2", "trainer.prompts_per_step=2", "rollout.group_size=4", "eval.prompts=8"]
    config = load_config(
        EXAMPLES / "sums.yaml",
        [f"model.name={smollm2}", f"run.dir={tmp_path / 'run'}", f"ray.address={ray_address}", *small],
    )
    summary = train(config, stream=io.StringIO())
    assert summary["finished"]
    assert [e["prompts"] for e in summary["eval"]] == [8, 8]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "reward/mean" in record]
    assert steps[0]["mismatch/abs_mean"] < 1e-5, "engine and trainer agree in float32"
    assert steps[0]["len/truncated_frac"] < 1.0, "answers end at <|im_end|>"
    answer = runpy.run_path(str(EXAMPLES / "answer.py"))["main"]
    text = answer(summary["checkpoint"] + "/hf", "What is 12 + 30? Answer with the number only.")
    assert text.strip()
    assert "<|im_" not in text
