"""Who may come into a Ray cluster, and what of our environment goes there: tokens, addresses, variables. Ray-free.

A Ray cluster runs the code of whoever may connect; the token is what keeps others out (SECURITY.md).
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

from hocket.errors import PlacementError
from hocket.observe.redact import is_secret

OLDEST_RAY = (2, 54)  # older dashboards let a web page delete jobs (CVE-2026-27482)

_KNOWN = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|TZ|TMPDIR|TEMP|TMP|PWD|HOSTNAME|VIRTUAL_ENV|LD_LIBRARY_PATH|"
    r"LD_PRELOAD|(https?|no|all)_proxy|(HTTPS?|NO|ALL)_PROXY|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|"
    r"(LC|XDG|PYTHON|CONDA|OMP|MKL|OPENBLAS|KMP|NUMEXPR|MALLOC|CUDA|NVIDIA|NCCL|GLOO|UCX|ROCR|HIP|TORCH|TORCHINDUCTOR|"
    r"PYTORCH|TRITON|HF|TRANSFORMERS|TOKENIZERS|VLLM|RAY|HOCKET|COVERAGE|SLURM)_?\w*"
)
_RAYS_OWN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def demand_version(found: str) -> None:
    """PlacementError when this version of Ray is older than what we take."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST_RAY:
        wanted = ".".join(map(str, OLDEST_RAY))
        raise PlacementError(f"Ray {found} is installed, wanted {wanted} or newer; pip install -U 'ray>={wanted}'")


def come_with_token(address: str, *, insecure: bool) -> None:
    """Have Ray use the token that there is, at an explicit address too. It reads that once, when it is imported: call
    this before, as the command does. Raises PlacementError as `admit` does.
    """
    if admit(address, insecure=insecure) and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def admit(address: str, *, insecure: bool) -> bool:
    """Whether to come with a token: there is one, and RAY_AUTH_MODE does not forbid it.

    Raises PlacementError for another machine's address without a token, unless `insecure`
    (`ray.allow_insecure_cluster`): all code and data would go there open to everybody.
    """
    forbidden = os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"
    source = None if forbidden else token_source()
    if source is None and not insecure and not is_local(address):
        why = f"RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']}" if forbidden else "no token was found"
        raise PlacementError(
            f"ray.address={address!r} is another machine, and {why}; give the cluster a token and name its file in "
            "RAY_AUTH_TOKEN_PATH, or set ray.allow_insecure_cluster=true: then whoever reaches it may run code there"
        )
    return source is not None


def token_source() -> str | None:
    """Where Ray will find a token, in its own order; None for nowhere. A file that others may read is warned about.

    Raises PlacementError when RAY_AUTH_TOKEN_PATH names a file that is missing, empty, or cannot be read.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the variable RAY_AUTH_TOKEN"
    named, default = os.environ.get("RAY_AUTH_TOKEN_PATH"), Path.home() / ".ray" / "auth_token"
    if not named and not default.is_file():
        return None
    path = Path(named or default)
    try:
        empty, mode = not path.read_text(encoding="utf-8", errors="replace").strip(), path.stat().st_mode & 0o777
    except OSError as error:
        raise PlacementError(f"token file {str(path)!r} cannot be read: {error.strerror}; see SECURITY.md") from error
    if empty:
        raise PlacementError(f"token file {str(path)!r} is empty; wanted the token that the cluster was started with")
    if mode & 0o077:
        logging.getLogger("hocket").warning("token file %s has mode %04o: others may read it; chmod 600", path, mode)
    return f"token file {str(path)!r}"


def is_local(address: str) -> bool:
    """Whether an address, as Ray takes them, means this machine; a name that has no address does not."""
    address = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
    if address in ("auto", "local"):
        return True
    host = address.rpartition("//")[2].rpartition(":")[0].strip("[]") or address
    own = {one.address.partition("%")[0] for ones in psutil.net_if_addrs().values() for one in ones}
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ip.startswith("127.") or ip in own | {"::1"} for ip in found)


@contextmanager
def own_token() -> Generator[None, None, None]:
    """A token for private clusters, where the user has set none; Ray's own goes into HOME, readable by everybody."""
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        token_source()
        yield
        return
    os.environ["RAY_AUTH_TOKEN_PATH"] = _token_file()
    try:
        yield
    finally:
        os.environ.pop("RAY_AUTH_TOKEN_PATH")


@cache
def _token_file() -> str:
    """One token for all private clusters of this process: Ray remembers the first that it has read."""
    folder = tempfile.mkdtemp(prefix="hocket-token-")  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return str(path)


@contextmanager
def only_known_variables(more: Sequence[str]) -> Generator[None, None, None]:
    """Inside, the environment is what workers may know: what computing needs, no secrets, and what `more` names.

    Ray's processes inherit the environment of the moment in which they are started, and workers inherit theirs.
    """
    held = {name: value for name, value in os.environ.items() if not may_travel(name, more)}
    for name in held:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(held)


def may_travel(name: str, more: Sequence[str] = ()) -> bool:
    """Whether workers of a private cluster get the variable of that name."""
    if name in more or name in _RAYS_OWN:
        return True
    return bool(_KNOWN.fullmatch(name)) and not is_secret(name)
