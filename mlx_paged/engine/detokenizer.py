"""Incremental detokenization: tokens in, text out, and the stop strings of one sequence.

A step needs the text of an answer only to look for stop strings. Decoding a token takes mlx-lm's
detokenizers a microsecond or more, so for answers without stop strings the reader does it
(`outputs.DeferredText`): the engine's thread keeps token ids, and the text is decoded on the
reader's thread.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
    _byte_decoder,
)

if TYPE_CHECKING:
    from mlx_paged.engine.sampling_params import SamplingParams


class _Decoder(Protocol):
    """Decodes the tokens of one text, without keeping it."""

    def add(self, token: int) -> str:
        """Adds a token; returns the text that became certain."""

    def finish(self) -> str:
        """Returns the rest."""


class _BPEDecoder:
    """Decodes byte-level BPE as mlx-lm does, without its changes to the bytes.

    mlx-lm drops a leading space, which is the indentation of a completed line of code, and treats
    byte 0 as missing. It also holds back tokens of one space until another token comes. A line of
    indented JSON can have 40 of them, and its stream would pause for as many steps.

    Args:
        pieces: The tokens' spellings by id.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        self._incomplete = ""  # pieces of a character

    def add(self, token: int) -> str:
        """See `_Decoder`."""
        # A padded vocabulary has ids without a token, which mlx-lm shows as "!".
        piece = self._pieces[token] if token < len(self._pieces) else "!"
        if self._incomplete:
            piece = self._incomplete + piece
            self._incomplete = ""
        text = _decode(piece)
        if text.endswith("\ufffd"):
            self._incomplete = piece
            return ""
        return text

    def finish(self) -> str:
        """See `_Decoder`."""
        text, self._incomplete = _decode(self._incomplete), ""
        return text


class _StreamDecoder:
    """Decodes with one of mlx-lm's detokenizers, which owns its text.

    Args:
        stream: Used by this object only.
    """

    def __init__(self, stream: StreamingDetokenizer) -> None:
        self._stream = stream
        stream.reset()

    def add(self, token: int) -> str:
        """See `_Decoder`."""
        self._stream.add_token(token)
        return str(self._stream.last_segment)

    def finish(self) -> str:
        """See `_Decoder`."""
        self._stream.finalize()
        return str(self._stream.last_segment)


def _decoder_of(tokenizer: TokenizerWrapper) -> _Decoder:
    # The token map is built once per tokenizer; a shallow copy shares only that.
    stream = tokenizer.detokenizer
    if type(stream) is BPEStreamingDetokenizer:
        return _BPEDecoder(stream.tokenmap)
    return _StreamDecoder(copy.copy(stream))


@lru_cache(maxsize=1 << 16)  # nearly always one token's bytes
def _decode(seq: str) -> str:
    return _spelled_bytes(seq).decode("utf-8", "replace")


def _spelled_bytes(piece: str) -> bytes:
    """Returns the bytes that a token of byte-level BPE spells."""
    decoder = _byte_decoder()
    return b"".join(bytes([decoder[c]]) if c in decoder else c.encode() for c in piece)


class TokenBytes:
    """Returns the bytes of single tokens, which concatenate to the bytes of the text.

    The decoded text of a token lacks them if the token is only part of a character.

    Args:
        tokenizer: mlx-lm's wrapper.
    """

    _BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self._detokenizer = type(tokenizer.detokenizer)
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Returns the bytes of a token."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def _find(self, token: int) -> bytes:
        if token in self._added:
            entry = self._added[token]
            return str(getattr(entry, "content", entry)).encode()
        [piece] = self._tokenizer.convert_ids_to_tokens([token])
        if isinstance(piece, bytes):
            return piece
        if piece is not None and issubclass(self._detokenizer, BPEStreamingDetokenizer):
            return _spelled_bytes(piece)
        if piece is not None and (byte := self._BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if piece is not None and issubclass(self._detokenizer, SPMStreamingDetokenizer):
            return str(piece).replace("\u2581", " ").encode()
        text = str(self._tokenizer.decode([token]))
        # Other kinds of tokenizers show the bytes of a broken character only in their pieces.
        if "\ufffd" in text and piece is not None and all(c in _byte_decoder() for c in piece):
            return _spelled_bytes(piece)
        return text.encode()


class IncrementalDetokenizer:
    """The text of one sequence as it grows.

    Text that may be the beginning of a stop string is held back until that is certain, so no part
    of a stop string is ever shown.

    Args:
        tokenizer: mlx-lm's wrapper; its streaming detokenizer never splits a character.
        stop: Strings that end the text.
        include_stop: Make the stop string part of the text.
        min_tokens: Ignore stop strings that are complete before the text has this many tokens.
        skip: Tokens to omit from the text.
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
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._first_characters = frozenset(s[0] for s in stop)
        self._include_stop = include_stop
        self._skip = skip
        self._min_tokens = min_tokens
        self.start_over()

    @classmethod
    def of(
        cls,
        tokenizer: TokenizerWrapper,
        params: SamplingParams,
        special_token_ids: Collection[int],
    ) -> IncrementalDetokenizer:
        """Returns the text of an answer with these parameters."""
        return cls(
            tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip=special_token_ids if params.skip_special_tokens else (),
        )

    def start_over(self) -> None:
        """Forgets all tokens."""
        # Created with the first token, so that a request's first step need not wait for it.
        self._decoder: _Decoder | None = None
        self._num_tokens_to_stop = self._min_tokens  # tokens to come that complete no stop string
        self._held = ""
        self._parts: list[str] = []  # of the text
        self.matched_stop: str | None = None

    @property
    def text(self) -> str:
        """The text so far, without what is held back."""
        if len(self._parts) > 1:
            self._parts[:] = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def add(self, token: int) -> str:
        """Adds a token; returns the text that became certain. Returns "" after a stop string."""
        if token in self._skip:
            segment = ""
        else:
            decoder = self._decoder
            if decoder is None:
                decoder = self._decoder = _decoder_of(self._tokenizer)
            segment = decoder.add(token)
        if not self._stop:  # A fast path: most requests have none, and this runs for each token.
            self._parts.append(segment)
            return segment
        may_stop = self._num_tokens_to_stop <= 0
        self._num_tokens_to_stop -= 1
        return self._take(segment, may_stop)

    def finish(self) -> str:
        """Ends the stream; returns the text that was held back."""
        if self.matched_stop is not None:
            return ""
        rest = "" if self._decoder is None else self._decoder.finish()
        delta = self._take(rest, self._num_tokens_to_stop < 0)
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
            # Only stop strings that this segment completes; earlier ones did not count.
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
        self._parts.append(text)
        return text
