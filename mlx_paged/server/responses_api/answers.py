"""Response types of `/v1/responses`, declared as in `server.responses`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged.server.responses import ContentLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TextPart(TypedDict):
    """Text of an input message, of reasoning, or of its summary."""

    type: Literal["input_text", "reasoning_text", "summary_text"]
    text: str


class OutputText(TypedDict):
    """Text of an output message."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ContentLogprob]


class MessageItem(TypedDict):
    """A message of the input or the output."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: str
    content: list[OutputText | TextPart]


class ReasoningItem(TypedDict):
    """Reasoning. Its text is in `summary` if a summary was requested, else in `content`."""

    id: str
    type: Literal["reasoning"]
    summary: list[TextPart]
    content: NotRequired[list[TextPart]]
    encrypted_content: NotRequired[str | None]
    status: NotRequired[ItemStatus]


class FunctionCallItem(TypedDict):
    """A call of a function, which may be in a namespace."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class FunctionCallOutputItem(TypedDict):
    """The output of a function."""

    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str | list[TextPart]


class CustomCallItem(TypedDict):
    """A call of a custom tool, which may be in a namespace."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


class CustomCallOutputItem(TypedDict):
    """The output of a custom tool."""

    id: str
    type: Literal["custom_tool_call_output"]
    status: ItemStatus
    call_id: str
    output: str | list[TextPart]


class OtherItem(TypedDict):
    """An item of the input that is ignored."""

    id: str
    type: Literal["web_search_call"]
    status: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputDetails(TypedDict):
    """Parts of `input_tokens`: read from the prefix cache, and written to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Parts of `output_tokens`."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class Response(TypedDict):
    """`POST /v1/responses` and `GET /v1/responses/{id}`. Repeats the fields of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseError | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """An event of a streamed response; its type determines its other fields."""

    type: str
    sequence_number: int


class Deleted(TypedDict):
    """`DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """`GET /v1/responses/{id}/input_items`."""

    object: Literal["list"]
    data: list[OutputItem | FunctionCallOutputItem | CustomCallOutputItem | OtherItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    """`POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int
