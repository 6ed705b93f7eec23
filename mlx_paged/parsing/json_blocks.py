"""Calls as JSON objects between markers: code shared by the families that write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.events import ContentText, Event
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.json_calls import CallsReader, JsonCalls
from mlx_paged.parsing.lark import MORE_CALLS, Lark
from mlx_paged.parsing.lexer import Lexeme

CLOSERS = " \t\r\n,;}]"  #: Characters that may be left over after a call.


class CallBlockParser:
    """Text, and blocks of calls.

    A block begins with a marker and contains calls: JSON objects, or an array of them. It ends with
    another marker or with text that is not a call; without an end marker, it ends with the array or
    the object. A block without a call is text, but repeated markers are not.

    Args:
        begin: Markers that begin a block.
        end: Markers that end it.
        reader: Makes a reader of the calls in a block.
    """

    def __init__(
        self,
        begin: Collection[str],
        end: Collection[str],
        reader: Callable[[], CallsReader],
    ) -> None:
        self._begin = begin
        self._end = end
        self._reader = reader
        self._calls: CallsReader | None = None  # of the open block
        self._marker = ""  # its begin marker
        self._follows_call = False
        self._awaits_end = False  # text came before the end of a block with calls

    @property
    def in_string(self) -> bool:
        """True if the text so far ends within a string of a call, where a marker is text."""
        return self._calls is not None and self._calls.in_string

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        text, is_marker = lexeme
        calls = self._calls
        if is_marker and not self.in_string:
            if text in self._begin:
                self._begin_block(text, out)
                return out
            if text in self._end and (calls is not None or self._follows_call or self._awaits_end):
                self._close(out, text)
                self._awaits_end = False
                return out
        at = 0
        if calls is not None:
            at = self._read(calls, text, out)
        if at < len(text):
            out.append(ContentText(text[at:]))
            # Another marker may end the calls after whitespace.
            self._follows_call = self._follows_call and not text[at:].strip()
        return out

    def _begin_block(self, marker: str, out: list[Event]) -> None:
        calls, before = self._calls, ""
        self._awaits_end = False
        if calls is not None and not calls.num_calls:
            read = calls.unread()
            if read.strip():
                out.append(ContentText(self._marker + read))
            else:  # a repeated marker
                before = self._marker + read
        else:
            self._close(out)
        self._calls, self._marker = self._reader(), before + marker

    def _read(self, calls: CallsReader, text: str, out: list[Event]) -> int:
        """Reads a text within a block; returns the end of the block."""
        at = calls.feed(text, 0, out)
        if at == len(text) and not calls.has_failed:
            return at
        if calls.num_calls and not calls.has_failed:
            while at < len(text) and text[at] in CLOSERS:
                at += 1
            if at == len(text):
                return at
        self._close(out, rest=text[at:])
        self._awaits_end = self._follows_call and bool(self._end)
        return at

    def passes(self, text: str) -> bool:
        return self._calls is None and not self._follows_call

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        self._close(out)
        return out

    def _close(self, out: list[Event], marker: str = "", *, rest: str = "") -> None:
        """Ends the open block. Without a call it is text, and so is the marker that ends it.

        Args:
            rest: The text that follows, if no marker ends the block.
        """
        calls = self._calls
        if calls is None:
            return
        calls.finish(out)
        unread = calls.unread()
        # A marker without anything after it is redundant.
        is_stray = self._follows_call and not (unread + rest).strip()
        if not calls.num_calls and not is_stray:
            unread = self._marker + unread + marker
        if unread.strip():
            out.append(ContentText(unread))
        self._calls = None
        self._follows_call = calls.num_calls > 0 or is_stray


class JsonBlockFormat(ToolFormat):
    """Blocks of JSON objects.

    Attributes:
        begin, end: Markers of a block, with the whitespace of chat templates.
        between: Text of chat templates between two blocks.
        is_array: True if a block contains an array of calls; otherwise it contains one call.
        arguments_key: Key of the arguments.
        frames: Markers around text.
    """

    begin: str
    end: str = ""
    between: ClassVar[str] = "\n"
    is_array: ClassVar[bool] = False
    arguments_key: str = "arguments"
    frames: ClassVar[tuple[str, ...]] = ()

    def parser(self, tools: Sequence[Tool]) -> Parser:
        ends = [marker for marker in self.markers if marker not in self.begins_call]
        known = {tool.name for tool in tools}
        return CallBlockParser(self.begins_call, ends, lambda: JsonCalls(known, one=not ends))

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        marker = next(marker for marker in self.begins_call if self.begin.startswith(marker))
        lark = Lark(self.vocabulary)
        body = json_call(lark, tools, self.arguments_key)
        if self.is_array:
            body = json_array(body, parallel=parallel)
        before = self.begin.removeprefix(marker)
        parts = [before and self.literal(before), body, self.end and self.literal(self.end)]
        return lark.answer(
            marker,
            lark.rule(" ".join(filter(None, parts))),
            required=required,
            parallel=parallel and not self.is_array,
            between=self.between,
            others=self.begins_call,
            frames=self.frames,
        )


def json_call(lark: Lark, tools: Sequence[Tool], arguments_key: str = "arguments") -> str:
    """A rule of Lark: a call object of any of the tools."""
    alternatives = []
    for tool in tools:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments_key}": '
        arguments = lark.rule(lark_arguments(tool))
        alternatives.append(f'{json.dumps(head)} {arguments} "}}"')
    return lark.rule("\n  | ".join(alternatives))


def json_array(call: str, *, parallel: bool) -> str:
    """Returns an array of calls in Lark, with one element unless `parallel`."""
    return f'"[" {call} (", " {call}){MORE_CALLS} "]"' if parallel else f'"[" {call} "]"'
