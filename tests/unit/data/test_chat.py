"""From prompts to token ids with small real tokenizers, with and without a chat template."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hocket.data.chat import describe_template, render_prompt, stop_ids
from hocket.errors import ConfigError, DataError

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|system|>",
    "<|tool|>",
    "<|assistant|>",
    "hi",
    "there",
    "be",
    "brief",
]
IDS = {word: index for index, word in enumerate(WORDS)}
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'narrator' %}{{ raise_exception('no such role') }}{% endif %}
{{- '<|' + message.role + '|> ' + message.content + ' ' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def make_tokenizer(
    *, template: str | None = None, wrap: str | None = None, eos: str | None = "</s>"
) -> PreTrainedTokenizerFast:
    """A word tokenizer; `wrap` is what it adds around each text by itself, like "<s> $A </s>"."""
    core = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([word for word in WORDS if word.startswith("<")])
    if wrap:
        special = [(token, IDS[token]) for token in ("<s>", "</s>")]
        core.post_processor = processors.TemplateProcessing(single=wrap, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=eos, pad_token=eos, chat_template=template
    )


def ids(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


CHAT = make_tokenizer(template=TEMPLATE, wrap="<s> $A </s>")
PLAIN = make_tokenizer()


@pytest.mark.parametrize("template", ["auto", "chat"])
def test_text_becomes_one_user_turn_that_ends_in_the_generation_prefix(template: str) -> None:
    got = render_prompt("hi there", CHAT, template=template)
    assert got == ids("<s> <|user|> hi there <|assistant|>")  # one BOS, no EOS, though the tokenizer adds both
    assert type(got) is list
    assert {type(token) for token in got} == {int}


def test_messages_keep_their_order_and_roles() -> None:
    turns = [("user", "hi"), ("assistant", "there"), ("tool", "brief"), ("user", "be")]
    messages = [{"role": role, "content": content} for role, content in turns]
    want = "<s> <|user|> hi <|assistant|> there <|tool|> brief <|user|> be <|assistant|>"
    assert render_prompt(messages, CHAT) == ids(want)


def test_the_system_text_comes_first_unless_the_prompt_has_its_own() -> None:
    own = [{"role": "system", "content": "there"}, {"role": "user", "content": "hi"}]
    first = "<s> <|system|> be brief <|user|> hi <|assistant|>"
    assert render_prompt("hi", CHAT, system="be brief") == ids(first)
    assert render_prompt(own[1:], CHAT, system="be brief") == ids(first)
    assert render_prompt(own, CHAT, system="be brief") == ids("<s> <|system|> there <|user|> hi <|assistant|>")
    assert len(own) == 2


@pytest.mark.parametrize(
    ("wrap", "text", "want"),
    [
        (None, "hi there", "hi there"),
        ("<s> $A", "hi there", "<s> hi there"),
        ("<s> $A </s>", "hi there", "<s> hi there"),
        ("$A </s>", "hi there", "hi there"),
        ("<s> $A", "<s> hi", "<s> hi"),
    ],
)
@pytest.mark.parametrize("template", ["auto", "plain"])
def test_plain_text_gets_no_special_token_but_the_tokenizers_own_bos(
    wrap: str | None, text: str, want: str, template: str
) -> None:
    assert render_prompt(text, make_tokenizer(wrap=wrap), template=template) == ids(want)


def test_plain_turns_an_existing_template_off() -> None:
    assert render_prompt("hi", CHAT, template="plain") == ids("<s> hi")


def test_messages_without_a_template_name_the_choices() -> None:
    messages = [{"role": "user", "content": "hi"}]
    for tokenizer, template in ((PLAIN, "auto"), (PLAIN, "plain"), (CHAT, "plain")):
        with pytest.raises(DataError, match=r"list of 1 messages.*no chat template.*data\.template=plain"):
            render_prompt(messages, tokenizer, template=template)


def test_chat_and_system_need_a_template() -> None:
    with pytest.raises(DataError, match=r"data\.template=chat, but there is no chat template"):
        render_prompt("hi", PLAIN, template="chat")
    with pytest.raises(DataError, match=r"data\.system needs a chat template"):
        render_prompt("hi", PLAIN, system="be brief")


def test_a_template_that_refuses_the_messages_says_why() -> None:
    with pytest.raises(DataError, match=r"refuses the messages .*'narrator'.*no such role"):
        render_prompt([{"role": "narrator", "content": "hi"}], CHAT)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="gives no tokens"):
        render_prompt(" ", PLAIN)


def test_the_header_says_what_is_used() -> None:
    assert describe_template(CHAT) == "the tokenizer's chat template (data.template=auto)"
    assert describe_template(PLAIN) == "plain text, no chat template (data.template=auto)"
    assert describe_template(CHAT, "plain") == "plain text, no chat template (data.template=plain)"
    with pytest.raises(ConfigError, match="'chatml'; it must be auto, chat or plain"):
        describe_template(CHAT, "chatml")


@pytest.mark.parametrize(
    ("configured", "want"), [(None, (2,)), (7, (2, 7)), ([5, 7], (2, 5, 7)), ([7, 2, 7], (2, 7)), (0, (2, 0))]
)
def test_stop_ids_join_tokenizer_and_generation_config(configured: int | list[int] | None, want: tuple[int]) -> None:
    assert stop_ids(PLAIN, configured) == want


def test_stop_ids_without_an_eos_of_the_tokenizer() -> None:
    tokenizer = make_tokenizer(eos=None)
    assert stop_ids(tokenizer, [5, 7]) == (5, 7)
    for nothing in (None, []):
        with pytest.raises(DataError, match="neither the tokenizer nor the generation config"):
            stop_ids(tokenizer, nothing)
