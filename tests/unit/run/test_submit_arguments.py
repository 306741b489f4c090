"""What `hocket submit` refuses before anything is sent, and what it sends to be let in."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import pytest

from hocket.errors import ConfigError, PlacementError
from hocket.run.submit import parse_env, submit

NOBODY = "http://127.0.0.1:1"
WITHOUT_JOBS = "import sys; sys.modules['aiohttp'] = None; import hocket.cli; hocket.cli.main()"


@pytest.fixture
def server():
    """A web server that gives `server.answer`, (status, text), to every request, and keeps what it was asked with."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.seen = self.headers["Authorization"]
            status, text = server.answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words):
            """Not to stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": []}, r"no command.*hocket submit -- hocket train"),
        ({"address": "127.0.0.1:8265"}, r"'127\.0\.0\.1:8265' is not that of a job server.*http://127\.0\.0\.1:8265"),
        ({"address": "ray://head:10001"}, "ray://head:10001"),
        ({"address": "http://"}, "'http://' is not that"),
        ({"address": "http://head:826500"}, "'http://head:826500' is not that"),
        ({"working_dir": "not/there"}, "'not/there' is no folder"),
        ({"pip": ["numpy", "not/there.txt"]}, r"'not/there\.txt' cannot be read: No such file"),
        ({"token_file": "not/there"}, "token file 'not/there' cannot be read"),
        ({"token_file": os.devnull}, "does not hold one word; wanted the token"),
        ({"token_file": sys.executable}, "does not hold one word"),
        ({"token_file": __file__}, r"^token file '[^']*' does not hold one word; wanted the token[a-z ]*$"),
    ],
)
def test_a_wrong_argument_is_named_before_any_server_is_asked(options, message):
    with pytest.raises(ConfigError, match=message):
        submit(**{"command": ["true"], "address": NOBODY, **options})


def test_variables_are_words_with_an_equals_sign():
    assert parse_env(["A=", "B_1=x y=z"]) == {"A": "", "B_1": "x y=z"}


@pytest.mark.parametrize("word", ["HOME", "=x", "1A=x", "a b=c", ""])
def test_a_word_that_sets_no_variable_is_refused_without_its_value(word):
    with pytest.raises(ConfigError, match="wanted KEY=VALUE") as caught:
        parse_env(["A=1", word])
    assert "=x" not in str(caught.value), "a value may be a secret"


def test_an_address_where_nobody_listens_is_said_at_once():
    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"no Ray job server answers at http://127\.0\.0\.1:1 .*refused.*ray\[def"):
        submit(["true"], address=NOBODY)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, "<html>"), "no Ray job server answers"),
        ((200, "{}"), "no Ray job server answers"),
        ((404, ""), "no Ray job server answers.*404"),
        ((401, ""), "it wants a token, and none was sent; name the file.*--token-file.*RAY_AUTH_TOKEN_PATH"),
    ],
)
def test_who_answers_may_be_no_job_server_or_may_not_know_us(server, answer, message, home_without_token):
    server.answer = answer
    with pytest.raises(PlacementError, match=message):
        submit(["true"], address=server.address)


@pytest.fixture
def home_without_token(tmp_path):
    """An environment in which Ray would find no token."""
    before = dict(os.environ)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None)
    os.environ["HOME"] = str(tmp_path)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def test_the_token_is_looked_for_where_ray_looks(server, home_without_token):
    server.answer = (403, "")
    places = {"own": home_without_token / ".ray" / "auth_token"}
    places["own"].parent.mkdir()
    for name in ("option", "path"):
        places[name] = home_without_token / name
    for name, place in places.items():
        place.write_text(f"{name}-token\n")

    def sent(token_file=None):
        with pytest.raises(PlacementError, match="the token that was sent is not that of the cluster") as caught:
            submit(["true"], address=server.address, token_file=token_file)
        assert "-token" not in str(caught.value).replace("--token-file", ""), "a token is never shown"
        return server.seen

    assert sent() == "Bearer own-token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(places["path"])
    assert sent() == "Bearer path-token"
    os.environ["RAY_AUTH_TOKEN"] = "variable-token"
    assert sent() == "Bearer variable-token"
    assert sent(places["option"]) == "Bearer option-token"


def test_without_rays_job_client_the_command_to_install_it_is_named(server):
    server.answer = (200, json.dumps({"ray_version": "2.60.0"}))
    words = ["submit", "--address", server.address, "--", "true"]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_JOBS, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    wanted = f"'ray[default]=={version('ray')}'"
    assert ran.stderr == f"ConfigError: Ray's job client is not installed; to get it: pip install {wanted}\n"


def test_ctrl_c_before_there_is_a_job():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "hocket", "submit", "--address", address, "--", "true"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=30) == ("", "interrupted; nothing was sent\n")
    assert process.returncode == 130
