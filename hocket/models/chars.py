"""A character tokenizer that transformers loads and saves: one token per printable ASCII character."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Vocabulary: <pad> 0, <eos> 1, <unk> 2, newline, then the 95 printable ASCII characters."""
    symbols = [PAD, EOS, UNKNOWN, "\n", " ", *string.digits, *string.ascii_letters, *string.punctuation]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
