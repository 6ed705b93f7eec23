"""ChatSession: handles the messages and commands that a user enters."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mlx_paged.cli.chat.attachments import (
    NOUNS,
    Content,
    kind_of,
    named,
    part_of,
    paths_of,
    size_of,
    text_of,
    with_files,
)
from mlx_paged.cli.chat.conversation import PARAMS, Backend, Call, Conversation, Message, Turn
from mlx_paged.content import Kind
from mlx_paged.errors import MlxPagedError
from mlx_paged.formatting import format_size

if TYPE_CHECKING:
    from mlx_paged.cli.chat.tools import ChatTools

#: Default of `ChatSession.max_tool_rounds`.
MAX_TOOL_ROUNDS = 10

_ASSIGNMENT = re.compile(r"(\w+)(?:\s*=\s*|\s+)(\S.*)", re.DOTALL)


class View(Protocol):
    """The display of a chat."""

    def answer(self, pieces: Iterator[str]) -> None:
        """Shows an answer as it arrives."""
        ...

    def note(self, what: RenderableType) -> None:
        """Shows the output of a command."""
        ...

    def error(self, message: str) -> None:
        """Shows an error as one line; the chat continues."""
        ...


class ChatSession:
    """One conversation with one backend.

    Args:
        tools: Tools that the model may call, or None.
        max_tool_rounds: Maximum answers with tool calls per user message.

    Attributes:
        attached: Files of the next message, as parts.
        turns: Metrics of each answer since the program started.
        failed: True if anything has failed so far.
    """

    def __init__(
        self,
        backend: Backend,
        view: View,
        conversation: Conversation,
        tools: ChatTools | None = None,
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
    ) -> None:
        self.tools = tools
        self.max_tool_rounds = max_tool_rounds
        self.backend = backend
        self.view = view
        self.conversation = conversation
        self.attached: list[Message] = []
        self.turns: list[Turn] = []
        self.failed = False
        self._no_answer = False

    def ask(self, text: str) -> None:
        """Sends a user message with the attached files."""
        content = with_files(self.attached, text)
        self.attached = []
        self.say(content)

    def say(self, text: Content) -> None:
        """Sends a user message, shows the answer, and runs its tool calls.

        The text of a stopped answer is kept. A message without an answer is not added to the
        conversation; ``/retry`` sends it again.
        """
        conversation = self.conversation
        conversation.unanswered = text
        calls: list[Message] = []  # and their results
        for num_left in range(self.max_tool_rounds, -1, -1):
            pieces: list[str] = []
            stopped = self._show_answer(pieces, [*conversation.asking(text), *calls])
            has_answer = bool(pieces) or not (stopped or self._no_answer)
            turn, content = self.backend.turn, "".join(pieces)
            if has_answer:
                self.turns.append(turn)
            if self.tools is None or stopped or self._no_answer or not turn.calls:
                break
            if not num_left:
                self.fail(f"not called: the maximum is {self.max_tool_rounds} rounds of calls")
                break
            has_answer = False
            calls.append(_calling(content, turn))
            try:
                calls += [self._result(self.tools, call) for call in turn.calls]
            except KeyboardInterrupt:
                stopped = True
                break
        if has_answer:
            conversation.add(text, content, calls)
        if stopped:
            self.view.note("(stopped)")

    def _show_answer(self, pieces: list[str], messages: list[Message]) -> bool:
        """Requests and shows an answer, and collects it; returns True if the user stopped it."""
        answer = self._collect(pieces, messages)
        try:
            self.view.answer(answer)
        except KeyboardInterrupt:
            return True
        except MlxPagedError as error:
            self.fail(named(str(error), messages))
        finally:
            answer.close()
        return False

    def _result(self, tools: ChatTools, call: Call) -> Message:
        result = tools.call(call, self.view.note)
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    def fail(self, message: str) -> None:
        """Shows an error; the chat continues."""
        self.failed = self._no_answer = True
        self.view.error(message)

    def _collect(self, pieces: list[str], messages: list[Message]) -> Generator[str, None, None]:
        self._no_answer = False
        answer = self.backend.answer(messages, self.conversation.params)
        try:
            for piece in answer:
                pieces.append(piece)
                yield piece
        finally:
            answer.close()


def _calling(content: str, turn: Turn) -> Message:
    """Returns an answer with tool calls as a message of the history."""
    message: Message = {"role": "assistant", "content": content}
    if turn.reasoning:
        message["reasoning"] = turn.reasoning
    message["tool_calls"] = [call.message() for call in turn.calls]
    return message


# --- User input -----------------------------------------------------------------------------------


class EndOfChat(Exception):
    """The user wants to leave."""


class Command(NamedTuple):
    """A command.

    Attributes:
        arguments: Syntax of the arguments, for the help; empty if there are none.
    """

    run: Callable[[ChatSession, str], None]
    arguments: str
    help: str


def handle(session: ChatSession, entered: str) -> None:
    """Handles a line: a command or a message. "//" starts a message that begins with a slash.

    Raises:
        EndOfChat: The user wants to leave.
    """
    text = entered.strip()
    if text.startswith("/") and not text.startswith("//"):
        _run(session, text)
    elif text:
        session.ask(text.removeprefix("/") if text.startswith("//") else entered)


def _run(session: ChatSession, text: str) -> None:
    parts = text[1:].split(maxsplit=1)
    name, rest = (parts[0] if parts else ""), (parts[1] if len(parts) > 1 else "")
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them"
        session.fail(f"there is no command /{name}: {hint} (a message may begin with //)")
        return
    if rest and not command.arguments:
        session.fail(f"/{name} takes nothing, but got {rest!r}")
        return
    try:
        command.run(session, rest)
    except MlxPagedError as error:
        session.fail(str(error))


def _system(session: ChatSession, rest: str) -> None:
    if rest:
        session.conversation.system = None if rest == "-" else rest
    session.view.note(f"system message: {session.conversation.system or '(none)'}")


def _params(session: ChatSession, rest: str) -> None:
    conversation = session.conversation
    if rest:
        assignment = _ASSIGNMENT.fullmatch(rest)
        if assignment is None:
            raise MlxPagedError(f"write /params NAME VALUE, not /params {rest}")
        name, value = assignment.groups()
        conversation.set_param(name, None if value == "-" else _value(value))
    table = Table(show_header=False, box=None)
    for name, value in {**session.backend.defaults, **conversation.params}.items():
        shown = "as the context allows" if value is None else json.dumps(value, default=list)
        table.add_row(name, shown, "" if name in conversation.params else "(default)")
    if table.row_count:
        session.view.note(table)
    else:
        session.view.note("none set: the server's defaults hold")


def _value(text: str) -> object:
    """Returns a JSON value, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _save(session: ChatSession, rest: str) -> None:
    path = Path(rest or time.strftime("chat-%Y%m%d-%H%M%S.json")).expanduser()
    session.conversation.save(path, session.backend.model)
    session.view.note(f"saved {_turns(session.conversation)} to {path}")


def _load(session: ChatSession, rest: str) -> None:
    if not rest:
        raise MlxPagedError("write /load FILE")
    session.conversation = Conversation.load(Path(rest).expanduser())
    session.view.note(f"loaded {_turns(session.conversation)} from {rest}")


def _turns(conversation: Conversation) -> str:
    count = conversation.num_turns
    return f"{count} turn" if count == 1 else f"{count} turns"


def _attaching(kind: Kind) -> Callable[[ChatSession, str], None]:
    """Returns a command that attaches files of a kind."""

    def attach(session: ChatSession, rest: str) -> None:
        if not rest:
            raise MlxPagedError(f"write /{kind} PATH")
        if wrong := session.backend.refusal(kind):
            raise MlxPagedError(wrong)
        for path in paths_of(rest):
            session.attached.append(part_of(path, kind))
        names = ", ".join(part["name"] for part in session.attached)
        session.view.note(Text(f"with your next message: {names}"))

    return attach


def _media(session: ChatSession, rest: str) -> None:
    attached = session.attached
    number = rest.removeprefix("-").strip()
    if rest.startswith("-") and not number:
        attached.clear()
    elif rest.startswith("-") and number.isdecimal() and 0 < int(number) <= len(attached):
        del attached[int(number) - 1]
    elif rest:
        raise MlxPagedError(f"write /media, /media - or /media -NUMBER, not /media {rest}")
    if not attached:
        session.view.note("no files are attached to your next message")
        return
    table = Table(show_header=False, box=None)
    for i, part in enumerate(attached, 1):
        noun = NOUNS[kind_of(part)][0]
        table.add_row(str(i), noun, Text(part["name"]), format_size(size_of(part)))
    session.view.note(table)


def _stats(session: ChatSession, _: str) -> None:
    table = Table()
    for name in ("turn", "prompt", "cached", "TTFT s", "tokens", "tokens/s", "ended by"):
        table.add_column(name, justify="right")
    for number, turn in enumerate(session.turns, 1):
        numbers = (turn.prompt_tokens, turn.cached_tokens)
        table.add_row(
            str(number),
            *("?" if n is None else str(n) for n in numbers),
            "" if turn.ttft is None else f"{turn.ttft:.3f}",
            "?" if turn.completion_tokens is None else str(turn.completion_tokens),
            "" if turn.tokens_per_second is None else f"{turn.tokens_per_second:.1f}",
            turn.finish_reason or "",
        )
    session.view.note(table)
    facts = Table(show_header=False, box=None)
    for name, value in [("model", session.backend.model), *session.backend.facts()]:
        facts.add_row(name, value)
    session.view.note(facts)


def _tools(session: ChatSession, _: str) -> None:
    if session.tools is None:
        raise MlxPagedError("there are no tools: give --mcp when the chat is started")
    table = Table()
    for name in ("tool", "server", "what it does", "asks"):
        table.add_column(name)
    for tool in session.tools.listed:
        about = (tool.description or tool.title or "").strip().split("\n")[0]
        asks = "no" if session.tools.is_allowed(tool.name) else "yes"
        row = (tool.name, tool.server, about, asks)
        table.add_row(*(Text("".join(c for c in text if c.isprintable())) for text in row))
    session.view.note(table)
    for error in session.tools.errors:
        session.view.note(error)


def _retry(session: ChatSession, _: str) -> None:
    content = session.conversation.unanswered or session.conversation.undo()
    if content is None:
        raise MlxPagedError("there is nothing to try again")
    session.say(content)


def _undo(session: ChatSession, _: str) -> None:
    content = session.conversation.undo()
    if content is None:
        raise MlxPagedError("there is nothing to take back")
    text = text_of(content)
    session.view.note(f"taken back: {text if len(text) <= 60 else text[:60] + '...'}")


def _clear(session: ChatSession, _: str) -> None:
    session.conversation.messages.clear()
    session.conversation.unanswered = None
    session.attached.clear()
    session.view.note("the conversation is empty; system message and parameters are kept")


def _help(session: ChatSession, _: str) -> None:
    table = Table(show_header=False, box=None)
    for name, command in COMMANDS.items():
        table.add_row(f"/{name} {command.arguments}", command.help)
    session.view.note(table)
    session.view.note(f"parameters: {', '.join(PARAMS)}")


def _exit(_: ChatSession, __: str) -> None:
    raise EndOfChat


COMMANDS: dict[str, Command] = {
    "system": Command(_system, "[TEXT | -]", "Show the system message, set it, or remove it."),
    "params": Command(_params, "[NAME VALUE | -]", "Show sampling parameters, set or reset one."),
    "image": Command(_attaching("image"), "PATH", "Attach a picture, or several, to the message."),
    "video": Command(_attaching("video"), "PATH", "Attach a video."),
    "audio": Command(_attaching("audio"), "PATH", "Attach a sound."),
    "media": Command(_media, "[- | -NUMBER]", "Show what is attached, drop all of it, or one."),
    "stats": Command(_stats, "", "Time and tokens of each answer, cached tokens too."),
    "tools": Command(
        _tools, "", "The tools of MCP servers, and which of them ask before they run."
    ),
    "retry": Command(_retry, "", "Answer the last message again."),
    "undo": Command(_undo, "", "Take back the last turn."),
    "clear": Command(_clear, "", "Begin a new conversation."),
    "save": Command(_save, "[FILE]", "Write the conversation to a file."),
    "load": Command(_load, "FILE", "Continue a saved conversation."),
    "help": Command(_help, "", "This list."),
    "exit": Command(_exit, "", "End; so does Ctrl-D."),
}


# --- Without a terminal ---------------------------------------------------------------------------


def converse_lines(session: ChatSession, lines: Iterable[str]) -> None:
    """Handles lines until the end, or until ``/exit``."""
    try:
        for entered in _joined(lines):
            handle(session, entered)
    except EndOfChat:
        return


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines, joining those that end with a backslash to the next one."""
    begun: list[str] = []
    for line in lines:
        line = line.rstrip("\r\n")
        if line.endswith("\\"):
            begun.append(line[:-1])
        else:
            yield "\n".join([*begun, line])
            begun.clear()
    if begun:
        yield "\n".join(begun)
