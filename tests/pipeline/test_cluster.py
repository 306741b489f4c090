"""Private and attached clusters by turns in one process: neither ends the other, and nothing is left."""

import os
import subprocess
import sys

import pytest

BY_TURNS = """
import os, sys
from pathlib import Path
import ray
from hocket.run.cluster import cluster

for address in (sys.argv[1], None, sys.argv[1], None):
    with cluster(address, [{"CPU": 1.0, "GPU": 0.0}]) as where:
        print(where.split()[0], ray.get(ray.remote(lambda: 41 + 1).remote(), timeout=60))
assert not list(Path("/tmp").glob(f"hocket-*/r/session_*_{os.getpid()}")), "its files are gone"
assert not (Path.home() / ".ray" / "auth_token").exists(), "no token was written into HOME"
"""


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_private_cluster_leaves_others_alone(ray_address):
    done = subprocess.run(
        [sys.executable, "-c", BY_TURNS, ray_address], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["attached", "42", "private", "42"] * 2


PRIVATE = """
import os, stat
from pathlib import Path
import psutil
from hocket.run.cluster import cluster

with cluster(None, [], variables=["MY_JUDGE"]):
    import ray
    names = ray.get(ray.remote(lambda: sorted(os.environ)).remote(), timeout=60)
    homes = [Path(home) for home in Path("/tmp").glob("hocket-*") if list(home.glob(f"r/session_*_{os.getpid()}"))]
    print(*[oct(stat.S_IMODE(home.stat().st_mode)) for home in homes])
    print(*[name for name in names if name in ("MY_JUDGE", "WANDB_API_KEY", "SOME_OTHER", "OMP_NUM_THREADS")])
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
    family = psutil.Process().children(recursive=True)
    shown = [" ".join([*one.cmdline(), *one.environ().values()]) for one in family if one.is_running()]
    print(len(shown) > 3, any(token in text or "s3cret" in text for text in shown))
print(os.environ["WANDB_API_KEY"])
"""

ATTACHED = """
import os, sys, time
from hocket.errors import PlacementError
from hocket.run.cluster import cluster

began = time.monotonic()
try:
    with cluster(sys.argv[1], []):
        print("in", os.environ.get("RAY_AUTH_MODE"))
except PlacementError as error:
    print(error.message)
assert time.monotonic() - began < 40
"""


def play(code, *words, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_private_cluster_gives_nothing_away(tmp_path):
    lines = play(PRIVATE, WANDB_API_KEY="s3cret", SOME_OTHER="s3cret", MY_JUDGE="x", OMP_NUM_THREADS="1")
    assert lines == ["0o700", "MY_JUDGE OMP_NUM_THREADS", "True False", "s3cret"]


HOST = """
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
print(cluster.address, flush=True)
input()
cluster.shutdown()
"""


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_an_explicit_address_with_the_right_and_a_wrong_token(tmp_path):
    for name, token in (("right", "1" * 64), ("wrong", "0" * 64)):
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    variables = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "right")}
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        try:
            address = host.stdout.readline().strip()
            assert play(ATTACHED, address, RAY_AUTH_TOKEN_PATH=str(tmp_path / "right")) == ["in token"]
            (message,) = play(ATTACHED, address, RAY_AUTH_TOKEN_PATH=str(tmp_path / "wrong"))
        finally:
            host.communicate("\n", timeout=60)
    assert f"no Ray cluster answers at ray.address={address!r}" in message
    assert f"RAY_AUTH_MODE is token, token file {str(tmp_path / 'wrong')!r} was found; it must be the one" in message
    assert "0000" not in message
