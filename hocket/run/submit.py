"""A command as a job of a Ray cluster: it is sent, its log is followed, its exit code is ours."""

from __future__ import annotations

import asyncio
import importlib
import secrets
import shlex
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hocket.errors import ConfigError, HocketError, PlacementError
from hocket.run.job_server import LOCAL, JobServer, first_line

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

INTERRUPTED = 130
_QUIET_S = 30.0  # after so long without a line of the log, see whether the server is still there


def submit(
    command: Sequence[str],
    *,
    address: str = LOCAL,
    working_dir: str | Path | None = None,
    pip: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    token_file: str | Path | None = None,
    wait: bool = True,
    stop_on_interrupt: bool = False,
    stream: TextIO | None = None,
) -> int:
    """Run `command` as a job of the cluster whose dashboard is at `address`, and return its exit code.

    The job gets a copy of `working_dir` as its current folder, the packages of `pip` (requirements, or files of them
    that end in .txt), and the variables in `env`: nothing else of this process's environment. The bearer token is
    read from `token_file`, or from where Ray looks for it. The job's id, its page on the dashboard and its log go to
    `stream` (stdout). With `wait=False` the result is 0 as soon as the job is accepted. Ctrl-C gives 130 and leaves
    the job running, unless `stop_on_interrupt`.

    Raises ConfigError for what is wrong with an argument, PlacementError when no job server answers at the address
    or the token is refused, HocketError when the server refuses the job or is lost.
    """
    if not command:
        raise ConfigError("no command to submit; write it behind two dashes: hocket submit -- hocket train recipe.yaml")
    server = JobServer.at(address, token_file)
    runtime_env = _runtime_env(working_dir, pip, env or {})
    job = _Job(f"hocket-{secrets.token_hex(6)}", server, server.client(), stream or sys.stdout)
    try:
        job.send(shlex.join(command), runtime_env)
        if wait:
            return job.follow()
        job.say_how_to_go_on()
        return 0
    except KeyboardInterrupt:
        job.leave(stop=stop_on_interrupt)
        return INTERRUPTED


def parse_env(words: Sequence[str]) -> dict[str, str]:
    """The variables in words KEY=VALUE; ConfigError for any other word."""
    pairs = [word.partition("=") for word in words]
    for key, equals, _ in pairs:
        if not (equals and key.isidentifier()):
            raise ConfigError(f"--env {key + equals!r} names no variable with its value; wanted KEY=VALUE")
    return {key: value for key, _, value in pairs}


@dataclass(frozen=True)
class _Job:
    """One job, known by its id before it is sent: whenever we are interrupted, we can say which it is."""

    id: str
    server: JobServer
    client: JobSubmissionClient
    stream: TextIO

    def send(self, entrypoint: str, runtime_env: dict[str, Any]) -> None:
        """Hand it to the server, and say where to find it."""
        try:
            self.client.submit_job(entrypoint=entrypoint, submission_id=self.id, runtime_env=runtime_env)
        except (OSError, RuntimeError, ValueError) as error:
            raise HocketError(f"{self.server.address} did not take the job: {str(error).strip(' .')}") from error
        self._say(f"job {self.id}: {self.server.address}/#/jobs/{self.id}")

    def follow(self) -> int:
        """Its log to the stream, until it ends; its exit code."""
        with self._lost():
            asyncio.run(self._tail())
            while not (info := self.client.get_job_info(self.id)).status.is_terminal():
                time.sleep(0.5)
        return self._end(info)

    async def _tail(self) -> None:
        log = self.client.tail_job_logs(self.id)
        while True:
            part = asyncio.ensure_future(anext(log, None))
            while not (await asyncio.wait({part}, timeout=_QUIET_S))[0]:
                self.server.check()  # a connection can die without a word
            if (text := part.result()) is None:
                return
            self._say(text, end="")

    def _end(self, info: Any) -> int:
        status, code = str(info.status), info.driver_exit_code
        if status == "SUCCEEDED":
            self._say(f"job {self.id} succeeded")
            return 0
        reason = info.message if code is None else f"exit code {code}"  # the message repeats the log
        self._say(f"job {self.id} {status.lower()}: {reason}")
        return code if code and code > 0 else 1

    def leave(self, *, stop: bool) -> None:
        """Ctrl-C: end the job, or say how to go on with it."""
        if not stop:
            self._say(f"\ninterrupted; job {self.id} goes on")
            return self.say_how_to_go_on()
        with self._lost():
            self.client.stop_job(self.id)
        return self._say(f"\ninterrupted; job {self.id} was told to stop")

    def say_how_to_go_on(self) -> None:
        """The two commands that people need when we are gone."""
        self._say(f"its log: {self.server.command('logs --follow', self.id)}")
        self._say(f"stop it: {self.server.command('stop', self.id)}")

    @contextmanager
    def _lost(self) -> Generator[None, None, None]:
        """Whatever Ray's client raises when the server goes away, in words."""
        network = importlib.import_module("aiohttp").ClientError
        try:
            yield
        except (OSError, RuntimeError, PlacementError, network) as error:
            raise HocketError(
                f"lost {self.server.address} while job {self.id} ran ({first_line(error)}); it may still be running. "
                f"To see its log: {self.server.command('logs --follow', self.id)}"
            ) from error

    def _say(self, text: str, *, end: str = "\n") -> None:
        self.stream.write(text + end)
        self.stream.flush()


def _runtime_env(working_dir: str | Path | None, pip: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """What Ray is to set up for the job; only what was asked for."""
    if working_dir is not None and not Path(working_dir).is_dir():
        raise ConfigError(f"working dir {str(working_dir)!r} is no folder; wanted one to send along with the job")
    packages = [requirement for word in pip for requirement in _requirements(word)]
    wanted = {"working_dir": working_dir and str(working_dir), "pip": packages, "env_vars": dict(env)}
    return {name: value for name, value in wanted.items() if value}


def _requirements(word: str) -> list[str]:
    if not word.endswith(".txt"):
        return [word]
    try:
        lines = [line.strip() for line in Path(word).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"requirements file {word!r} cannot be read: {error.strerror}") from error
    return [line for line in lines if line and not line.startswith("#")]
