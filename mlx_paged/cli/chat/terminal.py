"""A chat at a terminal: line editing, history, completion; Ctrl-C stops, Ctrl-D ends."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from mlx_paged.cli.chat.conversation import PARAMS
from mlx_paged.cli.chat.session import COMMANDS, ChatSession, EndOfChat, handle

_PROMPT = "> "
_HINT = (
    "/help lists the commands. Alt-Enter or a \\ at the end: a new line. "
    "Ctrl-C stops an answer, Ctrl-D ends."
)


def history_path() -> Path:
    """Where the history is, unless an option says otherwise."""
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
    session.view.note(f"{session.backend.model}. {_HINT}")
    while True:
        try:
            handle(session, prompts.prompt(_PROMPT))
        except KeyboardInterrupt:  # at the prompt: discards the line
            continue
        except (EOFError, EndOfChat):
            return


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
    """Names of commands and parameters, and paths."""

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
