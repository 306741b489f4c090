"""Who may come into a cluster: versions, addresses, tokens, and what the environment gives away. Without Ray."""

import logging
import os
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from hocket.errors import PlacementError
from hocket.run.access import admit, demand_version, is_local, only_known_variables, own_token, token_source

FAR = "203.0.113.7:6379"  # an address that documents may use; nobody is asked


@pytest.fixture
def environ(tmp_path):
    """Set variables for one test; HOME is empty and no token is named, unless the test says so."""

    @contextmanager
    def set_(**variables):
        before = dict(os.environ)
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
            os.environ.pop(name, None)
        os.environ.update({"HOME": str(tmp_path)} | variables)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    return set_


@pytest.mark.parametrize("version", ["2.53.9", "1.99", "2.9.3"])
def test_an_old_ray_is_refused(version):
    with pytest.raises(PlacementError, match=rf"Ray {version} is installed, wanted 2\.54 or newer; pip install"):
        demand_version(version)


@pytest.mark.parametrize("version", ["2.54.0", "2.60.0", "3.0.0.dev0"])
def test_a_newer_ray_is_taken(version):
    demand_version(version)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("auto", True),
        ("127.0.0.1:6379", True),
        ("localhost:6379", True),
        ("ray://127.0.0.1:10001", True),
        ("[::1]:6379", True),
        (FAR, False),
        ("ray://203.0.113.7:10001", False),
        ("no-such-host.invalid:6379", False),
    ],
)
def test_which_addresses_are_this_machine(environ, address, local):
    with environ():
        assert is_local(address) == local
        assert not admit(address, insecure=True)


def test_auto_may_mean_another_machine(environ):
    with environ(RAY_ADDRESS=FAR):
        assert not is_local("auto")


def test_another_machine_without_a_token_must_be_asked_for(environ):
    with environ(), pytest.raises(PlacementError, match=r"203\.0\.113\.7.*no token was found.*allow_insecure_cluster"):
        admit(FAR, insecure=False)
    with environ(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="x"), pytest.raises(PlacementError, match="MODE=disabled"):
        admit(FAR, insecure=False)
    with environ(RAY_AUTH_TOKEN="x"):
        assert admit(FAR, insecure=False)
    with environ():
        assert not admit("auto", insecure=False), "an open cluster on this machine is the user's own affair"


def test_a_token_file_that_others_may_read_is_warned_about(environ, tmp_path, caplog):
    path = tmp_path / "token"
    path.write_text("abc")
    path.chmod(0o644)
    with environ(RAY_AUTH_TOKEN_PATH=str(path)), caplog.at_level(logging.WARNING, "hocket"):
        assert token_source() == f"token file {str(path)!r}"
    assert "mode 0644: others may read it; chmod 600" in caplog.text
    assert "abc" not in caplog.text
    caplog.clear()
    path.chmod(0o600)
    with environ(RAY_AUTH_TOKEN_PATH=str(path)), caplog.at_level(logging.WARNING, "hocket"):
        token_source()
    assert not caplog.text


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("", "is empty"), (" \n", "is empty")])
def test_a_named_token_file_that_holds_none(environ, tmp_path, content, message):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with environ(RAY_AUTH_TOKEN_PATH=str(path)), pytest.raises(PlacementError, match=f"{path}.*{message}"):
        admit("auto", insecure=False)


def test_our_own_token_is_for_us_alone(environ):
    with environ():
        with own_token():
            path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
            assert len(path.read_text()) == 64
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_our_own_token_goes_with_the_process():
    code = "import os; from hocket.run.access import own_token; held = own_token(); held.__enter__(); "
    code += "print(os.environ['RAY_AUTH_TOKEN_PATH'])"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare, capture_output=True, text=True, timeout=30, check=True
    )
    assert not Path(done.stdout.strip()).parent.exists()


def test_the_environment_is_whole_again_afterwards(environ):
    with environ(WANDB_API_KEY="s3cret", MY_JUDGE="x", OTHER="y", OMP_NUM_THREADS="1"):
        with only_known_variables(["MY_JUDGE"]):
            assert os.environ.keys() >= {"PATH", "OMP_NUM_THREADS", "MY_JUDGE"}
            assert not os.environ.keys() & {"WANDB_API_KEY", "OTHER"}
        assert os.environ["WANDB_API_KEY"] == "s3cret"
        assert os.environ["OTHER"] == "y"
