"""Calls as a name and a JSON object between markers: code shared by several families."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import CallArguments, CallBegin, CallEnd, ContentText, Event
from mlx_paged.parsing.json_blocks import CLOSERS
from mlx_paged.parsing.json_calls import JsonArguments
from mlx_paged.parsing.lexer import Lexeme
from mlx_paged.parsing.schemas import properties_of

_MAX_HEAD_LENGTH = 512  # characters between a call's marker and its arguments

_AFTER = CLOSERS + "`"  # characters that may be left over after arguments


@dataclass(frozen=True)
class Marks:
    """The markers of a family.

    Attributes:
        call: Before a call.
        arguments: Between its identification and its arguments; "": the arguments' bracket is.
        call_end: After it.
        block: Around all calls; "" for none.
        others: Markers without a meaning of their own: kept in a head, dropped between calls.
        hides_text: True drops text between the block's marker and a call's.
    """

    call: str
    arguments: str
    call_end: str
    block: tuple[str, str]
    others: tuple[str, ...] = ()
    hides_text: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """All markers, for the lexer."""
        found = (*self.block, self.call, self.arguments, self.call_end, *self.others)
        return tuple(filter(None, found))


class NamedJsonParser:
    """Reads calls whose arguments are JSON objects.

    Between the markers of a call, anything but a tool's name and an object is text of the answer,
    and so is text between calls. Repeated markers, and redundant ones after a call, are dropped.

    Args:
        marks: The family's markers.
        name_of: Returns name and id of a call from the text before and after the marker
            `Marks.arguments`, up to the object's bracket; None if it is not a call.
        tools: Tools that may be called.
        is_nameless: True if the text before the arguments is that of a call without a name. Its
            tool is the only one that accepts the arguments.
    """

    def __init__(
        self,
        marks: Marks,
        name_of: Callable[[str, str], tuple[str, str | None] | None],
        tools: Sequence[Tool],
        is_nameless: Callable[[str], object] = lambda head: False,
    ) -> None:
        self._tools = tools
        self._is_nameless = is_nameless
        self._fitting: str | None = None  # the tool of a call without a name
        self._marks = marks
        self._name_of = name_of
        self._known: Collection[str] = {tool.name for tool in tools}
        self._state: Callable[[Lexeme, list[Event]], None] = self._outside
        self._raw: list[str] = []  # text that may be no call
        self._noise: list[str] = []  # the text in it that cannot be part of a call
        self._after = ""  # the text after the arguments of the open call
        self._held: list[str] = []  # arguments of a call without a name
        self._head: list[str] = []  # of the open call, before its arguments
        self._num_head = 0
        self._tail: list[str] | None = None  # the part of it after the marker
        self._arguments = JsonArguments()
        self._has_begun = False  # the open call
        self._follows_call = False
        self._ids: set[str] = set()

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        self._state(lexeme, out)
        return out

    def passes(self, text: str) -> bool:
        return self._state == self._outside and not self._follows_call

    @property
    def in_string(self) -> bool:
        """True while a string of a call is open: a marker in it is text."""
        return self._state == self._in_arguments and self._arguments.in_string

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        if self._state == self._in_arguments:
            self._end_call(out)
        elif self._state == self._in_head and self._named_tool() is not None:
            self._begin(out)
            out.append(CallEnd(is_complete=False))
        elif self._state == self._in_block and self._follows_call:
            self._noise_as_text(out)
        elif not self._follows_call or "".join(self._raw).strip() not in ("", *self._marks.all):
            self._as_text(out)
        self._state = self._outside
        return out

    def _named_tool(self) -> tuple[str, str | None] | None:
        """Name and id of the open call, if it is one of a tool."""
        if self._fitting is not None:
            return self._fitting, None
        found = self._name_of("".join(self._head), "".join(self._tail or ()))
        return found if found is not None and found[0] in self._known else None

    # States.

    def _outside(self, lexeme: Lexeme, out: list[Event]) -> None:
        marks = self._marks
        if lexeme.is_marker and lexeme.text in (marks.block[0], marks.call):
            self._raw.append(lexeme.text)
            self._state = self._in_block
            if lexeme.text == marks.call:  # Some models forget to open the block.
                self._begin_head()
        elif not (self._follows_call and self._is_end(lexeme)):
            self._follows_call = self._follows_call and not lexeme.text.strip()
            out.append(ContentText(lexeme.text))

    def _is_end(self, lexeme: Lexeme) -> bool:
        ends = (self._marks.call_end, self._marks.block[1], self._marks.arguments)
        return lexeme.is_marker and lexeme.text in ends

    def _in_block(self, lexeme: Lexeme, out: list[Event]) -> None:
        marks = self._marks
        if lexeme == (marks.call, True):
            self._raw.append(lexeme.text)
            self._begin_head()
        elif lexeme == (marks.block[1], True):
            if self._raw and not self._follows_call:  # a block without a call
                self._raw.append(lexeme.text)
                self._as_text(out)
            self._noise_as_text(out)
            self._state = self._outside
        elif lexeme == (marks.arguments, True) and "".join(self._noise).strip():
            self._raw.append(lexeme.text)  # the call's marker is missing
            head, self._noise = self._noise, []
            self._begin_head()
            self._head, self._tail = head, []
        elif self._is_end(lexeme) and self._follows_call:
            return
        elif lexeme == (marks.block[0], True) or self._is_other(lexeme):  # once more
            self._raw.append(lexeme.text)
        elif lexeme.is_marker:
            self._no_call(out)
            self._outside(lexeme, out)
        else:
            self._raw.append(lexeme.text)
            self._noise.append(lexeme.text)
            if sum(len(text.strip()) for text in self._raw) > _MAX_HEAD_LENGTH:
                self._no_call(out)

    def _is_other(self, lexeme: Lexeme) -> bool:
        """Returns True for a marker without a meaning of its own."""
        return lexeme.is_marker and lexeme.text in self._marks.others

    def _begin_head(self) -> None:
        self._head, self._tail, self._num_head, self._fitting = [], None, 0, None
        self._state = self._in_head

    def _in_head(self, lexeme: Lexeme, out: list[Event]) -> None:
        marks, text = self._marks, lexeme.text
        if lexeme == (marks.arguments, True) and self._tail is None:
            self._raw.append(text)
            self._tail = []
        elif lexeme == (marks.call_end, True) and self._named_tool() is not None:
            self._begin(out)  # without any arguments
            out += [CallArguments("{}"), CallEnd()]
            self._follows_call = True
            self._state = self._in_block
        elif lexeme == (marks.call, True) and not self._num_head and self._tail is None:
            self._raw.append(text)  # once more
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
            self._num_head += len(before.strip())
            if self._num_head > _MAX_HEAD_LENGTH:
                self._no_call(out)
                self._outside(Lexeme(text[len(before) :]), out)
            elif at >= 0:
                if self._named_tool() is not None:
                    self._arguments, self._has_begun = JsonArguments(), False
                    self._state = self._in_arguments
                    self._in_arguments(Lexeme(text[at:]), out)
                elif self._is_nameless("".join(self._head).strip()):
                    self._arguments, self._has_begun, self._held = JsonArguments(), False, []
                    self._state = self._in_nameless
                    self._in_nameless(Lexeme(text[at:]), out)
                else:
                    self._no_call(out)
                    self._outside(Lexeme(text[at:]), out)

    def _begin(self, out: list[Event]) -> None:
        """Emits the beginning of a call."""
        found = self._named_tool()
        assert found is not None
        name, call_id = found
        if self._marks.hides_text and not self._follows_call:
            self._noise = []
        self._noise_as_text(out)
        # A repeated id would not distinguish calls.
        out.append(CallBegin(name, call_id if call_id not in self._ids else None))
        if call_id is not None:
            self._ids.add(call_id)
        self._has_begun = True

    def _noise_as_text(self, out: list[Event]) -> None:
        """Text between calls."""
        noise, self._raw, self._noise = "".join(self._noise).strip(), [], []
        if noise:
            self._follows_call = False
            out.append(ContentText(noise + "\n"))

    def _no_call(self, out: list[Event]) -> None:
        self._follows_call = False
        self._as_text(out)
        self._state = self._outside

    def _as_text(self, out: list[Event]) -> None:
        raw, self._raw, self._noise = "".join(self._raw), [], []
        if raw:
            out.append(ContentText(raw))

    def _in_arguments(self, lexeme: Lexeme, out: list[Event]) -> None:
        marks, arguments = self._marks, self._arguments
        ends = lexeme.text in (marks.call_end, marks.call, marks.block[1])
        if lexeme.is_marker and ends and not arguments.in_string:
            self._end_call(out)
            self._state = self._in_block
            if lexeme.text != marks.call_end:
                self._in_block(lexeme, out)
            return
        if arguments.has_ended:
            self._after += "" if lexeme.is_marker else lexeme.text
            return
        at, piece = arguments.take(lexeme.text)
        if arguments.has_failed:
            self._raw += arguments.raw
            self._no_call(out)
            if at < len(lexeme.text):
                self._outside(Lexeme(lexeme.text[at:]), out)
            return
        if arguments.has_begun and not self._has_begun:
            self._begin(out)
        if piece:
            out.append(CallArguments(piece))
        self._after = lexeme.text[at:]

    def _in_nameless(self, lexeme: Lexeme, out: list[Event]) -> None:
        """Reads the arguments of a call without a name, which are returned when complete."""
        arguments, text = self._arguments, lexeme.text
        if lexeme.is_marker and not arguments.in_string:
            self._no_call(out)
            self._outside(lexeme, out)
            return
        at, piece = arguments.take(text)
        self._held.append(piece)
        self._raw.append(text[:at])
        if not (arguments.has_failed or arguments.has_ended):
            return
        self._fitting = self._tool_for("".join(self._held)) if arguments.is_complete else None
        if self._fitting is None:
            self._no_call(out)
            if at < len(text):
                self._outside(Lexeme(text[at:]), out)
            return
        self._begin(out)
        out.append(CallArguments("".join(self._held)))
        self._after = text[at:]
        self._state = self._in_arguments

    def _tool_for(self, arguments: str) -> str | None:
        """Returns the only tool that accepts some arguments; None if none does, or several do."""
        try:
            keys = json.loads(arguments).keys()
        except (ValueError, RecursionError):  # thousands of digits, or of brackets
            return None
        fitting = [
            tool.name
            for tool in self._tools
            if keys <= properties_of(tool.parameters).keys()
            and keys >= set(tool.parameters.get("required") or ())
        ]
        return fitting[0] if len(fitting) == 1 else None

    def _end_call(self, out: list[Event]) -> None:
        """Ends the open call; unfinished arguments are cut."""
        if not self._has_begun:
            self._begin(out)
        if rest := self._arguments.rest():
            out.append(CallArguments(rest))
        out.append(CallEnd(self._arguments.is_complete))
        self._follows_call = True
        after, self._after = self._after.strip(_AFTER), ""
        if after:
            out.append(ContentText(after + "\n"))
