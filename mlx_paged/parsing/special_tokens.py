"""The added and special tokens of a tokenizer (mlx-lm's wrapper, or one of transformers)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of added tokens by text. The tokenizer never splits these texts."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {str(getattr(entry, "content", entry)): int(token) for token, entry in added.items()}


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Returns the ids of special tokens, which `skip_special_tokens` omits."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special = {int(token) for token, entry in added.items() if getattr(entry, "special", False)}
    return frozenset(special | {int(token) for token in getattr(tokenizer, "all_special_ids", ())})


def special_texts(tokenizer: Any, special: Collection[int]) -> dict[int, str]:
    """Returns the texts of special tokens by id."""
    return {token: str(tokenizer.convert_ids_to_tokens(token)) for token in special}
