"""Turns a generation into an HTTP response, whole or streamed, for all APIs.

Each API is an adapter that formats its answer and the events of its stream. `OpenAIAdapter` is
shared by chats and plain completions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mlx_paged.server import lazy_json, responses, stream_response
from mlx_paged.server.bodies import GenerationBody
from mlx_paged.server.disconnect import ClientDisconnectedError, while_connected
from mlx_paged.server.errors import ApiError, failed
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.stream_response import EventStream, LineStream

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Response header that lists the parts of a schema that are not enforced.
RELAXED = "X-Structured-Outputs-Relaxed"

# Bytes serialized without yielding to other tasks; maximum bytes of an answer sent in one piece.
_PIECE_SIZE = 1 << 15
_MAX_HELD = 1 << 20


# Chats and plain completions.
ChunkChoice = responses.ChunkChoice | responses.CompletionChoice
Chunk = responses.ChatChunk | responses.CompletionAnswer


class Adapter(ABC):
    """Formats a generation for one API.

    Args:
        generation: Not submitted yet.

    Attributes:
        done: Ends a stream, even after an error.
        ping: Sent at intervals while a stream is silent; None sends a comment.
        lines: True if a stream consists of JSON lines instead of server-sent events.
        begins_with_piece: True to send the events of `begin` with the first piece.
    """

    done = b""
    ping: bytes | None = None
    lines = False
    begins_with_piece = False

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        relaxed = self.relaxed
        return {RELAXED: ", ".join(relaxed).encode("ascii", "replace").decode()} if relaxed else {}

    @property
    def relaxed(self) -> tuple[str, ...]:
        """Parts of schemas that are not enforced, once the generation is submitted."""
        return self.generation.relaxed

    async def run(self) -> None:
        """Waits for the generation to end, for an answer that is not streamed."""
        await self.generation.finish()

    @abstractmethod
    def whole(self) -> Mapping[str, Any]:
        """Returns the body of an answer that is not streamed, once the generation has ended."""

    def begin(self) -> Iterable[bytes]:
        """Returns the events before the first piece."""
        return ()

    @abstractmethod
    def piece(self, piece: Piece) -> Iterable[bytes]:
        """Returns the events of a piece; may be empty."""

    def end(self) -> Iterable[bytes]:
        """Returns the events after the last piece."""
        return ()

    def keepalive(self) -> Iterable[bytes]:
        """Returns empty events for clients that ignore comments; none if `ping` is an event."""
        return ()

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Returns the events for an error in the middle of a stream."""


async def respond(request: Request, adapter: Adapter, *, stream: bool) -> Response:
    """Runs the generation of an adapter.

    Returns:
        The whole answer, or a stream that has not begun.

    Raises:
        ApiError: The engine refuses it, or fails before a whole answer is complete.
    """
    if stream:
        await adapter.generation.submit()
        if adapter.lines:
            return LineStream(
                events_of(adapter), adapter.generation.trace, adapter.generation.context.config,
                headers=adapter.headers,
            )  # fmt: skip
        return EventStream(
            events_of(adapter), adapter.generation.trace, adapter.generation.context.config,
            ping=adapter.ping, headers=adapter.headers,
        )  # fmt: skip
    whole = await unless_disconnected(request, _whole(adapter))
    return await json_response(whole, adapter.headers)


async def unless_disconnected(request: Request, coroutine: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine; cancels it if the client disconnects.

    Raises:
        ApiError: 499, the client disconnected.
    """
    try:
        return await while_connected(request.receive, coroutine)
    except ClientDisconnectedError:  # Only the log shows this.
        raise ApiError(499, "the client disconnected", code="client_closed") from None


async def json_response(
    body: Mapping[str, Any] | Sequence[Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a JSON response, serialized in pieces so that other tasks run in between.

    A body over `_MAX_HELD` bytes is serialized while it is sent, at the client's pace.
    """
    pieces = _in_turns(lazy_json.json_pieces(body))
    held = []
    size = 0
    async for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size > _MAX_HELD:
            rest = _after(held, pieces)
            return StreamingResponse(rest, media_type="application/json", headers=headers)
    return Response(b"".join(held), media_type="application/json", headers=headers)


async def _after(held: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield b"".join(held)
    held.clear()
    async for piece in rest:
        yield piece


async def _in_turns(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Joins pieces into larger ones, and lets other tasks run between them."""
    joined = []
    size = 0
    for piece in pieces:
        joined.append(piece)
        size += len(piece)
        if size >= _PIECE_SIZE:
            yield b"".join(joined)
            joined.clear()
            size = 0
            await asyncio.sleep(0)
    yield b"".join(joined)


async def _whole(adapter: Adapter) -> Mapping[str, Any]:
    async with adapter.generation:
        await adapter.run()
    return adapter.whole()


def _pieces(generation: Generation) -> AsyncIterator[Piece | None]:
    """Yields a generation's pieces; with ``--stream-keepalive-deltas`` also None after every
    `PING_INTERVAL` without one."""
    pieces = generation.pieces()
    if generation.context.config.stream_keepalive_deltas:
        return _with_silences(pieces)
    return pieces


async def _with_silences(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece | None]:
    waiting = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=stream_response.PING_INTERVAL)
            if not done:
                yield None
                continue
            found = waiting.result()
            if found is None:
                return
            yield found
            waiting = asyncio.ensure_future(anext(pieces, None))
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def events_of(adapter: Adapter) -> AsyncGenerator[bytes]:
    """Yields the events of an adapter's stream, including errors."""
    trace = adapter.generation.trace
    try:
        async with adapter.generation as generation:
            waits = adapter.begins_with_piece
            if not waits:
                for event in adapter.begin():
                    yield event
            async for piece in _pieces(generation):
                if waits:
                    waits = False
                    for event in adapter.begin():
                        yield event
                if piece is None:
                    for event in adapter.keepalive():
                        yield event
                    continue
                several = False
                for event in adapter.piece(piece):
                    if several:
                        await asyncio.sleep(0)
                    several = True
                    yield event
            for event in adapter.end():
                yield event
    except ApiError as error:
        trace.fields["error"] = error.message
        yield adapter.failed(error)
    except Exception:
        logger.exception("a stream failed", extra={"request_id": trace.request_id})
        trace.fields["error"] = "internal error"
        yield adapter.failed(failed(trace.request_id))
    if adapter.done:
        yield adapter.done


def sse(body: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + lazy_json.json_bytes(body) + b"\n\n"


class TextEvent:
    """An event that is sent repeatedly with different text; the rest is serialized once.

    Args:
        event: The serialized event, with `TextEvent.TEXT` in place of the text.
    """

    TEXT = "\x00the text\x00"

    def __init__(self, event: bytes) -> None:
        self._before, self._after = event.split(to_json(self.TEXT))

    def __call__(self, text: str) -> bytes:
        """Returns the event with a text."""
        return self._before + to_json(text) + self._after


class OpenAIAdapter(Adapter):
    """Chats and plain completions: chunks of choices, usage if requested, ``[DONE]``.

    Args:
        id_prefix: Prefix of the answer's id.
    """

    done = b"data: [DONE]\n\n"

    def __init__(self, generation: Generation, body: GenerationBody, id_prefix: str) -> None:
        super().__init__(generation)
        self.id = f"{id_prefix}-{generation.trace.request_id}"
        self.created = int(time.time())
        self.model = body.model or generation.model.name
        self.return_token_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        # Templates of nearly all events, by (prompt, sequence).
        self._text_events: dict[tuple[int, int], TextEvent] = {}

    @abstractmethod
    def choice(self, piece: Piece) -> ChunkChoice:
        """Returns the choice for a piece."""

    @abstractmethod
    def chunk(self, choices: list[Any]) -> Chunk:
        """Returns a chunk with these choices, without usage."""

    def usage(self, num_completion_tokens: int) -> responses.Usage:
        """Returns OpenAI's `usage` object."""
        num_prompt_tokens = self.generation.num_prompt_tokens
        usage: responses.Usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.generation.num_cached_tokens},
        }
        misses = [o.cache_miss for o in self.generation.outputs if o.cache_miss is not None]
        if len(misses) == 1 == len(self.generation.outputs):
            miss = misses[0].for_client()
            usage["prompt_tokens_details"]["cache_miss"] = {
                "reason": miss.reason.value,
                "shared_tokens": miss.num_shared_tokens,
                "message": str(miss),
            }
        accepted = sum(output.num_accepted_drafts for output in self.generation.outputs)
        rejected = sum(output.num_rejected_drafts for output in self.generation.outputs)
        if accepted + rejected:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            }
        return usage

    def whole_usage(self) -> responses.Usage:
        """Returns the usage of all generated answers."""
        answers = [answer for output in self.generation.outputs for answer in output.outputs]
        return self.usage(sum(len(answer.token_ids) for answer in answers))

    def event(self, choice: ChunkChoice, num_sent: int | None = None) -> bytes:
        """Returns the event of one choice, with usage if the client wants it in every chunk.

        Args:
            num_sent: Tokens sent up to and including this chunk; None: those of all pieces so far.
        """
        chunk = self.chunk([choice])
        if self._usage_always:
            chunk["usage"] = self.usage(self.generation.num_sent if num_sent is None else num_sent)
        elif self._usage_at_end:
            chunk["usage"] = None
        return sse(chunk)

    def piece(self, piece: Piece) -> Iterable[bytes]:
        text = piece.text
        if piece.is_plain and not (self.return_token_ids or self._usage_always):
            if not text:
                return ()  # A character is still incomplete.
            key = piece.prompt, piece.index
            event = self._text_events.get(key)
            if event is None:
                pattern = self.choice(Piece(*key, piece.num_before, [TextEvent.TEXT]))
                event = self._text_events[key] = TextEvent(self.event(pattern))
            return (event(text),)
        if not (text or piece.logprobs or piece.finish_reason or self.return_token_ids):
            return ()
        return (self.event(self.choice(piece)),)

    def add_ending(self, choice: responses.ChatChoice | ChunkChoice, piece: Piece) -> None:
        """Adds a choice's optional fields."""
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self.return_token_ids:
            choice["token_ids"] = piece.token_ids

    def end(self) -> Iterable[bytes]:
        if self._usage_at_end:
            chunk = self.chunk([])
            chunk["usage"] = self.usage(self.generation.num_sent)
            yield sse(chunk)

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body)
