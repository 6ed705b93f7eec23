"""Calls that are a name and JSON, with texts around them: ``get_weather{"city": "Oslo"}``."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from mlx_paged.parsing.beginnings import Beginnings
from mlx_paged.parsing.call_syntax import Hole, Piece
from mlx_paged.parsing.events import CallArguments, CallBegin, CallEnd, Event
from mlx_paged.parsing.json_blocks import CLOSERS
from mlx_paged.parsing.json_calls import unpacked
from mlx_paged.parsing.json_value import JsonValue

_MAX_HEAD_LENGTH = 512  # characters
_WORDS = {Hole.NAME: r"""[^\s{}<>"'()]{1,256}?""", Hole.ID: r"""[^\s{}<>"']{1,128}?"""}
_NUMBER = r"\d{1,12}"
_SPACES = r"\s*"
_SPACE = re.compile(_SPACES)


class Head:
    """The head of a call, before its arguments: texts, its name, its id, a number.

    Whitespace between the texts may vary.

    Args:
        pieces: In order.
        lead: Text before the first of several heads.

    Attributes:
        text: All its texts.
    """

    def __init__(self, pieces: Sequence[Piece], lead: str = "") -> None:
        parts = [unit if unit.endswith("*") else f"{unit}?" for unit in _units(lead)]
        self.text = lead + " ".join(piece for piece in pieces if isinstance(piece, str))
        for piece in pieces:
            if isinstance(piece, str):
                parts += _units(piece)
            elif piece is Hole.INDEX:
                parts.append(_NUMBER)
            else:
                parts.append(f"(?P<{piece.value}>{_WORDS[piece]})")
        self._whole = re.compile("".join(parts) + r"(?=\s*[{\"])")
        self._beginnings = Beginnings([[*parts, _SPACES]])
        self._named = re.compile("".join(parts) + r"\s*")

    def match(self, text: str) -> re.Match[str] | None:
        """The head that a text begins with, if arguments follow it."""
        return self._whole.match(text)

    def without_arguments(self, text: str) -> re.Match[str] | None:
        """Matches a whole text as a head."""
        return self._named.fullmatch(text)

    def may_begin(self, text: str) -> bool:
        """Returns True if a text may become a head."""
        return len(text) < _MAX_HEAD_LENGTH and self._beginnings.has(text)


def _units(text: str) -> list[str]:
    """Returns a text as expressions of single characters, with flexible whitespace."""
    units = []
    for part in re.findall(r"\s+|\S", text):
        units.append(r"\s*" if part.isspace() else re.escape(part))
    return units


class HeadedCalls:
    """Reads such calls: one, or several in sequence.

    Args:
        head: Head of a call.
        tail: After the arguments: texts and holes.
        tools: Names of the request's tools; other names are not calls.
        separator: Text between two calls.
        marks: Markers of the format, of which one may be a part of the head or tail.

    Attributes:
        num_calls: Number of calls that have begun.
        has_failed: True if the last text is not a call.
    """

    def __init__(
        self,
        head: Head,
        tail: Sequence[Piece],
        tools: Collection[str],
        separator: str = "",
        marks: Collection[str] = (),
    ) -> None:
        self._marks = marks
        self._has_marks_in_head = any(mark in head.text for mark in marks)
        self._head = head
        self._tail = tail
        self._tools = tools
        self._between = re.compile(rf"[\s,;]*(?:{re.escape(separator.strip())})?\s*")
        self._has_ended = False
        self._held: list[str] = []  # possible head or tail
        self._expected = ""  # the rest of the tail
        self._value: JsonValue | None = None  # the arguments
        self._text: list[str] | None = None  # of arguments that are a string
        self.num_calls = 0
        self.has_failed = False

    @property
    def in_string(self) -> bool:
        """True if a marker is text here: within a string, or in a head or a tail that has one."""
        if self._value is not None:
            return self._value.in_string
        if self._expected:
            return any(mark in self._expected for mark in self._marks)
        return self._has_marks_in_head and ("".join(self._held).strip() != "" or not self.num_calls)

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """See `CallsReader`."""
        while at < len(text) and not (self.has_failed or self._has_ended):
            if self._value is not None:
                at = self._in_arguments(self._value, text, at, out)
            elif self._expected:
                at = self._in_tail(text, at)
            else:
                at = self._in_head(text, at, out)
        return at

    def finish(self, out: list[Event]) -> None:
        """See `CallsReader`."""
        if self._value is not None:
            if self._text is None and (rest := self._value.rest()):
                out.append(CallArguments(rest))
            self._end(out, is_complete=False)
        elif self._expected:  # Only the end of the call is missing.
            self._held = []
        elif not self.has_failed:
            found = self._head.without_arguments("".join(self._held).strip())
            if found is not None and found["name"] in self._tools:
                self._held = []
                self._begin(found, out)
                out.append(CallEnd(is_complete=False))

    def unread(self) -> str:
        """See `CallsReader`."""
        held, self._held = "".join(self._held), []
        # Before another call's marker, this was a separator.
        return "" if self.num_calls and self._between.fullmatch(held) else held

    def _in_head(self, text: str, at: int, out: list[Event]) -> int:
        before = "".join(self._held)
        held = before + text[at:]
        space = self._between if self.num_calls else _SPACE
        skipped = space.match(held).end()  # type: ignore[union-attr]
        found = self._head.match(held[skipped:])
        if found is not None and found["name"] in self._tools:
            self._held = []
            self._begin(found, out)
            self._value = JsonValue()
            return at + skipped + found.end() - len(before)
        if found is None and self._head.may_begin(held[skipped:]):
            self._held = [held]
            return len(text)
        # The block's parser reads the text after the calls.
        if self.num_calls:
            before = before.lstrip(CLOSERS)
            self._held = [before]
        self._has_ended = self.num_calls > 0 and not before
        self.has_failed = not self._has_ended
        return at

    def _begin(self, found: re.Match[str], out: list[Event]) -> None:
        groups = found.groupdict()
        holes = {Hole.NAME: groups["name"], Hole.ID: groups.get("id") or ""}
        tail = [holes.get(p, "") if isinstance(p, Hole) else p for p in self._tail]
        self._expected = re.sub(r"\s+", "", "".join(tail))
        self.num_calls += 1
        out.append(CallBegin(groups["name"], groups.get("id")))

    def _in_arguments(self, value: JsonValue, text: str, at: int, out: list[Event]) -> int:
        at, piece = value.take(text, at)
        if value.first == '"':
            self._text = [*(self._text or ()), piece]
        elif piece:
            out.append(CallArguments(piece))
        if value.has_ended:
            self._end(out, is_complete=not value.is_broken)
        return at

    def _end(self, out: list[Event], *, is_complete: bool) -> None:
        if self._text is not None and is_complete:
            out.append(CallArguments(unpacked("".join(self._text))))
        out.append(CallEnd(is_complete))
        self._value = self._text = None
        self._held = []

    def _in_tail(self, text: str, at: int) -> int:
        """Drops the end of the call. Anything else also ends it, and is text."""
        c = text[at]
        if c.isspace():
            self._held.append(c)
        elif c == self._expected[0]:
            self._held.append(c)
            self._expected = self._expected[1:]
            if not self._expected:
                self._held = []
        else:
            self._expected = ""
            if not "".join(self._held).strip():
                self._held = []
            return at
        return at + 1
