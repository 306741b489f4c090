"""Private and attached clusters by turns in one process: neither harms the other."""

import os
from pathlib import Path

import pytest
import ray

from hocket.run.cluster import cluster

ONE = [{"CPU": 1.0, "GPU": 0.0}]


def answer(address):
    with cluster(address, ONE) as where:
        return where.split()[0], ray.get(ray.remote(lambda: 41 + 1).remote(), timeout=60)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_private_cluster_leaves_others_alone(ray_address):
    assert answer(ray_address) == ("attached", 42)
    assert answer(None) == ("private", 42)
    assert answer(ray_address) == ("attached", 42)
    assert answer(None) == ("private", 42)
    assert not list(Path("/tmp").glob(f"hocket-*/session_*_{os.getpid()}")), "its files are gone"
    assert not (Path.home() / ".ray" / "auth_token").exists(), "no token was written into HOME"
