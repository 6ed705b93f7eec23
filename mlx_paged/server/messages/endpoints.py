"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.parsing.answer import ToolCall
from mlx_paged.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    Event,
    ReasoningText,
)
from mlx_paged.server import lazy_json
from mlx_paged.server.context import context_of, request_log_of
from mlx_paged.server.conversions import check_priority
from mlx_paged.server.errors import ApiError, bad_request, message_error, shorten
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.messages.answers import (
    Block,
    Delta,
    MessageAnswer,
    MessageEvent,
    StopReason,
    TokenCount,
    Usage,
)
from mlx_paged.server.messages.bodies import CountBody, MessagesBody
from mlx_paged.server.messages.tools import use_id
from mlx_paged.server.messages.turns import turn_of
from mlx_paged.server.requests import read_body
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.streaming import TextEvent, respond
from mlx_paged.server.turn import PreparedTurn, TurnAdapter
from mlx_paged.server.turn_preparation import prepare

# Clients drop thinking without a signature, and send the signature back. This server checks none.
SIGNATURE = "bWx4LXBhZ2Vk"

BlockType: TypeAlias = Literal["text", "thinking", "tool_use"]


async def messages(request: Request) -> Response:
    """Answers a conversation, whole or streamed."""
    body = await read_body(request, MessagesBody)
    context, trace = context_of(request), request_log_of(request)
    trace.fields |= {"model": body.model, "stream": bool(body.stream)}
    if body.metadata is not None and body.metadata.user_id is not None:
        trace.fields["user"] = shorten(body.metadata.user_id)
    check_priority(body.priority, context.config)
    model = context.models.of(body.model)
    turn = await prepare(request, model, turn_of(body), _params(body, model))
    limit, room = turn.params.max_tokens, _room(model, turn.prompt)
    is_cut_by_context = room is not None and limit is not None and room < limit
    if is_cut_by_context:
        turn = replace(turn, params=replace(turn.params, max_tokens=room))
    generation = Generation(
        request, model, [turn.prompt], turn.params,
        priority=body.priority or 0, cache_salt=body.cache_salt, media=turn.media,
        names=turn.names,
    )  # fmt: skip
    adapter = MessagesAdapter(generation, turn, body, is_cut_by_context=is_cut_by_context)
    return await respond(request, adapter, stream=bool(body.stream))


async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of a prompt."""
    body = await read_body(request, CountBody)
    turn = turn_of(body)
    model = context_of(request).models.of(body.model)
    prepared = await prepare(request, model, turn, SamplingParams())
    return JSONResponse(TokenCount(input_tokens=len(prepared.prompt)))


def _params(body: MessagesBody, model: ServedModel) -> SamplingParams:
    """Converts a body to sampling parameters."""
    asked: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
    }
    if body.thinking is not None and body.thinking.type == "enabled":
        if body.thinking.budget_tokens is None:
            where = "thinking.budget_tokens"
            raise bad_request(where, f"{where} is missing", "missing_field")
        # Clients ask every model to think; models that do not think need no budget.
        if model.reasoning_format is not None:
            asked["thinking_token_budget"] = body.thinking.budget_tokens
    asked = {name: value for name, value in asked.items() if value is not None}
    # max_tokens 0 only computes the prompt; the engine samples at least one token.
    limits = (max(1, body.max_tokens), model.defaults.max_new_tokens)
    max_tokens = min(limit for limit in limits if limit is not None)
    return SamplingParams(**{**model.defaults.sampling, **asked}, max_tokens=max_tokens)


def _room(model: ServedModel, prompt: Sequence[int]) -> int | None:
    """Returns the tokens left for an answer in the context; None means no limit.

    Raises:
        ApiError: 400, the prompt fills the context. The message is Anthropic's, because clients
            recognize it and compact the conversation.
    """
    limit = model.renderer.max_model_len
    if limit is None:
        return None
    if len(prompt) >= limit:
        raise bad_request(
            "messages",
            f"prompt is too long: {len(prompt)} tokens > {limit - 1} maximum",
            "context_length_exceeded",
        )
    return limit - len(prompt)


class MessagesAdapter(TurnAdapter):
    """The answer is a message of blocks: thinking, text and tool uses, in order.

    Args:
        is_cut_by_context: True if the context limits the answer, not the client's max_tokens.
    """

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self,
        generation: Generation,
        turn: PreparedTurn,
        body: MessagesBody,
        *,
        is_cut_by_context: bool,
    ) -> None:
        super().__init__(generation, turn)
        self._id = f"msg_{generation.trace.request_id}"
        self._model = body.model or generation.model.name
        self._is_cut_by_context = is_cut_by_context
        self._is_silent = body.max_tokens == 0
        thinking = body.thinking
        self._shows_thinking = thinking is None or thinking.type != "disabled"
        self._omits_thinking = thinking is not None and thinking.display == "omitted"
        # Events of the stream.
        self._num_blocks = 0
        self._open: BlockType | None = None
        self._text_event: TextEvent | None = None  # of the open block

    def whole(self) -> MessageAnswer:
        [output] = self.generation.outputs
        piece = Piece.whole(0, output.outputs[0])
        reason, sequence = self._ending(piece)
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks()),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(len(piece.token_ids)),
        }

    def _blocks(self) -> Iterator[Block]:
        if self._is_silent:
            return
        for item in self.answer(0).items:
            if isinstance(item, ToolCall):
                arguments = _arguments(item.arguments)
                yield {
                    "type": "tool_use",
                    "id": use_id(item.id),
                    "name": item.name,
                    "input": arguments,
                }
            elif isinstance(item, ContentText):
                yield {"type": "text", "text": item.text}
            elif self._shows_thinking:
                text = "" if self._omits_thinking else item.text
                yield {"type": "thinking", "thinking": text, "signature": SIGNATURE}

    def _ending(self, piece: Piece) -> tuple[StopReason | None, str | None]:
        """Returns why the message ended, and the stop sequence that ended it."""
        if piece.finish_reason == "length":
            by_context = self._is_cut_by_context
            return ("model_context_window_exceeded" if by_context else "max_tokens"), None
        if self._is_silent:
            return "max_tokens", None
        if isinstance(piece.stop_reason, str):
            return "stop_sequence", piece.stop_reason
        calls = self.answer(0).calls
        return ("tool_use" if calls and calls[-1].is_complete else "end_turn"), None

    def _usage(self, num_tokens: int, *, is_begin: bool = False) -> Usage:
        num_cached = 0 if is_begin else self.generation.num_cached_tokens
        usage: Usage = {
            "input_tokens": self.generation.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": 0 if self._is_silent else num_tokens,
        }
        if not self.turn.is_plain and not self._is_silent:
            usage["output_tokens_details"] = {
                "thinking_tokens": self.readers[0].num_reasoning_tokens
            }
        return usage

    # The stream.

    def begin(self) -> Iterable[bytes]:
        """Returns the message without content. How much of the prompt was cached is not known yet;
        the last event has the final usage."""
        message: MessageAnswer = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0, is_begin=True),
        }
        yield _event({"type": "message_start", "message": message})
        yield self.ping

    def events(self, piece: Piece, events: Sequence[Event]) -> Iterable[bytes]:
        if not self._is_silent:
            for event in events:
                yield from self._block_events(event)
        if piece.finish_reason is None:
            return
        yield from self._close()
        reason, sequence = self._ending(piece)
        delta: Delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = self._usage(self.generation.num_sent)
        yield _event({"type": "message_delta", "delta": delta, "usage": usage})
        yield _event({"type": "message_stop"})

    def _block_events(self, event: Event) -> Iterator[bytes]:
        """Yields the events of a piece of a block. A block of another type closes the open one."""
        if isinstance(event, ContentText):
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": TextEvent.TEXT}, event.text)
        elif isinstance(event, ReasoningText):
            if not self._shows_thinking:
                return
            if self._open != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            if not self._omits_thinking:
                pattern: Delta = {"type": "thinking_delta", "thinking": TextEvent.TEXT}
                yield self._delta(pattern, event.text)
        elif isinstance(event, CallBegin):
            assert event.id is not None
            yield from self._begin(
                {"type": "tool_use", "id": use_id(event.id), "name": event.name, "input": {}}
            )
        elif isinstance(event, CallArguments):
            pattern = {"type": "input_json_delta", "partial_json": TextEvent.TEXT}
            yield self._delta(pattern, event.text)
        else:
            assert isinstance(event, CallEnd)
            yield from self._close()

    def _begin(self, block: Block) -> Iterator[bytes]:
        yield from self._close()
        self._open = block["type"]
        yield _event(
            {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        )

    def _delta(self, pattern: Delta, text: str) -> bytes:
        """Returns a delta of the open block, whose deltas all have the same type."""
        if self._text_event is None:
            index = self._num_blocks
            event = _event({"type": "content_block_delta", "index": index, "delta": pattern})
            self._text_event = TextEvent(event)
        return self._text_event(text)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        index = self._num_blocks
        if self._open == "thinking":
            delta: Delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
        self._open = self._text_event = None
        self._num_blocks += 1

    def failed(self, error: ApiError) -> bytes:
        return _event(cast(MessageEvent, message_error(error, self.generation.trace.request_id)))


def _event(body: MessageEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), lazy_json.json_bytes(body))


def _arguments(text: str) -> dict[str, Any]:
    """Parses the arguments of a call; for a cut call, the part that was written."""
    try:
        found = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
