"""Tokenizers of Hugging Face's library, made of a file's vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.tokenizer.pre_tokenizers import pre_tokenizer_of
from mlx_paged.gguf.tokenizer.vocabulary import Kind, Vocabulary

_SPACE = "\u2581"


def byte_level_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """GPT-2's kind: merges of bytes, which are spelled as characters.

    Raises:
        GGUFError: Its merges are damaged, or its pre-tokenizer is unknown.
    """
    kind = pre_tokenizer_of(vocabulary.meta.text("tokenizer.ggml.pre", "default"))
    tokenizer = Tokenizer(
        models.BPE(vocabulary.ids, _merges(vocabulary), ignore_merges=kind.whole_words)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs of tokens to merge, in order. The library requires these tokens to exist.

    Raises:
        GGUFError: A merge is not a pair.
    """
    found: list[tuple[str, str]] = []
    for merge in vocabulary.meta.texts("tokenizer.ggml.merges"):
        at = merge.find(" ", 1)  # A token may begin with a space.
        if at < 0:
            raise GGUFError(f"its merge {merge!r} is not a pair of tokens")
        found.append((merge[:at], merge[at + 1 :]))
    return found


def sentencepiece_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """Llama's kind: merges in the order of the merged tokens' scores, with bytes as a fallback.

    Raises:
        GGUFError: It has no scores.
    """
    ids = vocabulary.ids
    merges = []
    listed = _scores(vocabulary).tolist()
    for token in np.flatnonzero(np.isin(vocabulary.kinds, (Kind.NORMAL, Kind.UNUSED))).tolist():
        text = vocabulary.tokens[token]
        for at in range(1, len(text)):
            left = ids.get(text[:at])
            if left is not None and (right := ids.get(text[at:])) is not None:
                merges.append((-listed[token], left, right))
    merges.sort()
    texts = vocabulary.tokens
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            [(texts[left], texts[right]) for _, left, right in merges],
            unk_token=None if unknown is None else texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replaced = normalizers.Replace(" ", _SPACE)
    if vocabulary.meta.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced])
        ends = [decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.normalizer, ends = replaced, []
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends,
    ])  # fmt: skip
    return tokenizer


def character_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """Gemma 4's kind: merges of characters, with bytes as a fallback. Spaces are a letter.

    Raises:
        GGUFError: Its merges are damaged.
    """
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
    ])  # fmt: skip
    return tokenizer


def unigram(vocabulary: Vocabulary) -> Tokenizer:
    """T5's kind: the most likely sequence of tokens by their scores.

    Raises:
        GGUFError: It has no scores.
    """
    meta, tokens = vocabulary.meta, vocabulary.tokens
    scores = _scores(vocabulary)
    # Control tokens are never found in text.
    plain = np.isin(vocabulary.kinds, (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED))
    least = float(scores[plain].min(initial=0.0))
    pieces = [
        (text, float(score) if is_plain else least - 100.0)
        for text, score, is_plain in zip(tokens, scores, plain)
    ]
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0 if unknown is None else unknown))
    steps: list[normalizers.Normalizer] = []
    charsmap = meta.array("tokenizer.ggml.precompiled_charsmap", None)
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(charsmap.astype(np.uint8).tobytes()))
    if meta.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    prefix = "always" if meta.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    return tokenizer


def _scores(vocabulary: Vocabulary) -> np.ndarray:
    scores: np.ndarray = vocabulary.meta.array("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise GGUFError(f"it has {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    if not np.isfinite(scores).all():
        raise GGUFError("its scores of tokens are not all finite numbers")
    return scores


#: By ``tokenizer.ggml.model``, with the default of ``add_bos_token``.
MODELS: dict[str, tuple[Callable[[Vocabulary], Tokenizer], bool]] = {
    "gpt2": (byte_level_bpe, False),
    "llama": (sentencepiece_bpe, True),
    "gemma4": (character_bpe, True),
    "t5": (unigram, False),
}
