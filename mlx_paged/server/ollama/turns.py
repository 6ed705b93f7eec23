"""Converts Ollama's bodies to `Turn` and `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from mlx_paged.content import Content, MediaSource
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.parsing.definitions import ToolChoice
from mlx_paged.server.context import context_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.conversions import check_logprobs
from mlx_paged.server.errors import ApiError, bad_request, context_exceeded, own_names
from mlx_paged.server.ollama.bodies import (
    GenerateBody,
    GenerationRequest,
    OllamaCall,
    OllamaChatBody,
    OllamaMessage,
    Options,
)
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.tool_requests import tools_of
from mlx_paged.server.turn import PreparedTurn, Turn
from mlx_paged.server.turn_preparation import prepare

_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed",
         "stop")  # fmt: skip
#: The API's names of the engine's fields, for errors.
NAMES = {
    **{name: f"options.{name}" for name in _SAME},
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    "logprobs": "top_logprobs",
    "structured_outputs": "format",
    "structured_outputs.json": "format",
    "structured_outputs.json_object": "format",
}
# Ollama's highest effort, by the name that templates know.
_EFFORTS = {"max": "high"}
_MAX_ROOM = 1024  # tokens that a shortened chat leaves for its answer


# --- Parameters -----------------------------------------------------------------------------------


def params_of(body: GenerationRequest, model: ServedModel, request: Request) -> SamplingParams:
    """Converts a body to sampling parameters. `limited` may lower the token limit later.

    Raises:
        ApiError: 400 for an unsupported option, or for `think` if the model does not think.
        InvalidParameterError: A value that `SamplingParams` refuses.
    """
    options = body.options or Options.model_validate({})
    check_logprobs("top_logprobs", body.top_logprobs, context_of(request).config)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
    if body.think and model.reasoning_format is None:
        raise bad_request("think", f"think: {model.name!r} does not support thinking")
    penalty = options.repeat_penalty
    if options.repeat_last_n == 0:
        penalty = 1.0
    elif options.repeat_last_n not in (None, -1) and penalty not in (None, 1.0):
        raise bad_request(
            "options.repeat_last_n",
            "options.repeat_last_n must be -1 or 0 with a repeat_penalty, which applies to all "
            f"tokens of prompt and answer, but got {options.repeat_last_n}",
            "unsupported_parameter",
        )
    asked = {
        **{name: getattr(options, name) for name in _SAME},
        "repetition_penalty": penalty,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    wanted = options.num_predict if options.num_predict and options.num_predict > 0 else None
    limits = (wanted, model.defaults.max_new_tokens)
    max_tokens = min((limit for limit in limits if limit is not None), default=None)
    with own_names(NAMES):
        return SamplingParams(**{**model.defaults.sampling, **asked}, max_tokens=max_tokens)


def context_len(body: GenerationRequest, model: ServedModel) -> int | None:
    """Returns the maximum tokens of prompt and answer; None means no limit."""
    limits = (body.options.num_ctx if body.options else None, model.renderer.max_model_len)
    return min((limit for limit in limits if limit is not None), default=None)


def limited(params: SamplingParams, prompt: Sequence[int], limit: int | None) -> SamplingParams:
    """Lowers the token limit so that the answer fits into the context.

    Raises:
        ApiError: The prompt alone fills the context.
    """
    if limit is None:
        return params
    room = limit - len(prompt)
    if room < 1:
        raise context_exceeded(limit, f"the prompt has {len(prompt)}")
    if params.max_tokens is not None and params.max_tokens <= room:
        return params
    return replace(params, max_tokens=room)


def structured_outputs_of(body: GenerationRequest) -> StructuredOutputs | None:
    """Converts `format` to a constraint on the answer."""
    if body.format is None or body.format == "":
        return None
    if body.format == "json":
        return StructuredOutputs(json_object=True)
    with own_names(NAMES):
        return StructuredOutputs(json=body.format)


def _template_kwargs(body: GenerationRequest) -> dict[str, Any]:
    """Returns the template's variables for thinking."""
    if body.think is None:
        return {}
    if isinstance(body.think, bool):
        return {"enable_thinking": body.think}
    effort = _EFFORTS.get(body.think, body.think)
    return {"enable_thinking": True, "reasoning_effort": effort}


# --- Turns ----------------------------------------------------------------------------------------


def chat_turn(body: OllamaChatBody) -> Turn:
    """Converts the body of a chat.

    Raises:
        ApiError: 400 for messages that contradict each other.
    """
    tools = tools_of(list(body.tools or ()), None)
    messages = _messages(body.messages or ())
    continues = messages[-1]["role"] == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise bad_request("messages", "messages must not end with tool_calls: results must follow")
    return Turn(
        Conversation(
            messages,
            tools=tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=_template_kwargs(body),
        ),
        tuple(tools),
        ToolChoice("auto" if tools else "none"),
        structured_outputs_of(body),
        names=NAMES,
    )


def prompt_turn(body: GenerateBody) -> Turn:
    """Converts the body of a prompt that the template renders."""
    content = _content(body.prompt, body.images, "images")
    system = [{"role": "system", "content": body.system}] if body.system else []
    return Turn(
        Conversation(
            [*system, {"role": "user", "content": content}], template_kwargs=_template_kwargs(body)
        ),
        structured_outputs=structured_outputs_of(body),
        names=NAMES,
    )


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Converts messages. Ollama's tool results name their tool, and not always their call."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        content = _content(message.content, message.images, f"{where}.images")
        plain: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            plain["reasoning"] = message.thinking
        if message.tool_calls:
            if message.role != "assistant":
                at = f"{where}.tool_calls"
                raise bad_request(at, f"{at} must be in a message of the assistant")
            calls = [_call(call, f"call_{i}_{j}") for j, call in enumerate(message.tool_calls)]
            plain["tool_calls"] = calls
            waiting = [(call["id"], call["function"]["name"]) for call in calls]
        if message.role == "tool":
            plain["tool_call_id"] = _answered(message, waiting, f"call_{i}")
            if message.tool_name:
                plain["name"] = message.tool_name
        found.append(plain)
    return found


def _call(call: OllamaCall, new_id: str) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    return {
        "id": call.id or new_id, "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }  # fmt: skip


def _answered(message: OllamaMessage, waiting: list[tuple[str, str]], new_id: str) -> str:
    """Removes the call that a result answers from `waiting`; returns its id.

    This is the call that the result names, or else the first call of its tool.
    """
    for index, (call_id, name) in enumerate(waiting):
        names_it = message.tool_call_id == call_id
        if names_it or (message.tool_call_id is None and message.tool_name in (None, name)):
            del waiting[index]
            return call_id
    return message.tool_call_id or new_id


def _content(text: str | None, images: Sequence[str] | None, where: str) -> str | Content:
    """Joins images and text; the images come first."""
    if not images:
        return text or ""
    sources: Content = [
        MediaSource("image", f"data:;base64,{data}", f"{where}[{i}]")
        for i, data in enumerate(images)
    ]
    return [*sources, text] if text else sources


# --- Truncation -----------------------------------------------------------------------------------


async def prepare_within(
    request: Request,
    model: ServedModel,
    turn: Turn,
    params: SamplingParams,
    limit: int | None,
    *,
    shortens: bool,
) -> PreparedTurn:
    """Prepares a chat; drops its oldest messages until it fits. System messages stay.

    Args:
        limit: Maximum tokens of prompt and answer; None: no limit.
        shortens: False refuses a chat that is too long.

    Raises:
        ApiError: Not even the last message fits. See also `turn.prepare`.
    """
    conversation = turn.conversation
    try:
        prepared = await prepare(request, model, turn, params)
        if limit is None or len(prepared.prompt) < limit or not shortens:
            return prepared
    except ApiError as error:  # so long that it was not tokenized
        if error.code != "context_length_exceeded" or not shortens or limit is None:
            raise
    room = min(limit // 4, _MAX_ROOM)
    if params.max_tokens is not None:
        room = min(room, params.max_tokens)
    starts = _starts(conversation)
    low, high = 0, len(starts) - 1  # the answer lies in (low, high], or is the last
    while high - low > 1:
        middle = (low + high) // 2
        fits = await _num_tokens(model, _from(conversation, starts[middle])) <= limit - room
        low, high = (low, middle) if fits else (middle, high)
    shorter = _from(conversation, starts[high])
    return await prepare(request, model, replace(turn, conversation=shorter), params)


def _starts(conversation: Conversation) -> list[int]:
    """Returns the indices at which a shortened chat may begin: neither system messages nor tool
    results, whose calls would be missing."""
    messages = conversation.messages
    found = [i for i, m in enumerate(messages) if m["role"] not in ("system", "developer", "tool")]
    return found or [0]


def _from(conversation: Conversation, start: int) -> Conversation:
    """Drops the messages before `start`, except system messages."""
    kept = [
        message
        for i, message in enumerate(conversation.messages)
        if i >= start or message["role"] in ("system", "developer")
    ]
    return replace(conversation, messages=kept)


async def _num_tokens(model: ServedModel, conversation: Conversation) -> float:
    try:
        return len(await model.renderer.render(conversation))
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return float("inf")
