"""Lexer: splits an answer into markers and the text between them, by its tokens and their text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# An object or an array that may be a call, also in a code block or after another call.
_BRACKET = re.compile(r"[\s,;]*(?:```\w*\s*)?[\[{]")
_PROSE = re.compile(r"\s*[^\W\d_][\w'-]*[,.;:!?]?\s+[^\W\d_]")  # two words


class Lexeme(NamedTuple):
    """A marker, or a piece of text without any.

    Text may arrive in any number of pieces. Markers are always whole.
    """

    text: str
    is_marker: bool = False


class Unseen(Lexeme):
    """A marker whose token ended the answer, so its text never arrives."""


class _Awaited(NamedTuple):
    """A token whose text is pending: stop strings and broken characters delay text."""

    text: str
    is_marker: bool
    num_before: int  # earlier occurrences of its text, spelled by ordinary tokens


class Lexer:
    """Finds markers in an answer as it grows.

    A marker that is a token of the vocabulary is found by that token alone; the same characters
    from other tokens are text. Any other marker is found in the text, and an end of the text that
    may begin one is held back.

    The text must include the text of the markers' tokens (``skip_special_tokens=False``). A token
    that ended the answer may be missing from it.

    Args:
        markers: Texts that the parser interprets.
        vocabulary: The tokenizer's added tokens, by text.
        skipped: Texts of tokens to drop, by id: special tokens that are not markers. A token that
            is a part of a marker is kept.
        decode: Returns the text of tokens. It is used if many tokens arrive together and the text
            has a marker's characters more often than its token; without it, the first ones count.
    """

    def __init__(
        self,
        markers: Iterable[str],
        vocabulary: Mapping[str, int],
        skipped: Mapping[int, str] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        markers = dict.fromkeys(markers)
        self._markers = list(markers)
        self._tokens = {vocabulary[text]: (text, True) for text in markers if text in vocabulary}
        spelled = sorted((m for m in markers if m not in vocabulary), key=len, reverse=True)
        for token, text in (skipped or {}).items():
            if text and not any(text in marker for marker in spelled):
                self._tokens.setdefault(token, (text, False))
        self._decode = decode
        self._held = ""
        self._awaited: deque[_Awaited] = deque()
        self._unseen: list[int] = []  # ordinary tokens whose text may be pending

        # Longest first, so that the longer one of two with the same beginning is found.
        self._spelled = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        self._beginnings = {m[:length] for m in spelled for length in range(1, len(m))}
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._first_letters = frozenset(marker[0] for marker in spelled)

    def passes(self, token: int | None, text: str) -> bool:
        """Returns True if an update is one plain text, which need not be fed."""
        return (
            text != ""
            and token not in self._tokens
            and not self._held
            and not self._awaited
            and not self._unseen
            and self._first_letters.isdisjoint(text)
        )

    def feed(self, token: int | None, text: str) -> Iterator[Lexeme]:
        """Reads one update of a sequence: its token, and the text that became certain with it.

        Many tokens whose text arrives together are fed one by one, the text with the last.
        """
        if token is not None:
            known = self._tokens.get(token)
            if known is not None:
                self._await(*known)
            elif not text or self._unseen:
                self._unseen.append(token)
        if not text:
            return iter(())
        self._held += text
        return self._cut()

    def finish(self, *, is_cut: bool = False) -> Iterator[Lexeme]:
        """Ends the answer: held text is text.

        A marker whose text never came is the token that ended the answer.

        Args:
            is_cut: The model would have continued, so the beginning of a marker is dropped, unless
                it is a single character or a word.
        """
        while self._awaited:
            awaited = self._awaited.popleft()
            begun = _overlap(self._held, awaited.text)
            yield from self._text(self._held[: len(self._held) - begun], is_whole=True)
            self._held = ""
            if awaited.is_marker:
                yield Unseen(awaited.text, True)
        held, self._held = self._held, ""
        is_marker = held in self._beginnings and len(held) > 1 and not _is_words(held)
        if not (is_cut and is_marker):
            yield from self._text(held, is_whole=True)

    def without_call(self, text: str) -> str:
        """Returns text that a parser held when the answer was cut, without the beginning of a call.

        A call begins with a marker or a bracket. Prose after the marker is kept.
        """
        if _BRACKET.match(text):
            return ""
        places = [at for marker in self._markers if (at := text.find(marker)) >= 0]
        if not places:
            return text
        before, rest = text[: min(places)], text[min(places) :]
        for marker in sorted(self._markers, key=len, reverse=True):
            rest = rest.replace(marker, "")
        return before + rest if _PROSE.match(rest) else before

    def _await(self, text: str, is_marker: bool) -> None:
        num_before = 0
        if self._unseen and self._decode is not None:
            num_before = self._decode(self._unseen).count(text)
        self._unseen.clear()
        self._awaited.append(_Awaited(text, is_marker, num_before))

    def _cut(self) -> Iterator[Lexeme]:
        while self._awaited:
            awaited = self._awaited[0]
            at = self._held.find(awaited.text)
            for _ in range(awaited.num_before):
                at = self._held.find(awaited.text, at + 1) if at >= 0 else -1
            if at < 0:
                certain = len(self._held) - _overlap(self._held, awaited.text)
                if awaited.num_before:
                    certain = 0  # Counted text must not be released.
                before, self._held = self._held[:certain], self._held[certain:]
                yield from self._text(before, is_whole=False)
                return
            before, self._held = self._held[:at], self._held[at + len(awaited.text) :]
            self._awaited.popleft()
            yield from self._text(before, is_whole=True)
            if awaited.is_marker:
                yield Lexeme(awaited.text, True)
        self._unseen.clear()
        before, self._held = self._held, ""
        yield from self._text(before, is_whole=False)

    def _text(self, text: str, *, is_whole: bool) -> Iterator[Lexeme]:
        """Yields text, and the markers spelled in it.

        Args:
            is_whole: True if nothing that follows can complete a marker. Otherwise, an end that may
                begin one goes in front of the held text.
        """
        if self._spelled is None:
            if text:
                yield Lexeme(text)
            return
        at = 0
        for found in self._spelled.finditer(text):
            begin, end = found.span()
            if not is_whole and self._begun(text, at) <= begin:
                break  # It may become a longer one, or be a part of an earlier one.
            if begin > at:
                yield Lexeme(text[at:begin])
            yield Lexeme(found[0], True)
            at = end
        begun = len(text) if is_whole else self._begun(text, at)
        if begun > at:
            yield Lexeme(text[at:begun])
        if begun < len(text):
            self._held = text[begun:] + self._held

    def _begun(self, text: str, start: int) -> int:
        """Returns the start of the longest end of a text that may begin a marker."""
        for at in range(max(start, len(text) - self._longest_beginning), len(text)):
            if text[at:] in self._beginnings:
                return at
        return len(text)


def _is_words(text: str) -> bool:
    return all(c.isalnum() or c.isspace() for c in text)


def _overlap(text: str, marker: str) -> int:
    """Returns the length of the longest end of a text that is a proper beginning of a marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
