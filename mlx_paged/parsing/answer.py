"""AnswerReader: turns the tokens of an answer into events, and collects the items of the answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from mlx_paged.parsing import events
from mlx_paged.parsing.call_ids import new_call_id
from mlx_paged.parsing.custom import InputReader
from mlx_paged.parsing.definitions import Tool
from mlx_paged.parsing.format import Parser, PlainTextParser, ToolFormat
from mlx_paged.parsing.lexer import Lexeme, Lexer, Unseen
from mlx_paged.parsing.reasoning import ReasoningFormat
from mlx_paged.parsing.reasoning_reader import ContentTrimmer, ReasoningParser
from mlx_paged.parsing.surrogates import without_lone_surrogates

NewId = Callable[[str, int], str]
_TextKind: TypeAlias = type[events.ReasoningText | events.ContentText]


class ToolCall:
    """A call in an answer.

    Attributes:
        id: The model's id, or a new one; it never changes.
        name: Name of the tool, as the model wrote it.
        tool: The request's tool of that name.
        is_complete: False while it is being written, and if the answer ended within it.
        is_custom: True if its arguments are the input of a custom tool.
    """

    def __init__(self, id: str, name: str, tool: Tool | None = None, arguments: str = "") -> None:
        self.id = id
        self.name = name
        self.tool = tool
        self.is_complete = False
        self._arguments = _Text(arguments)

    @property
    def arguments(self) -> str:
        """JSON text; of a custom tool, its input."""
        return self._arguments.text

    @property
    def is_custom(self) -> bool:
        return self.tool is not None and self.tool.is_custom

    def add_arguments(self, piece: str) -> None:
        """Takes more of the arguments."""
        self._arguments.add(piece)


class _Text:
    """A text that grows; joined when it is read, as adding to a string copies it each time."""

    def __init__(self, text: str = "") -> None:
        self._pieces = [text]

    def add(self, piece: str) -> None:
        self._pieces.append(piece)

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]


class Answer:
    """The contents of an answer so far."""

    def __init__(self) -> None:
        self._items: list[tuple[_TextKind, _Text] | ToolCall] = []
        self._content = _Text()
        self._ends_in_space = True  # the content

    @property
    def items(self) -> list[events.ReasoningText | events.ContentText | ToolCall]:
        """Reasoning, texts and calls, in the order in which they were written."""
        return [i if isinstance(i, ToolCall) else i[0](i[1].text) for i in self._items]

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(i.text for i in self.items if isinstance(i, events.ReasoningText))

    @property
    def content(self) -> str:
        """All text that is not reasoning; a newline is between texts that something separates."""
        return self._content.text

    @property
    def calls(self) -> list[ToolCall]:
        """The calls."""
        return [i for i in self._items if isinstance(i, ToolCall)]

    def extend_content(self, text: str) -> bool:
        """Appends to the last item if it is text; returns False if it is not."""
        last = self._items[-1] if self._items else None
        if not isinstance(last, tuple) or last[0] is not events.ContentText:
            return False
        last[1].add(text)
        self._content.add(text)
        self._ends_in_space = text[-1].isspace()
        return True

    def separator(self, text: str) -> str:
        """Returns the separator between the content so far and the next text."""
        last = self._items[-1] if self._items else None
        is_separate = not isinstance(last, tuple) or last[0] is not events.ContentText
        return "\n" if is_separate and not (self._ends_in_space or text[:1].isspace()) else ""

    def add(self, event: events.Event, tools: Sequence[Tool]) -> None:
        """Takes the next event."""
        last = self._items[-1] if self._items else None
        if isinstance(event, events.ContentText) and event.text:
            self._content.add(event.separator + event.text)
            self._ends_in_space = event.text[-1].isspace()
        if isinstance(event, (events.ReasoningText, events.ContentText)):
            if isinstance(last, tuple) and last[0] is type(event):
                last[1].add(event.text)
            else:
                self._items.append((type(event), _Text(event.text)))
        elif isinstance(event, events.CallBegin):
            tool = next((t for t in tools if t.name == event.name), None)
            assert event.id is not None
            self._items.append(ToolCall(event.id, event.name, tool))
        elif isinstance(event, events.CallArguments):
            assert isinstance(last, ToolCall)
            last.add_arguments(event.text)
        else:
            assert isinstance(last, ToolCall)
            last.is_complete = event.is_complete


class AnswerReader:
    """Reads one answer as it is generated.

    Args:
        lexer: Splits it into lexemes.
        parser: Interprets them.
        tools: Tools of the request.
        ends: Texts of the model's end tokens, which are never text of the answer.
        new_id: Makes the id of a call without one, from its name and its index.
        is_calls: True if a grammar allows only calls and reasoning.

    Attributes:
        answer: The answer so far.
        num_reasoning_tokens: Tokens of its reasoning, including the end marker.
    """

    def __init__(
        self,
        lexer: Lexer,
        parser: Parser,
        tools: Sequence[Tool],
        ends: Collection[str] = (),
        new_id: NewId | None = None,
        *,
        is_calls: bool = False,
    ) -> None:
        self._is_calls = is_calls
        self._num_undecided = 0  # tokens that may belong to the reasoning
        self._lexer = lexer
        self._ends = frozenset(ends)
        self._new_id = new_id or new_call_id
        self._num_calls = 0
        self._end = ""  # the end token, if it was the last lexeme
        self._parser = parser
        self._tools = tools
        self._trimmer = ContentTrimmer() if tools else None
        self._custom = {tool.name for tool in tools if tool.is_custom}
        self._input: InputReader | None = None  # of the call that is open
        self.answer = Answer()
        self.num_reasoning_tokens = 0

    def feed(self, token: int | None, text: str) -> Sequence[events.Event]:
        """Reads an update of the sequence; returns the events that became certain.

        Every call gets an id. The arguments of a custom tool become its input.
        """
        if (
            self._lexer.passes(token, text)
            and self._parser.passes(text)
            and (self._trimmer is None or self._trimmer.passes(text))
            and self.answer.extend_content(text)
        ):
            return (events.ContentText(text),)
        found: list[events.Event] = []
        self._num_undecided += token is not None
        is_reasoning: bool | None = None
        for lexeme in self._lexer.feed(token, text):
            for event in self._parsed(lexeme):
                found += self._take(event)
            in_reasoning = getattr(self._parser, "in_reasoning", False)
            if in_reasoning is not None:
                is_reasoning = is_reasoning or in_reasoning
        self._count(is_reasoning)
        return found

    def finish(self, *, is_cut: bool = False) -> Iterator[events.Event]:
        """Ends the answer.

        Args:
            is_cut: True if something other than the model ended it, such as ``max_tokens``.
        """
        # Without tools, no text is the beginning of a call.
        for event in self._rest(is_cut=is_cut and bool(self._tools)):
            if isinstance(event, events.ContentText) and self._is_calls and is_cut:
                continue  # the beginning of a call, which is no use without the rest
            if isinstance(event, events.CallEnd) and event.lacks_end and is_cut:
                event = events.CallEnd(is_complete=False)
            yield from self._take(event)
        self._count(bool(getattr(self._parser, "in_reasoning", False)))
        if self._trimmer is not None:
            for event in self._trimmer.finish():
                if not (self._is_calls and is_cut):
                    yield self._added(event)

    def _rest(self, *, is_cut: bool) -> Iterator[events.Event]:
        for lexeme in self._lexer.finish(is_cut=is_cut):
            yield from self._parsed(lexeme)
        for event in self._without_end(self._parser.finish()):
            if is_cut and isinstance(event, events.ContentText):
                event = events.ContentText(self._lexer.without_call(event.text))
                if not event.text:
                    continue
            yield event

    def _count(self, is_reasoning: bool | None) -> None:
        """Counts tokens that were undecided, once their meaning is known."""
        if is_reasoning is not None:
            self.num_reasoning_tokens += self._num_undecided if is_reasoning else 0
            self._num_undecided = 0

    def _parsed(self, lexeme: Lexeme) -> Iterator[events.Event]:
        """Returns the events of a lexeme.

        A parser returns a marker without meaning as text, but an end token never is text.
        """
        is_end = isinstance(lexeme, Unseen) or (lexeme.is_marker and lexeme.text in self._ends)
        self._end = lexeme.text if is_end else ""
        return self._without_end(self._parser.feed(lexeme))

    def _without_end(self, found: Iterable[events.Event]) -> Iterator[events.Event]:
        for event in found:
            if self._end and isinstance(event, (events.ContentText, events.ReasoningText)):
                if rest := event.text.removesuffix(self._end):
                    yield type(event)(rest)
            else:
                yield event

    def _take(self, event: events.Event) -> Iterator[events.Event]:
        if isinstance(event, events.CallBegin):
            id = event.id if event.id is not None else self._new_id(event.name, self._num_calls)
            event = events.CallBegin(event.name, without_lone_surrogates(id))
            self._num_calls += 1
            self._input = InputReader() if event.name in self._custom else None
        for read in (event,) if self._input is None else self._with_input(event):
            for certain in (read,) if self._trimmer is None else self._trimmer.take(read):
                yield self._added(certain)

    def _with_input(self, event: events.Event) -> Iterator[events.Event]:
        """Yields an event of a custom tool's call, with its input in place of its arguments."""
        assert self._input is not None
        if isinstance(event, events.CallArguments):
            if text := self._input.feed(event.text):
                yield events.CallArguments(text)
            return
        if isinstance(event, events.CallEnd):
            if text := self._input.finish():
                yield events.CallArguments(text)
            self._input = None
        yield event

    def _added(self, event: events.Event) -> events.Event:
        if isinstance(event, events.ContentText):
            event = events.ContentText(event.text, self.answer.separator(event.text))
        elif isinstance(event, events.CallArguments):
            # Strings in them may have been unescaped.
            event = events.CallArguments(without_lone_surrogates(event.text))
        self.answer.add(event, self._tools)
        return event


def answer_reader(
    tool_format: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    tools: Sequence[Tool],
    prompt: Sequence[int],
    added_tokens: Mapping[str, int],
    skipped: Mapping[int, str],
    decode: Callable[[Sequence[int]], str] | None = None,
    ends: Collection[str] = (),
    new_id: NewId | None = None,
    *,
    is_calls: bool = False,
) -> AnswerReader:
    """Returns a reader for an answer to a prompt.

    Args:
        tool_format, reasoning: Formats of the model; None treats these parts as text.
        tools: Tools that the model may call.
        added_tokens, skipped, decode: See `Lexer`.
        ends, new_id, is_calls: See `AnswerReader`.
    """
    markers: list[str] = []
    if tool_format is not None and tool_format.reads(tools):
        markers += tool_format.markers
    if reasoning is not None and not (tool_format and tool_format.reads_everything):
        markers += [reasoning.start, reasoning.end]
    parser = answer_parser(
        tool_format,
        reasoning,
        tools,
        begins_inside=reasoning is not None and reasoning.begins_inside(prompt),
    )
    lexer = Lexer(dict.fromkeys(markers), added_tokens, skipped, decode=decode)
    return AnswerReader(lexer, parser, tools, ends, new_id, is_calls=is_calls)


def answer_parser(
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
    tools: Sequence[Tool],
    *,
    begins_inside: bool,
) -> Parser:
    """Returns the parser of an answer: of its reasoning, text and calls."""
    if tool_format is not None and tool_format.reads_everything:
        return tool_format.parser(tools)

    takes_calls = tool_format is not None and tool_format.reads(tools)

    def inner() -> Parser:
        return (
            tool_format.parser(tools)
            if tool_format is not None and takes_calls
            else PlainTextParser()
        )

    if reasoning_format is None:
        return inner()
    begins_call: list[str] = []
    if tool_format is not None and takes_calls:
        # A marker that is a plain word may occur in the reasoning.
        begins_call = [marker for marker in tool_format.begins_call if not marker.isalnum()]
    return ReasoningParser(
        reasoning_format,
        inner,
        begins_inside=begins_inside,
        begins_call=begins_call,
        begins_text=tool_format.begins_text if tool_format is not None and takes_calls else (),
    )
