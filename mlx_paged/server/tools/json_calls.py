"""Calls that are JSON objects, read as they are written: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import ClassVar, Protocol

from mlx_paged.server.tools.events import CallArguments, CallBegin, CallEnd, Event

_SPACE = re.compile(r"[ \t\r\n]*")
_OUTSIDE = re.compile(r'[^"{}\[\], \t\r\n]+')  # numbers, words, colons
_INSIDE = re.compile(r'[^"\\\x00-\x1f]+')  # a part of a string that needs no change
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonValue:
    """One JSON value in text that comes in pieces: where it ends, and its text made valid.

    What models write wrong within strings is mended: raw control characters are escaped, and a
    backslash that begins no escape is doubled. Otherwise it follows strings and brackets only.

    Attributes:
        has_begun: Whether its first character came.
        has_ended: Whether its last one did. A number ends with what follows it.
        in_string: Whether the text so far ends within a string.
        first: Its first character.
    """

    __slots__ = ("_depth", "_escape", "first", "has_begun", "has_ended", "in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._escape = ""  # a backslash and what is known of its escape
        self.first = ""
        self.has_begun = False
        self.has_ended = False
        self.in_string = False

    @property
    def has_literal(self) -> bool:
        """Whether it is a number, or a word."""
        return self.has_begun and self.first not in '"{['

    def take(self, text: str, at: int = 0) -> tuple[int, str]:
        """Reads on from an index: where it stopped, and the value's text up to there.

        Space before the value is dropped. It stops at the end of the value, or of the text.
        """
        out: list[str] = []
        if not self.has_begun:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text):
                self.has_begun, self.first = True, text[at]
        while at < len(text) and not self.has_ended:
            c = text[at]
            if self._escape:
                at += 1
                self._go_on_escape(c, out)
                if self._escape == "again":  # it was no escape: the character counts by itself
                    self._escape = ""
                    at -= 1
            elif self.in_string:
                run = _INSIDE.match(text, at)
                if run is not None:
                    out.append(run[0])
                    at = run.end()
                    continue
                at += 1
                if c == "\\":
                    self._escape = c
                elif c == '"':
                    out.append(c)
                    self.in_string = False
                    self.has_ended = self._depth == 0
                else:
                    out.append(json.dumps(c)[1:-1])
            elif self._depth == 0 and self.has_literal:
                run = _OUTSIDE.match(text, at)
                self.has_ended = run is None
                if run is not None:
                    out.append(run[0])
                    at = run.end()
            elif c == '"':
                out.append(c)
                at += 1
                self.in_string = True
            elif c in "{[":
                out.append(c)
                at += 1
                self._depth += 1
            elif c in "}]":
                out.append(c)
                at += 1
                self._depth -= 1
                self.has_ended = self._depth == 0
            elif c in ", \t\r\n":
                out.append(c)
                at += 1
            else:
                run = _OUTSIDE.match(text, at)
                assert run is not None
                out.append(run[0])
                at = run.end()
        return at, "".join(out)

    def _go_on_escape(self, c: str, out: list[str]) -> None:
        """Takes the next character after a backslash."""
        if self._escape == "\\":
            if c in '"\\/bfnrt':
                out.append("\\" + c)
                self._escape = ""
            elif c == "u":
                self._escape = "\\u"
            else:
                out.append("\\\\")
                self._escape = "again"
        elif c in _HEX:
            self._escape += c
            if len(self._escape) == 6:
                out.append(self._escape)
                self._escape = ""
        else:
            out.append("\\" + self._escape)
            self._escape = "again"


_State = Callable[[str, int], int]


class JsonCall:
    """Reads one call object; name and pieces of arguments come as soon as they are known.

    Arguments that are written before the name are held until it is known. Some models write them
    as a JSON string: it is unpacked when it is whole. Some put name and arguments into another
    object, as OpenAI's API has it (``{"type": "function", "function": {...}}``): it is entered.

    Args:
        known: names of tools. None: any object with a name is a call, as between the markers of a
            call. Otherwise an object whose name is none of them is a call only if it has
            arguments; this is for syntaxes in which any JSON may be a call.

    Attributes:
        has_begun: Whether its name was given out: until then it may turn out to be no call.
        has_ended: Whether its last bracket was read.
        has_failed: Whether it is no call.
        raw: Its text as written, while it may turn out to be no call.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("name", "function", "function_name", "tool_name", "tool")
    ARGUMENTS: ClassVar[tuple[str, ...]] = (
        "arguments",
        "parameters",
        "args",
        "tool_arguments",
        "input",
    )
    IDS: ClassVar[tuple[str, ...]] = ("id", "call_id", "tool_call_id")
    OTHERS: ClassVar[tuple[str, ...]] = (*IDS, "type", "index")
    OUTER: ClassVar[tuple[str, ...]] = (
        "function",
        "tool",
    )  # of an object that has name and arguments

    def __init__(self, known: Collection[str] | None = None) -> None:
        self._known = known
        self._state: _State = self._open
        self._depth = 0  # of objects entered
        self._key = ""
        self._value = JsonValue()
        self._value_text: list[str] = []
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: list[str] = []  # read and not given out
        self._has_arguments = False
        self._gave_arguments = False
        self._arguments_ended = False
        self.has_begun = False
        self.has_ended = False
        self.has_failed = False
        self.raw: list[str] = []

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a string: a marker there is text."""
        return self._value.in_string and not self.has_ended and not self.has_failed

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """Reads on from an index; adds events to `out`, returns the index where it stopped."""
        start = at
        while at < len(text) and not self.has_ended and not self.has_failed:
            at = self._state(text, at)
            self._give(out)
        if not self.has_begun:
            self.raw.append(text[start:at])
        return at

    def finish(self, out: list[Event]) -> None:
        """The answer, or the block of the call, ends here."""
        if not self.has_begun:
            self.has_failed = True
        elif not self.has_ended:
            self.has_ended = True
            if self._arguments_ended and not self._gave_arguments:
                out.append(CallArguments("{}"))
            out.append(CallEnd(is_complete=self._arguments_ended))

    def _give(self, out: list[Event]) -> None:
        """Gives out what is certain by now."""
        if not self.has_begun:
            if self._name is None or self.has_failed:
                return
            if (
                self._known is not None
                and not self._has_arguments
                and self._name not in self._known
            ):
                self.has_failed = self.has_ended
                return
            self.has_begun = True
            self.raw.clear()
            out.append(CallBegin(self._name, self._id))
        if self._arguments:
            piece = "".join(self._arguments)
            self._arguments.clear()
            if piece:
                self._gave_arguments = True
                out.append(CallArguments(piece))
        if self.has_ended:
            if not self._gave_arguments:
                out.append(CallArguments("{}"))
            out.append(CallEnd())

    # States: each reads on from an index and returns where it stopped.

    def _open(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at < len(text):
            self.has_failed = text[at] != "{"
            self._state = self._before_key
            at += not self.has_failed
        return at

    def _before_key(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if text[at] == "}":
            return self._close(at)
        if text[at] == ",":
            return at + 1
        if text[at] == '"':
            self._begin_value(self._in_key)
        else:
            self._give_up()
        return at

    def _give_up(self) -> None:
        """It is no JSON any more: a call that has begun ends here."""
        self.has_failed = not self.has_begun
        self.has_ended = self.has_begun

    def _in_key(self, text: str, at: int) -> int:
        at = self._read_value(text, at)
        if self._value.has_ended:
            self._key = _string("".join(self._value_text))
            known = self.NAMES + self.ARGUMENTS + self.OTHERS
            if self._known is not None and self._name is None and self._key not in known:
                self.has_failed = True
            self._state = self._before_value
        return at

    def _before_value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if text[at] == ":":
            self._state = self._at_value
            return at + 1
        self._give_up()
        return at

    def _at_value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if self._key in self.OUTER and text[at] == "{":
            self._depth += 1
            self._state = self._before_key
            return at + 1
        if self._key in self.ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._begin_value(self._in_arguments if text[at] in "{[" else self._in_other_arguments)
        else:
            self._begin_value(self._in_other)
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        at, piece = self._value.take(text, at)
        self._arguments.append(piece)
        if self._value.has_ended:
            self._arguments_ended = True
            self._state = self._before_key
        return at

    def _in_other_arguments(self, text: str, at: int) -> int:
        at = self._read_value(text, at)
        if self._value.has_ended:
            self._arguments.append(unpacked("".join(self._value_text)))
            self._arguments_ended = True
            self._state = self._before_key
        return at

    def _in_other(self, text: str, at: int) -> int:
        at = self._read_value(text, at)
        if self._value.has_ended:
            value = "".join(self._value_text)
            if self._key in self.NAMES and self._name is None and self._value.first == '"':
                self._name = _string(value)
            elif self._key in self.IDS and self._value.first == '"':
                self._id = self._id or _string(value)
            self._state = self._before_key
        return at

    def _begin_value(self, state: _State) -> None:
        self._value = JsonValue()
        self._value_text = []
        self._state = state

    def _read_value(self, text: str, at: int) -> int:
        at, piece = self._value.take(text, at)
        self._value_text.append(piece)
        return at

    def _close(self, at: int) -> int:
        if self._depth:
            self._depth -= 1
        elif self._name is None:
            self.has_failed = True
        else:
            self.has_ended = True
        return at + 1


class CallsReader(Protocol):
    """Reads calls that need no markers to be told apart from text.

    Attributes:
        num_calls: Calls that have begun.
        has_failed: Whether what was read last is no call.
        in_string: Whether the text so far ends within a string: a marker there is text.
    """

    @property
    def num_calls(self) -> int: ...

    @property
    def has_failed(self) -> bool: ...

    @property
    def in_string(self) -> bool: ...

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """Reads on from an index; adds events to `out`, returns the index where it stopped.

        That is the end of the text, or behind the calls, or where it turned out that there is none:
        what it has read then is left for `unread`.
        """

    def finish(self, out: list[Event]) -> None:
        """The answer, or the block of the calls, ends here: an open call does too."""

    def unread(self) -> str:
        """What was read and is no call; it is forgotten."""


class JsonCalls:
    """Reads call objects that follow each other, or an array of them.

    Args:
        known: see `JsonCall`.
        one: whether it ends with an object that is in no array.
        kind: reads an object.

    Attributes:
        is_array: Whether an array is open.
        has_ended: Whether nothing more is read: an array was closed.
        num_calls: Calls that have begun.
    """

    def __init__(
        self,
        known: Collection[str] | None = None,
        *,
        one: bool = False,
        kind: type[JsonCall] = JsonCall,
    ) -> None:
        self._known = known
        self._one = one
        self._kind = kind
        self._call: JsonCall | None = None
        self._space: list[str] = []  # before the first call, in case there is none
        self.is_array = False
        self.has_ended = False
        self.num_calls = 0

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a string."""
        return self._call is not None and self._call.in_string

    @property
    def in_call(self) -> bool:
        """Whether an object is open."""
        return self._call is not None

    @property
    def has_failed(self) -> bool:
        """Whether the object that was read last is no call."""
        return self._call is not None and self._call.has_failed

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """Reads on from an index; adds events to `out`, returns the index where it stopped.

        That is the end of the text, behind the array's bracket, or a character that begins no call.
        Where an object turned out to be no call (`has_failed`), it is left for `unread`.
        """
        while at < len(text) and not self.has_ended:
            if self._call is None:
                c = text[at]
                if c == "{":
                    self._call = self._kind(self._known)
                    continue
                if c not in " \t\r\n,;" and (c != "[" or self.is_array):
                    if c != "]" or not self.is_array:
                        return at
                    self.is_array, self.has_ended = False, True
                    self._hold(c)
                    return at + 1
                self.is_array = self.is_array or c == "["
                self._hold(c)
                at += 1
                continue
            begun = self._call.has_begun
            at = self._call.feed(text, at, out)
            self.num_calls += self._call.has_begun and not begun
            if self._call.has_failed:
                return at
            if self._call.has_ended:
                self._call = None
                self.has_ended = self._one and not self.is_array
        return at

    def finish(self, out: list[Event]) -> None:
        """The answer, or the block of the calls, ends here: an open call does too.

        What turned out to be no call is left for `unread`, as are brackets without calls.
        """
        if self._call is not None:
            self._call.finish(out)
            if not self._call.has_failed:
                self._call = None

    def unread(self) -> str:
        """What was read and is no call; it is forgotten."""
        before = [] if self.num_calls else self._space
        raw = "".join(before + (self._call.raw if self._call is not None else []))
        self._space, self._call, self.is_array = [], None, False
        return raw

    def _hold(self, c: str) -> None:
        if not self.num_calls:
            self._space.append(c)


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _string(text: str) -> str:
    """The value of a JSON string."""
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def unpacked(text: str) -> str:
    """Arguments that were written as no object: those in a string, or none at all."""
    if text in ("null", ""):
        return "{}"
    inner = _string(text) if text.startswith('"') else ""
    value = JsonValue()
    end, mended = value.take(inner)
    if value.first == "{" and value.has_ended and not inner[end:].strip():
        return mended
    return "{}" if text.startswith('"') and not inner.strip() else text
