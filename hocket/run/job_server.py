"""The job server of a Ray cluster: whether it answers, who we are to it, and Ray's own client for it."""

from __future__ import annotations

import http.client
import importlib
import importlib.metadata
import json
import logging
import os
import shlex
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hocket.errors import ConfigError, PlacementError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

LOCAL = "http://127.0.0.1:8265"
_ANSWER_S = 5.0  # what a job server has for its first answer
_CHATTY = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")


@dataclass(frozen=True)
class JobServer:
    """The job server at an address, and the header that it is asked with."""

    address: str
    headers: dict[str, str]
    token_file: str | Path | None

    @classmethod
    def at(cls, address: str, token_file: str | Path | None = None) -> JobServer:
        """The server at the dashboard's address, with the cluster's token from the file or from where Ray looks for it.

        Asks nobody. Raises ConfigError for what is no such address, and for a token that cannot be read.
        """
        return cls(_checked_address(address), _headers(token_file), token_file)

    def check(self) -> None:
        """PlacementError within seconds when it does not answer, or not to us; Ray's client has no deadline."""
        request = urllib.request.Request(f"{self.address}/api/version", headers=self.headers)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                json.load(answer)["ray_version"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
                raise PlacementError(_refused(self.address, sent=bool(self.headers))) from error
            raise PlacementError(
                f"no Ray job server answers at {self.address} ({first_line(error)}); wanted the dashboard's address "
                "of a cluster whose Ray was installed as `ray[default]`, through a tunnel if it is far away"
            ) from error

    def client(self) -> JobSubmissionClient:
        """Ray's client for it. ConfigError without `ray[default]`, else as `check`."""
        self.check()
        try:
            importlib.import_module("aiohttp")  # Ray's client is importable without it, and then fails late
        except ImportError as error:
            wanted = f"'ray[default]=={importlib.metadata.version('ray')}'"
            raise ConfigError(f"Ray's job client is not installed; to get it: pip install {wanted}") from error
        from ray.job_submission import JobSubmissionClient

        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        with _undisturbed(self.address):
            return JobSubmissionClient(self.address, headers=dict(self.headers))

    def command(self, verb: str, job: str) -> str:
        """Ray's own command for a job, to paste into a shell."""
        words = ["RAY_AUTH_MODE=token"] if self.headers else []
        if self.token_file:
            words.append(f"RAY_AUTH_TOKEN_PATH={shlex.quote(str(Path(self.token_file).absolute()))}")
        return " ".join([*words, "ray job", verb, "--address", self.address, job])


def _checked_address(address: str) -> str:
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no number, or none that is a port
        good = False
    if good:
        return address.rstrip("/")
    raise ConfigError(
        f"address {address!r} is not that of a job server; wanted the dashboard's, as in {LOCAL} or https://HOST"
    )


def _headers(token_file: str | Path | None) -> dict[str, str]:
    """The header with the cluster's token; from Ray's own places, in Ray's order, when no file is named."""
    variable = os.environ.get("RAY_AUTH_TOKEN")
    if variable and not token_file:
        return _bearer(variable, "the variable RAY_AUTH_TOKEN")
    named, default = token_file or os.environ.get("RAY_AUTH_TOKEN_PATH"), Path.home() / ".ray" / "auth_token"
    if not named and not default.is_file():
        return {}
    path = Path(named or default)
    try:
        return _bearer(path.read_text(encoding="utf-8", errors="replace"), f"token file {str(path)!r}")
    except OSError as error:
        raise ConfigError(f"token file {str(path)!r} cannot be read: {error.strerror}") from error


def _bearer(text: str, source: str) -> dict[str, str]:
    """ConfigError when the text is no token: it would be shown by the error that http raises for such a header."""
    token = text.strip()
    if not token.isascii() or len(token.split()) != 1:
        raise ConfigError(f"{source} does not hold one word; wanted the token that the cluster was started with")
    return {"Authorization": f"Bearer {token}"}


def _refused(address: str, *, sent: bool) -> str:
    found = "the token that was sent is not that of the cluster" if sent else "it wants a token, and none was sent"
    return (
        f"{address} refused us: {found}; name the file with the cluster's token in --token-file, "
        "or in the environment as RAY_AUTH_TOKEN_PATH"
    )


@contextmanager
def _undisturbed(address: str) -> Generator[None, None, None]:
    """Ray's client lets RAY_ADDRESS override the address that it is given; this variable stands above that one."""
    name = "RAY_API_SERVER_ADDRESS"
    before = os.environ.get(name)
    os.environ[name] = address
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
