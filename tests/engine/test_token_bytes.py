"""The bytes of single tokens: joined, they are the text, also where a token splits a character."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from support.models import embedded
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_paged.engine.detokenizer import TokenBytes

TEXT = "Zürich 東京 🙂 e\u0301\n  x"
MARKER = "<｜call｜>"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Sentence pieces, where characters that have none are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "Z", "r", "i", "c", "h"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "detokenizer"),
    [
        (byte_level, BPEStreamingDetokenizer),
        (byte_level, NaiveStreamingDetokenizer),
        (byte_fallback, SPMStreamingDetokenizer),
        (byte_fallback, NaiveStreamingDetokenizer),
    ],
)
def test_joined_they_are_the_text(kind: Any, detokenizer: Any) -> None:
    made = kind()
    made.add_special_tokens([AddedToken(MARKER, special=True, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    bytes_of = TokenBytes(TokenizerWrapper(fast, detokenizer))
    ids = fast.encode(TEXT + MARKER, add_special_tokens=False)
    assert b"".join(map(bytes_of, ids)) == (TEXT + MARKER).encode()
    assert any(len(bytes_of(token)) == 1 and bytes_of(token)[0] > 127 for token in ids)


def test_those_of_the_embedded_model() -> None:
    tokenizer = embedded().tokenizer
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(TokenBytes(tokenizer), ids)) == TEXT.encode()
