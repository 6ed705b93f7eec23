"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.parsing.answer import ToolCall
from mlx_paged.parsing.events import CallEnd, ContentText, Event, ReasoningText
from mlx_paged.server import lazy_json, logprobs
from mlx_paged.server.context import context_of, request_log_of
from mlx_paged.server.errors import ApiError, bad_request
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.ollama.answers import Call, Ending, Logprob, Message, OllamaError
from mlx_paged.server.ollama.bodies import GenerateBody, GenerationRequest, OllamaChatBody
from mlx_paged.server.ollama.turns import (
    NAMES,
    chat_turn,
    context_len,
    limited,
    params_of,
    prepare_within,
    prompt_turn,
    structured_outputs_of,
)
from mlx_paged.server.requests import read_body
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.streaming import respond
from mlx_paged.server.turn import PreparedTurn, TurnAdapter, plain_turn
from mlx_paged.server.turn_preparation import prepare


def now() -> str:
    """Returns the current time in Ollama's format."""
    return time_of(time.time())


def time_of(seconds: float) -> str:
    """Formats a Unix time as Ollama does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(begin: float | None, end: float | None) -> int:
    """Converts an interval in seconds to nanoseconds; at least 1, because clients divide by it."""
    return max(1, int(((end or 0.0) - (begin or 0.0)) * 1e9))


async def chat(request: Request) -> Response:
    """Answers a chat, streamed or whole."""
    started = time.monotonic()
    body = await _read(request, OllamaChatBody)
    model = context_of(request).models.of(body.model)
    if not body.messages:
        message = Message(role="assistant", content="")
        return JSONResponse({**_loaded(body, model), "message": message})
    limit = context_len(body, model)
    turn = await prepare_within(
        request, model, chat_turn(body), params_of(body, model, request), limit,
        shortens=body.truncate is not False,
    )  # fmt: skip
    return await _answer(request, model, turn, body, ChatAdapter, limit, started)


async def generate(request: Request) -> Response:
    """Answers a prompt, streamed or whole."""
    started = time.monotonic()
    body = await _read(request, GenerateBody)
    for name, reason in GenerateBody.REFUSED.items():
        if getattr(body, name) not in (None, ""):
            raise bad_request(name, f"{name} is not supported: {reason}", "unsupported_parameter")
    model = context_of(request).models.of(body.model)
    if not body.prompt and not body.images:
        return JSONResponse({**_loaded(body, model), "response": ""})
    limit = context_len(body, model)
    turn = await _prompt(request, model, body, limit)
    return await _answer(request, model, turn, body, GenerateAdapter, limit, started)


async def _read(request: Request, kind: type[Any]) -> Any:
    body = await read_body(request, kind)
    request_log_of(request).fields |= {"model": body.model, "stream": body.streams}
    return body


def _loaded(body: GenerationRequest, model: ServedModel) -> Ending:
    """Answers a request that only loads its model, or unloads it with keep_alive 0."""
    reason: Literal["load", "unload"] = "unload" if body.keep_alive == 0 else "load"
    return _ended(body.model or model.name, reason)


def _ended(model: str, reason: Literal["load", "unload"]) -> Ending:
    return {"model": model, "created_at": now(), "done": True, "done_reason": reason}


# By path: the fields that hold a prompt, and the answer to a request without one.
_PROMPTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "/api/chat": (("messages",), {"message": {"role": "assistant", "content": ""}}),
    "/api/generate": (("prompt", "images"), {"response": ""}),
}


def answer_to_unload(path: str, body: bytes, model: str) -> Response | None:
    """Answers a request that only unloads its model: `keep_alive` is 0, and there is no prompt.

    Args:
        body: A JSON object.

    Returns:
        None if the request has a prompt, or its path is another one.
    """
    names, empty = _PROMPTS.get(path, ((), {}))
    if not names or any(map(from_json(body).get, names)):
        return None
    return JSONResponse({**_ended(model, "unload"), **empty})


async def _answer(
    request: Request,
    model: ServedModel,
    turn: PreparedTurn,
    body: GenerationRequest,
    adapter: type[OllamaAdapter],
    limit: int | None,
    started: float,
) -> Response:
    turn = replace(turn, params=limited(turn.params, turn.prompt, limit))
    generation = Generation(
        request, model, [turn.prompt], turn.params, media=turn.media, names=NAMES
    )
    return await respond(request, adapter(generation, turn, body, started), stream=body.streams)


async def _prompt(
    request: Request, model: ServedModel, body: GenerateBody, limit: int | None
) -> PreparedTurn:
    """Prepares a prompt, raw or rendered by the template, after the tokens of `context`."""
    params = params_of(body, model, request)
    renderer = model.renderer
    is_raw = body.raw or not renderer.chat_template
    if is_raw:
        _check_raw(body)
        tokens = await renderer.encode(body.prompt or "", add_special_tokens=True)
        params = params.constrained(structured_outputs_of(body), skip_special_tokens=True)
        turn = plain_turn(model, tokens, params, NAMES)
    else:
        turn = await prepare(request, model, prompt_turn(body), params)
    earlier = list(body.context or ())
    if earlier:
        renderer.check_tokens("context", earlier)
        if turn.media is not None:
            raise bad_request("context", "context must not be given with images")
    tokens = earlier + _without_bos(model, turn.prompt) if earlier else turn.prompt
    over = 0 if limit is None else len(tokens) - (limit - 1)
    can_lose = len(tokens) if is_raw else len(earlier)
    if over > 0 and body.truncate is not False and over <= can_lose:
        room = 0 if limit is None else min(limit // 4, params.max_tokens or limit)
        tokens = tokens[min(can_lose, over + room) :] or tokens[-1:]
    return replace(turn, prompt=tokens)


def _check_raw(body: GenerateBody) -> None:
    for name, value in (("system", body.system), ("images", body.images)):
        if value:
            raise bad_request(
                name,
                f"{name} needs a chat template, which neither raw prompts nor models without one "
                "have",
            )


def _without_bos(model: ServedModel, tokens: list[int]) -> list[int]:
    """Drops the BOS token, because other tokens precede the prompt."""
    bos = getattr(model.renderer.tokenizer, "bos_token_id", None)
    return tokens[1:] if bos is not None and tokens[:1] == [bos] else tokens


class OllamaAdapter(TurnAdapter):
    """Formats an answer as JSON lines. The last one has the finish reason and durations.

    Args:
        started: When the request came, in seconds of the monotonic clock.
    """

    lines = True

    def __init__(
        self, generation: Generation, turn: PreparedTurn, body: GenerationRequest, started: float
    ) -> None:
        super().__init__(generation, turn)
        self._body = body
        self._model = body.model or generation.model.name
        self._shows_thinking = body.think is not False
        self._started = started
        self._loaded = time.monotonic()
        self._num_calls = 0

    @abstractmethod
    def content(
        self, text: str = "", *, thinking: str = "", calls: Sequence[ToolCall] = ()
    ) -> dict[str, Any]:
        """Returns the fields that hold a text, its thinking and its calls."""

    def whole(self) -> dict[str, Any]:
        [output] = self.generation.outputs
        piece = Piece.whole(0, output.outputs[0])
        answer = self.answer(0)
        thinking = answer.reasoning if self._shows_thinking else ""
        calls = [call for call in answer.calls if call.is_complete]
        content = self.content(answer.content, thinking=thinking, calls=calls)
        return {**content, **self._ending(piece), **self._logprobs(piece)}

    def events(self, piece: Piece, events: Sequence[Event]) -> Iterable[bytes]:
        lines = list(self._contents(events))
        logprobs = self._logprobs(piece)
        if logprobs and not lines:
            lines.append(self.content())
        for i, line in enumerate(lines):
            of_last = logprobs if i == len(lines) - 1 else {}
            yield self._line({**line, **self._head(done=False), **of_last})
        if piece.finish_reason is not None:
            yield self._line({**self.content(), **self._ending(piece)})

    def _contents(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            if isinstance(event, ContentText):
                if text := event.separator + event.text:
                    yield self.content(text)
            elif isinstance(event, ReasoningText):
                if self._shows_thinking:
                    yield self.content(thinking=event.text)
            elif isinstance(event, CallEnd):
                call = self.answer(0).calls[self._num_calls]
                self._num_calls += 1
                if event.is_complete:
                    yield self.content(calls=[call])

    def keepalive(self) -> Iterable[bytes]:
        yield self._line({**self.content(), **self._head(done=False)})

    def failed(self, error: ApiError) -> bytes:
        return self._line(OllamaError(error=error.message))

    def _head(self, *, done: bool) -> Ending:
        return {"model": self._model, "created_at": now(), "done": done}

    def _ending(self, piece: Piece) -> Ending:
        """Returns the fields of a finished answer."""
        [output] = self.generation.outputs
        times, end = output.metrics, time.monotonic()
        reason: Literal["stop", "length"] = "length" if piece.finish_reason == "length" else "stop"
        return {
            **self._head(done=True),
            "done_reason": reason,
            "total_duration": nanoseconds(self._started, end),
            "load_duration": nanoseconds(self._started, self._loaded),
            "prompt_eval_count": self.generation.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(times.scheduled_time, times.first_token_time),
            "eval_count": len(output.outputs[0].token_ids),
            "eval_duration": nanoseconds(times.first_token_time, times.finished_time or end),
        }

    def _logprobs(self, piece: Piece) -> dict[str, list[Logprob]]:
        if not self._body.logprobs or not piece.logprobs:
            return {}
        num_top = self._body.top_logprobs or 0
        reports = logprobs.chat_logprobs(piece.logprobs, num_top, as_ids=False)
        found = [dict(report) for report in reports]
        for each in found if not num_top else ():
            del each["top_logprobs"]
        return {"logprobs": found}  # type: ignore[dict-item]

    @staticmethod
    def _line(body: Any) -> bytes:
        return lazy_json.json_bytes(body) + b"\n"


class ChatAdapter(OllamaAdapter):
    """Formats an answer as a message. Each call is one line."""

    def content(
        self, text: str = "", *, thinking: str = "", calls: Sequence[ToolCall] = ()
    ) -> dict[str, Any]:
        message: Message = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            every = self.answer(0).calls
            message["tool_calls"] = [_call(call, every.index(call)) for call in calls]
        return {"message": message}


class GenerateAdapter(OllamaAdapter):
    """Formats an answer as text, with the tokens that a later prompt may continue (`context`)."""

    _body: GenerateBody

    def content(
        self, text: str = "", *, thinking: str = "", calls: Sequence[ToolCall] = ()
    ) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def _ending(self, piece: Piece) -> Ending:
        ending = super()._ending(piece)
        if self._body.raw or self.turn.media is not None:
            return ending
        tokens = [*self.generation.prompts[0], *self.generation.outputs[0].outputs[0].token_ids]
        return {**ending, "context": tokens}  # type: ignore[typeddict-unknown-key]


def _call(call: ToolCall, index: int) -> Call:
    arguments = from_json(call.arguments or "{}")
    return {
        "id": call.id,
        "function": {
            "index": index,
            "name": call.name,
            "arguments": arguments if isinstance(arguments, dict) else {},
        },
    }
