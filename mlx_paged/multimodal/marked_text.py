"""MarkedText: tokenizes texts with marks (`marks`) and placeholders of items."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mlx_paged.multimodal.marks import MARK, MARKED


class MarkedText:
    """Tokenizes marked texts, without the tokens that a tokenizer puts around a text.

    Args:
        tokenizer: transformers' tokenizer.
        placeholders: Texts that are tokens only without a mark.
        placeholder: One of them; spaces around `separator` are treated like those around this.

    Attributes:
        separator: A random text that stands for an item; random, so that no user can write it.
    """

    def __init__(self, tokenizer: Any, placeholders: Iterable[str], placeholder: str) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        nonce = secrets.token_hex(8)
        self.separator = f"{MARK}{nonce}item{MARK}"
        self._names = {each: f"{MARK}{nonce}{i}{MARK}" for i, each in enumerate(placeholders)}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._ids: dict[int | None, int] = {}  # of the copy -> of the tokenizer; -1: a separator
        self._backend = None if backend is None else self._renamed(backend, placeholder)

    def _renamed(self, backend: Any, like: str) -> Tokenizer:
        """Returns a copy of a tokenizer whose placeholders have other names.

        Args:
            like: The placeholder whose options the separator gets.
        """
        config = json.loads(backend.to_str())
        added = config["added_tokens"]
        kept = [token for token in added if token["content"] not in self._names]
        renamed = [token for token in added if token["content"] in self._names]
        copy = Tokenizer.from_str(json.dumps({**config, "added_tokens": kept}))
        model: dict[str, Any] = next((token for token in added if token["content"] == like), {})
        renamed.append({**model, "content": None, "id": -1})
        for token in renamed:
            name = self._names[token["content"]] if token["content"] else self.separator
            given = AddedToken(
                name,
                lstrip=token.get("lstrip", False),
                rstrip=token.get("rstrip", False),
                single_word=token.get("single_word", False),
                normalized=False,
            )
            # Not special ones, which `encode_special_tokens` may treat as text.
            copy.add_tokens([given])
            self._ids[copy.token_to_id(name)] = token["id"]
        # Added tokens outside the vocabulary are numbered in order, which now has gaps.
        for token in kept:
            self._ids.setdefault(copy.token_to_id(token["content"]), token["id"])
        return copy

    def pieces(self, text: str) -> list[list[int]]:
        """Returns the tokens before, between and after each `separator` in a text."""
        if self._backend is None:
            return [self._in_parts(piece) for piece in text.split(self.separator)]
        parts = text.split(self.separator)
        for i, part in enumerate(parts):
            for placeholder, name in self._names.items():
                part = part.replace(placeholder, name)
            parts[i] = part
        # Names have marks, too; these stay.
        names = [*self._names.values(), self.separator]
        keep = "|".join(re.escape(name) for name in names)
        plain = re.sub(
            rf"({keep})|{MARKED.pattern}",
            lambda found: found.group(1) or found.group(2),
            self.separator.join(parts),
            flags=re.DOTALL,
        )
        with self._lock:
            tokens = self._backend.encode(plain, add_special_tokens=False).ids
        found: list[list[int]] = [[]]
        for token in tokens:
            token = self._ids.get(token, token)
            if token < 0:
                found.append([])
            else:
                found[-1].append(token)
        return found

    def _in_parts(self, text: str) -> list[int]:
        """Without a copy of the tokenizer, splits a literal placeholder at its mark."""
        tokens: list[int] = []
        doubled = "\x00"
        for part in text.replace(MARK * 2, doubled).split(MARK):
            part = part.replace(doubled, MARK)
            tokens += self._tokenizer(part, add_special_tokens=False)["input_ids"]
        return tokens
