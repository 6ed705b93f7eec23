"""Tokenizers of GGUF files: llama.cpp's published tests, and small vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import byte_vocabulary, write_file
from support.llama_vocabularies import NAMES, published_tests, vocabularies

# isort: split
import numpy as np

from mlx_paged.demo import model_path
from mlx_paged.engine.detokenizer import IncrementalDetokenizer
from mlx_paged.engine.loading import load
from mlx_paged.gguf.metadata import Metadata
from mlx_paged.gguf.reader import GGUFFile
from mlx_paged.gguf.tokenizer import build_tokenizer
from mlx_paged.gguf.tokenizer.build import fast_tokenizer
from mlx_paged.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from mlx_paged.gguf.tokenizer.vocabulary import Vocabulary
from mlx_paged.wheels import DownloadError

TEXTS = [
    "Hello, world! It's 1234 o'clock.",
    "def f(x):\n    return x + 1\n",
    "  two  spaces and \t tabs\n\n\n",
    "Grüße, 你好, 😀 e\u0301",
    "I'LL we've DON'T",
]


@pytest.fixture(scope="session")
def folder() -> Path:
    try:
        return vocabularies()
    except DownloadError as error:
        pytest.skip(str(error))


def tokenizer_of(path: Path) -> Any:
    return build_tokenizer(Metadata(GGUFFile(path)))


def vocabulary_file(path: Path, tokens: dict[str, Any]) -> Path:
    keys = {"context_length": 64}
    return write_file(path, "llama", keys, {"w": np.zeros((1, 4), np.float32)}, tokens=tokens)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(folder: Path, name: str) -> None:
    tokenizer = fast_tokenizer(Vocabulary.of(Metadata(GGUFFile(folder / f"{name}.gguf"))))
    tests = published_tests(folder, name)
    assert len(tests) > 40
    for text, ids in tests:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


# --- The embedded model's tokenizer ---------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's vocabulary in a file."""
    saved = json.loads((model_path() / "tokenizer.json").read_text())
    added = {token["content"]: token for token in saved["added_tokens"]}
    ids = {**saved["model"]["vocab"], **{text: token["id"] for text, token in added.items()}}
    tokens = sorted(ids, key=lambda text: ids[text])
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in saved["model"]["merges"]]
    path = tmp_path_factory.mktemp("vocabulary") / "embedded.gguf"
    return vocabulary_file(
        path,
        {
            "ggml.model": "gpt2",
            "ggml.pre": "dbrx",  # the same expression
            "ggml.tokens": tokens,
            "ggml.token_type": [3 if text in added else 1 for text in tokens],
            "ggml.merges": pairs,
            "ggml.eos_token_id": ids["<|im_end|>"] if "<|im_end|>" in ids else len(ids) - 1,
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        },
    )


def test_ids_and_texts_are_those_of_the_same_tokenizer_json(embedded: Path) -> None:
    ours, theirs = tokenizer_of(embedded), load(None).tokenizer
    assert ours.get_vocab() == theirs.get_vocab()
    assert type(ours.detokenizer) is type(theirs.detokenizer)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids) == text
        stream = IncrementalDetokenizer(ours)
        assert "".join(map(stream.add, ids)) + stream.finish() == text


def test_the_template_is_the_file_s(embedded: Path) -> None:
    tokenizer = tokenizer_of(embedded)
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode("Hello", add_special_tokens=False)


# --- Small vocabularies ---------------------------------------------------------------------------


def pieces(**fields: Any) -> dict[str, Any]:
    """A vocabulary of SentencePiece's kind: the best score merges first."""
    words = {"▁": -9.0, "▁he": -1.0, "l": -9.0, "lo": -2.0, "▁hello": -5.0, "he": -3.0, "h": -9.0}
    words |= {"e": -9.0, "o": -9.0, "el": -2.5, "llo": -2.2}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.scores": [0.0] * 259 + list(words.values()),
        "ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **fields,
    }


@pytest.mark.parametrize(
    ("prefix", "text", "expected"),
    [
        (True, "hello", ["▁hello"]),
        # "lo" has the best score, then "llo"; "el" would need the "l" of it.
        (False, "hello", ["he", "llo"]),
        (True, "lo lo", ["▁", "lo", "▁", "lo"]),
        (True, "é", ["▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_merges_by_score(tmp_path, prefix, text, expected) -> None:
    tokens = pieces(**{"ggml.add_space_prefix": prefix})
    tokenizer = tokenizer_of(vocabulary_file(tmp_path / "a.gguf", tokens))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids) == text
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(map(stream.add, ids)) + stream.finish() == text


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, [1]),  # SentencePiece's default
        ({"ggml.add_bos_token": False}, []),
        ({"ggml.add_eos_token": True}, [1, 2]),
        ({"ggml.add_bos_token": False, "ggml.add_eos_token": True}, [2]),
    ],
)
def test_texts_begin_and_end_as_the_file_says(tmp_path, fields, ends) -> None:
    tokenizer = tokenizer_of(vocabulary_file(tmp_path / "a.gguf", pieces(**fields)))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    ids = tokenizer.encode("hello")
    first, last = [i for i in ends if i == 1], [i for i in ends if i == 2]
    assert ids == first + plain + last
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_id == 2


def with_words(*words: str, **fields: Any) -> dict[str, Any]:
    """A byte-level vocabulary with control tokens behind it."""
    tokens = byte_vocabulary(100)
    return {
        **tokens,
        "ggml.tokens": [*tokens["ggml.tokens"], *words],
        "ggml.token_type": [*tokens["ggml.token_type"], *[3] * len(words)],
        **fields,
    }


@pytest.mark.parametrize(
    ("words", "fields", "ends"),
    [
        ((), {}, {"</s>"}),
        (("<|eot_id|>", "<|im_end|>"), {}, {"</s>", "<|eot_id|>", "<|im_end|>"}),
        (("<end>",), {"ggml.eot_token_id": 100}, {"</s>", "<end>"}),
        # Harmony's "<|end|>" ends a message, not an answer.
        (("<|end|>",), {}, {"</s>", "<|end|>"}),
        (("<|end|>", "<|return|>", "<|call|>"), {}, {"</s>", "<|return|>", "<|call|>"}),
    ],
)
def test_tokens_that_end_an_answer(tmp_path, words, fields, ends) -> None:
    path = vocabulary_file(tmp_path / "a.gguf", with_words(*words, **fields))
    tokenizer = tokenizer_of(path)
    found = set(tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids)))
    assert found == ends


def test_control_tokens_are_found_in_text_and_left_out_of_answers(tmp_path) -> None:
    path = vocabulary_file(tmp_path / "a.gguf", with_words("<|im_start|>", "<|channel|>"))
    tokenizer = tokenizer_of(path)
    ids = tokenizer.encode("<|im_start|>a<|channel|>", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "a", "<|channel|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|channel|>"


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_pre_tokenizers_keep_all_text(tmp_path, name: str) -> None:
    tokens = {**byte_vocabulary(), "ggml.pre": name}
    tokenizer = tokenizer_of(vocabulary_file(tmp_path / "a.gguf", tokens))
    text = "abc 12345 it's (x)!\n"
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "".join(piece for piece, _ in split) == text.replace(" ", "Ġ").replace("\n", "Ċ")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["Hi", "Ġ12345", "Ġit", "'s", "Ġa", ".", "Ċ"]),
        ("smollm", ["Hi", "Ġ", "1", "2", "3", "4", "5", "Ġit", "'s", "Ġa", ".", "Ċ"]),
        ("qwen2", ["Hi", "Ġ", "1", "2", "3", "4", "5", "Ġit", "'s", "Ġa", ".Ċ"]),
        ("llama-bpe", ["Hi", "Ġ", "123", "45", "Ġit", "'s", "Ġa", ".Ċ"]),
        ("gpt-4o", ["Hi", "Ġ", "123", "45", "Ġit's", "Ġa", ".Ċ"]),
        ("deepseek-v3", ["Hi", "Ġ", "123", "45", "Ġit", "'s", "Ġa", ".Ċ"]),
    ],
)
def test_pre_tokenizers_split_numbers_and_contractions(tmp_path, name, expected) -> None:
    tokens = {**byte_vocabulary(), "ggml.pre": name}
    tokenizer = tokenizer_of(vocabulary_file(tmp_path / "a.gguf", tokens))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("Hi 12345 it's a.\n")
    assert [piece for piece, _ in split] == expected
