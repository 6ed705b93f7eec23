"""Reads the bodies of requests, and converts them for the engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

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
    Unsupported,
    contradiction,
)
from mlx_paged.server.body_bounds import MAX_TOKEN_IDS, BodyBounds
from mlx_paged.server.config import GenerationDefaults, ServerConfig
from mlx_paged.server.context import request_log_of, server_context_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.documents import read_documents
from mlx_paged.server.errors import ApiError, bad_request, shorten, speaks_anthropic
from mlx_paged.server.tool_requests import CallBody, CallFunction, tools_of

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)

_MAX_NAMED_FIELDS = 8
_SCANNED_AT_ONCE = 1 << 13  # bytes of a body
_SMALL_BODY = 1 << 16  # bytes
_TURN = 0.002  # seconds of scanning after which other tasks run
# Names that pydantic puts into the path of a field for the branches of a union.
_BRANCHES = frozenset(
    {"str", "int", "float", "bool", "ToolChoiceBody", "ToolChoiceObject", "NamedFunction"}
)


async def read_body(request: Request, model: type[B]) -> B:
    """The body of a request that the server can take now, validated.

    Raises:
        ApiError: 400 with the field, 404 for a model that is not served, 408, 413 or 415, 503 while
            the server takes no requests.
    """
    context, trace = server_context_of(request), request_log_of(request)
    body = validated(request, await read_bytes(request), model)
    if isinstance(body, Unsupported):
        unsupported = body.unsupported()
        if unsupported is not None:
            raise bad_request(*unsupported, code="unsupported_parameter")
    if (name := getattr(body, "model", None)) is not None:
        setattr(body, "model", context.served_name(name))  # noqa: B010 (not every body has it)
    await read_documents(body, context.documents)
    if isinstance(body, GenerationBody):
        trace.request_id = body.request_id or trace.request_id
        trace.fields |= {"model": body.model, "stream": bool(body.stream)}
        for name in ("user", "safety_identifier", "metadata"):
            if getattr(body, name) is not None:
                trace.fields[name] = getattr(body, name)
    return body


async def read_small_body(request: Request, model: type[B]) -> B:
    """The body of a request about models, which needs no engine; unknown fields are ignored.

    Raises:
        ApiError: 400 with the field, 413 or 415.
    """
    check_content(request)
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _SMALL_BODY:
            raise too_large(_SMALL_BODY)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _from_validation(error, is_openai=True) from None


async def read_bytes(request: Request) -> bytes:
    """The body of a request that the server can take now, not validated.

    Raises:
        ApiError: 408, 413 or 415, 503 while the server takes no requests.
    """
    context = server_context_of(request)
    context.check_takes_requests()
    check_content(request)
    limit = context.max_model_len
    bounds = BodyBounds(max(MAX_TOKEN_IDS, limit or 0), limit)
    async with context.reading_body():
        return await _received(request, bounds)


def validated(request: Request, raw: bytes | bytearray, model: type[B]) -> B:
    """A body, or a part of one.

    Raises:
        ApiError: 400 with the field.
    """
    try:
        body = model.model_validate_json(raw)
    except ValidationError as error:
        raise _from_validation(error, is_openai=not speaks_anthropic(request.scope)) from None
    _check_unknown(body, server_context_of(request).config, request_log_of(request).request_id)
    return body


def has_body(request: Request) -> bool:
    """True if a request announces a body."""
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def check_content(request: Request) -> None:
    """Refuses a body that is not declared as JSON, or is compressed.

    Pages of any site may send bodies without a type or with those of forms. For other types, the
    browser asks this server first.

    Raises:
        ApiError: 415, which says what to send.
    """
    kind = request.headers.get("content-type")
    if kind is None or kind.partition(";")[0].strip().lower() != "application/json":
        shown = "missing" if kind is None else repr(shorten(kind, 64))
        raise unsupported_content(
            f"Content-Type must be application/json but is {shown}: send the header "
            "'Content-Type: application/json' (with curl: -H 'Content-Type: application/json')"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise unsupported_content(
            f"Content-Encoding must be identity but is {shorten(encoding, 64)!r}: send the body "
            "uncompressed",
            {"Accept-Encoding": "identity"},
        )


def unsupported_content(message: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """415; the connection is closed, as the body is not read."""
    return ApiError(
        415, message, code="unsupported_media_type",
        headers={"Connection": "close", **(headers or {})},
    )  # fmt: skip


async def _received(request: Request, bounds: BodyBounds) -> bytes:
    context, trace = server_context_of(request), request_log_of(request)
    limit, read_timeout = context.max_body_size, context.config.read_timeout
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(read_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large(limit)
                context.hold_body(trace, size)
                chunks.append(chunk)
                began = time.monotonic()
                for begin in range(0, len(chunk), _SCANNED_AT_ONCE):
                    if time.monotonic() - began > _TURN:
                        await asyncio.sleep(0)
                        began = time.monotonic()
                    bounds.feed(chunk[begin : begin + _SCANNED_AT_ONCE])
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {read_timeout:g} s", code="read_timeout",
            headers={"Connection": "close"},
        ) from None  # fmt: skip
    except ClientDisconnect:
        raise ApiError(499, "the client disconnected", code="client_closed") from None
    except ApiError as error:
        error.headers.setdefault("Connection", "close")  # the rest of the body is not read
        raise
    return b"".join(chunks)


def too_large(limit: int, what: str = "the body") -> ApiError:
    """Returns 413 with the limit."""
    return ApiError(
        413,
        f"{what} must be at most {limit} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _from_validation(error: ValidationError, *, is_openai: bool) -> ApiError:
    found = error.errors(include_url=False, include_context=False)
    # The client meant the branch of the union that matched furthest.
    top = [e for e in found if e["loc"][:1] == found[0]["loc"][:1]]
    first = max(top, key=lambda e: (e["type"] == "too_long", len(_path_of(e["loc"]))))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    path = _path_of(first["loc"])
    param = _spelled(path, is_openai=is_openai) or None
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_field")
    # Each branch of a union reports its expectation.
    same = [e["msg"] for e in found if _path_of(e["loc"]) == path]
    expected = ", or ".join(dict.fromkeys(m[:1].lower() + m[1:] for m in same))
    value = first["input"]
    if isinstance(value, str):
        value = shorten(value)  # before its repr is made
    given = "" if isinstance(value, (dict, list)) else f" but got {value!r}"
    where = param or "the body"
    return ApiError(400, f"{where}: {shorten(expected + given)}", param=param, code="invalid_value")


def _path_of(path: Sequence[int | str]) -> list[int | str]:
    """The path of a field as the client wrote it: without the branches of unions."""
    names = [p for p in path if isinstance(p, int) or (p.isidentifier() and p not in _BRANCHES)]
    return names[:8]


def _spelled(path: Sequence[int | str], *, is_openai: bool) -> str:
    """A path in the notation of an API: ``messages[0].role`` in OpenAI's, ``messages.0.role`` in
    Anthropic's."""
    text = ".".join(map(str, path))
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", text) if is_openai else text


def _check_unknown(body: BaseModel, config: ServerConfig, request_id: str) -> None:
    names = list(itertools.islice(_unknown(body), _MAX_NAMED_FIELDS))
    if not names:
        return
    shown = [shorten(name, 64) for name in names]
    if config.strict_requests:
        raise ApiError(400, f"unknown field {shown[0]!r}", param=shown[0], code="unknown_parameter")
    logger.warning("unknown fields %s", shown, extra={"request_id": request_id})


def _unknown(body: BaseModel) -> Iterator[str]:
    yield from body.model_extra or ()
    for field in ("stream_options", "reasoning", "options"):
        options = getattr(body, field, None)
        if isinstance(options, BaseModel):
            yield from (f"{field}.{name}" for name in options.model_extra or ())


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
    """The conversation that a body asks about.

    Args:
        io: how the server reads media.

    Raises:
        ApiError: 400 for content of another kind, and for fields that contradict each other.
        InvalidParameterError: a part that cannot be.
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
    """Returns how to read the media of a body if their parts do not say."""
    found = defaults.with_(body.media_io_kwargs)
    asked = found.of_clips(vars(body), _OF_VIDEOS)
    of_video = (body.media_io_kwargs or {}).get("video") or {}
    for name, option in _OF_VIDEOS.items():
        both = getattr(body, name) is not None and of_video.get(option) is not None
        if both and getattr(asked, option) != getattr(found, option):
            raise contradiction(name, f"media_io_kwargs.video.{option}")
    return asked


def template_message(message: Message, index: int, io: IoOptions | None = None) -> dict[str, Any]:
    """A message of a `Conversation`: its content is one text, or texts and media.

    Raises:
        ApiError, InvalidParameterError: content of another kind.
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
    """A call of an earlier answer, its arguments as JSON text."""
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
        # There may be many, and each is looked at several times.
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
