"""Conversation, its file format for ``/save``, and Backend, the protocol of what answers it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mlx_paged.cli.chat.attachments import Content, is_content
from mlx_paged.content import Kind
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError, MlxPagedError

if TYPE_CHECKING:
    from mlx_paged.parsing.definitions import Tool

#: A message of OpenAI's API: `role`, `content`, and the fields of calls and results. `attachments`
#: describes the content of messages with files.
Message = dict[str, Any]

_FORMAT = "mlx-paged chat"
_VERSION = 3  # 1 had no calls, 2 no files
#: Parameters that ``/params`` may set: without those for several answers and log-probabilities.
PARAMS = tuple(
    f.name for f in fields(SamplingParams) if f.name not in ("n", "logprobs", "prompt_logprobs")
)


@dataclass
class Conversation:
    """A system message, turns of user and assistant, and sampling parameters.

    Attributes:
        messages: Alternating messages of the user and answers. Tool calls, followed by their
            results, may precede an answer.
        params: Fields of `SamplingParams` that were set.
        unanswered: The user's last message if it has no answer, for ``/retry``.
    """

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    unanswered: Content | None = None

    def asking(self, content: Content) -> list[Message]:
        """Returns the messages of a request with `content` as the user's next message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages, {"role": "user", "content": content}]

    def add(self, content: Content, answer: str, calls: Sequence[Message] = ()) -> None:
        """Adds a turn. `calls` are messages with the calls and results that led to the answer."""
        self.messages.append({"role": "user", "content": content})
        self.messages += calls
        self.messages.append({"role": "assistant", "content": answer})
        self.unanswered = None

    def undo(self) -> Content | None:
        """Removes the last turn; returns its user message, or None if there is no turn."""
        while self.messages:
            said = self.messages.pop()
            if said["role"] == "user":
                content: Content = said["content"]
                return content
        return None

    @property
    def num_turns(self) -> int:
        """Number of user messages."""
        return sum(message["role"] == "user" for message in self.messages)

    def set_param(self, name: str, value: Any) -> None:
        """Sets a parameter; None resets it to its default.

        Raises:
            InvalidParameterError: An unknown name or an invalid value.
        """
        if name not in PARAMS:
            raise InvalidParameterError("the parameter", f"one of {', '.join(PARAMS)}", name)
        params = {**self.params, name: value}
        if value is None:
            del params[name]
        _check(params)
        self.params = params

    def save(self, path: Path, model: str) -> None:
        """Writes a file for `load`. Refuses to overwrite a file that is not a saved chat.

        Raises:
            MlxPagedError: The file cannot be written.
        """
        if path.exists():
            try:
                Conversation.load(path)
            except MlxPagedError as error:
                raise MlxPagedError(
                    f"{path} exists and is not a saved chat; use another"
                ) from error
        saved = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": model,
            "system": self.system,
            "params": self.params,
            "messages": self.messages,
        }
        text = json.dumps(saved, indent=2, ensure_ascii=False) + "\n"
        try:
            _replace(path, text)
        except OSError as error:
            raise MlxPagedError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Reads a file written by `save`.

        Raises:
            MlxPagedError: The file cannot be read or is not a saved chat.
        """
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise MlxPagedError(f"cannot read {path}: {error.strerror}") from error
        except ValueError:
            raise MlxPagedError(f"{path} is not a saved chat: it is not JSON") from None
        if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
            raise MlxPagedError(f"{path} is not a saved chat")
        if saved.get("version") not in range(1, _VERSION + 1):
            raise MlxPagedError(
                f"{path} is a chat of version {saved.get('version')!r}; this program reads "
                f"versions 1 to {_VERSION}"
            )
        system, messages = saved.get("system"), saved.get("messages")
        params = saved.get("params")
        if not (system is None or isinstance(system, str)) or not isinstance(params, dict):
            raise MlxPagedError(f"{path} is damaged: system or params")
        if not isinstance(messages, list) or not _alternates(messages):
            raise MlxPagedError(f"{path} is damaged: user messages and answers must alternate")
        loaded = cls(system, [{k: m[k] for k in _FIELDS if k in m} for m in messages])
        for name, value in params.items():
            loaded.set_param(name, value)
        return loaded


def _replace(path: Path, text: str) -> None:
    """Writes a file completely or not at all."""
    with contextlib.ExitStack() as on_error:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as file:
            on_error.callback(os.unlink, file.name)
            file.write(text)
        os.replace(file.name, path)
        on_error.pop_all()


_FIELDS = ("role", "content", "reasoning", "tool_calls", "tool_call_id")


def _alternates(messages: list[Any]) -> bool:
    return re.fullmatch("(u(ct+)*a)*", "".join(map(_kind, messages))) is not None


def _kind(message: Any) -> str:
    """Classifies a message: u: user, a: answer, c: tool calls, t: tool result, x: invalid."""
    if not isinstance(message, dict):
        return "x"
    content = message.get("content")
    if not (isinstance(content, str) or (message.get("role") == "user" and is_content(content))):
        return "x"
    role, calls = message.get("role"), message.get("tool_calls")
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        return "t"
    if role == "assistant" and calls is not None:
        is_sound = isinstance(message.get("reasoning", ""), str) and isinstance(calls, list)
        return "c" if is_sound and calls and all(map(_is_call, calls)) else "x"
    return {"user": "u", "assistant": "a"}.get(str(role), "x")


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        return False
    return all(isinstance(function.get(name), str) for name in ("name", "arguments"))


def _check(params: dict[str, Any]) -> None:
    bias = params.get("logit_bias")
    if isinstance(bias, dict):  # JSON's keys are strings
        params["logit_bias"] = {int(k) if str(k).isdigit() else k: v for k, v in bias.items()}
    SamplingParams(**{"max_tokens": None, **params})


# --- Backends -------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A tool call of an answer. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    def message(self) -> dict[str, Any]:
        """Returns the call as in OpenAI's API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Turn:
    """Metrics of one answer, and its parts besides the text.

    Attributes:
        prompt_tokens: Tokens of the prompt; None if the server does not report them.
        cached_tokens: Prompt tokens from the prefix cache.
        completion_tokens: Tokens of the answer.
        ttft: Seconds to the first token.
        seconds: Seconds to the end of the answer.
        finish_reason: "stop", "tool_calls", "length", "stopped" (by the user), or "error".
        calls: Complete tool calls.
        reasoning: The reasoning, if it is separate from the text.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft: float | None = None
    seconds: float = 0.0
    finish_reason: str | None = None
    calls: list[Call] = field(default_factory=list)
    reasoning: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed, without the time to the first token; None if unknown."""
        if self.ttft is None or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / max(self.seconds - self.ttft, 1e-9)


class Backend(Protocol):
    """Answers conversations, one at a time.

    Attributes:
        model: Name of the model.
        turn: Metrics of the last answer; complete once its generator has ended or was closed.
        defaults: Values of parameters that are not set, as far as they are known.
        tools: Tools that the model may call.
    """

    model: str
    turn: Turn
    defaults: dict[str, Any]
    tools: tuple[Tool, ...]

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Generator[str, None, None]:
        """Yields pieces of the answer as they arrive. Closing the generator stops it.

        Args:
            messages: The conversation, which ends with a user message or a tool result. Parts with
                files have the `name` of the file.
            params: Fields of `SamplingParams`.

        Raises:
            MlxPagedError: There was no answer; a later request may succeed.
            KeyboardInterrupt: The user pressed Ctrl-C; raised between two steps.
        """
        ...

    def refusal(self, kind: Kind) -> str | None:
        """Returns why the model does not accept a kind of media; None if it may accept it."""
        ...

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, value) pairs for ``/stats``."""
        ...

    def close(self) -> None:
        """Releases the engine or the connection."""
        ...
