"""Bodies of requests with OpenAI's and vLLM's names: read, validated, converted for the engine.

A body's fields work or are refused; they are never ignored. A new field that `SamplingParams` has,
too, is one entry here. Any other is an entry here, and a line in the code that uses it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from mlx_paged.engine.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from mlx_paged.multimodal.items import Content
from mlx_paged.multimodal.options import IoOptions
from mlx_paged.multimodal.parts import URL_PARTS, is_media, source_of
from mlx_paged.parsing.custom import arguments_of
from mlx_paged.server.body_bounds import MAX_TOKEN_IDS, BodyBounds
from mlx_paged.server.config import (
    MAX_SEQUENCES_PER_REQUEST,
    GenerationDefaults,
    ServerConfig,
)
from mlx_paged.server.context import context_of, request_log_of
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.documents import read_documents
from mlx_paged.server.errors import ApiError, bad_request, shorten, speaks_anthropic
from mlx_paged.server.request_fields import REFUSED
from mlx_paged.server.tool_requests import (
    MAX_TOOLS,
    CallBody,
    CallFunction,
    FunctionBody,
    NamedFunction,
    ResponseFormat,
    ToolBody,
    ToolChoiceBody,
    tools_of,
)

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
# A list fails at its first wrong entry, because reporting a hundred thousand would take seconds.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Label = Annotated[str, Field(max_length=512)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MaxTokens = Annotated[int, Field(ge=1, lt=1 << 31)]
NumLogprobs = Annotated[int, Field(ge=0)]

_OLDER = "An older name of a field of structured_outputs."
_MAX_NAMED_FIELDS = 8
_SCANNED_AT_ONCE = 1 << 13  # bytes of a body
_TURN = 0.002  # seconds of scanning after which other tasks run
# Names that pydantic puts into the path of a field for the branches of a union.
_BRANCHES = frozenset(
    {"str", "int", "float", "bool", "ToolChoiceBody", "ToolChoiceObject", "NamedFunction"}
)


def _what_works_first(schema: dict[str, Any]) -> None:
    """Orders fields in documents: a class's own, then those of its bases, refused ones last."""
    refused = Unsupported.model_fields
    properties = schema.get("properties", {})
    schema["properties"] = dict(sorted(properties.items(), key=lambda item: item[0] in refused))


class Body(BaseModel):
    """A request's body.

    Types are strict ("5" is no number), and numbers must be finite. Unknown fields stay in
    `model_extra`; the server logs them, or refuses them under ``--strict-requests``.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=_what_works_first
    )


class StreamOptions(Body):
    """Options for the extra contents of a stream."""

    include_usage: bool | None = Field(None, description="Send usage in a last chunk.")
    continuous_usage_stats: bool | None = Field(None, description="Send usage in every chunk.")
    include_obfuscation: Literal[False] | None = None


class Unsupported(Body):
    """Hints, and fields that are refused (`server.request_fields`)."""

    prediction: Any = Field(None, description="A hint.")
    service_tier: Label | None = Field(None, description="A hint: there is one tier.")
    prompt_cache_key: Label | None = Field(
        None, description="A hint for the placement of requests; there is one cache here."
    )
    prompt_cache_options: Any = Field(None, description="A hint.")
    prompt_cache_retention: Label | None = Field(None, description="A hint.")
    session_id: Label | None = Field(None, description="A hint.")
    return_token_offsets: bool | None = Field(None, description="Means nothing here.")
    return_mm_kwargs: bool | None = Field(None, description="Means nothing here.")
    store: bool | None = Field(
        None, description="Taken, and nothing is stored: this API cannot ask for it again."
    )

    audio: Any = Field(None, description="Not supported: 400.")
    modalities: list[str] | None = Field(None, description='Only ["text"].')
    web_search_options: Any = Field(None, description="Not supported: 400.")
    moderation: Any = Field(None, description="Not supported: 400.")
    prompt_embeds: Any = Field(None, description="Not supported: 400.")
    use_beam_search: bool | None = Field(None, description="true is not supported: 400.")
    length_penalty: float | None = Field(None, description="Of beam search: only 1.")
    logits_processors: Any = Field(None, description="Not supported: 400.")
    mm_processor_kwargs: Any = Field(None, description="Not supported: 400.")
    kv_transfer_params: Any = Field(None, description="Not supported: 400.")
    ec_transfer_params: Any = Field(None, description="Not supported: 400.")
    vllm_xargs: Any = Field(None, description="Not supported: 400.")
    watermarking: bool | None = Field(None, description="true is not supported: 400.")
    repetition_detection: Any = Field(None, description="Not supported: 400.")
    routed_experts_prompt_start: int | None = Field(None, description="Only 0.")
    return_prompt_text: bool | None = Field(None, description="true is not supported: 400.")

    #: Refused in addition to `REFUSED` if given at all; [] does not count.
    refused: ClassVar[tuple[str, ...]] = ()

    def unsupported(self) -> tuple[str, str] | None:
        """The first field that asks for such a feature, and why it is refused."""
        for name in self.refused:
            value = getattr(self, name)
            if value is not None and value != []:
                return name, f"{name} is not supported by this server"
        for name, allowed, reason in REFUSED:
            value = getattr(self, name)
            if value is not None and not any(_is_same(value, each) for each in allowed):
                values = " or ".join(json.dumps(each) for each in (*allowed, None) if each != [])
                return name, f"{name} must be {values}: {reason}"
        return None


def _is_same(value: Any, other: Any) -> bool:
    """Equality that tells false from 0, and true from 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


class GenerationBody(Unsupported):
    """Fields that chat and plain completions share. null means the default everywhere."""

    model: str | None = Field(None, description="A served name; null and default: the first.")

    # Sampling.
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        None, description="0 is greedy; 1 by default, unless the model has a default of its own."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(
        None, description="0 and -1: all tokens."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=4096)] | None = Field(
        None, description="Token id (as a string) to what is added to its logit."
    )
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        None, description="Nothing but these tokens is generated."
    )
    bad_words: Annotated[list[StopString], Field(max_length=256)] | None = Field(
        None, description="Texts that are not generated."
    )
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = Field(
        None, description="Makes a sampled answer repeatable."
    )
    n: Annotated[int, Field(ge=1, le=256)] | None = None

    # The end of an answer.
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None

    # The format of the answer's text.
    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, json_schema, or vLLM's structural_tag."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="vLLM's: one of json, regex, choice, grammar, json_object, structural_tag.",
    )
    guided_json: dict[str, Any] | str | None = Field(None, description=_OLDER)
    guided_json_object: bool | None = Field(None, description=_OLDER)
    guided_regex: str | None = Field(None, description=_OLDER)
    guided_choice: list[str] | None = Field(None, description=_OLDER)
    guided_grammar: str | None = Field(None, description=_OLDER)
    guided_whitespace_pattern: str | None = Field(None, description=_OLDER)
    guided_decoding_backend: str | None = Field(None, description='Only "auto" or "guidance".')
    structural_tag: dict[str, Any] | str | None = Field(None, description=_OLDER)
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(
        None, description="Most tokens of reasoning; its end is forced. -1: any number."
    )

    # The contents of the answer.
    logprob_token_ids: (
        Annotated[TokenIds, Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None
    ) = Field(
        None,
        description="Alternatives are these tokens, not the likeliest; needs log-probabilities.",
    )
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Log-probabilities of the prompt, and of so many alternatives."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; true by default."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="true needs skip_special_tokens: this server adds no spaces."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens "token_id:7" in log-probabilities.'
    )
    return_token_ids: bool | None = Field(None, description="Token ids beside the text.")

    # Streaming.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, lt=1 << 31)] | None = Field(
        None, description="Tokens of a chunk, if that is more than --stream-interval."
    )

    # The request as such.
    user: Label | None = Field(None, description="Logged.")
    safety_identifier: Label | None = Field(None, description="Logged.")
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = Field(
        None, description="Logged."
    )
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = Field(
        None, description="Lower is served first; needs --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Requests of different salts share no cached blocks."
    )
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = Field(
        None, description="Instead of the X-Request-Id header."
    )

    # The prompt.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Keep only so many of the last tokens; -1: as many as the model takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="right keeps the first tokens instead."
    )


MediaUrl = str | dict[str, Any]


class ContentPart(Body):
    """A part of a message: a text, or, for models that take them, an image, a video or a sound."""

    type: str = Field(
        description="text, image_url, video_url, audio_url, input_audio or file; input_image, "
        "image, video and audio too."
    )
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | None = Field(
        None, description='A URL (data:, https:, ...), or {"url": ..., "detail": ...}.'
    )
    video_url: MediaUrl | None = Field(None, description='A URL, or {"url": ...}.')
    audio_url: MediaUrl | None = Field(None, description='A URL, or {"url": ...}.')
    image: MediaUrl | None = Field(None, description="Of an image part: a URL.")
    video: MediaUrl | None = Field(None, description="Of a video part: a URL.")
    audio: MediaUrl | None = Field(None, description="Of an audio part: a URL.")
    url: str | None = Field(None, description="Of an image, video or audio part.")
    input_audio: dict[str, Any] | None = Field(
        None, description='{"data": in base64, "format": "wav", "mp3", ...}.'
    )
    detail: str | None = Field(None, description="Of an input_image; low makes it smaller.")
    file_id: str | None = Field(None, description="Not supported: 400.")
    file: dict[str, Any] | None = Field(
        None, description='Of a file: {"filename", "file_data"}; a PDF, or text, in base64.'
    )
    fps: float | None = Field(None, description="Of a video: frames a second, at most.")
    num_frames: int | None = Field(None, description="Of a video: frames, at most.")
    max_frames: int | None = Field(None, description="num_frames in Qwen's words; nframes too.")
    nframes: int | None = None
    uuid: str | None = Field(None, description="Of media; it stands for no content: no effect.")


class Message(Body):
    """One message of a conversation; fields that the template knows are handed to it."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning: str | None = Field(None, description="Of an answer; reasoning_content too.")
    reasoning_content: str | None = None
    tool_calls: Annotated[list[CallBody], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: CallFunction | None = Field(None, description="tool_calls, before they were.")
    refusal: str | None = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class MediaFields(Body):
    """How the media of a conversation are read."""

    media_io_kwargs: dict[str, Any] | None = Field(
        None, description='How media are read: {"video": {"num_frames": 8}}.'
    )
    video_fps: float | None = Field(None, description="Of all videos: frames a second, at most.")
    video_max_frames: int | None = Field(None, description="Of all videos: frames, at most.")
    max_frames: int | None = Field(None, description="video_max_frames too.")


class ChatReasoning(Body):
    """About the reasoning of an answer, as the Responses API and OpenRouter have it."""

    effort: Label | None = Field(None, description="The same as reasoning_effort.")
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="The same as thinking_token_budget."
    )
    enabled: bool | None = Field(None, description="The same as enable_thinking.")
    exclude: bool | None = Field(None, description="true: include_reasoning is false.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="A hint: the reasoning comes as it is."
    )


class ChatBody(GenerationBody, MediaFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    functions: Annotated[list[FunctionBody], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="tools, before they were."
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    include_reasoning: bool | None = Field(None, description="false leaves reasoning out.")
    enable_thinking: bool | None = Field(None, description="Handed to the template.")
    max_tokens: MaxTokens | None = Field(None, description="null: as many as the context allows.")
    max_completion_tokens: MaxTokens | None = Field(None, description="OpenAI's newer name.")
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives; needs logprobs.")
    echo: bool | None = Field(
        None, description="Begin with the last message, where it is the assistant's."
    )
    add_special_tokens: bool | None = Field(
        None, description="Those that the tokenizer adds to a text; null: as transformers does it."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message; needs add_generation_prompt false."
    )
    chat_template: str | None = Field(
        None, description="Jinja source; needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = Field(None, description="Handed to the template.")
    reasoning_effort: str | None = Field(
        None, description="Handed to the template; none turns reasoning off."
    )
    reasoning: ChatReasoning | None = Field(
        None, description='{"effort": ...}: another form of reasoning_effort and its like.'
    )
    verbosity: str | None = Field(None, description="A hint; handed to the template.")

    @model_validator(mode="after")
    def _take_reasoning(self) -> ChatBody:
        """Sets the fields that `reasoning` stands for.

        Raises:
            ApiError: 400 for a field that is given in both forms with different values.
        """
        given = self.reasoning
        if given is None:
            return self
        for name, other, value in (
            ("effort", "reasoning_effort", given.effort),
            ("max_tokens", "thinking_token_budget", given.max_tokens),
            ("enabled", "enable_thinking", given.enabled),
            ("exclude", "include_reasoning", None if given.exclude is None else not given.exclude),
        ):
            if value is not None and getattr(self, other) not in (None, value):
                raise contradiction(f"reasoning.{name}", other)
            if value is not None:
                setattr(self, other, value)
        return self


class DocumentBody(Body):
    """`POST /extract_text`."""

    data: str = Field(description="The bytes of a PDF, in base64.")


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    refused: ClassVar[tuple[str, ...]] = (*GenerationBody.refused, "tools", "functions")

    tools: list[Any] | None = Field(None, description="Of chats only: 400.")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="There are no tools.")
    parallel_tool_calls: bool | None = Field(None, description="Means nothing without tools.")
    functions: list[Any] | None = Field(None, description="Of chats only: 400.")
    function_call: Literal["none", "auto"] | None = Field(None, description="Like tool_choice.")

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_SEQUENCES_PER_REQUEST, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_SEQUENCES_PER_REQUEST, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="16 by default; 0 only with echo."
    )
    best_of: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="Generate so many, return the n likeliest."
    )
    logprobs: NumLogprobs | None = None
    echo: bool | None = Field(None, description="Begin with the prompt.")
    suffix: str | None = Field(None, description="Not supported: 400.")
    max_completion_tokens: MaxTokens | None = Field(None, description="The same as max_tokens.")
    verbosity: Literal["medium"] | None = Field(None, description="There is no template to tell.")
    add_special_tokens: bool | None = Field(
        None, description="Those that the tokenizer adds to a text; true by default."
    )


class TokenizeBody(MediaFields):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="true by default for a prompt; for messages as in a chat."
    )
    add_generation_prompt: bool | None = Field(None, description="Of messages only, as the rest.")
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


async def read_body(request: Request, model: type[B]) -> B:
    """The body of a request that the server can take now, validated.

    Raises:
        ApiError: 400 with the field, 404 for a model that is not served, 408, 413 or 415, 503 while
            the server takes no requests.
    """
    context, trace = context_of(request), request_log_of(request)
    context.check_takes_requests()
    check_content(request)
    limit = context.models.max_model_len
    bounds = BodyBounds(max(MAX_TOKEN_IDS, limit or 0), limit)
    async with context.reading_body():
        raw = await _read_bytes(request, bounds)
    body = validated(request, raw, model)
    if isinstance(body, Unsupported):
        unsupported = body.unsupported()
        if unsupported is not None:
            raise bad_request(*unsupported, code="unsupported_parameter")
    if (name := getattr(body, "model", None)) is not None:
        setattr(body, "model", context.models.find(name).name)  # noqa: B010 (not every body has it)
    await read_documents(body, context.documents)
    if isinstance(body, GenerationBody):
        trace.request_id = body.request_id or trace.request_id
        trace.fields |= {"model": body.model, "stream": bool(body.stream)}
        for name in ("user", "safety_identifier", "metadata"):
            if getattr(body, name) is not None:
                trace.fields[name] = getattr(body, name)
    return body


def validated(request: Request, raw: bytes | bytearray, model: type[B]) -> B:
    """A body, or a part of one.

    Raises:
        ApiError: 400 with the field.
    """
    try:
        body = model.model_validate_json(raw)
    except ValidationError as error:
        raise _from_validation(error, is_openai=not speaks_anthropic(request.scope)) from None
    _check_unknown(body, context_of(request).config, request_log_of(request).request_id)
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


async def _read_bytes(request: Request, bounds: BodyBounds) -> bytes:
    context, trace = context_of(request), request_log_of(request)
    limit, read_timeout = context.models.max_body_size, context.config.read_timeout
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
        raise ApiError(499, "the client has gone", code="client_closed") from None
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
    for field in ("stream_options", "reasoning"):
        options = getattr(body, field, None)
        if options is not None:
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


def _call(call: CallBody, index: int, place: int) -> dict[str, Any]:
    """A call of an earlier answer, its arguments as JSON text."""
    if call.custom is not None:
        function = CallFunction(
            name=call.custom.name, arguments=arguments_of(call.custom.input or "")
        )  # fmt: skip
        call = CallBody(id=call.id, function=function)
    if call.function is None:
        where = f"messages[{index}].tool_calls[{place}].function"
        raise bad_request(where, f"{where} is missing", "missing_field")
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.id or f"call_{index}_{place}",
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


def contradiction(name: str, other: str) -> ApiError:
    """400 for two fields of one meaning with different values."""
    return bad_request(name, f"{other} and {name} mean the same but say different things")


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
