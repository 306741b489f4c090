"""The article's flow learns the demo task, driven by `workingloop` and `fit` alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "detached_article.py"
pytestmark = pytest.mark.ray


def run(*options, timeout):
    ran = subprocess.run([sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=timeout)
    assert ran.returncode == 0, ran.stderr[-4000:]
    ledger = ast.literal_eval(re.search(r"^ledger: (.*)$", ran.stdout, re.MULTILINE)[1])
    assert ledger["made"] == ledger["trained"] + ledger["refused"] + ledger["left"]
    rewards = re.findall(r"first and the last tenth ([\d.]+) -> ([\d.]+); it has made all its steps", ran.stdout)
    return ledger, [(float(first), float(last)) for first, last in rewards]


@pytest.mark.timeout(200)
def test_the_example_runs_and_saves(tmp_path):
    ledger, rewards = run("--trainers", "2", "--steps", "4", "--save", str(tmp_path / "saved"), timeout=190)
    assert ledger["trained"] == 2 * 4 * 32
    assert len(rewards) == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("makers", [1, 2])
def test_the_mean_reward_rises(makers):
    _, [(first, last)] = run("--makers", str(makers), "--steps", "1440", timeout=890)
    assert last - first >= 0.2
