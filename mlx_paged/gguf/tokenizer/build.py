"""Builds the tokenizer of a file, with its special tokens and chat template."""

from __future__ import annotations

import importlib
from typing import Any

from mlx_paged import extension  # noqa: F401  checks the extension, and loads BLAS, before mlx

# isort: split
from mlx_lm import tokenizer_utils
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.metadata import Metadata
from mlx_paged.gguf.tokenizer.models import MODELS
from mlx_paged.gguf.tokenizer.pre_tokenizers import pre_tokenizer_of
from mlx_paged.gguf.tokenizer.vocabulary import Kind, Vocabulary


def build_tokenizer(meta: Metadata) -> TokenizerWrapper:
    """Returns the tokenizer of a file.

    Raises:
        GGUFError: The file has none, or one of a kind that is not read.
    """
    vocabulary = Vocabulary.of(meta)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_Moved(fast_tokenizer(vocabulary)),
        chat_template=meta.text("tokenizer.chat_template", None),
        clean_up_tokenization_spaces=False,
        model_max_length=meta.size("context_length"),
        **_special_tokens(vocabulary),
    )
    return _wrapped(tokenizer, vocabulary)


class _Moved:
    """A tokenizer that its new owner does not copy, which takes as long as building it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self._tokenizer


def fast_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Returns the tokenizer that turns text into ids.

    Raises:
        GGUFError: Its kind is not read, or its vocabulary is damaged.
    """
    if vocabulary.model not in MODELS:
        raise GGUFError(
            f"its tokenizer {vocabulary.model!r} is not read from GGUF; those that are: "
            f"{', '.join(MODELS)}"
        )
    make, adds_bos = MODELS[vocabulary.model]
    try:
        tokenizer = make(vocabulary)
    except GGUFError:
        raise
    except Exception as error:  # The library has no error types.
        raise GGUFError(f"its vocabulary is damaged: {str(error).splitlines()[0]}") from error
    tokenizer.add_tokens(
        [
            AddedToken(text, special=vocabulary.is_special(token), normalized=False)
            for token, text in vocabulary.of_kind(Kind.CONTROL, Kind.USER_DEFINED)
            if text
        ]
    )
    if vocabulary.model == "gpt2":
        adds_bos = pre_tokenizer_of(vocabulary.meta.text("tokenizer.ggml.pre", "default")).adds_bos
    _add_ends(tokenizer, vocabulary, adds_bos)
    return tokenizer


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, adds_bos: bool) -> None:
    """Makes encoded texts begin and end with the tokens that the file asks for."""
    flag = vocabulary.meta.flag
    bos = vocabulary.special("bos") if flag("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = vocabulary.special("eos") if flag("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    first, last = ("" if token is None else f"{{{token}}}" for token in (bos, eos))
    # Names in a template must be free of spaces and of "$" and ":".
    single = " ".join(part for part in (first, "$A", last) if part)
    pair = " ".join(part for part in (first, "$A", last, first, "$B:1", last) if part)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(f"{{{token}}}", token) for token in {bos, eos} if token is not None],
    )


def _special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
    found = {}
    for name, short in names.items():
        token = vocabulary.special(name)
        if token is not None:
            found[f"{short}_token"] = vocabulary.tokens[token]
    return found


def _wrapped(tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary) -> TokenizerWrapper:
    """Wraps a tokenizer with a detokenizer and a parser of tool calls, as mlx-lm would."""
    detokenizer: Any = NaiveStreamingDetokenizer
    if vocabulary.model == "gpt2":
        detokenizer = BPEStreamingDetokenizer
    elif vocabulary.model == "llama":
        trims = vocabulary.meta.flag("tokenizer.ggml.add_space_prefix", True)

        def detokenizer(of: Any) -> SPMStreamingDetokenizer:
            return SPMStreamingDetokenizer(of, trim_space=trims)

    parser: dict[str, Any] = {}
    kind = tokenizer_utils._infer_tool_parser(tokenizer)
    if kind is not None:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{kind}")
        tokenizer.init_kwargs["tool_parser_type"] = kind
        parser = {
            "tool_parser": module.parse_tool_call,
            "tool_call_start": module.tool_call_start,
            "tool_call_end": module.tool_call_end,
        }
    return TokenizerWrapper(tokenizer, detokenizer, eos_token_ids=vocabulary.end_ids(), **parser)
