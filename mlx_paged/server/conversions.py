"""Converts the bodies of chats and completions for the engine."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from mlx_paged.content import URL_PARTS, Content, is_media
from mlx_paged.engine.media import IoOptions, source_of
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.parsing.custom import arguments_of
from mlx_paged.server.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    MediaFields,
    Message,
    TokenizeBody,
    contradiction,
)
from mlx_paged.server.config import GenerationDefaults, ServerConfig
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.errors import bad_request, shorten
from mlx_paged.server.tool_requests import CallBody, CallFunction, tools_of

# Arguments of the renderer itself, which `chat_template_kwargs` must not replace.
_RESERVED_KWARGS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools",
    "truncation",
}  # fmt: skip


def template_kwargs_of(given: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the template variables of a body's `chat_template_kwargs`.

    Raises:
        ApiError: 400 for variables that the server sets.
    """
    kwargs = dict(given or {})
    if reserved := _RESERVED_KWARGS & kwargs.keys():
        name = f"chat_template_kwargs.{min(reserved)}"
        raise bad_request(name, f"{name} must not be given: the server sets it")
    return kwargs


def conversation_of(body: ChatBody | TokenizeBody, io: IoOptions | None = None) -> Conversation:
    """Returns the conversation of a body.

    Args:
        io: How the server reads media.

    Raises:
        ApiError: 400 for content of another kind, and for fields that contradict each other.
        InvalidParameterError: A part of a message is invalid.
    """
    io = _io_of(body, io or IoOptions())
    kwargs = template_kwargs_of(body.chat_template_kwargs)
    if isinstance(body, ChatBody):
        for name in ("documents", "reasoning_effort", "verbosity", "enable_thinking"):
            value = getattr(body, name)
            if value is not None and kwargs.setdefault(name, value) != value:
                raise contradiction(name, f"chat_template_kwargs.{name}")
        if body.reasoning_effort is not None:  # Some templates think only on request.
            kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message",
            "continue_final_message needs add_generation_prompt to be false",
        )
    prompts = body.add_generation_prompt
    return Conversation(
        [template_message(message, i, io) for i, message in enumerate(body.messages or [])],
        tools=tools_of(body.tools, getattr(body, "functions", None)),
        add_generation_prompt=not continues if prompts is None else prompts,
        continue_final_message=continues,
        add_special_tokens=body.add_special_tokens,
        chat_template=body.chat_template,
        template_kwargs=kwargs,
    )


# Fields for the videos of a chat, with the option that each sets.
_OF_VIDEOS = {"video_fps": "fps", "video_max_frames": "num_frames", "max_frames": "num_frames"}


def _io_of(body: MediaFields, defaults: IoOptions) -> IoOptions:
    """Returns the default options for reading the media of a body."""
    found = defaults.with_(body.media_io_kwargs)
    asked = found.of_clips(vars(body), _OF_VIDEOS)
    of_video = (body.media_io_kwargs or {}).get("video") or {}
    for name, option in _OF_VIDEOS.items():
        both = getattr(body, name) is not None and of_video.get(option) is not None
        if both and getattr(asked, option) != getattr(found, option):
            raise contradiction(name, f"media_io_kwargs.video.{option}")
    return asked


def template_message(message: Message, index: int, io: IoOptions | None = None) -> dict[str, Any]:
    """Converts a message to one of a `Conversation`: its content is one text, or texts and media.

    Raises:
        ApiError, InvalidParameterError: The message has content of another kind.
    """
    plain: dict[str, Any] = {"role": message.role, **(message.model_extra or {})}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    reasoning = message.reasoning or message.reasoning_content
    if reasoning is not None:
        plain["reasoning"] = reasoning
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(CallBody(function=message.function_call))
    if calls:
        plain["tool_calls"] = [_call(call, index, j) for j, call in enumerate(calls)]
    if message.role == "function":  # the legacy form of a result
        plain["role"] = "tool"
    if isinstance(message.content, list):
        content: Content = []
        for j, part in enumerate(message.content):
            where = f"messages[{index}].content[{j}]"
            text = part.refusal if part.type == "refusal" else part.text
            if is_media(vars(part)):
                content.append(source_of({**vars(part), **(part.model_extra or {})}, where, io))
            elif part.type in ("text", "input_text", "refusal") and text is not None:
                content.append(text)
            else:
                known = ", ".join(("text", *URL_PARTS, "image", "video", "audio", "file"))
                raise bad_request(
                    where,
                    f"{where} must be a text part, or media: this server reads {known}, not "
                    f"{shorten(part.type, 64)!r}",
                )
        plain["content"] = content or ""
    else:
        plain["content"] = message.content
        if message.content is None and message.role != "assistant":
            where = f"messages[{index}].content"
            raise bad_request(where, f"{where} must be a text or text parts but is null")
    return plain


def _call(call: CallBody, index: int, call_index: int) -> dict[str, Any]:
    """Converts a call of an earlier answer; its arguments become JSON text."""
    if call.custom is not None:
        function = CallFunction(
            name=call.custom.name, arguments=arguments_of(call.custom.input or "")
        )  # fmt: skip
        call = CallBody(id=call.id, function=function)
    if call.function is None:
        where = f"messages[{index}].tool_calls[{call_index}].function"
        raise bad_request(where, f"{where} is missing", "missing_field")
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.id or f"call_{index}_{call_index}",
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments or "{}"},
    }


# Fields of a body that are passed on as they are.
_SAMPLING = {field.name for field in fields(SamplingParams)} & GenerationBody.model_fields.keys()
_SAMPLING -= {"structured_outputs"}


def sampling_params(
    body: GenerationBody, config: ServerConfig, defaults: GenerationDefaults, **given: Any
) -> SamplingParams:
    """Returns the sampling parameters of a body.

    Args:
        given: Fields with another name or meaning in the API, including `max_tokens`.

    Raises:
        ApiError: 400 for a field that this server, or the rest of the body, does not allow.
        InvalidParameterError: A value that `SamplingParams` refuses.
    """
    if body.prompt_logprobs is not None:
        check_logprobs("prompt_logprobs", body.prompt_logprobs, config)
        if body.stream:
            raise bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed")
    check_priority(body.priority, config)
    if body.spaces_between_special_tokens and body.skip_special_tokens is False:
        raise bad_request(
            "spaces_between_special_tokens",
            "spaces_between_special_tokens must be false where special tokens are shown: this "
            "server shows them as they are",
            "unsupported_parameter",
        )
    if body.logprob_token_ids is not None and given.get("logprobs") is None:
        raise bad_request(
            "logprob_token_ids", "logprob_token_ids needs log-probabilities to be asked for"
        )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options needs stream to be true")
    values = {name: getattr(body, name) for name in _SAMPLING}
    if body.logit_bias is not None:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.prediction is not None:
        values["prediction"] = body.prediction.text
    if body.allowed_token_ids is not None:
        # There may be many, and each is processed several times.
        values["allowed_token_ids"] = tuple(dict.fromkeys(body.allowed_token_ids))
    if body.logprob_token_ids is not None:
        values["logprob_token_ids"] = tuple(body.logprob_token_ids)
    if body.thinking_token_budget == -1:
        values["thinking_token_budget"] = None
    values.update(given)
    limits = (values.pop("max_tokens"), defaults.max_new_tokens)
    asked = {name: value for name, value in values.items() if value is not None}
    max_tokens = min((limit for limit in limits if limit is not None), default=None)
    return SamplingParams(**{**defaults.sampling, **asked}, max_tokens=max_tokens)


def max_tokens_of(body: ChatBody | CompletionBody) -> int | None:
    """Returns the limit of an answer, which has two names that must not contradict each other.

    Raises:
        ApiError: 400 for different limits.
    """
    limit, same = body.max_tokens, body.max_completion_tokens
    if limit is not None and same is not None and limit != same:
        raise contradiction("max_completion_tokens", "max_tokens")
    return same if limit is None else limit


def check_priority(value: int | None, config: ServerConfig) -> None:
    """Refuses a priority that the engine would not heed."""
    if value and not config.priority_scheduling:
        raise bad_request(
            "priority", "priority needs a server started with --scheduling-policy priority"
        )


def check_logprobs(name: str, value: int | None, config: ServerConfig) -> None:
    """Refuses more alternatives than the server allows."""
    if value is not None and value > config.max_logprobs:
        raise bad_request(
            name, f"{name} must be at most {config.max_logprobs} (--max-logprobs) but got {value}"
        )
