"""What may be another when a run is resumed, what may not, and what an asynchronous run takes along."""

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import Strike, count, facts, learned, residual

from hocket.errors import CheckpointError, ConfigError
from hocket.run.audit import audit
from hocket.run.train import train

slow = pytest.mark.slow
STEPS = 6
SETTINGS = {
    "trainer": {"max_steps": STEPS, "schedule": "cosine", "warmup_steps": 2, "minibatches": 2, "epochs": 2},
    "checkpoint": {"every": 2, "keep_last": None},
}


@pytest.fixture
def run(make_config):
    """Runs SETTINGS with sections replaced; gives summary and output."""

    def go(**sections):
        settings = {**SETTINGS, **sections}
        settings["trainer"] = SETTINGS["trainer"] | sections.get("trainer", {})
        stream = io.StringIO()
        return train(make_config(**settings), stream=stream), stream.getvalue()

    return go


@pytest.fixture
def stopped(run, tmp_path):
    """A run in the folder `run`, with checkpoints behind steps 2 and 4."""

    def stop(placement="local", **sections):
        summary, _ = run(
            placement=placement, run={"dir": str(tmp_path / "run")}, **({"trainer": {"max_steps": 4}} | sections)
        )
        return Path(summary["folder"])

    return stop


def check_equal(found, wanted):
    for digest in ("weights_sha256", "optimizer_sha256"):
        assert found[digest] == wanted[digest]
    assert residual(found) == 0
    assert audit(Path(found["folder"])).violations == []


def test_learning_rate_and_order_of_minibatches_go_on(run, stopped):
    """`max_steps` decides the cosine: so the run is stopped by its checkpoint, not by fewer steps."""
    whole, _ = run(placement="local")
    folder = stopped(trainer={})
    again, text = run(placement="local", run={"dir": str(folder), "resume": "step:2"})
    assert "resumed behind step 2" in text
    check_equal(again, whole)
    assert learned(folder) == learned(whole["folder"])
    rates = [record["lr"] for record in learned(folder) if "lr" in record]
    assert len(set(rates)) > 3, rates


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("local", "detached(makers=2)"),
        pytest.param("detached(makers=2)", "local", marks=slow),
        pytest.param("detached(makers=1)", "detached(makers=3, cpus_per_worker=0.5)", marks=slow),
        pytest.param("detached(makers=3, cpus_per_worker=0.5)", "colocated", marks=slow),
        pytest.param("colocated", "detached(makers=1)", marks=slow),
    ],
)
def test_another_placement_goes_on_with_the_same_weights(run, stopped, ray_address, first, second):
    whole, _ = run(placement="local")
    ray = {"address": ray_address}
    folder = stopped(first, trainer={}, ray=ray)
    again, _ = run(placement=second, ray=ray, run={"dir": str(folder), "resume": "step:4"})
    check_equal(again, whole)
    assert again["eval"] == whole["eval"]


def test_a_fork_leaves_the_first_run_as_it_is(run, stopped, tmp_path):
    folder = stopped()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for where in (folder / "checkpoints" / "step_000002", folder):
        fork, _ = run(placement="local", run={"dir": str(tmp_path / f"fork-{where.name}"), "resume": str(where)})
        assert fork["steps"] == STEPS
        assert audit(Path(fork["folder"])).violations == []
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_that_has_all_its_steps_is_not_touched(run, stopped):
    folder = stopped()
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}
    summary, text = run(placement="local", trainer={"max_steps": 4}, run={"dir": str(folder), "resume": "latest"})
    assert text.startswith("already at max_steps: ")
    assert summary["steps"] == 4
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algo": {"kl_coef": 0.1}}, "algo.kl_coef: was 0.05, is 0.1"),
        ({"trainer": {"lr": 2e-3}}, "trainer.lr: was 0.001, is 0.002"),
        ({"rollout": {"max_new_tokens": 7}}, "rollout.max_new_tokens: was 6, is 7"),
        ({"seed": 6}, "seed: was 5, is 6"),
    ],
)
def test_another_setting_of_what_is_learned_is_refused_with_the_difference(run, stopped, sections, words):
    folder = stopped()
    before = (folder / "config.resolved.yaml").read_text()
    with pytest.raises(ConfigError, match=words):
        run(placement="local", run={"dir": str(folder), "resume": "latest"}, **sections)
    assert (folder / "config.resolved.yaml").read_text() == before


def test_other_prompts_under_the_same_name_are_refused(run, stopped, tmp_path):
    data = tmp_path / "prompts.csv"
    rows = [f"sort {n}:,{''.join(sorted(str(n)))}" for n in range(100, 140)]
    data.write_text("prompt,answer\n" + "\n".join(rows) + "\n")
    same = {"data": {"path": str(data)}, "eval": {"path": None, "prompts": None}}
    folder = stopped(**same)
    data.write_text("prompt,answer\n" + "\n".join(rows[::-1]) + "\n")
    with pytest.raises(ConfigError, match="the prompts changed since checkpoint"):
        run(placement="local", run={"dir": str(folder), "resume": "latest"}, **same)


def test_a_folder_whose_checkpoints_are_all_damaged_is_refused(run, stopped):
    folder = stopped()
    for complete in folder.glob("checkpoints/step_*/COMPLETE"):
        complete.unlink()
    with pytest.raises(CheckpointError, match="is whole"):
        run(placement="local", run={"dir": str(folder), "resume": "latest"})


RUNNER = """
import json, sys
from hocket.read_config import parse_config
from hocket.run.train import train
train(parse_config(json.loads(sys.stdin.read())))
"""


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=slow)])
@pytest.mark.slow
def test_an_asynchronous_run_loses_nothing_and_trains_nothing_twice(make_config, ray_address, tmp_path, how):
    """Makers are two versions ahead: what waits is in the checkpoint, what was being made is made again."""
    settings = {
        **SETTINGS,
        "placement": "detached(makers=2, max_staleness=2)",
        "ray": {"address": ray_address},
        "trainer": SETTINGS["trainer"] | {"max_steps": 12},
        "checkpoint": {"every": 1, "keep_last": 2},
        "eval": {"path": None, "prompts": None},
    }
    config = make_config(**settings, run={"dir": str(tmp_path / "run")})
    process = subprocess.Popen([sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, text=True)
    strike = Strike(config.run.dir, lambda run: count(run, "trained") >= 5, lambda run: process.send_signal(how))
    process.communicate(config.model_dump_json(), timeout=120)
    strike.check()
    again = make_config(**settings, run={"dir": str(tmp_path / "run"), "resume": "latest"})
    stream = io.StringIO()
    summary = train(again, stream=stream)
    resumed = next(fact for fact in facts(summary["folder"], "driver") if fact["fact"] == "resumed")
    assert resumed["step"] >= 3
    assert resumed["waiting"], "the makers were ahead"
    records = [record for record in learned(summary["folder"]) if "reward/mean" in record]
    assert [record["step"] for record in records] == list(range(1, 13))
    assert max(record["staleness/max"] for record in records) <= 2
    assert summary["ledger"]["ledger/trained"] == 12 * 16
    assert residual(summary) == 0
    found = audit(Path(summary["folder"]))
    assert found.violations == []
    assert found.lineage == list(range(12))
