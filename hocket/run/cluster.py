"""The Ray cluster that a run uses: a private one on this machine, or one that is there already."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from hocket.config import Bundle
from hocket.errors import PlacementError
from hocket.run.access import come_with_token, demand_version, only_known_variables, own_token, token_source
from hocket.run.signals import uninterrupted


def total(bundles: list[Bundle]) -> Bundle:
    """The sum of all bundles."""
    return {kind: sum(bundle[kind] for bundle in bundles) for kind in ("CPU", "GPU")}


@contextmanager
def cluster(
    address: str | None, bundles: list[Bundle], *, insecure: bool = False, variables: Sequence[str] = ()
) -> Generator[str, None, None]:
    """Connect to `address`, or start a private cluster; yields a line that says which.

    A private cluster has as many logical CPUs as cores, or as many as asked for; GPUs are never made up. Its workers
    get of our environment what computing needs, and the `variables` named. `insecure` allows an address on another
    machine without a token. Raises PlacementError when what is asked can never be given, or not safely. On leaving,
    nothing of a private cluster stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # the waiting loop raises them, in words
    if address is not None:
        come_with_token(address, insecure=insecure)
    import ray

    demand_version(ray.__version__)
    if ray.is_initialized():
        check_fits(bundles, dict(ray.available_resources()), where="the Ray cluster of this process")
        yield "the Ray cluster that this process is connected to"
    elif address is not None:
        _attach(address)
        try:
            check_fits(bundles, dict(ray.available_resources()), where=f"the cluster at {address!r}")
            yield f"attached to the Ray cluster at {address}"
        finally:
            ray.shutdown()
    else:
        with _private(cpus=math.ceil(total(bundles)["CPU"]), variables=variables) as where:
            yield where


@contextmanager
def _private(*, cpus: int, variables: Sequence[str]) -> Generator[str, None, None]:
    """A cluster on this machine that ends with the `with`; its files and its token are its own."""
    cores = len(os.sched_getaffinity(0))
    # a short path: those of the sockets below it have a limit of 107 bytes
    with tempfile.TemporaryDirectory(prefix="hocket-", ignore_cleanup_errors=True) as home, own_token():
        try:
            inside = f"{home}/r"  # Ray opens its folder to everybody; the one above it stays ours
            with only_known_variables(variables):
                _init(address="local", num_cpus=max(cores, cpus), include_dashboard=False, _temp_dir=inside)
            yield f"private Ray cluster with {max(cores, cpus)} logical CPUs on {cores} cores"
        finally:
            with uninterrupted():
                _shut_down(home)


def _init(**options: Any) -> None:
    """`ray.init`, quiet, and without the handler for SIGTERM that ends the process before anything is written."""
    import ray

    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    if main:
        signal.signal(signal.SIGTERM, handler)


def _shut_down(home: str) -> None:
    """End Ray and wait until the processes of the cluster in `home` are gone: a few outlive `ray.shutdown`."""
    import ray

    family = [process for process in psutil.Process().children(recursive=True) if _belongs(process, home)]
    ray.shutdown()
    for process in psutil.wait_procs(family, timeout=5)[1]:
        process.kill()
    psutil.wait_procs(family, timeout=5)


def _belongs(process: psutil.Process, home: str) -> bool:
    """Whether the process, or one that it comes from, was started with a path in `home`; workers rename themselves."""
    try:
        return any(home in " ".join(one.cmdline()) for one in (process, *process.parents()))
    except psutil.NoSuchProcess:
        return False


def check_fits(bundles: list[Bundle], there: Mapping[str, float], *, where: str) -> None:
    """PlacementError naming asked and available when the sum of `bundles` exceeds what is `there`."""
    asked = total(bundles)
    short = {kind: n for kind, n in asked.items() if n > there.get(kind, 0.0)}
    if short:
        kinds = ", ".join(f"{n:g} {kind}s asked, {there.get(kind, 0.0):g} available" for kind, n in short.items())
        raise PlacementError(
            f"the placement does not fit {where}: {kinds}. Ask for fewer makers, "
            "or lower placement.cpus_per_worker / gpus_per_maker / gpus_per_trainer / gpus_per_worker"
        )


def _attach(address: str) -> None:
    try:
        _demand_listener(address)
        _init(address=address)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PlacementError(
            f"no Ray cluster answers at ray.address={address!r} ({reason}); start one with `ray start --head`, check "
            f"the address, or leave ray.address unset. A wrong token looks the same: {_token_in_words()}"
        ) from error


def _token_in_words() -> str:
    mode, source = os.environ.get("RAY_AUTH_MODE", "unset"), token_source()
    found = f"{source} was found" if source else "no token was found"
    return f"RAY_AUTH_MODE is {mode}, {found}; it must be the one that the cluster was started with"


def _demand_listener(address: str) -> None:
    """OSError within seconds when nobody listens at host:port; Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in address:
        socket.create_connection((host, int(port)), timeout=5).close()


def demand_gpus(bundles: list[Bundle]) -> None:
    """PlacementError when a private cluster could not give the GPUs that are asked for."""
    gpus = torch.cuda.device_count()
    check_fits(bundles, {"CPU": math.inf, "GPU": gpus}, where="this machine")
