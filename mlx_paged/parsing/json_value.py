"""One JSON value in text that comes in pieces."""

from __future__ import annotations

import json
import re
from enum import Enum

SPACE = re.compile(r"[ \t\r\n]*")
_LITERAL = re.compile(r'[^"{}\[\]:, \t\r\n]+')  # numbers and words
_INSIDE = re.compile(r'[^"\\\x00-\x1f]+')  # a part of a string that needs no change
_HEX = frozenset("0123456789abcdefABCDEF")
_JSON_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_STARTS_LITERAL = frozenset("-0123456789tfn")
#: Words that models write for those of JSON.
_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": "null", "undefined": "null"}
_CLOSER = {"{": "}", "[": "]"}


class _Expected(Enum):
    """The next part of JSON, apart from space."""

    VALUE = "a value"
    VALUE_OR_END = "a value, or the end of an empty array"
    KEY = "a key"
    KEY_OR_END = "a key, or the end of an empty object"
    COLON = "a colon"
    MORE = "a comma, or the end of what is open"


class JsonValue:
    """One JSON value in text that arrives in pieces: finds its end, and makes its text valid.

    Typical errors of models in strings are repaired: raw control characters are escaped, and a
    backslash that does not begin an escape is doubled. Python's words (``True``) are converted.
    Once the value is proven to be JSON, commas, colons, brackets and quotes of keys are repaired,
    too: missing ones are added, and redundant ones dropped. Other errors are passed on unchanged;
    after one, only strings and brackets are tracked.

    Attributes:
        has_begun: True after its first character.
        has_ended: True after its last character. A number ends with the character after it.
        in_string: True if the text so far ends within a string.
        first: Its first character.
        is_broken: True if it is not JSON, and was not repaired.
        is_proven: True if a complete part (a string, a number, a word, an object or an array) came
            before anything that is not JSON. Text in braces that is not JSON never gets there.
    """

    __slots__ = (
        *(
            "_comma",
            "_escape",
            "_expected",
            "_in_key",
            "_is_held",
            "_key",
            "_literal",
            "_open",
            "_word",
        ),
        *("first", "has_begun", "has_ended", "in_string", "is_broken", "is_proven"),
    )

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets
        self._expected = _Expected.VALUE
        self._in_key = False  # True if the open string is one
        self._literal = ""  # a number or word that may continue
        self._is_held = False  # True if JSON has no such number or word
        self._word = ""  # the literal, if it is held
        self._key: str | None = None  # a key without quotes, and whitespace after it
        self._comma = ""  # a comma and whitespace after it, held until something follows
        self._escape = ""  # a backslash and the known part of its escape
        self.first = ""
        self.has_begun = False
        self.has_ended = False
        self.in_string = False
        self.is_broken = False
        self.is_proven = False

    @property
    def has_literal(self) -> bool:
        """True for a number, or a word."""
        return self.has_begun and self.first not in '"{['

    def take(self, text: str, at: int = 0, *, stops_if_broken: bool = False) -> tuple[int, str]:
        """Continues from an index; returns where it stopped, and the value's text up to there.

        Whitespace before the value is dropped. It stops at the end of the value, or of the text.

        Args:
            stops_if_broken: Also stop after the character that proves it is not JSON, unless
                `is_proven`.
        """
        out: list[str] = []
        if not self.has_begun:
            at = SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text):
                self.has_begun, self.first = True, text[at]
        while at < len(text) and not self.has_ended:
            if stops_if_broken and self.is_broken and not self.is_proven:
                break
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
                    self._end_string()
                else:
                    out.append(json.dumps(c)[1:-1])
            elif (run := _LITERAL.match(text, at)) is not None:
                self._take_literal(run[0], out)
                at = run.end()
            else:
                if self._literal:
                    self._end_literal(out)
                    if self.has_ended:
                        break
                if self.has_literal:  # Its first character does not begin a value.
                    self.is_broken = self.has_ended = True
                    break
                at += 1
                if c in " \t\r\n":
                    self._take_space(c, out)
                else:
                    self._end_key(c, out)
                    self._take_syntax(c, out)
        return at, "".join(out)

    def rest(self) -> str:
        """Returns the text that is held back, for an answer that ends within the value."""
        held = self._comma + (self._key or "") + self._word
        self._comma, self._key, self._word = "", None, ""
        return held

    @property
    def _mends(self) -> bool:
        return self.is_proven and not self.is_broken

    def _take_space(self, c: str, out: list[str]) -> None:
        if self._key is not None:
            self._key += c
        elif self._comma:
            self._comma += c
        else:
            out.append(c)

    # Numbers, words, and keys without quotes.

    def _take_literal(self, run: str, out: list[str]) -> None:
        if not self._literal:
            self._end_key("", out)
            if self._mends and self._expected is _Expected.MORE and self._open[-1] == "[":
                out.append(", ")
                self._expected = _Expected.VALUE
            self._give_comma(out)
            if self._mends and self._expected is _Expected.COLON:
                out.append(": ")
                self._expected = _Expected.VALUE
            takes_value = self._expected in (_Expected.VALUE, _Expected.VALUE_OR_END)
            # The first character shows if it may be one of JSON's.
            is_possible = takes_value and run[0] in _STARTS_LITERAL
            self._is_held = not (is_possible or self.is_broken) and self._open != []
        self._literal += run
        if self._is_held:
            self._word += run
        else:
            out.append(run)

    def _end_literal(self, out: list[str]) -> None:
        literal, word = self._literal, self._word
        self._literal = self._word = ""
        if self._expected not in (_Expected.VALUE, _Expected.VALUE_OR_END):
            if self._mends and word:
                self._key = word
                return
            self.is_broken = True
        elif word in _WORDS:
            word = _WORDS[word]
        elif word and self._mends:
            word = json.dumps(word, ensure_ascii=False)
        elif _JSON_LITERAL.fullmatch(literal) is None:
            self.is_broken = True
        out.append(word)
        self._end_value()

    def _end_key(self, c: str, out: list[str]) -> None:
        """Decides about a word where a key is expected: it is a key if a colon follows."""
        key, self._key = self._key, None
        if key is None:
            return
        if c != ":":
            self.is_broken = True
            self._give_comma(out)
            out.append(key)
            self._end_value()
            return
        if self._expected is _Expected.MORE:
            out.append(", ")
        self._give_comma(out)
        bare = key.rstrip()
        out.append(json.dumps(bare.strip("'"), ensure_ascii=False) + key[len(bare) :])
        self._expected = _Expected.COLON

    # Brackets, commas, colons and quotes.

    def _begin_value(self, out: list[str]) -> None:
        """Begins a string, an object or an array; adds missing text before it."""
        if self._mends and self._expected is _Expected.COLON:
            out.append(": ")
            self._expected = _Expected.VALUE
        elif self._mends and self._expected is _Expected.MORE:
            is_object = self._open[-1] == "{"
            out.append(", ")
            self._expected = _Expected.KEY if is_object else _Expected.VALUE

    def _end_value(self) -> None:
        self.is_proven = self.is_proven or not self.is_broken
        self._expected = _Expected.MORE
        self.has_ended = not self._open

    def _end_string(self) -> None:
        self.in_string = False
        if self._in_key:
            self._in_key = False
            self._expected = _Expected.COLON
        else:
            self._end_value()

    def _give_comma(self, out: list[str]) -> None:
        out.append(self._comma)
        self._comma = ""

    def _take_syntax(self, c: str, out: list[str]) -> None:
        """Takes a character that means something outside of strings."""
        if c in "}]":
            self._close(c, out)
            return
        if c == ",":
            self._take_comma(out)
            return
        self._give_comma(out)
        if c == ":":
            if self._expected is not _Expected.COLON:
                if self._mends and self._expected is _Expected.VALUE:
                    return
                self.is_broken = True
            self._expected = _Expected.VALUE
            out.append(c)
            return
        self._begin_value(out)
        takes_key = self._expected in (_Expected.KEY, _Expected.KEY_OR_END)
        takes_value = self._expected in (_Expected.VALUE, _Expected.VALUE_OR_END)
        out.append(c)
        if c == '"':
            self.in_string, self._in_key = True, takes_key
            self.is_broken = self.is_broken or not (takes_key or takes_value)
            if not takes_key:
                self.is_proven = self.is_proven or not self.is_broken
            return
        self.is_broken = self.is_broken or not takes_value
        self._open.append(c)
        self._expected = _Expected.KEY_OR_END if c == "{" else _Expected.VALUE_OR_END

    def _take_comma(self, out: list[str]) -> None:
        if self._mends and not self._comma:
            self._complete(out)
        if self._expected is _Expected.MORE:
            is_object = self._open[-1] == "{"
            self._expected = _Expected.KEY if is_object else _Expected.VALUE
            self._comma = ","
        elif not (self._mends and self._comma):  # A redundant one is dropped.
            self.is_broken = True
            out.append(",")

    def _close(self, c: str, out: list[str]) -> None:
        """Reads a closing bracket. If it does not fit, missing ones are added."""
        opener = "{" if c == "}" else "["
        if self._mends:
            if opener not in self._open:
                return
            while self._open[-1] != opener:
                self._complete(out)
                out.append(_CLOSER[self._open.pop()])
                self._end_value()
            self._complete(out)
        ends = (_Expected.MORE, _Expected.KEY_OR_END, _Expected.VALUE_OR_END)
        if self._expected not in ends or self._open[-1] != opener:
            self.is_broken = True
        out.append(self._comma + c)
        self._comma = ""
        self._open.pop()
        self._end_value()

    def _complete(self, out: list[str]) -> None:
        """Ends the last item of the innermost container."""
        if self._comma:
            self._comma, self._expected = "", _Expected.MORE
        elif self._expected is _Expected.COLON or (
            self._expected is _Expected.VALUE and self._open[-1] == "{"
        ):
            out.append(": null" if self._expected is _Expected.COLON else "null")
            self._expected = _Expected.MORE

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
