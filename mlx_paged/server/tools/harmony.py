"""gpt-oss (harmony): messages in channels. Reasoning, text and calls are told apart by them.

<|channel|>analysis<|message|>The user wants the weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
{"city": "Oslo"}<|call|>  (without the newlines)

The recipient may also follow the role, as in the calls that chat templates render:
<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from mlx_paged.server.tools.definitions import Tool
from mlx_paged.server.tools.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Event,
    ReasoningText,
)
from mlx_paged.server.tools.format import Parser, ToolFormat, lark_arguments
from mlx_paged.server.tools.json_calls import JsonValue
from mlx_paged.server.tools.lark import Lark
from mlx_paged.server.tools.lexer import Lexeme

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
CALL, RETURN = "<|call|>", "<|return|>"

_ENDS = (END, CALL, RETURN)
_LONGEST_HEADER = 512  # characters; what is longer is no header
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyFormat(ToolFormat):
    """A state machine over the channels' tokens."""

    names = ("openai", "gpt_oss")
    models = "gpt-oss"
    markers = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
    begins_call = (f"{CHANNEL}commentary to=",)
    reads_everything = True

    @classmethod
    def matches(cls, chat_template: str, vocabulary: Mapping[str, int]) -> bool:
        return {START, MESSAGE, CHANNEL, CALL} <= vocabulary.keys() or (
            f"{CHANNEL}commentary" in chat_template
        )

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return HarmonyParser(tools)

    def forced(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. It begins at the answer's first token: the reasoning is a part of it.

        A call ends the turn, so there is never more than one. Its end is not in the grammar: the
        token may be one that ends answers.
        """
        lark = Lark(self.vocabulary)
        # (Only where the markers are no tokens can text spell them.)
        others = [marker for marker in self.markers if marker != END]
        again = lark.literal(f"{START}assistant")

        def message(channel: str) -> str:
            opening = lark.literal(f"{CHANNEL}{channel}{MESSAGE}")
            return lark.rule(f"{opening} {lark.until(END, others=others)} {again}")

        calls = []
        for tool in tools:
            arguments = lark.rule(lark_arguments(tool))
            to = f"to=functions.{tool.name}"
            headers = [
                f"{CHANNEL}commentary {to} {CONSTRAIN}json{MESSAGE}",
                f" {to}{CHANNEL}commentary json{MESSAGE}",
            ]
            calls += [f"{lark.literal(header)} {arguments}" for header in headers]
        call = lark.rule(" | ".join(calls))
        thoughts = message("analysis")
        if required:
            lark.rule(f"{thoughts}* {call}", "start")
        else:
            text = lark.terminal(lark.without(self.markers))
            final = f"{lark.literal(f'{CHANNEL}final{MESSAGE}')} {text}"
            lark.rule(f"({thoughts} | {message('commentary')})* ({call} | {final})", "start")
        return lark.text()


class HarmonyParser:
    """Reads an answer that begins behind ``<|start|>assistant``, within a message's header."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._known = {tool.name for tool in tools}
        self._state: Callable[[Lexeme, list[Event]], None] = self._in_header
        self._header: list[str] = []
        self._num_header = 0
        self._make: Callable[[str], Event] = ContentText  # of a message that is no call
        self._name = ""
        self._value: JsonValue | None = None  # of a call that has begun
        self._space: list[str] = []  # before a call's arguments

    def feed(self, lexeme: Lexeme) -> Iterable[Event]:
        out: list[Event] = []
        self._state(lexeme, out)
        return out

    def passes(self, text: str) -> bool:
        return self._state == self._in_text and self._make is ContentText

    def finish(self) -> Iterable[Event]:
        out: list[Event] = []
        if self._state == self._in_header:
            header = "".join(self._header)
            # (A header that is cut says nothing to anyone.)
            if CHANNEL not in header and not header.startswith(START) and header.strip():
                out.append(ContentText(header))
        elif self._state == self._in_call:
            self._end_call(out, is_cut=True)
        self._state = self._between
        return out

    # States.

    def _in_header(self, lexeme: Lexeme, out: list[Event]) -> None:
        text, is_marker = lexeme
        if is_marker and text == MESSAGE:
            self._begin_message("".join(self._header))
            return
        if is_marker and text in _ENDS:
            self._no_header(out)
            return
        if is_marker and text == START:
            self._header = []
            self._num_header = 0
        self._header.append(text)
        self._num_header += len(text)
        if self._num_header > _LONGEST_HEADER:
            self._no_header(out)
            self._state = self._in_text
            self._make = ContentText

    def _no_header(self, out: list[Event]) -> None:
        """What was read begins no message: it is text."""
        header, self._header, self._num_header = "".join(self._header), [], 0
        if header.strip() and not header.startswith(START):
            out.append(ContentText(header))
        self._state = self._between

    def _begin_message(self, header: str) -> None:
        self._header, self._num_header = [], 0
        role = header.removeprefix(START).split(CHANNEL)[0]
        channel = found[1] if (found := _CHANNEL.search(header)) else "final"
        recipient = found[1] if (found := _RECIPIENT.search(header.replace(CHANNEL, " "))) else ""
        self._make = ReasoningText if channel == "analysis" else ContentText
        self._state = self._in_text
        is_function = recipient.startswith("functions.") or recipient in self._known
        is_ours = "functions." not in role.split("to=")[0]  # (and no answer of a tool)
        if is_ours and (is_function or (recipient and channel == "commentary")):
            self._name = recipient.removeprefix("functions.")
            self._value, self._space = None, []
            self._state = self._in_call

    def _leaves(self, lexeme: Lexeme) -> bool:
        """Whether a marker ends the open message."""
        return lexeme.is_marker and lexeme.text in (*_ENDS, START, CHANNEL)

    def _leave(self, lexeme: Lexeme) -> None:
        self._state = self._between
        if lexeme.text in (START, CHANNEL):  # the end of the message is missing
            self._header, self._num_header = [lexeme.text], 0
            self._state = self._in_header

    def _in_text(self, lexeme: Lexeme, out: list[Event]) -> None:
        if self._leaves(lexeme):
            self._leave(lexeme)
        else:
            out.append(self._make(lexeme.text))

    def _in_call(self, lexeme: Lexeme, out: list[Event]) -> None:
        in_string = self._value is not None and self._value.in_string
        if self._leaves(lexeme) and not in_string:
            self._end_call(out, is_cut=False)
            self._leave(lexeme)
            return
        if self._value is None:
            if not lexeme.text.strip():
                self._space.append(lexeme.text)
                return
            text = "".join(self._space) + lexeme.text
            if not text.lstrip().startswith("{"):  # it calls nothing that we know
                self._state = self._in_text
                out.append(self._make(text))
                return
            self._value = JsonValue()
            out.append(CallBegin(self._name))
            lexeme = Lexeme(text)
        _, piece = self._value.take(lexeme.text)
        if piece:
            out.append(CallArguments(piece))

    def _end_call(self, out: list[Event], *, is_cut: bool) -> None:
        if self._value is None:
            out.append(CallBegin(self._name))
            if not is_cut:
                out.append(CallArguments("{}"))
        out.append(CallEnd(self._value.has_ended if self._value is not None else not is_cut))

    def _between(self, lexeme: Lexeme, out: list[Event]) -> None:
        """After a message."""
        if lexeme.is_marker and lexeme.text in (START, CHANNEL):
            self._leave(lexeme)
        elif not lexeme.is_marker and lexeme.text.strip():
            out.append(ContentText(lexeme.text))
