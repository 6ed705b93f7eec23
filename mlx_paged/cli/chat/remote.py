"""RemoteBackend: answers with a server of OpenAI's API."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import httpx

from mlx_paged.cli.chat.attachments import refusal, without_names
from mlx_paged.cli.chat.conversation import Call, Message, Turn
from mlx_paged.content import Kind
from mlx_paged.errors import InvalidParameterError, MlxPagedError

if TYPE_CHECKING:
    from mlx_paged.parsing.definitions import Tool

_CONNECT_TIMEOUT = 10.0
_READ_TIMEOUT = 600.0  # a long prompt on a busy server


class RemoteBackend:
    """See `Backend`.

    Args:
        url: URL of the server, with or without ``/v1``.
        model: Name of the model on the server; None: the first one that it lists.
        api_key: Sent as ``Authorization: Bearer``.

    Raises:
        MlxPagedError: The server cannot be reached, or lists no model.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidParameterError("--server", "a URL like http://127.0.0.1:8000", url)
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(_READ_TIMEOUT, connect=_CONNECT_TIMEOUT)
        self._client = httpx.Client(headers=headers, timeout=timeout)
        self.turn = Turn()
        self.defaults: dict[str, Any] = {}
        self.tools: tuple[Tool, ...] = ()
        self._listed: list[Any] | None = None  # models of the server
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        try:
            return str(self._models()[0]["id"])
        except (LookupError, TypeError):
            raise MlxPagedError(f"{self.url} lists no model: give --model") from None

    def _models(self) -> list[Any]:
        if self._listed is None:
            with self._described_errors():
                response = self._client.get(f"{self.url}/v1/models")
                _check(response)
            try:
                self._listed = list(response.json()["data"])
            except (ValueError, LookupError, TypeError):
                self._listed = []
        return self._listed

    def refusal(self, kind: Kind) -> str | None:
        """See `Backend`. Few servers list input modalities; others refuse requests instead."""
        try:
            models = self._models()
        except MlxPagedError:
            return None
        for listed in models:
            if isinstance(listed, dict) and listed.get("id") == self.model:
                kinds = listed.get("input_modalities")
                return refusal(kind, kinds, self.model) if isinstance(kinds, list) else None
        return None

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Generator[str, None, None]:
        """See `Backend`."""
        turn = self.turn = Turn()
        body = {
            **params,
            "model": self.model,
            "messages": [without_names(message) for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.tools:
            body["tools"] = [tool.for_template() for tool in self.tools]
        calls = _Calls()
        num_pieces, start = 0, time.monotonic()
        url = f"{self.url}/v1/chat/completions"
        try:
            with self._described_errors(), self._client.stream("POST", url, json=body) as response:
                _check(response)
                for event in _events(response.iter_bytes()):
                    _take_usage(turn, event.get("usage"))
                    for choice in event.get("choices") or ():
                        turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
                        delta = choice.get("delta") or {}
                        turn.reasoning += (
                            delta.get("reasoning") or delta.get("reasoning_content") or ""
                        )
                        calls.take(delta.get("tool_calls") or ())
                        piece = delta.get("content")
                        if piece:
                            if not num_pieces:
                                turn.ttft = time.monotonic() - start
                            num_pieces += 1
                            yield piece
                turn.calls = calls.whole(turn.finish_reason)
        except (GeneratorExit, KeyboardInterrupt):
            turn.finish_reason = "stopped"
            raise
        except MlxPagedError:
            turn.finish_reason = "error"
            raise
        finally:
            turn.seconds = time.monotonic() - start
            if turn.completion_tokens is None:
                turn.completion_tokens = num_pieces  # an estimate: usually one token per piece

    def facts(self) -> list[tuple[str, str]]:
        """See `Backend`."""
        return [("server", self.url)]

    def close(self) -> None:
        """See `Backend`."""
        self._client.close()

    @contextlib.contextmanager
    def _described_errors(self) -> Iterator[None]:
        """Converts connection errors to MlxPagedError."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise MlxPagedError(
                f"cannot reach {self.url} ({error or 'timed out'}): is the server running? "
                "'mlx-paged serve' starts one"
            ) from error
        except httpx.TimeoutException as error:
            raise MlxPagedError(f"{self.url} did not answer in time") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise MlxPagedError(f"{self.url}: {error or type(error).__name__}") from error


class _Calls:
    """Assembles tool calls from deltas."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, str]] = {}

    def take(self, pieces: Iterable[Any]) -> None:
        """Adds deltas."""
        for piece in pieces:
            if not isinstance(piece, dict):
                continue
            # Some servers send whole calls, without an index.
            index = piece.get("index")
            call = self._calls.setdefault(
                index if isinstance(index, int) else len(self._calls),
                {"id": "", "name": "", "arguments": ""},
            )
            function = piece.get("function") or {}
            arguments = function.get("arguments") or ""
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            call["id"] = piece.get("id") or call["id"]
            call["name"] = function.get("name") or call["name"]
            call["arguments"] += arguments

    def whole(self, finish_reason: str | None) -> list[Call]:
        """Returns the calls, without the last one if the answer was cut."""
        found = [
            Call(call["id"] or f"call_{index}", call["name"], call["arguments"] or "{}")
            for index, call in sorted(self._calls.items())
        ]
        return found[:-1] if finish_reason == "length" else found


def _check(response: httpx.Response) -> None:
    """Raises an error if the response reports one."""
    if response.status_code == 200:
        return
    try:
        message = _message(json.loads(response.read()))
    except ValueError:
        message = response.reason_phrase
    hint = " (give --api-key)" if response.status_code == 401 else ""
    raise MlxPagedError(f"the server answers {response.status_code}: {message}{hint}")


def _message(body: Any) -> str:
    """Returns the message of an error in OpenAI's format, or in one that other servers use."""
    error = body.get("error", body) if isinstance(body, dict) else body
    found = error.get("message", error) if isinstance(error, dict) else error
    return str(found)[:500]


def _events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream until ``[DONE]``.

    Raises:
        MlxPagedError: An event is an error or invalid, or the stream ends early.
    """
    rest = b""
    for chunk in chunks:
        # `iter_lines` would also break lines at U+2028, which JSON strings may contain.
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError:
                raise MlxPagedError("the server sent an event that is not JSON") from None
            if isinstance(event, dict) and event.get("error"):
                raise MlxPagedError(f"the server reports an error: {_message(event)}")
            if isinstance(event, dict):
                yield event
    raise MlxPagedError("the server ended the answer too early")


def _take_usage(turn: Turn, usage: Any) -> None:
    if not isinstance(usage, dict):
        return
    turn.prompt_tokens = usage.get("prompt_tokens")
    turn.completion_tokens = usage.get("completion_tokens")
    turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
