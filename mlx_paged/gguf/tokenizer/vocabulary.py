"""Vocabulary: the tokens of a file, with their kinds and special ids."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.metadata import Metadata


class Kind(IntEnum):
    """Kinds of tokens, as GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts of tokens that end an answer, whatever the file says: files often name only one of several.
_ENDS = frozenset({
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<｜end▁of▁sentence｜>", "[e~["),
})  # fmt: skip
# Texts of these that end only a part of an answer where the others exist.
_ENDS_A_PART = {"<|end|>": ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})}
# Harmony's marks of channels are text for its parser.
_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
        model: Kind of tokenizer: "gpt2", "llama", "t5" or "gemma4".
        tokens: Texts by id.
        kinds: A `Kind` for each token.
        ids: Ids by text; the last one of equal texts.
    """

    meta: Metadata
    model: str
    tokens: list[str]
    kinds: np.ndarray
    ids: dict[str, int]

    @classmethod
    def of(cls, meta: Metadata) -> Vocabulary:
        """Reads a file's vocabulary.

        Raises:
            GGUFError: It has none, or a damaged one.
        """
        model = meta.text("tokenizer.ggml.model")
        tokens = meta.texts("tokenizer.ggml.tokens")
        if not tokens:
            raise GGUFError("its vocabulary is empty")
        kinds = meta.array("tokenizer.ggml.token_type", None)
        if kinds is None:
            kinds = np.full(len(tokens), Kind.NORMAL)
        if len(kinds) != len(tokens):
            raise GGUFError(f"it has {len(tokens)} tokens but {len(kinds)} types of tokens")
        return cls(meta, model, tokens, kinds, {token: i for i, token in enumerate(tokens)})

    def of_kind(self, *kinds: Kind) -> list[tuple[int, str]]:
        """Ids and texts of the tokens of these kinds, in order of ids."""
        found = np.flatnonzero(np.isin(self.kinds, kinds))
        return [(int(i), self.tokens[i]) for i in found]

    def special(self, name: str) -> int | None:
        """The id of a special token, such as "bos"; None if there is none.

        Raises:
            GGUFError: The id is not in the vocabulary.
        """
        token: int | None = self.meta.integer(f"tokenizer.ggml.{name}_token_id", None)
        if token == 0xFFFFFFFF:  # llama.cpp's "none" as an unsigned number
            return None
        if token is not None and token >= len(self.tokens):
            raise GGUFError(
                f"its metadata tokenizer.ggml.{name}_token_id is {token}, and it has "
                f"{len(self.tokens)} tokens"
            )
        return token

    def end_ids(self) -> list[int]:
        """Tokens that end an answer: those that the file names, and those that do so by name."""
        found = {self.special(name) for name in ("eos", "eot", "eom")}
        known = {text for text in _ENDS if text in self.ids}
        for text, others in _ENDS_A_PART.items():
            if any(both <= known for both in others):
                known.discard(text)
                if self.ids.get(text) in found and self.special("eos") != self.ids[text]:
                    found.discard(self.ids[text])
        found |= {self.ids[text] for text in known}
        return sorted(token for token in found if token is not None)

    def is_special(self, token: int) -> bool:
        """True if a token is no text, so that it is left out of answers."""
        if self.tokens[token] in _SHOWN:
            return False
        return self.kinds[token] in (Kind.CONTROL, Kind.UNKNOWN) or self.tokens[token] in _ENDS
