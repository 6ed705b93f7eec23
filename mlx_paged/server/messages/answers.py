"""Response, event and error types of Anthropic's API; declared as in `server.responses`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

#: Why an answer ended. Anthropic's "refusal" does not occur, because this server refuses nothing.
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class OutputDetails(TypedDict):
    """Parts of `output_tokens`."""

    thinking_tokens: int


class Usage(TypedDict):
    """Tokens of a request. A prompt has `input_tokens` and `cache_read_input_tokens`."""

    input_tokens: int
    # Prefixes are always cached, so nothing counts as the creation of a cache entry.
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputDetails]
    service_tier: NotRequired[Literal["standard"]]


class Block(TypedDict):
    """A content block of an answer: text, thinking, or a tool use."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageAnswer(TypedDict):
    """An answer to `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class Delta(TypedDict, total=False):
    """Further content of a block, or how the message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str
    thinking: str
    signature: str
    partial_json: str
    stop_reason: StopReason | None
    stop_sequence: str | None


class ErrorCause(TypedDict):
    """Machine-readable cause of an error."""

    error_code: str


class ErrorDetail(TypedDict):
    """The error."""

    type: str
    message: str
    details: NotRequired[ErrorCause]


class MessageError(TypedDict):
    """Anthropic's error body."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: NotRequired[str]


class MessageEvent(TypedDict):
    """An event of a stream. `index` counts the blocks."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: NotRequired[MessageAnswer]
    index: NotRequired[int]
    content_block: NotRequired[Block]
    delta: NotRequired[Delta]
    usage: NotRequired[Usage]
    error: NotRequired[ErrorDetail]
    request_id: NotRequired[str]


class TokenCount(TypedDict):
    """An answer to `POST /v1/messages/count_tokens`."""

    input_tokens: int


class ModelInfo(TypedDict):
    """A served name, in the form of Anthropic's list of models."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: NotRequired[int | None]  # unknown while the model loads
    max_tokens: NotRequired[int | None]


class ModelPage(TypedDict):
    """All served names, on one page."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str
    last_id: str
