"""Whole nodes die, stand still, leave and come, and a store that is too small. The numbers are those of CHAOS.md.

Run as a program with the name of a case, this file starts a cluster of its own and prints a line of JSON.
"""

import io
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from chaos import Strike, count, facts, learned, pid_of, residual, until

CASES = {
    "C19 killed": "maker-1",
    "C19 killed trainer": "trainer-0",
    "C20 stopped": "maker-1",
    "C21 C22 left and came": "maker-1",
    "C30 small store": None,
}
STEPS = 12
REWARD = """
import os, time

def reward(completions, answer):
    time.sleep(0.1)
    while os.path.exists({hold!r}):
        time.sleep(0.05)
    return [len(one) / 10 for one in completions]
"""
# Ray's defaults find a dead node after 15 s, and one that stands still after 65 s
FAST = {"initial_delay_ms": 1000, "period_ms": 500, "timeout_ms": 1000, "failure_threshold": 3}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("case", CASES)
def test_nodes(case):
    done = subprocess.run(
        [sys.executable, Path(__file__), case], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"], "the weights of the run on one machine, and its metrics"
    assert found["residual"] == 0
    assert found["violations"] == []
    if CASES[case]:
        assert found["starts"] == 2, "it was replaced once"
        assert found["back"] < 60, f"{found['back']:.1f} s until it was at work again"


def settings(folder, hold, **sections):
    from conftest import SETTINGS

    path = Path(folder) / "reward.py"
    path.write_text(REWARD.format(hold=str(hold)))
    own = {
        "algo": {"name": "grpo"},
        "eval": {},
        "reward": str(path),
        "checkpoint": {"every": 2},
        "trainer": SETTINGS["trainer"] | {"max_steps": STEPS},
        "supervise": {"heartbeat": 0.2, "backoff": 0.1},
    }
    return SETTINGS | own | sections


class Nodes:
    """A head without CPUs, which the driver is connected to, and nodes with one CPU each."""

    def __init__(self, number, *, store=200_000_000):
        from ray.cluster_utils import Cluster

        self._options = {"num_cpus": 1, "object_store_memory": store}
        head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "object_store_memory": store}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(number)]
        self.cluster.wait_for_nodes()
        self.late = None

    def add(self):
        return self.cluster.add_node(**self._options)

    def join(self):
        """One more node, from any thread; it goes with the program."""
        command = [Path(sys.executable).with_name("ray"), "start", f"--address={self.cluster.address}", "--block"]
        self.late = subprocess.Popen([*command, "--num-cpus=1", "--num-gpus=0"], stdout=subprocess.DEVNULL)

    def of(self, run, role):
        """The node on which that role is, and its raylet."""
        parent = psutil.Process(pid_of(run, role)).ppid()
        for node in self.nodes:
            raylet = node.all_processes["raylet"][0].process
            if raylet.pid == parent:
                return node, raylet
        raise AssertionError(f"{role} is on the head")


def harm_of(case, nodes, hold, found):
    """What is done to the node of the role that the case names."""
    role = CASES[case]

    def harm(run):
        node, raylet = nodes.of(run, role)
        hold.touch()  # the run is not to end before it is there again
        try:
            if "left" in case:
                nodes.cluster.remove_node(node)
                steps = count(run, "trained")
                hold.unlink()
                until(lambda: count(run, "trained") >= steps + 2, timeout=60, pause=0.01)  # with fewer makers
                hold.touch()
                nodes.join()
            else:
                raylet.send_signal(signal.SIGSTOP if "stopped" in case else signal.SIGKILL)
                if "stopped" not in case:
                    raylet.wait()  # a zombie's workers would live on
            began = time.monotonic()
            until(lambda: sum(fact["fact"] == "started" for fact in facts(run, role)) == 2, timeout=90)
            found["back"] = time.monotonic() - began
        finally:
            hold.unlink(missing_ok=True)

    return harm


def main(case):
    from hocket.read_config import parse_config
    from hocket.run.audit import audit
    from hocket.run.train import train

    found, role = {}, CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        hold = Path(folder) / "hold"
        sections = {}
        if role is None:
            model = settings(folder, hold)["model"]
            sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
            sections = {"model": model | {"config": model["config"] | sizes, "warm_start": {}}}
        base = settings(folder, hold, **sections)
        run = f"{folder}/run"
        config = {**base, "placement": "detached(makers=2)", "run": {"dir": run}}
        calm = train(
            parse_config({**base, "placement": "local", "run": {"dir": f"{folder}/calm"}}), stream=io.StringIO()
        )
        nodes = Nodes(3 if "left" in case or role is None else 4, store=80_000_000 if role is None else 200_000_000)
        config["ray"] = {"address": nodes.cluster.address}
        strike = (
            Strike(run, lambda run: count(run, "trained") >= 3, harm_of(case, nodes, hold, found)) if role else None
        )
        out = io.StringIO()
        try:
            summary = train(parse_config(config), stream=out)
        finally:
            sys.stderr.write(out.getvalue())
        if strike is not None:
            strike.check()
            found["starts"] = sum(fact["fact"] == "started" for fact in facts(run, role))
        digests = ("weights_sha256", "optimizer_sha256")
        found["equal"] = all(summary[d] == calm[d] for d in digests) and learned(run) == learned(f"{folder}/calm")
        found |= {"residual": residual(summary), "violations": audit(Path(run)).violations}
        if nodes.late is not None:
            nodes.late.terminate()
            nodes.late.wait(30)
        nodes.cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.NamedTemporaryFile("w") as token:
        token.write(secrets.token_hex(32))
        token.flush()
        os.environ["RAY_AUTH_TOKEN_PATH"] = token.name
        os.environ |= {f"RAY_health_check_{name}": str(value) for name, value in FAST.items()}
        main(sys.argv[1])
