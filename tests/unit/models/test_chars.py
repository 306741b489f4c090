"""The character tokenizer."""

import string

import pytest
from transformers import AutoTokenizer

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


@pytest.mark.parametrize(
    "text", [PRINTABLE, "a  b\n\n c ", " ", "What is 23 + 45?", "", string.digits * 3, "a . b , c n't"]
)
def test_round_trip_of_any_printable_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_what_it_does_not_know_is_one_token(tokenizer):
    assert tokenizer.encode("é\t") == [tokenizer.unk_token_id] * 2


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 99)
    assert tokenizer.decode([*tokenizer.encode("12"), 1, 0], skip_special_tokens=True) == "12"
    assert len({tokenizer.encode(c)[0] for c in PRINTABLE}) == len(PRINTABLE)


def test_saves_and_loads(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode(PRINTABLE) == tokenizer.encode(PRINTABLE)
    assert again.decode(again.encode(PRINTABLE)) == PRINTABLE
    assert (again.pad_token_id, again.eos_token_id) == (0, 1)
