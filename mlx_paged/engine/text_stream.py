"""Tokens in, text out: streaming detokenization and stop strings of one sequence."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
    _byte_decoder,
)


class _ExactBPEDetokenizer(BPEStreamingDetokenizer):  # type: ignore[misc]
    """mlx-lm's detokenizer for byte-level BPE, without what it does to the bytes.

    It drops a space at the beginning of a text, which is the indentation of a completed line of
    code, and takes byte 0 for a missing one.
    """

    def _maybe_trim_space(self, current_text: str) -> str:
        return current_text

    def _decode_bytes(self, seq: str) -> str:
        return _decode(seq)


@lru_cache(maxsize=1 << 16)  # nearly always one token's bytes
def _decode(seq: str) -> str:
    decoder = _byte_decoder()
    decoded = (bytes([decoder[c]]) if c in decoder else c.encode() for c in seq)
    return b"".join(decoded).decode("utf-8", "replace")


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that `skip_special_tokens` leaves out: those that the tokenizer declares special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, entry in added.items() if getattr(entry, "special", False)}
    return frozenset(special | set(getattr(tokenizer, "all_special_ids", ())))


class TextStream:
    """The text of one sequence as it grows.

    Text that may turn out to be the beginning of a stop string is held back until it is known, so a
    stop string is never shown in part.

    Args:
        tokenizer: mlx-lm's wrapper; its streaming detokenizer never splits a character.
        stop: strings that end the text.
        include_stop: make the stop string that ended it part of the text.
        min_tokens: stop strings that are complete before a later token do not count.
        skip: tokens that are no text.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip: Collection[int] = (),
    ) -> None:
        # The token map is built once per tokenizer; a shallow copy shares it and nothing else.
        self._detokenizer: StreamingDetokenizer = copy.copy(tokenizer.detokenizer)
        if type(self._detokenizer) is BPEStreamingDetokenizer:
            self._detokenizer.__class__ = _ExactBPEDetokenizer
        self._detokenizer.reset()
        self._stop = tuple(stop)
        self._first_characters = frozenset(s[0] for s in stop)
        self._include_stop = include_stop
        self._skip = skip
        self._num_tokens_to_stop = min_tokens  # tokens to come that complete no stop string
        self._held = ""
        self.text = ""
        self.matched_stop: str | None = None

    def add(self, token: int) -> str:
        """Takes one token; returns the text that became certain. Nothing after a stop string."""
        if token in self._skip:
            segment = ""
        else:
            self._detokenizer.add_token(token)
            segment = self._detokenizer.last_segment
        if not self._stop:  # most requests have none, and this runs once a token
            return self._emit(segment)
        may_stop = self._num_tokens_to_stop <= 0
        self._num_tokens_to_stop -= 1
        return self._take(segment, may_stop)

    def finish(self) -> str:
        """Ends the stream; returns the text that was held back."""
        if self.matched_stop is not None:
            return ""
        self._detokenizer.finalize()
        delta = self._take(self._detokenizer.last_segment, self._num_tokens_to_stop < 0)
        if self.matched_stop is None:
            delta += self._emit(self._held)
            self._held = ""
        return delta

    def _take(self, segment: str, may_stop: bool) -> str:
        if self.matched_stop is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(segment):
            return self._emit(segment)  # no stop string begins in it, nor ends
        num_seen = len(self._held)
        self._held += segment
        found = []
        if may_stop:
            # Only what the segment completes: the rest was not complete, or did not count.
            matches = ((self._held.find(s, max(0, num_seen - len(s) + 1)), s) for s in self._stop)
            found = [(at, stop) for at, stop in matches if at >= 0]
        if found:
            at, self.matched_stop = min(found)
            end = at + len(self.matched_stop) if self._include_stop else at
            certain, self._held = self._held[:end], ""
        else:
            num_certain = len(self._held) - self._undecided()
            certain, self._held = self._held[:num_certain], self._held[num_certain:]
        return self._emit(certain)

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0

    def _emit(self, text: str) -> str:
        self.text += text
        return text
