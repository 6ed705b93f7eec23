"""Calls with separate parameters between texts that contain names, ids or keys.

<call id="7"><get_weather><city>Oslo</city></get_weather></call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_paged.parsing.beginnings import Beginnings
from mlx_paged.parsing.call_syntax import ID, KEY, NAME, Parameters
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallArguments, CallBegin, CallEnd, Event
from mlx_paged.parsing.json_blocks import CLOSERS
from mlx_paged.parsing.json_value import JsonValue
from mlx_paged.parsing.schemas import ArgumentsWriter

_NEVER = "\ue0e5"  # no text has it
_SPACE = "\ue0e4"  # stands for a text that is any space
_MAX_HEAD_LENGTH = 512  # maximum characters of a head, or of the text around a key
_HOLES = {
    NAME: r"(?P<name>[^\s{}<>\"'()/]{1,256}?)",
    ID: r"(?P<id>[^\s{}<>\"']{1,128}?)",
    KEY: r"(?P<key>[^\s<>\"'/]{1,256}?)",
}


class Pattern:
    """A text with holes, matched at the beginning of text that arrives in pieces.

    Args:
        texts: Alternatives, with the values of known holes.
        follows: Required text after it.
    """

    def __init__(self, texts: Iterable[str], follows: Pattern | None = None) -> None:
        parts: list[list[str]] = [_units(text) for text in dict.fromkeys(texts)]
        after = f"(?={follows.expression})" if follows is not None else ""
        whole = "|".join(_renamed("".join(units), i) for i, units in enumerate(parts))
        self.expression: str = _unnamed(f"(?:{whole}){after}")
        self._whole = re.compile(f"(?:{whole}){after}")
        self.units: list[list[str]] = parts
        more = follows.units if follows is not None else [[]]
        self._beginnings = Beginnings([*units, *rest] for units in parts for rest in more)

    def match(self, text: str) -> re.Match[str] | None:
        """Matches the beginning of a text; `may_begin` decides if it is all there is."""
        return self._whole.match(text)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """Matches a whole text."""
        return self._whole.fullmatch(text)

    def may_begin(self, text: str) -> bool:
        """Returns True if a text may become one, with the required text after it."""
        return len(text) < _MAX_HEAD_LENGTH and self._beginnings.has(text)


def _units(text: str) -> list[str]:
    """Returns a text as expressions of single characters with flexible whitespace."""
    if text == _SPACE:
        return [r"\s"]
    units = [r"\s*"]
    for part in re.findall(r"\s+|\S", text):
        if part in _HOLES:
            units.append(_HOLES[part])
        elif part.isspace():
            units.append(r"\s*")
        else:
            units.append(re.escape(part))
    return units


def _unnamed(expression: str) -> str:
    return re.sub(r"\?P<\w+>", "?:", expression)


def _renamed(expression: str, index: int) -> str:
    """Names of groups that are different in each alternative, and only once in one."""
    seen: set[str] = set()

    def rename(found: re.Match[str]) -> str:
        name = f"{found[1]}{index}"
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{found[2]})"

    return re.sub(r"\(\?P<(\w+)>(\[[^\]]*\]\{[^}]*\}\??)\)", rename, expression)


def group(found: re.Match[str], name: str) -> str | None:
    """The text in a hole."""
    return next(
        (v for k, v in found.groupdict().items() if v and k.rstrip("0123456789") == name), None
    )


@dataclass(frozen=True)
class ParameterTexts:
    """The texts of a syntax, for the reader.

    Attributes:
        parts: Parts of the syntax.
        lead: Text before the first call, which models may omit.
        rest: Text before each call, after its marker.
        tails: Text after the last value's end, or after the head of a call without parameters.
    """

    parts: Parameters
    lead: str
    rest: str
    tails: tuple[str, ...]

    @classmethod
    def of(cls, parts: Parameters, lead: str, rest: str) -> ParameterTexts:
        tails = [parts.tail]
        if parts.empty.startswith(parts.head):
            tails.append(parts.empty.removeprefix(parts.head))
        return cls(parts, lead, rest, tuple(dict.fromkeys(tails)))


class ParameterCalls:
    """Reads such calls.

    A value ends at its end tag only if another parameter, or the call's end, follows.

    Args:
        texts: Texts of the syntax.
        tools: Tools of the request; other names are not calls.
        separator: Text between two calls in sequence.
    """

    def __init__(self, texts: ParameterTexts, tools: Sequence[Tool], separator: str = "") -> None:
        self._texts = texts
        self._tools = {tool.name: tool for tool in tools}
        parts = texts.parts
        befores = [before.rstrip() for before in parts.before_value.values()]
        self._keys = Pattern([parts.key + KEY + before for before in befores])
        tails = [tail for tail in texts.tails if tail.strip()]
        after = Pattern([parts.key, parts.between + parts.key, *(tails or [_SPACE])])
        head = texts.rest + parts.head
        self._head = Pattern([head, texts.lead + head], after)
        self._head_alone = Pattern([head, texts.lead + head])
        self._separator = separator.strip()
        self._state = "head"
        self._text = ""  # undecided text
        self._raw = ""  # of a head
        self._holes: dict[str, str] = {}
        self._tail = self._follows = self._head
        self._end = ""
        self._skipped = ""  # before a value
        self._json: JsonValue | None = None
        self._writer = ArgumentsWriter(None)
        self._seen: set[str] = set()
        self.num_calls = 0
        self.has_failed = False
        self._has_ended = False
        self._is_broken = False  # a value of the open call is not JSON

    @property
    def in_string(self) -> bool:
        """True if a marker is text here."""
        if self._json is not None:
            return self._json.in_string or not self._json.has_ended
        return self._state == "value" and not self._ends_value

    @property
    def _ends_value(self) -> bool:
        """True if all that is held is the end of a value."""
        return self._text.rstrip() == self._end.rstrip() and bool(self._text)

    def feed(self, text: str, at: int, out: list[Event]) -> int:
        """See `CallsReader`."""
        self._text += text[at:]
        while self._step(out):
            pass
        if not (self.has_failed or self._has_ended):
            return len(text)
        # `unread` returns the text held before.
        rest = len(self._text)
        if rest <= len(text) - at:
            self._text = ""
            return len(text) - rest
        before = self._text[: rest - (len(text) - at)]
        self._text = before.lstrip(CLOSERS) if self.num_calls else before
        self.has_failed = self.has_failed or self._text != ""
        return at

    def _step(self, out: list[Event]) -> bool:
        """Continues; returns True if there may be more to read."""
        if not self._text or self.has_failed or self._has_ended:
            return False
        if self._state == "head":
            return self._read_head(out)
        if self._state == "parameters":
            return self._read_parameter(out)
        return self._read_json(out) if self._json is not None else self._read_value(out)

    def _read_head(self, out: list[Event]) -> bool:
        held = self._text
        if self.num_calls:
            held = held.lstrip(CLOSERS).removeprefix(self._separator)
        found = self._head.match(held)
        if found is not None and (name := group(found, "name")) in self._tools:
            assert name is not None
            self._begin(name, group(found, "id"), out)
            self._text = held[found.end() :]
            return True
        if found is None and self._head.may_begin(held):
            return False
        if self.num_calls:
            self._has_ended = True
        else:
            self.has_failed = True
        return False

    def _begin(self, name: str, call_id: str | None, out: list[Event]) -> None:
        self.num_calls += 1
        out.append(CallBegin(name, call_id))
        self._writer = ArgumentsWriter(
            self._tools[name].parameters, trims_newlines=self._trims_newlines
        )
        self._seen, self._is_broken = set(), False
        self._holes = {NAME: name, ID: call_id or ""}
        tails = [self._filled(tail) for tail in self._texts.tails if tail.strip()]
        self._tail = Pattern(tails or [_NEVER])
        self._state = "parameters"

    @property
    def _trims_newlines(self) -> bool:
        parts = self._texts.parts
        before = parts.before_value["string"]
        return before.endswith("\n") and parts.value_end.startswith("\n")

    def _filled(self, text: str, key: str = "") -> str:
        for hole, value in (*self._holes.items(), (KEY, key)):
            text = text.replace(hole, value)
        return text

    def _read_parameter(self, out: list[Event]) -> bool:
        found = self._keys.match(self._text)
        if found is not None and self._tail.match(self._text) is None:
            self._begin_value(found, out)
            return True
        found = self._tail.match(self._text)
        if found is not None:
            self._text = self._text[found.end() :]
            self._close(out, is_complete=True)
            return True
        if self._keys.may_begin(self._text) or self._tail.may_begin(self._text):
            return False
        # The call ends here: its end has no marker, or that is missing.
        self._close(out, is_complete=self._has_required())
        self._has_ended = any(tail.strip() for tail in self._texts.tails)
        return not self._has_ended

    def _has_required(self) -> bool:
        required = self._tools[self._holes[NAME]].parameters.get("required") or ()
        return set(required) <= self._seen

    def _begin_value(self, found: re.Match[str], out: list[Event]) -> None:
        parts = self._texts.parts
        key = group(found, "key") or ""
        self._seen.add(key)
        before = "".join(found[0].split()).rpartition(key)[2]
        kinds = {
            name == "string"
            for name, text in parts.before_value.items()
            if "".join(text.split()) == before
        }
        is_string = kinds.pop() if len(kinds) == 1 else None
        opening = self._writer.begin(key, is_string=is_string)
        self._state = "value"
        # Whitespace at the end of the text before a value belongs to the syntax, exactly.
        self._text = self._text[len(found[0].rstrip()) :]
        self._end = self._filled(parts.value_end, key)
        string = parts.before_value["string"]
        self._skipped = string[len(string.rstrip()) :]
        if self._trims_newlines:
            self._skipped, self._end = "", self._end.lstrip("\n")
        if parts.are_json:
            self._json = JsonValue()
            comma = "{" if len(self._seen) == 1 else ", "
            opening = f"{comma}{json.dumps(key, ensure_ascii=False)}: "
        out.append(CallArguments(opening))
        self._follows = Pattern(
            [parts.key, parts.between + parts.key, *map(self._filled, self._texts.tails)]
        )

    def _read_value(self, out: list[Event]) -> bool:
        """Text up to the value's end."""
        if self._skipped:
            if len(self._text) < len(self._skipped) and self._skipped.startswith(self._text):
                return False
            self._text = self._text.removeprefix(self._skipped)
            self._skipped = ""
        at = -1
        while (at := self._text.find(self._end[0], at + 1)) >= 0:
            rest = self._text[at:]
            if rest.startswith(self._end):
                after = rest[len(self._end) :]
                if self._follows.match(after) is not None:
                    self._give(self._writer.add(self._text[:at]), out)
                    self._give(self._writer.end(), out)
                    self._text, self._state = after, "parameters"
                    return True
                if self._follows.may_begin(after):
                    break
            elif self._end.startswith(rest):
                break
        certain = len(self._text) if at < 0 else at
        self._give(self._writer.add(self._text[:certain]), out)
        self._text = self._text[certain:]
        return False

    def _read_json(self, out: list[Event]) -> bool:
        value = self._json
        assert value is not None
        if not value.has_begun and (first := self._text.lstrip()[:1]) not in '"{[':
            # A number or a word ends where the next character shows it.
            at = self._text.find(self._end.strip())
            if not first or at < 0:
                return False
            self._give(self._text[:at].strip(), out)
            self._text = self._text[at:]
            self._json, self._state = JsonValue(), "value"
            self._json.take("{}")
            return True
        if not value.has_ended:
            at, piece = value.take(self._text)
            self._is_broken = self._is_broken or value.is_broken
            self._give(piece, out)
            self._text = self._text[at:]
            return value.has_ended
        end = Pattern([self._end])
        found = end.match(self._text)
        if found is None and end.may_begin(self._text):
            return False
        self._text = self._text[found.end() :] if found is not None else self._text
        self._json, self._state = None, "parameters"
        return True

    @staticmethod
    def _give(text: str, out: list[Event]) -> None:
        if text:
            out.append(CallArguments(text))

    def _close(self, out: list[Event], *, is_complete: bool) -> None:
        self._give("}" if self._seen else "{}", out)
        out.append(CallEnd(is_complete and not self._is_broken))
        self._state = "head"

    def finish(self, out: list[Event]) -> None:
        """See `CallsReader`."""
        if self.has_failed or self._has_ended:
            return
        if self._state == "head":
            found = self._head_alone.fullmatch(self._text.rstrip())
            name = None if found is None else group(found, "name")
            if found is None or name not in self._tools:
                return
            self._begin(name, group(found, "id"), out)
        is_complete = False
        if self._state == "value":
            if self._json is not None:
                is_complete = self._json.has_ended and self._has_required()
            elif self._ends_value:
                self._give(self._writer.end(), out)
                is_complete = self._has_required()
            else:
                self._give(self._writer.add(self._text), out)
        else:
            is_complete = self._has_required()
        is_complete = is_complete and not self._is_broken
        if is_complete:
            self._give("}" if self._seen else "{}", out)
        out.append(CallEnd(is_complete, lacks_end=True))
        self._state, self._text = "head", ""

    def unread(self) -> str:
        """See `CallsReader`."""
        text, self._text = self._text, ""
        # Before another call's marker, this was a separator.
        is_between = self.num_calls and text.strip(CLOSERS) in ("", self._separator)
        return "" if is_between else text
