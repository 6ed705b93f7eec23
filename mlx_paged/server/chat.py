"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlx_paged.engine.media import IoOptions
from mlx_paged.engine.outputs import CompletionOutput
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.parsing import events
from mlx_paged.parsing.answer import Answer, ToolCall
from mlx_paged.parsing.definitions import ToolChoice
from mlx_paged.server import conversions, logprobs, requests, responses, tool_requests
from mlx_paged.server.bodies import ChatBody
from mlx_paged.server.config import GenerationDefaults, ServerConfig
from mlx_paged.server.context import context_of
from mlx_paged.server.errors import bad_request
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.lazy_json import Lazy
from mlx_paged.server.streaming import OpenAIAdapter, respond
from mlx_paged.server.turn import AnswerReaders, PreparedTurn, Turn
from mlx_paged.server.turn_preparation import check_takes_tools, prepare


async def chat_completions(request: Request) -> Response:
    """Answers a conversation, as a whole or as a stream."""
    body, turn, generation = await prepared_generation(request, ChatBody)
    return await respond(request, ChatAdapter(generation, turn, body), stream=bool(body.stream))


async def prepared_generation(
    request: Request, kind: type[ChatBody]
) -> tuple[ChatBody, PreparedTurn, Generation]:
    """Returns a chat's body, its turn, and its generation, which is not submitted yet.

    Args:
        kind: Type of the body.

    Raises:
        ApiError, MlxPagedError: See `prepared_chat`.
    """
    body, turn, prompt = await prepared_chat(request, kind)
    generation = Generation(
        request,
        context_of(request).models.of(body.model),
        [prompt],
        turn.params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        stream_interval=body.stream_interval,
        media=turn.media,
        names=turn.names,
    )
    return body, turn, generation


async def prepared_chat(
    request: Request, kind: type[ChatBody] = ChatBody
) -> tuple[ChatBody, PreparedTurn, list[int]]:
    """Returns a chat's body, its turn, and the tokens of its prompt.

    Raises:
        ApiError, MlxPagedError: See `requests.read_body`, `turn_of` and `turn.prepare`.
    """
    body = await requests.read_body(request, kind)
    context = context_of(request)
    model = context.models.of(body.model)
    params = chat_params(body, context.config, model.defaults)
    if body.functions:
        check_takes_tools(model, "functions")
    turn = await prepare(request, model, turn_of(body, model.media_io), params)
    if turn.media is not None and body.truncate_prompt_tokens is not None:
        raise bad_request(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens must not be given with media: a picture cannot be cut",
        )
    prompt = model.renderer.truncate(
        turn.prompt, body.truncate_prompt_tokens, params.max_tokens, body.truncation_side
    )
    return body, turn, prompt


def turn_of(body: ChatBody, io: IoOptions | None = None) -> Turn:
    """Converts a body to a turn.

    Args:
        io: How the server reads media.

    Raises:
        ApiError: 400, fields contradict each other.
        InvalidParameterError: A part of a message is invalid.
    """
    conversation = conversions.conversation_of(body, io)
    choice = tool_requests.choice_of(body.tool_choice, body.parallel_tool_calls, conversation.tools)
    if body.functions:
        if body.tool_choice is not None:
            raise bad_request("tool_choice", "tool_choice needs tools, but the body has functions")
        choice = _legacy_choice(body, choice)
    elif body.function_call not in (None, "none", "auto"):
        raise bad_request("function_call", "function_call needs functions")
    return Turn(
        conversation,
        tuple(conversation.tools),
        choice,
        tool_requests.structured_outputs_of(body),
        names=tool_requests.names_of(body),
    )


def _legacy_choice(body: ChatBody, choice: ToolChoice) -> ToolChoice:
    """Converts the legacy field `function_call`, which allows at most one call."""
    if choice.mode == "none" or body.function_call == "none":
        return ToolChoice("none")
    if body.function_call in (None, "auto"):
        return ToolChoice("auto", parallel=False)
    assert isinstance(body.function_call, tool_requests.NamedFunction)
    if all(function.name != body.function_call.name for function in body.functions or ()):
        raise bad_request(
            "function_call",
            f"function_call names {body.function_call.name!r}, which functions lacks",
        )
    return ToolChoice("named", (body.function_call.name,), parallel=False)


def chat_params(
    body: ChatBody, config: ServerConfig, defaults: GenerationDefaults
) -> SamplingParams:
    """Returns the sampling parameters of a body.

    Raises:
        ApiError: 400, a field is invalid.
    """
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
    conversions.check_logprobs("top_logprobs", body.top_logprobs, config)
    return conversions.sampling_params(
        body,
        config,
        defaults,
        max_tokens=conversions.max_tokens_of(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


class ChatAdapter(OpenAIAdapter):
    """Formats each of the n sequences as a choice with a message."""

    # As in vLLM. Clients that measure TTFT would take an earlier role chunk for the first token.
    begins_with_piece = True

    def __init__(self, generation: Generation, turn: PreparedTurn, body: ChatBody) -> None:
        super().__init__(generation, body, "chatcmpl")
        self._body = body
        self._turn = turn
        self._echo = _echo(body)
        self._readers = None if turn.is_plain else AnswerReaders(turn)
        self._is_legacy = bool(body.functions)
        self._shows_reasoning = body.include_reasoning is not False
        self._num_calls = [0] * turn.params.n
        self._custom = {tool.name for tool in turn.tools if tool.is_custom}
        self._calls_custom = [False] * turn.params.n  # of each open call

    @property
    def relaxed(self) -> tuple[str, ...]:
        return self._turn.relaxed

    @property
    def has_calls(self) -> bool:
        """True if an answer ends with a call."""
        calls = [reader.answer.calls for reader in self._readers or ()]
        return any(each and each[-1].is_complete for each in calls)

    async def run(self) -> None:
        if self._readers is None:
            await self.generation.finish()
        else:
            await self._readers.run(self.generation)

    def whole(self) -> responses.ChatAnswer:
        [output] = self.generation.outputs
        whole: responses.ChatAnswer = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": responses.FINGERPRINT,
            "choices": Lazy.list(map(self._whole_choice, output.outputs)),
            "usage": self.whole_usage(),
        }
        if self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = logprobs.prompt_logprobs(output.prompt_logprobs)
        if self.return_token_ids:
            whole["prompt_token_ids"] = self.generation.prompts[0]
        return whole

    def usage(self, num_completion_tokens: int) -> responses.Usage:
        usage = super().usage(num_completion_tokens)
        if self._readers is not None:
            reasoning = sum(reader.num_reasoning_tokens for reader in self._readers)
            usage.setdefault("completion_tokens_details", {})["reasoning_tokens"] = reasoning
        return usage

    def _whole_choice(self, output: CompletionOutput) -> responses.ChatChoice:
        piece = Piece.whole(0, output)
        reason = self._finish_reason(piece)
        assert reason is not None
        choice: responses.ChatChoice = {
            "index": piece.index,
            "message": self._message(piece),
            "logprobs": self._logprobs(piece),
            "finish_reason": reason,
        }
        self.add_ending(choice, piece)
        return choice

    def _message(self, piece: Piece) -> responses.AnswerMessage:
        if self._readers is None:
            return {"role": "assistant", "content": self._echo + piece.text, "refusal": None}
        answer: Answer = self._readers[piece.index].answer
        content = self._echo + answer.content
        message: responses.AnswerMessage = {
            "role": "assistant",
            # OpenAI's content is null if there are calls and no text.
            "content": content if content or not answer.calls else None,
            "refusal": None,
        }
        if answer.reasoning and self._shows_reasoning:
            message["reasoning"] = message["reasoning_content"] = answer.reasoning
        if answer.calls and self._is_legacy:
            first = answer.calls[0]
            message["function_call"] = {"name": first.name, "arguments": first.arguments}
        elif answer.calls:
            message["tool_calls"] = list(map(_call, answer.calls))
        return message

    def _finish_reason(self, piece: Piece) -> responses.Reason | None:
        calls = self._readers[piece.index].answer.calls if self._readers is not None else []
        # A cut-off call keeps the answer's reason, because there is nothing to call.
        if piece.finish_reason == "stop" and calls and calls[-1].is_complete:
            return "function_call" if self._is_legacy else "tool_calls"
        return piece.finish_reason

    def begin(self) -> Iterable[bytes]:
        # As in OpenAI's API, content is null if only calls can follow.
        content = self._echo or (None if self._turn.forces_a_call else "")
        for index in range(self.generation.params.n):
            yield self.event(
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": content},
                    "logprobs": None,
                    "finish_reason": None,
                },
                num_sent=0,  # The first tokens follow in the next chunk.
            )

    def keepalive(self) -> Iterable[bytes]:
        # Empty content would turn the null content of a message of calls into text.
        yield self.event({"index": 0, "delta": {}, "logprobs": None, "finish_reason": None})

    def piece(self, piece: Piece) -> Iterable[bytes]:
        if self._readers is None:
            return super().piece(piece)
        return self._parsed(piece, self._readers.read(piece))

    def _parsed(self, piece: Piece, read: list[events.Event]) -> Iterable[bytes]:
        """Yields a chunk per event; the last one carries log-probabilities and tokens."""
        deltas = [d for event in read if (d := self._delta(piece.index, event)) is not None]
        rest = piece.finish_reason or piece.logprobs or (self.return_token_ids and piece.token_ids)
        if rest and (piece.finish_reason or not deltas):
            deltas.append({})
        for i, delta in enumerate(deltas):
            is_last = i == len(deltas) - 1
            choice: responses.ChunkChoice = {
                "index": piece.index,
                "delta": delta,
                "logprobs": self._logprobs(piece) if is_last else None,
                "finish_reason": self._finish_reason(piece) if is_last else None,
            }
            if is_last:
                self.add_ending(choice, piece)
            yield self.event(choice)

    def _delta(self, index: int, event: events.Event) -> responses.Delta | None:
        """Returns the delta of an event, or None."""
        if isinstance(event, events.ContentText):
            return {"content": event.separator + event.text}
        if isinstance(event, events.ReasoningText):
            if not self._shows_reasoning:
                return None
            return {"reasoning": event.text, "reasoning_content": event.text}
        if isinstance(event, events.CallEnd):
            return None
        if isinstance(event, events.CallBegin):
            self._num_calls[index] += 1
            self._calls_custom[index] = event.name in self._custom
            function: responses.FunctionDelta = {"name": event.name, "arguments": ""}
        else:
            assert isinstance(event, events.CallArguments)
            function = {"arguments": event.text}
        if self._is_legacy:
            return {"function_call": function}
        is_custom = self._calls_custom[index]
        call: responses.ToolCallDelta = {"index": self._num_calls[index] - 1}
        if isinstance(event, events.CallBegin):
            assert event.id is not None
            call |= {"id": event.id, "type": "custom" if is_custom else "function"}
        if not is_custom:
            call["function"] = function
        elif isinstance(event, events.CallBegin):
            call["custom"] = {"name": event.name, "input": ""}
        else:
            call["custom"] = {"input": event.text}
        return {"tool_calls": [call]}

    def choice(self, piece: Piece) -> responses.ChunkChoice:
        text = piece.text
        choice: responses.ChunkChoice = {
            "index": piece.index,
            "delta": {"content": text} if text or piece.finish_reason is None else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        self.add_ending(choice, piece)
        return choice

    def chunk(self, choices: list[Any]) -> responses.ChatChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": responses.FINGERPRINT,
            "choices": choices,
        }

    def _logprobs(self, piece: Piece) -> responses.ChatLogprobs | None:
        body = self._body
        if not body.logprobs:
            return None
        as_ids = bool(body.return_tokens_as_token_ids)
        content = logprobs.chat_logprobs(piece.logprobs, body.top_logprobs or 0, as_ids=as_ids)
        return {"content": Lazy.list(content), "refusal": None}


def _call(call: ToolCall) -> responses.ToolCall:
    if call.is_custom:
        custom: responses.CalledCustom = {"name": call.name, "input": call.arguments}
        return {"id": call.id, "type": "custom", "custom": custom}
    function: responses.CalledFunction = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _echo(body: ChatBody) -> str:
    """Returns the last message if the answer must begin with it (`echo`)."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text or "" for part in last.content)
