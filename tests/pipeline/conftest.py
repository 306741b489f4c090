"""A run of seconds: one layer, two steps, four prompts. And one small Ray cluster that many tests attach to."""

import json
import os
import secrets
from pathlib import Path

import pytest
from chaos import Started

from hocket.read_config import parse_config

SETTINGS = {
    "seed": 5,
    "model": {
        "tokenizer": "chars",
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
        "warm_start": {"steps": 3, "rows": 16},
    },
    "data": {"path": "recipe:digits_train.csv"},
    "eval": {"path": "recipe:digits_eval.csv", "prompts": 8},
    "reward": "digits",
    "rollout": {"group_size": 4, "max_new_tokens": 6, "prompts_per_unit": 2},
    "algo": {"name": "ppo", "kl_coef": 0.05},
    "trainer": {"max_steps": 2, "prompts_per_step": 4, "lr": 1e-3, "minibatches": 2},
}


@pytest.fixture
def make_config(tmp_path):
    """The settings above with sections replaced; every run has a folder of its own."""
    count = iter(range(100))

    def make(**sections):
        settings = json.loads(json.dumps(SETTINGS))
        for name, section in sections.items():
            old = settings.get(name)
            settings[name] = {**old, **section} if isinstance(old, dict) and isinstance(section, dict) else section
        settings.setdefault("run", {"dir": str(tmp_path / f"run{next(count)}")})
        return parse_config(settings)

    return make


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory):
    """Address of a cluster with 4 logical CPUs and no GPU, which lives as long as the tests."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)


@pytest.fixture
def lines():
    """Metrics of a run folder, one dict per finished step."""

    def read(folder):
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if "reward/mean" in record]

    return read


@pytest.fixture
def started(tmp_path):
    """Starts runs in processes of their own, on private clusters, and ends them."""
    runs = []

    def start(*settings, folder=None, env=None):
        runs.append(Started(folder or tmp_path / f"run{len(runs)}", settings, env or {}))
        return runs[-1]

    yield start
    for run in runs:
        run.end()
