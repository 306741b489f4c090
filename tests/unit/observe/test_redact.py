"""What is named like a secret, or looks like one, is not written down; what only sounds like one is."""

import pytest

from hocket.observe.redact import HIDDEN, is_secret, redacted, redacted_command
from hocket.read_config import known_keys, parse_config
from hocket.run.access import may_travel

SECRETS = ["WANDB_API_KEY", "HF_TOKEN", "MY_SECRET_X", "DB_PASSWORD", "SSH_KEYS", "api_key", "apikey", "hf_token"]
SECRETS += ["token", "password", "client_secret", "aws-access-key", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN"]
PLAIN = ["max_prompt_tokens", "pad_token_id", "eos_token", "prompt_key", "TOKENIZERS_PARALLELISM", "tokenizer", "PATH"]


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_by_name(name):
    assert is_secret(name)
    assert redacted({"options": {name: "s3cret"}}) == {"options": {name: HIDDEN}}
    assert redacted_command(["hocket", f"algo.options.{name}=s3cret"])[1].endswith(f"={HIDDEN}")
    assert redacted_command([f"--algo.options.{name}", "s3cret", "seed=1"])[1:] == [HIDDEN, "seed=1"]


@pytest.mark.parametrize("name", [*PLAIN, *(key.rpartition(".")[2] for key in known_keys())])
def test_settings_that_only_sound_like_secrets(name):
    assert not is_secret(name)
    assert redacted({name: "value"}) == {name: "value"}
    assert redacted_command([f"{name}=7", f"--{name}", "7"]) == [f"{name}=7", f"--{name}", "7"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:s3cret@host/data.csv", f"https://me:{HIDDEN}@host/data.csv"),
        ("hf_" + "a" * 30, HIDDEN),
        ("judge:sk-" + "b" * 30, f"judge:{HIDDEN}"),
        ("plain text with a: colon @ sign", "plain text with a: colon @ sign"),
    ],
)
def test_secrets_by_their_looks(text, shown):
    assert redacted({"path": [text]}) == {"path": [shown]}
    assert redacted_command([f"data.path={text}"]) == [f"data.path={shown}"]


def test_a_token_file_is_a_path_and_may_be_shown():
    assert redacted_command(["--token-file", "here.txt"]) == ["--token-file", "here.txt"]


def test_the_config_as_text_shows_no_secret():
    options = {"judge": {"api_key": "s3cret", "url": "http://u:s3cret@h"}, "list": [{"password": 12345}], "depth": 2}
    settings = {"model": {"name": "m"}, "data": {"path": "p.csv"}, "reward": "exact", "algo": {"options": options}}
    config = parse_config(settings)
    text = config.to_yaml()
    assert "s3cret" not in text
    assert "12345" not in text
    assert "depth: 2" in text
    assert config.algo.options["judge"]["api_key"] == "s3cret", "only what is shown is changed"


@pytest.mark.parametrize(
    ("name", "travels"),
    [
        ("PATH", True),
        ("OMP_NUM_THREADS", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("HF_HUB_OFFLINE", True),
        ("HF_TOKEN", False),
        ("WANDB_API_KEY", False),
        ("AWS_PROFILE", False),
        ("RAY_AUTH_TOKEN_PATH", True),
        ("TOKENIZERS_PARALLELISM", True),
        ("https_proxy", True),
        ("SOMETHING_ELSE", False),
    ],
)
def test_what_workers_may_know(name, travels):
    assert may_travel(name) == travels
    assert may_travel(name, ["SOMETHING_ELSE", name])
