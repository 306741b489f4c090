"""The promise: placement does not change what is learned."""

import io
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hocket.observe.trace import read_trace
from hocket.run.train import train

PLACEMENTS = ["local", "colocated", "detached(makers=1)", "detached(makers=2)"]


def run(config):
    stream = io.StringIO()
    return train(config, stream=stream), stream.getvalue()


def learned(folder, lines):
    """Everything in the metrics that says what was learned, and nothing that says how long it took."""
    timed = ("time", "tokens_per_s", "queue", "ledger")  # the ledger shows how far ahead the makers are
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in lines(folder)]


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("algo", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_same_seed_same_weights_in_every_placement(make_config, ray_address, lines, algo):
    found = {}
    for placement in PLACEMENTS:
        config = make_config(placement=placement, ray={"address": ray_address}, algo={"name": algo})
        summary, _ = run(config)
        found[placement] = (summary["weights_sha256"], summary["eval"], learned(summary["folder"], lines))
    first = found["local"]
    assert first[0] != ""
    for placement, result in found.items():
        assert result == first, placement


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("detached(makers=2, trainers=2)", marks=pytest.mark.slow),
        "detached(makers=3, trainers=2, edges=[[0], [1], [0, 1]], cpus_per_worker=0.5)",
    ],
)
def test_two_trainer_ranks_learn_what_one_learns(make_config, ray_address, lines, placement):
    """Also where some makers feed one rank only: the rank of a unit is decided by its number, not by its maker."""
    one, _ = run(make_config(placement="local", eval={"path": None}))
    two, _ = run(make_config(placement=placement, ray={"address": ray_address}, eval={"path": None}))
    alone, ranks = learned(one["folder"], lines), learned(two["folder"], lines)
    assert len(alone) == len(ranks) == 2
    for a, b in zip(alone, ranks, strict=True):
        assert a.keys() == b.keys()
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    weights = [
        torch.cat(
            [
                p.detach().reshape(-1)
                for p in AutoModelForCausalLM.from_pretrained(f"{run['checkpoint']}/hf").parameters()
            ]
        )
        for run in (one, two)
    ]
    assert (weights[0] - weights[1]).norm() <= 1e-5 * weights[0].norm()
    assert two["ledger"]["ledger/trained"] == one["ledger"]["ledger/trained"]


def test_the_seed_matters(make_config):
    shas = {run(make_config(placement="local", seed=seed))[0]["weights_sha256"] for seed in (1, 2)}
    assert len(shas) == 2


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_detached_with_staleness_keeps_its_bound_and_writes_a_whole_run_folder(make_config, lines):
    config = make_config(
        placement="detached(makers=2, max_staleness=1)", trainer={"max_steps": 4}, logging={"samples_every": 2}
    )
    summary, text = run(config)
    folder = Path(summary["folder"])
    records = lines(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert max(record["staleness/max"] for record in records) <= 1
    assert summary["finished"]
    for record in records:
        accounts = {k: v for k, v in record.items() if k.startswith("ledger/") and k != "ledger/produced"}
        assert sum(accounts.values()) == record["ledger/produced"]
    assert summary["ledger"]["ledger/trained"] == summary["ledger"]["ledger/produced"] == 4 * 16
    assert "\x1b" not in text
    assert text.count("step ") >= 4
    _check_files(folder)
    _check_models(folder / "checkpoints" / "latest")


def _check_files(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"config.resolved.yaml", "env.json", "metrics.jsonl", "samples", "trace.json", "report.html"} <= names
    assert {p.stem for p in (folder / "logs" / "latest").iterdir()} == {"driver", "maker-0", "maker-1", "trainer-0"}
    spans = read_trace(folder / "trace.json")
    phases = {(span.role, span.name) for span in spans}
    assert {("maker-0", "generate"), ("maker-1", "reward"), ("trainer-0", "train"), ("trainer-0", "wait")} <= phases
    assert {"sync", "eval", "checkpoint", "reference"} <= {name for _, name in phases}
    assert sorted(p.name for p in (folder / "samples").iterdir()) == [f"step_{step:06d}.jsonl" for step in (1, 2, 4)]
    sample = json.loads((folder / "samples" / "step_000004.jsonl").read_text().splitlines()[0])
    assert set(sample) == {"step", "uid", "sample", "prompt", "completion", "answer", "score", "version"}
    page = (folder / "report.html").read_text()
    assert "Reward" in page
    assert sample["prompt"] in page


def _check_models(checkpoint):
    assert json.loads((checkpoint / "COMPLETE").read_text())["step"] == 4
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "hf")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "hf")
    inputs = tokenizer("sort 312:", return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > inputs["input_ids"].shape[1]
    critic = AutoModelForSequenceClassification.from_pretrained(checkpoint / "critic")
    assert critic.config.num_labels == 1
    assert bool(torch.any(critic.score.weight != 0)), "the critic's head was trained"


def test_a_checkpoint_starts_the_next_run(make_config):
    first, _ = run(make_config(placement="local"))
    hf = str(Path(first["checkpoint"]) / "hf")
    config = make_config(placement="local", model={"name": hf, "config": {}, "tokenizer": None, "warm_start": {}})
    second, _ = run(config)
    assert second["eval"][0]["eval/reward"] == first["eval"][-1]["eval/reward"]


def test_a_reward_model_scores_like_a_rule(make_config):
    first, _ = run(make_config(placement="local"))
    critic = str(Path(first["checkpoint"]) / "critic")
    summary, _ = run(make_config(placement="local", reward=critic, algo={"name": "grpo"}))
    assert summary["finished"]
