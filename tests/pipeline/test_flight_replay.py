"""An asynchronous run is repeated bit for bit from its own record; makers come and go while it runs."""

import io
import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from hocket.errors import ConfigError, DataError
from hocket.run.folder import make_request
from hocket.run.replay import read_flight, replay
from hocket.run.train import train

pytestmark = pytest.mark.ray


def learned(folder, lines):
    """The metrics that say what was learned."""
    timed = ("time", "tokens_per_s", "queue", "ledger")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in lines(folder)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("algo", "in_flight"),
    [("grpo", 1), *(pytest.param(algo, None, marks=pytest.mark.slow) for algo in ("ppo", "grpo"))],
)
def test_an_asynchronous_run_is_repeated_bit_for_bit(make_config, ray_address, lines, tmp_path, algo, in_flight):
    config = make_config(
        sync={"in_flight": in_flight},
        placement="detached(makers=2, max_staleness=2)",
        ray={"address": ray_address},
        algo={"name": algo},
        trainer={"max_steps": 12},
        rollout={"max_new_tokens": 40},
        checkpoint={"every": 4},
    )
    summary = train(config, stream=io.StringIO())
    run = Path(summary["folder"])
    versions = read_flight(run).versions
    assert len(versions) == 24
    assert any(len(made) > 1 for made in versions.values()) == (in_flight is not None)
    assert any(made[-1][1] < step for (step, _), made in versions.items()), "nothing in it was asynchronous"
    again, wanted = replay(run, folder=tmp_path / "again", stream=io.StringIO())
    assert again["weights_sha256"] == wanted == summary["weights_sha256"]
    assert again["optimizer_sha256"] == summary["optimizer_sha256"]
    assert learned(again["folder"], lines) == learned(run, lines)
    assert again["eval"] == summary["eval"]


@pytest.mark.timeout(240)
def test_makers_join_late_and_leave_while_the_run_goes_on(make_config, ray_address, lines):
    """Staleness 0: with makers that come and go the weights stay those of the run with one."""
    steps = {"max_steps": 120}
    alone = train(make_config(placement="local", trainer=steps, eval={"path": None}), stream=io.StringIO())
    config = make_config(
        placement="detached(makers=1, cpus_per_worker=0.5)",
        ray={"address": ray_address},
        trainer=steps,
        eval={"path": None},
        supervise={"heartbeat": 0.2},
    )
    run, answers = Path(config.run.dir), []

    def ask():
        while not (run / "metrics.jsonl").exists() or not lines(run):
            time.sleep(0.05)
        answers.extend(make_request(run, "makers", number) for number in (3, 1, 100))

    asking = threading.Thread(target=ask)
    asking.start()
    summary = train(config, stream=io.StringIO())
    asking.join()
    assert answers[:2] == ["3 makers now, as asked", "1 makers now, as asked"]
    assert answers[2].startswith("not 100 makers: the placement does not fit what the cluster has left: ")
    facts = [json.loads(line) for line in (run / "history" / "driver.jsonl").read_text().splitlines()]
    made = Counter(fact["worker"] for fact in facts if fact["fact"] == "made")
    assert set(made) > {"maker-0"}
    assert facts[-2]["fact"] != "lost"
    assert summary["weights_sha256"] == alone["weights_sha256"]
    assert summary["ledger"] == alone["ledger"]


def test_what_cannot_be_repeated_or_asked(make_config, tmp_path):
    with pytest.raises(DataError, match="is no run folder"):
        replay(tmp_path)
    with pytest.raises(ConfigError, match="is no run folder"):
        make_request(tmp_path, "makers", 2)
    summary = train(make_config(placement="local", trainer={"max_steps": 1}), stream=io.StringIO())
    with pytest.raises(ConfigError, match="no run goes on in"):
        make_request(Path(summary["folder"]), "makers", 2)
