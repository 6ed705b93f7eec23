"""A chat on a terminal: line editing, history, completion, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import re
import termios
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import clear_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from mlx_paged.cli.chat.conversation import PARAMS
from mlx_paged.cli.chat.session import COMMANDS, ChatSession, EndOfChat, handle
from mlx_paged.content import KINDS

if TYPE_CHECKING:
    from mlx_paged.cli.chat.tools import Consent

_PROMPT = "> "
_HINT = (
    "/help lists the commands. Alt-Enter or a \\ at the end: a new line. "
    "Ctrl-C stops an answer, Ctrl-D ends."
)


def history_path() -> Path:
    """Returns the default path of the history."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "mlx-paged" / "chat-history"


def converse(session: ChatSession, history: Path) -> None:
    """Runs the chat until the user ends it."""
    prompts: PromptSession[str] = PromptSession(
        history=_history(session, history),
        multiline=True,
        prompt_continuation=". ",
        key_bindings=_keys(),
        completer=_Completer(),
        complete_while_typing=False,
    )
    if session.tools is not None:
        session.tools.ask = _asking(session)
    session.view.note(f"{session.backend.model}. {_HINT}")
    while True:
        try:
            handle(session, prompts.prompt(_PROMPT))
        except KeyboardInterrupt:  # at the prompt: discards the line
            continue
        except (EOFError, EndOfChat):
            return


def _asking(session: ChatSession) -> Callable[[str], Consent]:
    """Returns a function that asks the user to approve a call."""
    prompts: PromptSession[str] = PromptSession(history=InMemoryHistory())
    answers: dict[str, Consent] = {
        "y": "yes", "yes": "yes", "n": "no", "no": "no", "a": "always", "always": "always",
    }  # fmt: skip

    def ask(what: str) -> Consent:
        session.view.note(what)
        # Discards text that was typed before the question.
        clear_typeahead(prompts.input)
        termios.tcflush(prompts.input.fileno(), termios.TCIFLUSH)
        while True:
            try:
                answer = prompts.prompt("run it? [y]es, [n]o, [a]lways in this session: ")
            except EOFError:
                return "no"
            if consent := answers.get(answer.strip().lower()):
                return consent

    return ask


def _history(session: ChatSession, path: Path) -> History:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        session.view.error(f"there is no history: cannot write {path}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _Completer(Completer):
    """Completes commands, parameters and paths."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, rest = text[1:].partition(" ")
        if not space:
            for name, entry in COMMANDS.items():
                if name.startswith(command):
                    yield Completion(name, -len(command), display_meta=entry.help)
        elif command == "params":
            yield from (Completion(n, -len(rest)) for n in PARAMS if n.startswith(rest))
        elif command in ("save", "load"):
            yield from self._paths.get_completions(Document(rest), complete_event)
        elif command in KINDS:
            # A single path with spaces, one in quotation marks, or the last of several.
            for path in (rest, re.split("[\"']", rest)[-1], rest.rpartition(" ")[2]):
                found = list(self._paths.get_completions(Document(path), complete_event))
                if found:
                    yield from found
                    return
