"""Private and attached clusters by turns in one process: neither ends the other, and nothing is left."""

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
assert not list(Path("/tmp").glob(f"hocket-*/session_*_{os.getpid()}")), "its files are gone"
assert not (Path.home() / ".ray" / "auth_token").exists(), "no token was written into HOME"
"""


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_private_cluster_leaves_others_alone(ray_address):
    done = subprocess.run(
        [sys.executable, "-c", BY_TURNS, ray_address], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["attached", "42", "private", "42"] * 2
