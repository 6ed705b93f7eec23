"""Calls as a name and a JSON object, with markers around each: what these families share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from mlx_paged.server.tools.definitions import Tool
from mlx_paged.server.tools.events import CallArguments, CallBegin, CallEnd, ContentText, Event
from mlx_paged.server.tools.json_calls import JsonValue
from mlx_paged.server.tools.lexer import Lexeme

_LONGEST_HEAD = 512  # characters between a call's marker and its arguments


@dataclass(frozen=True)
class Marks:
    """The markers of a family.

    Attributes:
        call: Before a call.
        arguments: Between what identifies it and its arguments; "": the arguments' bracket is.
        call_end: After it.
        block: Around all calls; "" for nothing.
        others: Markers without a meaning of their own: in a head they are a part of it, between
            calls they are left out.
    """

    call: str
    arguments: str
    call_end: str
    block: tuple[str, str]
    others: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """All of them, for the lexer."""
        found = (*self.block, self.call, self.arguments, self.call_end, *self.others)
        return tuple(filter(None, found))


class NamedJsonParser:
    """Reads calls whose arguments are JSON objects.

    What is between the markers of a call but is no name and no object is text.

    Args:
        marks: the family's markers.
        name_of: name and id of a call, from the text before and after the marker `Marks.arguments`,
            up to the object's bracket; None: it is no call.
        tools: of the request.
    """

    def __init__(
        self,
        marks: Marks,
        name_of: Callable[[str, str], tuple[str, str | None] | None],
        tools: Sequence[Tool],
    ) -> None:
        self._marks = marks
        self._name_of = name_of
        self._known: Collection[str] = {tool.name for tool in tools}
        self._state: Callable[[Lexeme, list[Event]], None] = self._outside
        self._raw: list[str] = []  # what was read and may be no call
        self._head: list[str] = []  # of the open call, before its arguments
        self._num_head = 0
        self._tail: list[str] | None = None  # the part of it after the marker
        self._value = JsonValue()
        self._ids: set[str] = set()

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        self._state(lexeme, out)
        return out

    def passes(self, text: str) -> bool:
        return self._state == self._outside

    @property
    def in_string(self) -> bool:
        """True while a string of a call is open: a marker in it is text."""
        return self._state == self._in_arguments and self._value.in_string

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        if self._state == self._in_arguments:
            out.append(CallEnd(self._value.has_ended))
        elif self._state == self._in_head and self._names_a_tool():
            self._begin(out)
            out.append(CallEnd(is_complete=False))
        else:
            self._as_text(out)
        self._state = self._outside
        return out

    def _names_a_tool(self) -> bool:
        found = self._name_of("".join(self._head), "".join(self._tail or ()))
        return found is not None and found[0] in self._known

    # States.

    def _outside(self, lexeme: Lexeme, out: list[Event]) -> None:
        marks = self._marks
        if lexeme.is_marker and lexeme.text in (marks.block[0], marks.call):
            self._raw.append(lexeme.text)
            self._state = self._in_block
            if lexeme.text == marks.call:  # (Some models forget to open the block.)
                self._begin_head()
        else:
            out.append(ContentText(lexeme.text))

    def _in_block(self, lexeme: Lexeme, out: list[Event]) -> None:
        marks = self._marks
        if lexeme == (marks.call, True):
            self._raw.append(lexeme.text)
            self._begin_head()
        elif lexeme == (marks.block[1], True):
            if self._raw:  # a block without a call
                self._raw.append(lexeme.text)
                self._as_text(out)
            self._state = self._outside
        elif not self._is_other(lexeme) and (lexeme.is_marker or lexeme.text.strip()):
            self._as_text(out)
            self._state = self._outside
            self._outside(lexeme, out)
        elif self._raw:
            self._raw.append(lexeme.text)

    def _is_other(self, lexeme: Lexeme) -> bool:
        """True for a marker without a meaning of its own."""
        return lexeme.is_marker and lexeme.text in self._marks.others

    def _begin_head(self) -> None:
        self._head, self._tail, self._num_head = [], None, 0
        self._state = self._in_head

    def _in_head(self, lexeme: Lexeme, out: list[Event]) -> None:
        marks, text = self._marks, lexeme.text
        if lexeme == (marks.arguments, True) and self._tail is None:
            self._raw.append(text)
            self._tail = []
        elif lexeme == (marks.call_end, True) and self._names_a_tool():
            self._begin(out)  # without any arguments
            out += [CallArguments("{}"), CallEnd()]
            self._state = self._in_block
        elif lexeme.is_marker and not self._is_other(lexeme):
            self._no_call(out)
            self._outside(lexeme, out)
        else:
            is_tail = self._tail is not None or not marks.arguments
            at = text.find("{") if is_tail else -1
            part = self._head if self._tail is None else self._tail
            before = text if at < 0 else text[:at]
            part.append(before)
            self._raw.append(before)
            self._num_head += len(before)
            if self._num_head > _LONGEST_HEAD:
                self._no_call(out)
                self._outside(Lexeme(text[len(before) :]), out)
            elif at >= 0:
                if self._begin(out):
                    self._value = JsonValue()
                    self._state = self._in_arguments
                    self._in_arguments(Lexeme(text[at:]), out)
                else:
                    self._no_call(out)
                    self._outside(Lexeme(text[at:]), out)

    def _begin(self, out: list[Event]) -> bool:
        """Gives out a call's name, if it has one."""
        found = self._name_of("".join(self._head), "".join(self._tail or ()))
        if found is None:
            return False
        name, call_id = found
        # (An id that was there before would not tell calls apart.)
        out.append(CallBegin(name, call_id if call_id not in self._ids else None))
        if call_id is not None:
            self._ids.add(call_id)
        self._raw = []
        return True

    def _no_call(self, out: list[Event]) -> None:
        self._as_text(out)
        self._state = self._outside

    def _as_text(self, out: list[Event]) -> None:
        raw, self._raw = "".join(self._raw), []
        if raw:
            out.append(ContentText(raw))

    def _in_arguments(self, lexeme: Lexeme, out: list[Event]) -> None:
        marks, value = self._marks, self._value
        ends = lexeme.text in (marks.call_end, marks.call, marks.block[1])
        if lexeme.is_marker and ends and not value.in_string:
            out.append(CallEnd(value.has_ended))
            self._state = self._in_block
            if lexeme.text != marks.call_end:
                self._in_block(lexeme, out)
            return
        if not value.has_ended:
            _, piece = value.take(lexeme.text)
            if piece:
                out.append(CallArguments(piece))
