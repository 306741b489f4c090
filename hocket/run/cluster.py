"""The Ray cluster that a run uses: a private one on this machine, or one that is there already."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from hocket.config import Colocated, Detached, Placement
from hocket.errors import PlacementError


def demand(placement: Placement) -> list[dict[str, float]]:
    """What Ray is to reserve, a bundle per worker process; empty without Ray."""
    match placement:
        case Detached():
            maker = {"CPU": placement.cpus_per_worker, "GPU": placement.gpus_per_maker}
            trainer = {"CPU": placement.cpus_per_worker, "GPU": placement.gpus_per_trainer}
            return [maker] * placement.makers + [trainer] * placement.trainers
        case Colocated():
            return [{"CPU": placement.cpus_per_worker, "GPU": placement.gpus_per_worker}]
        case _:
            return []


def total(bundles: list[dict[str, float]]) -> dict[str, float]:
    """The sum of all bundles."""
    return {kind: sum(bundle[kind] for bundle in bundles) for kind in ("CPU", "GPU")}


@contextmanager
def cluster(address: str | None, bundles: list[dict[str, float]]) -> Generator[str, None, None]:
    """Connect to `address`, or start a private cluster; yields a line that says which.

    A private cluster has as many logical CPUs as cores, or as many as asked for; GPUs are never made up.
    Raises PlacementError when what is asked can never be given. On leaving, nothing of a private cluster stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # the waiting loop raises them, in words
    import ray

    if address is not None:
        _attach(address)
        try:
            check_fits(bundles, dict(ray.available_resources()), where=f"the cluster at {address!r}")
            yield f"attached to the Ray cluster at {address}"
        finally:
            ray.shutdown()
        return
    cores = len(os.sched_getaffinity(0))
    cpus = max(float(cores), total(bundles)["CPU"])
    home = Path(tempfile.mkdtemp(prefix="hocket-"))  # short: socket paths below it have a limit of 107 bytes
    try:
        _own_token(home)
        ray.init(
            address="local",
            num_cpus=int(-(-cpus // 1)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(home),
        )
        check_fits(bundles, dict(ray.cluster_resources()), where="this machine")
        yield f"private Ray cluster with {cpus:g} logical CPUs on {cores} cores"
    finally:
        _shut_down()
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        shutil.rmtree(home, ignore_errors=True)


def _shut_down() -> None:
    """End Ray and wait until its processes are gone: a few outlive `ray.shutdown` by seconds."""
    import ray

    family = psutil.Process().children(recursive=True)
    ray.shutdown()
    ours = [process for process in family if _is_ray(process)]
    for process in psutil.wait_procs(ours, timeout=5)[1]:
        process.kill()
    psutil.wait_procs(ours, timeout=5)


def _is_ray(process: psutil.Process) -> bool:
    try:
        return "ray" in " ".join(process.cmdline()[:4])
    except psutil.NoSuchProcess:
        return False


def _own_token(home: Path) -> None:
    """A token that only this cluster accepts; Ray's own goes into HOME, readable by everybody."""
    token = home / "token"
    with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def check_fits(bundles: list[dict[str, float]], there: Mapping[str, float], *, where: str) -> None:
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
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlacementError(
            f"no Ray cluster answers at ray.address={address!r} ({str(error).strip().splitlines()[0]}); "
            "start one with `ray start --head`, check the address and token, or leave ray.address unset"
        ) from error
