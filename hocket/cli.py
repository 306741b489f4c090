"""The command line: verbs only; the work is done by the packages below."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from hocket.errors import HocketError

app = typer.Typer(
    help="Reinforcement-learning post-training of language models, where placement is a value.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "digits.yaml"
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="RECIPE.yaml (default: the bundled digits recipe), then key=value or --key value"),
]


@app.command(context_settings=_PASS_ON)
def train(
    words: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything, print the config, start nothing")
    ] = False,
) -> None:
    """Train. `trainer.max_steps` is the total number of steps.

    Examples: hocket train; hocket train recipe.yaml seed=1 placement=local;
    hocket train "placement=detached(makers=2)" trainer.max_steps=50
    """
    from hocket.read_config import load_config

    config = load_config(*_recipe(words or []))
    signal.signal(signal.SIGINT, _leave)  # some libraries swallow a Ctrl-C while they are imported
    if config.ray.address is not None:
        from hocket.run.access import come_with_token

        come_with_token(config.ray.address, insecure=config.ray.allow_insecure_cluster)
    from hocket.observe.console import ledger_line
    from hocket.run.train import check, train  # heavy: only when the config is right

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if dry_run:
        for line in check(config):
            typer.echo(line)
        return
    try:
        summary = train(config)
    except KeyboardInterrupt as error:
        typer.echo("interrupted; what the run had is in its folder", err=True)
        raise typer.Exit(143 if getattr(error, "signal", "") == "SIGTERM" else 130) from None
    if summary["steps"]:
        rise = f"{summary['reward_first_tenth']:.3f} -> {summary['reward_last_tenth']:.3f}"
        typer.echo(f"mean reward, first and last tenth of {summary['steps']} steps: {rise}")
    typer.echo(f"ledger: {ledger_line(summary['ledger'])}")
    typer.echo(f"report: {Path(str(summary['folder'])) / 'report.html'}")


@app.command(context_settings=_PASS_ON)
def config(words: Overrides = None) -> None:
    """Print the resolved config: every key that there is, with its value."""
    from hocket.read_config import load_config

    typer.echo(load_config(*_recipe(words or [])).to_yaml(), nl=False)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """Write report.html of a run folder again."""
    from hocket.errors import DataError
    from hocket.observe.report import write_report

    if not (run / "metrics.jsonl").is_file():
        raise DataError(f"{str(run)!r} is no run folder: it has no metrics.jsonl")
    typer.echo(f"report: {write_report(run)}")


@app.command()
def scale(
    run: Annotated[Path, typer.Argument(help="folder of a run that goes on")],
    setting: Annotated[str, typer.Argument(help="makers=N")],
) -> None:
    """Add makers to a run that goes on, or take some away. A new one gets the newest weights by itself."""
    from hocket.errors import ConfigError
    from hocket.run.folder import make_request

    key, _, number = setting.partition("=")
    if key != "makers" or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"cannot read {setting!r}; write makers=N with N of 1 or more")
    typer.echo(make_request(run, "makers", int(number)))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="run folder")],
    folder: Annotated[Path | None, typer.Option("--dir", help="folder of the repetition; default RUN-replay")] = None,
) -> None:
    """Repeat an asynchronous run in one process, unit by unit as it was, and compare the weights."""
    from hocket.run.replay import replay

    summary, wanted = replay(run, folder=folder)
    found = str(summary.get("weights_sha256"))
    same = "equal" if found == wanted else "NOT equal"
    typer.echo(f"weights after {summary['steps']} steps: {found[:16]}, recorded {wanted[:16]}: {same}")
    raise typer.Exit(0 if found == wanted else 1)


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    command: Annotated[list[str], typer.Argument(help="behind two dashes: what the job runs")],
    address: Annotated[str, typer.Option(help="address of the cluster's dashboard")] = "http://127.0.0.1:8265",
    working_dir: Annotated[Path | None, typer.Option(help="folder that is sent along; the job starts in it")] = None,
    pip: Annotated[list[str] | None, typer.Option(help="package, or requirements .txt; may be repeated")] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the job; may be repeated")] = None,
    token_file: Annotated[Path | None, typer.Option(help="file with the cluster's token")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="do not follow the job")] = False,
    stop_on_interrupt: Annotated[bool, typer.Option("--stop-on-interrupt", help="Ctrl-C stops the job, too")] = False,
) -> None:
    """Run a command as a job of a Ray cluster, show its log, and end with its exit code.

    Ctrl-C ends with 130 and leaves the job running.

    Example: hocket submit --address http://127.0.0.1:8265 --working-dir . -- hocket train recipe.yaml
    """
    from hocket.run.submit import parse_env, submit

    try:
        code = submit(
            command,
            address=address,
            working_dir=working_dir,
            pip=pip or [],
            env=parse_env(env or []),
            token_file=token_file,
            wait=not no_wait,
            stop_on_interrupt=stop_on_interrupt,
        )
    except KeyboardInterrupt:  # later, submit itself says what becomes of the job
        typer.echo("interrupted; nothing was sent", err=True)
        code = 130
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the `hocket` command; an error is one message on stderr and its own exit code."""
    signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except HocketError as error:
        typer.echo(f"{type(error).__name__}: {error.message}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        sys.exit(error.exit_code)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)  # nothing was started


class _Terminated(KeyboardInterrupt):
    """SIGTERM before a run has begun."""

    signal = "SIGTERM"


def _end(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _recipe(words: list[str]) -> tuple[Path, list[str]]:
    """The recipe file, when the first word is one, and the overrides."""
    first = words[0] if words else ""
    if first and not first.startswith("-") and "=" not in first:
        return Path(first), words[1:]
    return _DEFAULT_RECIPE, words
