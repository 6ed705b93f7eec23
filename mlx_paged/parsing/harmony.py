"""gpt-oss (harmony): messages in channels, which distinguish reasoning, text and calls.

<|channel|>analysis<|message|>The user wants the weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
{"city": "Oslo"}<|call|>  (without the newlines)

The recipient may also follow the role, as in the calls that chat templates render:
<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from mlx_paged.parsing import events
from mlx_paged.parsing.channels import channel_answer, message_rules
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser, ToolFormat, lark_arguments
from mlx_paged.parsing.json_blocks import CLOSERS
from mlx_paged.parsing.json_calls import JsonArguments
from mlx_paged.parsing.lark import Lark
from mlx_paged.parsing.lexer import Lexeme

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
CALL, RETURN = "<|call|>", "<|return|>"

_ENDS = (END, CALL, RETURN)
_MAX_HEADER_LENGTH = 512  # characters; a longer text is not a header
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_CHANNELS = ("analysis", "commentary", "final")
# A header: role, recipient, channel and constraint, all optional.
_HEADER = re.compile(
    rf"\s*(?:{re.escape(START)}\s*(?:assistant|functions\.[^\s<]+)?)?(?:\s*to=[^\s<]+)?"
    rf"(?:\s*{re.escape(CHANNEL)}\s*(?:{'|'.join(_CHANNELS)})?(?:\s*to=[^\s<]+)?"
    rf"(?:\s*{re.escape(CONSTRAIN)}\s*\w*)?)?\s*"
)
# Constraints that templates render without their marker.
_WORDS = ("json", "code")
_JSON_FOLLOWS = re.compile(r"json\s*(?=[{\[])")

_Text: TypeAlias = type[events.ReasoningText] | type[events.ContentText]


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

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str:
        """See the base. It begins at the answer's first token and includes the reasoning.

        A call ends the turn, so there is never more than one. The grammar excludes its end, which
        may be a token that ends answers.
        """
        lark = Lark(self.vocabulary)
        message = message_rules(lark, self.markers, END, f"{START}assistant")
        calls = []
        for tool in tools:
            arguments = lark.rule(lark_arguments(tool))
            to = f"to=functions.{tool.name}"
            headers = [
                f"{CHANNEL}commentary {to} {CONSTRAIN}json{MESSAGE}",
                f" {to}{CHANNEL}commentary json{MESSAGE}",
            ]
            calls += [f"{lark.literal(header)} {arguments}" for header in headers]
        return channel_answer(
            lark,
            self.markers,
            thoughts=message(f"{CHANNEL}analysis{MESSAGE}"),
            texts="" if required else message(f"{CHANNEL}commentary{MESSAGE}"),
            last="" if required else f"{CHANNEL}final{MESSAGE}",
            calls=lark.rule(" | ".join(calls)),
        )


class HarmonyParser:
    """Reads an answer that begins after ``<|start|>assistant``, within a message's header.

    Adjacent messages of one kind are joined by a newline. If a header lacks its ``<|message|>``,
    the text begins where the header cannot continue.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._known = {tool.name for tool in tools}
        self._state: Callable[[Lexeme, list[events.Event]], None] = self._in_header
        self._header: list[str] = []
        self._make: _Text = events.ContentText  # of a message that is not a call
        self._written: set[_Text] = set()  # kinds with text so far
        self._is_new = False  # True if the open message has no text yet
        self._name = ""
        self._arguments = JsonArguments()
        self._has_begun = False  # the open call
        self._space: list[str] = []  # before a call's arguments
        self._after: list[str] = []  # the text after them
        self.in_reasoning = False

    def feed(self, lexeme: Lexeme) -> Iterable[events.Event]:
        out: list[events.Event] = []
        self.in_reasoning = self._state == self._in_text and self._make is events.ReasoningText
        self._state(lexeme, out)
        if any(isinstance(event, events.ReasoningText) for event in out):
            self.in_reasoning = True
        return out

    def passes(self, text: str) -> bool:
        is_content = self._state == self._in_text and self._make is events.ContentText
        return is_content and not self._is_new

    def finish(self) -> Iterable[events.Event]:
        out: list[events.Event] = []
        if self._state == self._in_header:
            header = "".join(self._header)
            is_cut = START in header or (CHANNEL in header and _channel(header) != "final")
            if not (is_cut and _may_be_header(header)):
                self._end_header(out)
            else:
                self._begin_message(_split(header)[0])
        if self._state == self._in_call:
            self._end_call(out, is_cut=True)
        self._state = self._between
        return out

    # States.

    def _in_header(self, lexeme: Lexeme, out: list[events.Event]) -> None:
        text, is_marker = lexeme
        if is_marker and text == MESSAGE:
            self._begin_message("".join(self._header))
            return
        if is_marker and text in _ENDS:
            self._end_header(out)
            if self._state == self._in_call:
                self._end_call(out, is_cut=False)
            self._state = self._between
            return
        if is_marker and text == START:
            self._end_header(out)
            self._state, self._header = self._in_header, [START]
            return
        self._header.append(text)
        if not is_marker and not _may_be_header("".join(self._header)):
            self._end_header(out)

    def _end_header(self, out: list[events.Event]) -> None:
        """The header lacks ``<|message|>``: the part that does not fit is the message's text."""
        header, text = _split("".join(self._header))
        self._header = []
        if header.rstrip().endswith(CHANNEL) and any(c.startswith(text) for c in _CHANNELS):
            text = ""  # a cut header
        self._begin_message(header)
        if text:
            self._state(Lexeme(_JSON_FOLLOWS.sub("", text, count=1)), out)
        elif self._state == self._in_text:
            self._state = self._between

    def _begin_message(self, header: str) -> None:
        self._header = []
        role = header.removeprefix(START).split(CHANNEL)[0]
        channel = _channel(header)
        recipient = found[1] if (found := _RECIPIENT.search(header.replace(CHANNEL, " "))) else ""
        self._make = events.ReasoningText if channel == "analysis" else events.ContentText
        self._is_new = True
        self._state = self._in_text
        name = recipient.removeprefix("functions.")
        is_ours = "functions." not in role.split("to=")[0]  # not a tool's answer
        if is_ours and name in self._known:
            self._name = name
            self._arguments, self._has_begun, self._space = JsonArguments(), False, []
            self._after = []
            self._state = self._in_call

    def _leaves(self, lexeme: Lexeme) -> bool:
        """True if a marker ends the open message."""
        return lexeme.is_marker and lexeme.text in (*_ENDS, START, CHANNEL)

    def _leave(self, lexeme: Lexeme) -> None:
        self._state = self._between
        if lexeme.text in (START, CHANNEL):  # the end of the message is missing
            self._header = [lexeme.text]
            self._state = self._in_header

    def _in_text(self, lexeme: Lexeme, out: list[events.Event]) -> None:
        if self._leaves(lexeme):
            self._leave(lexeme)
        else:
            self._write(lexeme.text, out)

    def _write(self, text: str, out: list[events.Event]) -> None:
        """Continues the open message, which begins on a new line."""
        if self._is_new and self._make in self._written:
            text = "\n" + text
        self._is_new = False
        self._written.add(self._make)
        out.append(self._make(text))

    def _in_call(self, lexeme: Lexeme, out: list[events.Event]) -> None:
        arguments = self._arguments
        if self._leaves(lexeme) and not arguments.in_string:
            self._end_call(out, is_cut=False)
            self._leave(lexeme)
            return
        if arguments.has_ended:
            self._after.append("" if lexeme.is_marker else lexeme.text)
            return
        text = "".join(self._space) + lexeme.text
        self._space = []
        if not (text.strip() or arguments.has_begun or "".join(arguments.raw).strip()):
            self._space = [text]
            return
        at, piece = arguments.take(text)
        if arguments.has_failed:  # It is not a call after all.
            self._state = self._in_text
            self._write("".join(arguments.raw) + text[at:], out)
            return
        if arguments.has_begun and not self._has_begun:
            self._begin_call(out)
        if piece:
            out.append(events.CallArguments(piece))
        self._after.append(text[at:])

    def _begin_call(self, out: list[events.Event]) -> None:
        out.append(events.CallBegin(self._name))
        self._has_begun = True

    def _end_call(self, out: list[events.Event], *, is_cut: bool) -> None:
        arguments = self._arguments
        is_empty = not "".join(arguments.raw).strip() and not self._has_begun
        if not self._has_begun:
            self._begin_call(out)
        if rest := arguments.rest():
            out.append(events.CallArguments(rest))
        elif is_empty and not is_cut:
            out.append(events.CallArguments("{}"))
        out.append(events.CallEnd(arguments.is_complete or (is_empty and not is_cut)))
        if "".join(self._after).strip(CLOSERS):
            self._make, self._is_new = events.ContentText, True
            self._write("".join(self._after).strip(), out)

    def _between(self, lexeme: Lexeme, out: list[events.Event]) -> None:
        """After a message."""
        if lexeme.is_marker and lexeme.text in (START, CHANNEL):
            self._leave(lexeme)
        elif not lexeme.is_marker and lexeme.text.strip():
            self._make, self._is_new = events.ContentText, True
            self._state = self._in_text
            self._write(lexeme.text.lstrip(), out)


def _channel(header: str) -> str:
    found = _CHANNEL.search(header)
    return found[1] if found is not None else "final"


def _split(text: str) -> tuple[str, str]:
    """Returns a header, and the text after it."""
    found = _HEADER.match(text)
    assert found is not None  # It may be empty.
    return found[0], text[found.end() :]


def _may_be_header(text: str) -> bool:
    """Returns True if a text is the beginning of a header."""
    header, rest = _split(text)
    if not rest or len(text) > _MAX_HEADER_LENGTH:
        return not rest
    if header.rstrip().endswith((CHANNEL, START)):  # a channel or a role that we do not know
        return not re.search(r"\s", rest)
    return rest.rstrip() in _WORDS or any(word.startswith(rest) for word in ("to=", *_WORDS))
