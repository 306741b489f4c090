"""What the examples with the older command lines, detached.py and roles_as_groups.py, have in common.

All of it runs in the program that the user starts; nothing in here has to be known to the workers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hocket.errors import ConfigError, HocketError
from hocket.models.load import named_architecture
from hocket.workers.factories import ARCHITECTURES

POSITIONS = 128  # of the tiny models, prompt and answer together


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help tells the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser(description: str | None) -> Parser:
    """The options that both examples have."""
    made = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument("--model", choices=ARCHITECTURES, default="gpt2", help="architecture (default: gpt2)")
    made.add_argument("--pretrain", help="folder or id of that architecture; without it, a tiny fresh model")
    made.add_argument("--experience_batch_size", type=positive, default=8, help="prompts that one process asks at once")
    made.add_argument("--max_new_tokens", type=positive, default=16, help="longest answer, in tokens")
    made.add_argument("--kl_coef", type=float, default=0.1, help="penalty per token for leaving the initial model")
    made.add_argument("--actor_lr", type=float, default=1e-4)
    made.add_argument("--critic_lr", type=float, default=5e-4)
    made.add_argument("--reward", help="exact, digits, number, or file.py; without it, a random reward model")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--save_path", type=absolute, help="folder for the trained actor (default: it is not saved)")
    made.add_argument("--address", help="of a running Ray cluster; without it, a private one on this machine")
    return made


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted a whole number of 1 or more")
    return int(text)


def absolute(path: str) -> str:
    """The path as a worker, whose current folder is another, can use it."""
    return str(Path(path).resolve())


def tiny(model: str) -> dict[str, Any]:
    """The config of a small model of that architecture, as hocket.workers' factories and `model.config` take it."""
    sizes = {"model_type": model, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    feed_forward = {"opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "llama": {"intermediate_size": 64}}
    positions = {} if model == "bloom" else {"max_position_embeddings": POSITIONS}
    return sizes | feed_forward.get(model, {}) | positions


def pretrained(model: str, name: str | None) -> str | None:
    """The folder (by its full path) or id, when it is of that architecture; ConfigError when it is of another."""
    if name is None:
        return None
    name = absolute(name) if Path(name).exists() else name
    if (found := named_architecture(name)) != model:
        raise ConfigError(f"{name} is a {found} model, but the option beside it says {model}; make them agree")
    return name


def run(
    main: Callable[[argparse.Namespace], None], options: argparse.ArgumentParser, words: list[str] | None = None
) -> None:
    """`main` with the options in `words` (default: the command line); what is wrong becomes a line and an exit code."""
    try:
        main(options.parse_args(words))
    except HocketError as error:
        told = getattr(error, "cause", error)  # Ray wraps what comes from a worker
        print(f"{options.prog}: {told.args[0]}", file=sys.stderr)
        sys.exit(told.exit_code)
