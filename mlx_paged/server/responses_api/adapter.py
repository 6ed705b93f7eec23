"""ResponseAdapter: formats a generation as a response, whole or as OpenAI's numbered events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from mlx_paged.parsing.events import (
    CallArguments,
    ContentText,
    Event,
    ReasoningText,
)
from mlx_paged.server import logprobs
from mlx_paged.server.errors import ApiError
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.responses import ContentLogprob
from mlx_paged.server.responses_api.answers import Response, ResponseUsage, Status
from mlx_paged.server.responses_api.body import (
    ENCRYPTED,
    LOGPROBS,
    ResponseBody,
    ResponseTool,
    summary_of,
)
from mlx_paged.server.responses_api.items import Item, new_id
from mlx_paged.server.responses_api.output import EventBody, Output
from mlx_paged.server.responses_api.store import ResponseStore, Segment
from mlx_paged.server.streaming import Adapter
from mlx_paged.server.turn import PreparedTurn

_TEXTS = (ContentText, ReasoningText, CallArguments)


_NO_ROOM = ApiError(
    500,
    "the response exceeds the limit for stored responses (--max-stored-bytes)",
    code="too_large",
)


@dataclass(frozen=True)
class Remembered:
    """The part of a response's input that the store keeps.

    Attributes:
        new_input: Items that this request adds to the conversation.
        before: The conversation that it continues; None if it begins one.
    """

    new_input: list[Item]
    before: Segment | None


def wants_logprobs(body: ResponseBody) -> bool:
    """Returns True if the request asks for log-probabilities."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def stores(body: ResponseBody, store: ResponseStore) -> bool:
    """Returns True if the completed response should be stored."""
    return body.store is not False and store.max_responses > 0


class ResponseAdapter(Adapter):
    """Formats the answer to a turn, and stores it at its end unless `store` is false.

    Reads token by token instead of piece by piece, to match log-probabilities to text.

    Attributes:
        id: Id of the response.
        status: Current status of the response.
    """

    def __init__(
        self,
        generation: Generation,
        turn: PreparedTurn,
        body: ResponseBody,
        remembered: Remembered,
    ) -> None:
        super().__init__(generation)
        self.id = new_id("resp")
        self._turn = turn
        self._reader = turn.reader()
        self._body = body
        self._remembered = remembered
        self._created_at = int(time.time())
        self._head = _head(body, turn, generation)
        self._output = Output(
            turn.tools,
            summarizes=summary_of(body.reasoning) is not None,
            encrypts=ENCRYPTED in (body.include or ()),
        )
        self._sequence = itertools.count()
        self._logprobs: list[ContentLogprob] = []  # of tokens without an event so far
        self._is_cut = False
        self._is_background = bool(body.background)
        self.status: Status = "queued" if self._is_background else "in_progress"

    @property
    def remembered(self) -> Remembered:
        """The part of the input that the store keeps."""
        return self._remembered

    @property
    def relaxed(self) -> tuple[str, ...]:
        return self._turn.relaxed

    async def run(self) -> None:
        async for piece in self.generation.pieces():
            for _ in self._read(piece):
                pass
        for _ in self._finish():
            pass

    def whole(self) -> Response:
        response = self._ended()
        self._store(response)
        return response

    def now(self) -> Response:
        """Returns the response so far, with its finished items."""
        response = self._response(self.status)
        response["output"] = self._output.items
        return response

    def begin(self) -> Iterable[bytes]:
        response = self._response(self.status)
        yield self._sse({"type": "response.created", "response": response})
        yield self._sse({"type": f"response.{self.status}", "response": response})

    def piece(self, piece: Piece) -> Iterable[bytes]:
        if self.status == "queued":
            self.status = "in_progress"
            response = self._response(self.status)
            yield self._sse({"type": "response.in_progress", "response": response})
        yield from map(self._sse, self._read(piece))

    def keepalive(self) -> Iterable[bytes]:
        response = self._response("in_progress")
        response["output"] = self._output.items
        yield self._sse({"type": "response.in_progress", "response": response})

    def end(self) -> Iterable[bytes]:
        yield from map(self._sse, self._finish())
        response = self._ended()
        if self._store(response) or not self._is_background:
            yield self._sse({"type": f"response.{response['status']}", "response": response})
        else:  # The client could never retrieve it.
            yield self.failed(_NO_ROOM)

    def without_answer(self) -> Iterable[bytes]:
        """Returns the last event of a response that only computed its prompt."""
        response = self._ended()
        self._store(response)
        yield self._sse({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: ApiError) -> bytes:
        self.status = "failed"
        response = self.now()
        response["error"] = {"code": failure_code(error), "message": error.message}
        if self._is_background:
            self._store_end(response)
        return self._sse({"type": "response.failed", "response": response})

    def stopped(self, failure: ApiError | None) -> Iterable[bytes]:
        """Returns the last events of a response that was stopped early.

        Args:
            failure: Why the response failed; None: it was cancelled.
        """
        yield from map(self._sse, self._output.close("incomplete"))
        if failure is not None:
            yield self.failed(failure)
            return
        self.status = "cancelled"
        response = self.now()
        response["usage"] = self._usage()
        self._store_end(response)
        # There is no event for "cancelled". Clients treat this one as the end.
        yield self._sse({"type": "response.incomplete", "response": response})

    # From tokens to events.

    def _read(self, piece: Piece) -> Iterator[EventBody]:
        """Yields the events of a piece. Consecutive texts of one type become one delta."""
        pending: Event | None = None
        logprobs: list[ContentLogprob] = []
        for event, event_logprobs in self._events(piece):
            if type(pending) is type(event) and isinstance(event, _TEXTS):
                pending = type(event)(pending.text + event.text)  # type: ignore[union-attr]
                logprobs += event_logprobs
                continue
            if pending is not None:
                yield from self._output.take(pending, logprobs)
            pending, logprobs = event, event_logprobs
        if pending is not None:
            yield from self._output.take(pending, logprobs)

    def _events(self, piece: Piece) -> Iterator[tuple[Event, list[ContentLogprob]]]:
        """Yields the parsed events of a piece, each with the log-probabilities of its tokens."""
        reader = self._reader
        reports = self._reports(piece)
        for token, text in piece.updates:
            if token is not None:
                self._logprobs += itertools.islice(reports, 1)
            for event in reader.feed(token, text):
                yield event, self._take_logprobs()
            items = reader.answer.items
            if items and isinstance(items[-1], ReasoningText):
                self._logprobs.clear()  # of the marker that ends the reasoning
        if piece.finish_reason is not None:
            for event in reader.finish(is_cut=piece.is_cut):
                yield event, self._take_logprobs()
            self._is_cut = piece.finish_reason == "length"

    def _take_logprobs(self) -> list[ContentLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _reports(self, piece: Piece) -> Iterator[ContentLogprob]:
        body = self._body
        as_ids = bool(body.return_tokens_as_token_ids)
        return logprobs.chat_logprobs(piece.logprobs, body.top_logprobs or 0, as_ids=as_ids)

    def _finish(self) -> Iterator[EventBody]:
        """Ends the open item. A finished answer without a message or call gets an empty message."""
        yield from self._output.close("incomplete" if self._is_cut else "completed")
        if not self._is_cut and not self._output.has_answer:
            yield from self._output.text("", [])
            yield from self._output.close()

    def _sse(self, body: EventBody) -> bytes:
        event = {**body, "sequence_number": next(self._sequence)}
        return b"event: " + body["type"].encode() + b"\ndata: " + to_json(event) + b"\n\n"

    # The response.

    def _response(self, status: Status) -> Response:
        return {
            **self._head,
            "id": self.id,
            "created_at": self._created_at,
            "status": status,
        }

    def _ended(self) -> Response:
        self.status = "incomplete" if self._is_cut else "completed"
        response = self._response(self.status)
        if self._is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["output"] = self._output.items
        response["usage"] = self._usage()
        return response

    def _usage(self) -> ResponseUsage:
        generation = self.generation
        num_input, num_cached = generation.num_prompt_tokens, generation.num_cached_tokens
        num_output = generation.num_sent
        config = generation.model.info.config
        in_blocks = num_input - num_input % config.block_size
        num_written = max(0, in_blocks - num_cached) if config.enable_prefix_caching else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": num_cached, "cache_write_tokens": num_written,
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }  # fmt: skip

    def _store(self, response: Response) -> bool:
        """Stores the response if the request wants that; returns False if there was no room."""
        store, remembered = self.generation.model.response_store, self._remembered
        if not stores(self._body, store):
            return True
        return store.put(response, remembered.new_input, remembered.before)

    def _store_end(self, response: Response) -> None:
        """Stores a background response that was not completed, since its client will ask for it."""
        if not self._store(response):
            self._store({**response, "output": []})


def failure_code(error: ApiError) -> str:
    """Returns the code of a failed response: one of those that clients know."""
    if error.code == "context_length_exceeded":
        return error.code
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


def _head(body: ResponseBody, turn: PreparedTurn, generation: Generation) -> Response:
    """Returns the fields of a response that do not change while it is generated."""
    text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text else {}
    choice = body.tool_choice
    return {
        "id": "",
        "object": "response",
        "created_at": 0,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "frequency_penalty": turn.params.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model or generation.model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": turn.params.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": summary_of(body.reasoning),
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stores(body, generation.model.response_store),
        "temperature": turn.params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": (
            choice.model_dump(exclude_none=True)
            if choice is not None and not isinstance(choice, str)
            else choice or "auto"
        ),
        "tools": [_echo(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": turn.params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _echo(tool: ResponseTool) -> dict[str, Any]:
    """Returns a tool of the request in the form in which the response repeats it."""
    shown: dict[str, Any] = {"type": tool.type}
    if tool.type == "namespace":
        shown["description"] = tool.description or ""
        shown["tools"] = [_echo(inner) for inner in tool.tools or ()]
    elif tool.type == "custom":
        given = (
            {"type": "text"} if tool.format is None else tool.format.model_dump(exclude_none=True)
        )
        shown |= {"description": tool.description, "format": given}
    elif tool.type == "function":
        shown |= {
            "description": tool.description, "parameters": tool.parameters, "strict": tool.strict,
        }  # fmt: skip
    if tool.name is not None:
        shown["name"] = tool.name
    return {**(tool.model_extra or {}), **shown}
