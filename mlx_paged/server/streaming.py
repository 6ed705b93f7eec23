"""Turns a generation into an HTTP response, whole or as a stream, for all APIs.

An API is an adapter, which formats its answer and the events of its stream. `OpenAIAdapter` is the
common part of chats and plain completions.
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

from mlx_paged.server import responses, stream_response
from mlx_paged.server.bodies import GenerationBody
from mlx_paged.server.errors import ApiError, failed
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.stream_response import EventStream, LineStream

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The header that names the parts of a schema that are not enforced.
RELAXED = "X-Structured-Outputs-Relaxed"

# Bytes that are serialised at a stretch, and of an answer that is held until it is complete.
_PIECE_SIZE = 1 << 15
_MAX_HELD = 1 << 20


# Chats and plain completions.
ChunkChoice = responses.ChunkChoice | responses.CompletionChoice
Chunk = responses.ChatChunk | responses.CompletionAnswer


class Adapter(ABC):
    """The form of a generation in one API.

    Args:
        generation: Not submitted yet.

    Attributes:
        done: The end of a stream, also after an error.
        ping: Sent at intervals while a stream is silent; None sends a comment.
        lines: True if a stream has a JSON object on each line, instead of server-sent events.
        begins_with_piece: True if the events of `begin` come with the first piece.
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
        """Waits until the generation has ended, for an answer that is not streamed."""
        await self.generation.finish()

    @abstractmethod
    def whole(self) -> Mapping[str, Any]:
        """The body of an answer that is not streamed; the generation has ended."""

    def begin(self) -> Iterable[bytes]:
        """Events before the first piece."""
        return ()

    @abstractmethod
    def piece(self, piece: Piece) -> Iterable[bytes]:
        """Returns the events of a piece; empty if there is nothing to send yet."""

    def end(self) -> Iterable[bytes]:
        """Events after the last piece."""
        return ()

    def keepalive(self) -> Iterable[bytes]:
        """Events without content, for clients that ignore comments. Empty if `ping` is an event."""
        return ()

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """The events of an error in the middle of a stream."""


async def respond(request: Request, adapter: Adapter, *, stream: bool) -> Response:
    """Runs the generation of an adapter.

    Returns:
        The whole answer, or a stream that has not begun.

    Raises:
        ApiError: the engine refuses it, or cannot finish an answer that is not streamed.
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
    """Awaits a coroutine, and cancels it if the client leaves.

    Raises:
        ApiError: The client has left.
    """
    work = asyncio.ensure_future(coroutine)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        # Only the log will show it.
        raise ApiError(499, "the client has gone", code="client_closed")
    finally:
        for each in (work, watch):
            each.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def json_response(
    body: Mapping[str, Any] | Sequence[Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a body as a response, serialized in pieces so that other tasks run in between.

    A body over `_MAX_HELD` bytes is serialized while it is sent, as fast as the client reads.
    """
    pieces = _in_turns(responses.json_pieces(body))
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
    """Joins pieces to larger ones, and lets other tasks run before each."""
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


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _pieces(generation: Generation) -> AsyncIterator[Piece | None]:
    """The pieces of a generation; with ``--stream-keepalive-deltas`` None for each `PING_INTERVAL`
    without one."""
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
    """The events of an adapter's stream, errors included."""
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
    """One event."""
    return b"data: " + responses.json_bytes(body) + b"\n\n"


class TextEvent:
    """An event that is sent repeatedly with another text: the rest of it is serialised once.

    Args:
        event: with `TextEvent.TEXT` in place of the text.
    """

    TEXT = "\x00the text\x00"

    def __init__(self, event: bytes) -> None:
        self._before, self._after = event.split(to_json(self.TEXT))

    def __call__(self, text: str) -> bytes:
        """The event with a text."""
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
        # The form of nearly all events, by index of the prompt and sequence.
        self._text_events: dict[tuple[int, int], TextEvent] = {}

    @abstractmethod
    def choice(self, piece: Piece) -> ChunkChoice:
        """The part of a choice that represents a piece."""

    @abstractmethod
    def chunk(self, choices: list[Any]) -> Chunk:
        """An event of choices, without usage."""

    def usage(self, num_completion_tokens: int) -> responses.Usage:
        """OpenAI's `usage`."""
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
        """Returns a chunk of one choice, with usage if every chunk has it.

        Args:
            num_sent: Tokens that were sent, with this chunk; None: those of all pieces so far.
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
                return ()  # A character is incomplete.
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
        """Adds the fields of a choice that are not always there."""
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
