"""Calls in Python's notation, read as they are written: ``[name(key="value", number=1)]``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Event,
)
from mlx_paged.parsing.schemas import ArgumentsWriter, properties_of
from mlx_paged.parsing.surrogates import without_lone_surrogates

_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^\s=,()\[\]'\"]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_ESCAPES |= {c: c for c in "\\'\"/"}
_DIGITS = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits of an escape
_HEX = frozenset("0123456789abcdefABCDEF")
_OPEN, _CLOSED = "([{", ")]}"

_State = Callable[[str, int], int]


class PythonString:
    """The value of a string literal that arrives in pieces.

    An unescaped quote without a comma or a bracket after it is text, because models and templates
    forget to escape.

    Args:
        quote: Its opening quote.

    Attributes:
        has_ended: True if its closing quote, and the character after it, were read.
    """

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._run = re.compile(f"[^\\\\{quote}]+")
        self._escape = ""
        self._after = ""  # a possible closing quote, and whitespace
        self._surrogate = 0  # the first half of a character
        self.has_ended = False

    @property
    def has_closed(self) -> bool:
        """True if a quote was read that closes it, unless text follows."""
        return self._after != ""

    def take(self, text: str, at: int) -> tuple[int, str]:
        """Continues from an index; returns where it stopped, and the characters."""
        out: list[str] = []
        while at < len(text) and not self.has_ended:
            c = text[at]
            if self._after:
                if c in ",)":
                    self.has_ended = True
                elif c in " \t\r\n":
                    self._after += c
                    at += 1
                else:
                    out.append(self._after)
                    self._after = ""
            elif self._escape:
                at = self._go_on_escape(c, at, out)
            elif c == "\\":
                self._escape = c
                at += 1
            elif c == self._quote:
                self._after = c
                at += 1
            else:
                run = self._run.match(text, at)
                assert run is not None
                out.append(run[0])
                at = run.end()
        return at, self._joined(out)

    def _go_on_escape(self, c: str, at: int, out: list[str]) -> int:
        """Reads the next character after a backslash; returns where to continue."""
        kind = self._escape[1:2]
        if kind:
            if c in _HEX:
                self._escape += c
                if len(self._escape) == 2 + _DIGITS[kind]:
                    code = int(self._escape[2:], 16)
                    out.append(chr(code) if code <= 0x10FFFF else "\ufffd")
                    self._escape = ""
                return at + 1
            out.append(self._escape)
            self._escape = ""
            return at
        if c in _DIGITS:
            self._escape += c
            return at + 1
        out.append(_ESCAPES.get(c, "\\" + c))
        self._escape = ""
        return at + 1

    def _joined(self, out: list[str]) -> str:
        """Returns the characters, with surrogate pairs from two escapes joined."""
        text = "".join(out)
        if self._surrogate:
            text, self._surrogate = chr(self._surrogate) + text, 0
        if text and "\ud800" <= text[-1] <= "\udbff" and not self.has_ended:
            self._surrogate, text = ord(text[-1]), text[:-1]
        return without_lone_surrogates(text)


class PythonCalls:
    """Reads ``[name(key=value, ...), ...]``, or calls on separate lines.

    Strings are returned as JSON while they are written; other values when they are complete, by the
    types of the tool's schema, or by their form without one.

    Args:
        tools: Tools that may be called. A call of another one is text; calls next to it are still
            calls.
        in_list: True if the calls are in a list; otherwise they are a sequence.

    Attributes:
        num_calls: Number of calls that have begun; before the first, there may be none.
        has_ended: True if the list was closed, or is no longer a list.
        has_failed: True if it turned out to be no call.
    """

    def __init__(self, tools: Sequence[Tool], *, in_list: bool = True) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {t.name: t.parameters for t in tools}
        self._in_list = in_list
        self._state: _State = self._open if in_list else self._in_name
        self._out: list[Event] = []
        self._name = ""
        self._key = ""
        # Names of parameters that are not identifiers, by tool.
        self._odd_keys = {
            tool.name: [key for key in properties_of(tool.parameters) if not _KEY.fullmatch(key)]
            for tool in tools
        }
        self._in_call = False
        self._writer = ArgumentsWriter(None)
        self._string = PythonString('"')
        self._bare: list[str] = []  # of a value that is not a string
        self._depth = 0
        self._quote = ""  # of a string within it
        self._raw: list[str] = []  # text since the last call of a tool
        self._skipped: list[str] = []  # calls of no tool
        self._is_skipped = False  # the open call
        self._num_ended = 0  # calls of tools
        self.num_calls = 0
        self.has_ended = False
        self.has_failed = False

    @property
    def in_string(self) -> bool:
        """True if the text so far ends within a string, where a marker is text."""
        if self.has_ended or self.has_failed:
            return False
        return self._state == self._in_string or (
            self._state == self._in_bare and self._quote != ""
        )

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """Continues from an index; adds events to `out`, returns the index where it stopped."""
        self._out = out
        while at < len(text) and not self.has_ended and not self.has_failed:
            num_ended = self._num_ended
            start, at = at, self._state(text, at)
            if self._is_skipped or not (self._in_call or self._num_ended > num_ended):
                self._raw.append(text[start:at])
            if self._is_skipped and not self._in_call:
                self._is_skipped = False
                self._skipped += self._raw
                self._raw = []
        return at

    def finish(self, out: list[Event]) -> None:
        """The answer, or the block of the calls, ends here."""
        self._out = out
        if not self.num_calls:
            self.has_failed = True
        elif self._in_call:
            if self._state == self._in_string and self._string.has_closed:
                self._give(self._writer.end())
            if self._state == self._in_bare and self._writer.is_string:
                self._give(self._writer.add("".join(self._bare).strip()))
                self._bare = []
            is_skipped = self._is_skipped
            self._add_end(is_complete=False)
            self._in_call = False
            bare = "".join(self._bare).strip()
            if self._state == self._in_bare and bare and not is_skipped:
                # The bracket marks the beginning of a call, which `Lexer.without_call` drops if the
                # answer was cut.
                out.append(ContentText(f"[{self._name}({self._key}={bare}"))
        elif self._state == self._in_name and self._begins_name():
            self._raw = []
        elif (
            self._state in (self._in_key, self._after_key)
            and self._name in self._parameters
            and not self.has_ended
        ):
            self._begin_call()
            self._add_end(is_complete=False)
            self._in_call = False
        self.has_ended = True

    def _begins_name(self) -> bool:
        """True if the last name may be the beginning of a tool's."""
        return any(name.startswith(self._name) for name in self._parameters)

    def unread(self) -> str:
        """Returns, and forgets, text that was read and is not a call."""
        raw = "".join([*self._skipped, *self._raw])
        is_needed = not self.num_calls or re.search(r"\w", raw) is not None
        self._skipped, self._raw = [], []
        return raw if is_needed else ""

    def _give(self, text: str) -> None:
        if text and not self._is_skipped:
            self._out.append(CallArguments(text))

    def _add_end(self, *, is_complete: bool) -> None:
        if not self._is_skipped:
            self._out.append(CallEnd(is_complete))
            self._raw = []
            self._num_ended += 1

    def _give_up(self) -> None:
        """Ends the list at text that is not a call."""
        self.has_failed = not self.num_calls
        self.has_ended = not self.has_failed
        if self._in_call:
            self._add_end(is_complete=False)
            self._in_call = False

    def _begin_call(self) -> None:
        if self._in_call:
            return
        self._in_call = True
        self._writer = ArgumentsWriter(self._parameters.get(self._name))
        self._is_skipped = self._name not in self._parameters
        if self._is_skipped:
            return
        self.num_calls += 1
        if skipped := "".join(self._skipped).strip():
            self._out.append(ContentText(skipped))
        self._raw, self._skipped = [], []
        self._out.append(CallBegin(self._name))

    # States: each continues from an index and returns where it stopped.

    def _open(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at < len(text):
            if text[at] != "[":
                self._give_up()
                return at
            self._state, self._name = self._in_name, ""
            at += 1
        return at

    def _in_name(self, text: str, at: int) -> int:
        if not self._name:
            at = _after_space(text, at)
        end = _NAME.match(text, at).end()  # type: ignore[union-attr]
        self._name += text[at:end]
        at = end
        if at == len(text):
            return at
        if not self._name and text[at] == "]" and self.num_calls:
            self.has_ended = True
            return at + 1
        if not self._name or text[at] != "(":
            self._give_up()
            return at
        self._state, self._key = self._in_key, ""
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        if not self._key:
            at = _after_space(text, at)
        odd = self._odd_keys.get(self._name, ())
        while at < len(text) and any(key.startswith(self._key + text[at]) for key in odd):
            self._key += text[at]
            at += 1
        if at == len(text):
            return at
        if self._key in odd:
            self._state = self._after_key
            return at
        end = _KEY.match(text, at).end()  # type: ignore[union-attr]
        self._key += text[at:end]
        if end < len(text):
            self._state = self._after_key
        return end

    def _after_key(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if not self._key and text[at] == ")":
            self._begin_call()
            return self._end_call(at)
        if not self._key or text[at] != "=":
            self._give_up()
            return at
        self._begin_call()
        self._state = self._at_value
        return at + 1

    def _at_value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        types = self._writer.types(self._key)
        if text[at] in "\"'":
            # A string is one, unless the parameter cannot be: models quote numbers as well.
            is_string = types is None or "string" in types
            self._give(self._writer.begin(self._key, is_string=is_string or None))
            self._string = PythonString(text[at])
            self._state = self._in_string
            return at + 1
        self._give(self._writer.begin(self._key, is_string=False if types is None else None))
        self._bare, self._depth, self._quote = [], 0, ""
        self._state = self._in_bare
        return at

    def _in_string(self, text: str, at: int) -> int:
        at, value = self._string.take(text, at)
        self._give(self._writer.add(value) if value else "")
        if self._string.has_ended:
            self._give(self._writer.end())
            self._state = self._after_value
        return at

    def _in_bare(self, text: str, at: int) -> int:
        start = at
        while at < len(text):
            c = text[at]
            if self._quote:
                if self._quote.endswith("\\"):
                    self._quote = self._quote[0]
                elif c == "\\":
                    self._quote += c
                elif c == self._quote:
                    self._quote = ""
            elif c in "\"'":
                self._quote = c
            elif c in _OPEN:
                self._depth += 1
            elif self._depth == 0 and c in ",)":
                self._bare.append(text[start:at])
                self._give(self._writer.add("".join(self._bare).strip()))
                self._give(self._writer.end())
                self._state = self._after_value
                return at
            elif c in _CLOSED:
                self._depth = max(0, self._depth - 1)
            at += 1
        self._bare.append(text[start:])
        return at

    def _after_value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if text[at] == ")":
            return self._end_call(at)
        if text[at] == ",":
            self._state, self._key = self._in_key, ""
            return at + 1
        self._give_up()
        return at

    def _end_call(self, at: int) -> int:
        self._give(self._writer.close())
        self._add_end(is_complete=True)
        self._in_call = False
        self._state = self._after_call
        return at + 1

    def _after_call(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if text[at] in ",;":
            self._state, self._name = self._in_name, ""
            return at + 1
        if not self._in_list and _NAME.match(text, at).end() > at:  # type: ignore[union-attr]
            self._state, self._name = self._in_name, ""
            return at
        self.has_ended = True
        return at + (text[at] == "]")


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]
