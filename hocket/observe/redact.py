"""Secrets are not written down: what is named like one is replaced wherever settings are shown or stored (B17)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

HIDDEN = "<redacted>"

# Settings of lower case are judged by whole words: `max_prompt_tokens`, `prompt_key` and `pad_token` are no secrets.
_SECRET = re.compile(
    r"(^|[^a-z])(api|access|private|secret|auth|signing|encryption|account)[_-]?keys?($|[^a-z])"
    r"|(^|[^a-z])(secrets?|passwords?|passwd|credentials?)($|[^a-z])"
    r"|^token$|(^|[^a-z])(api|access|auth|bearer|refresh|hub|hf|wandb)[_-]?tokens?($|[^a-z])",
    re.IGNORECASE,
)
_LOUD = re.compile(r"[A-Z0-9_]*(KEY|TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|CREDENTIAL)[A-Z0-9_]*")
_IN_URL = re.compile(r"(?<=://)([^/@\s:]*):([^/@\s]+)(?=@)")
_KNOWN_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
)


def is_secret(name: str) -> bool:
    """Whether a variable or setting of that name holds a secret: *KEY*, *TOKEN*, *SECRET*, *PASSWORD* in capitals,
    or such a word in a setting's name (`api_key`, not `prompt_key`)."""
    return bool(_LOUD.fullmatch(name) or _SECRET.search(name))


def redacted(value: Any, *, name: str = "") -> Any:
    """A copy of nested dicts and lists in which what is named like a secret, or looks like one, is replaced."""
    if isinstance(value, Mapping):
        return {key: redacted(one, name=str(key)) for key, one in cast(Mapping[Any, Any], value).items()}
    if name and value is not None and value != "" and is_secret(name):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [redacted(one) for one in cast(Sequence[Any], value)]
    return _text(value) if isinstance(value, str) else value


def redacted_command(words: Sequence[str]) -> list[str]:
    """A command line without the values of KEY=VALUE and `--key VALUE` that are named like secrets."""
    shown: list[str] = []
    hide = False
    for word in words:
        key, equals, _ = word.partition("=")
        name = key.lstrip("-").rpartition(".")[2].replace("-", "_")
        if hide and not word.startswith("-"):
            shown.append(HIDDEN)
        elif equals and is_secret(name):
            shown.append(f"{key}={HIDDEN}")
        else:
            shown.append(_text(word))
        hide = word.startswith("--") and not equals and is_secret(name) and not name.endswith(("_file", "_path"))
    return shown


def _text(text: str) -> str:
    return _KNOWN_FORMS.sub(HIDDEN, _IN_URL.sub(rf"\1:{HIDDEN}", text))
