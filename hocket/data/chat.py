"""From a prompt to token ids: through the tokenizer's chat template, or as plain text.

Tokenizers come as objects; this module asks only for the few members that `Tokenizer` names.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from jinja2 import TemplateError

from hocket.data.prompts import Message
from hocket.errors import ConfigError, DataError


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def chat_template(self) -> Any: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    def encode(self, text: str, /, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...


def render_prompt(
    prompt: str | list[Message], tokenizer: Tokenizer, *, template: str = "auto", system: str | None = None
) -> list[int]:
    """Token ids of the whole prompt, ready for the first token of the response.

    With a chat template, text becomes one user turn, `system` a turn before it unless the prompt has its own,
    and the ids end with the template's generation prefix. Plain text is encoded as it stands, with no special
    token but a BOS that the tokenizer adds by itself (an EOS that it adds would end the prompt).

    Raises `DataError` when template and prompt do not fit each other, when the template refuses the prompt,
    and when nothing is left to encode; `ConfigError` for an unknown `template`.
    """
    use_chat = _resolve(tokenizer, template) == "chat"
    if not use_chat and system is not None:
        raise DataError(f"data.system needs a chat template, but {_choices()}")
    if use_chat:
        ids = _chat_ids(_with_system(prompt, system), tokenizer)
    elif isinstance(prompt, str):
        ids = _plain_ids(prompt, tokenizer)
    else:
        raise DataError(f"the prompt is a list of {len(prompt)} messages, but {_choices()}")
    if not ids:
        raise DataError(f"the prompt {_cut(prompt)} gives no tokens; check the tokenizer and the prompt column")
    return ids


def describe_template(tokenizer: Tokenizer, template: str = "auto") -> str:
    """How prompts become tokens, in words for the header of a run. Raises as `render_prompt` does."""
    used = _resolve(tokenizer, template)
    words = {"chat": "the tokenizer's chat template", "plain": "plain text, no chat template"}[used]
    return f"{words} (data.template={template})"


def prompt_text(prompt: str | list[Message]) -> str:
    """A prompt as one text: what rewards get as `prompt`. The turns of a conversation stand below one another."""
    return prompt if isinstance(prompt, str) else "\n".join(str(turn["content"]) for turn in prompt)


def stop_ids(tokenizer: Tokenizer, generation_config_eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """All token ids that end a response: the tokenizer's EOS, then those of the generation config.

    Raises `DataError` when there are none: no response would ever end by itself.
    """
    configured = generation_config_eos
    more: Iterable[int] = (configured,) if isinstance(configured, int) else configured or ()
    found = (tokenizer.eos_token_id, *more)
    ids = tuple(dict.fromkeys(int(token) for token in found if token is not None))
    if not ids:
        raise DataError(
            "neither the tokenizer nor the generation config names an end-of-sequence token, so no response "
            "could end; set eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
        )
    return ids


def _resolve(tokenizer: Tokenizer, template: str) -> Literal["chat", "plain"]:
    has_template = bool(tokenizer.chat_template)
    if template == "auto":
        return "chat" if has_template else "plain"
    if template == "plain":
        return "plain"
    if template != "chat":
        raise ConfigError(f"data.template is {template!r}; it must be auto, chat or plain")
    if not has_template:
        raise DataError(f"data.template=chat, but {_choices()}")
    return "chat"


def _choices() -> str:
    return (
        "there is no chat template: the tokenizer has none, or data.template=plain turns it off. Either name "
        "a model or tokenizer with a chat template (most Instruct models have one), or put "
        "chat_template.jinja into the tokenizer's folder and leave data.template=auto, "
        "or give prompts as text (not messages), with data.template=plain and no data.system"
    )


def _with_system(prompt: str | list[Message], system: str | None) -> list[Message]:
    turns: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is None or turns[0]["role"] == "system":
        return turns
    return [{"role": "system", "content": system}, *turns]


def _chat_ids(messages: list[Message], tokenizer: Tokenizer) -> list[int]:
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    except (TemplateError, TypeError) as error:
        raise DataError(
            f"the tokenizer's chat template refuses the messages {_cut(messages)}: {error}; mend the row, "
            f"or use a tokenizer whose template takes these roles"
        ) from error
    return [int(token) for token in ids]


def _plain_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    ids = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and list(tokenizer.encode(text, add_special_tokens=True))[:1] == [bos]
    return [int(bos), *ids] if adds_bos and bos is not None and ids[:1] != [bos] else ids


def _cut(prompt: object) -> str:
    return f"{prompt!r:.200}"
