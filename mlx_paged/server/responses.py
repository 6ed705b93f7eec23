"""Bodies of answers: built by endpoints, and described in the OpenAPI document.

They are dicts with declared fields, because some are built for every token and a pydantic model
costs three times as much. mypy checks the code that builds them; tests validate the sent bodies.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged import __version__

FINGERPRINT = f"mlx-paged-{__version__}"

#: Why an answer ended. Any other reason is an error.
Reason = Literal["stop", "length", "tool_calls", "function_call"]


class ErrorDetail(TypedDict):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """OpenAI's error body."""

    error: ErrorDetail


class CacheMissDetails(TypedDict):
    """Why more tokens of a prompt were not cached; an extension."""

    reason: str
    shared_tokens: int
    message: str


class PromptDetails(TypedDict):
    """Parts of `prompt_tokens`."""

    cached_tokens: int
    cache_miss: NotRequired[CacheMissDetails]


class CompletionDetails(TypedDict):
    """Parts of `completion_tokens`."""

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]


class TokenLogprob(TypedDict):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A token of an answer, with its likeliest alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's choice."""

    content: list[ContentLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """A token of a prompt, or one of its alternatives."""

    logprob: float
    rank: int
    decoded_token: str


#: By token id for each token of a prompt; null for the first token, which follows nothing.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(TypedDict):
    """The function of a call, with its arguments as JSON text."""

    name: str
    arguments: str


class CalledCustom(TypedDict):
    """The custom tool of a call, and its input."""

    name: str
    input: str


class ToolCall(TypedDict):
    """An answer's call of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[CalledFunction]
    custom: NotRequired[CalledCustom]


class AnswerMessage(TypedDict):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[CalledFunction]


class ChatChoice(TypedDict):
    """One of n answers. It has `token_ids` if they were requested."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class Answer(TypedDict):
    """Fields that all answers begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatAnswer(Answer):
    """`POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class FunctionDelta(TypedDict):
    """The next part of a call: its name at first, then pieces of its arguments."""

    name: NotRequired[str]
    arguments: str


class CustomDelta(TypedDict):
    """The next part of a custom tool's call: its name at first, then pieces of its input."""

    name: NotRequired[str]
    input: str


class ToolCallDelta(TypedDict):
    """The next part of the call at an index."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomDelta]


class Delta(TypedDict, total=False):
    """The next part of a choice."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]
    function_call: FunctionDelta


class ChunkChoice(TypedDict):
    """A part of a choice. The last one has `finish_reason` and `stop_reason`."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(Answer):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobsAnswer(TypedDict):
    """Log-probabilities of a plain completion's choice: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One of n answers to one of the prompts, or in a stream a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None
    finish_reason: Reason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class CompletionAnswer(Answer):
    """`POST /v1/completions`, and an event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    """A name of the model. Optional fields are unknown while it loads."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: NotRequired[int | None]
    input_modalities: NotRequired[list[str]]


class ModelList(TypedDict):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """`POST /tokenize`."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """`POST /detokenize`."""

    prompt: str


class Status(TypedDict):
    """`/health`, `/live`, `/ready`."""

    status: Literal["loading", "ready", "draining", "dead", "short_of_memory"]


class Version(TypedDict):
    """`GET /version`."""

    version: str
    mlx_version: str
    mlx_lm_version: str
    backends: str


class Load(TypedDict):
    """`GET /load`."""

    server_load: int


class Reset(TypedDict):
    """`POST /reset_prefix_cache`."""

    num_blocks: int


class DocumentText(TypedDict):
    """`POST /extract_text`."""

    text: str
    num_pages: int


class MediaLimit(TypedDict):
    """The limits of one kind of media in a prompt."""

    max_items: int
    max_bytes: int


class MediaInfo(TypedDict):
    """The media that prompts may have.

    `kinds` is empty for a model that accepts only text; `reason` says why.
    """

    kinds: dict[str, MediaLimit]
    max_image_pixels: int
    image_types: list[str]
    reason: str | None
    pdf: PdfInfo


class PdfInfo(TypedDict):
    """PDFs that the server extracts text from; `reason` says why it reads none."""

    max_bytes: int
    max_pages: int
    reason: str | None


class ParsingInfo(TypedDict):
    """The formats of answers.

    Attributes:
        tool_calls: Name of the format of tool calls; "derived" from the chat template.
        tool_call_syntax: An example of a derived call.
        no_tool_calls: Why no format is known.
        reasoning: Name of the reasoning format.
        reasoning_markers: Markers around reasoning.
    """

    tool_calls: str | None
    tool_call_syntax: str | None
    no_tool_calls: str | None
    reasoning: str | None
    reasoning_markers: list[str] | None


class ReplicaInfo(TypedDict):
    """One of several processes that serve a model."""

    replica: int
    status: str
    uptime_seconds: float
    stats: dict[str, Any] | None


class ServerInfo(TypedDict):
    """`GET /server_info`. It has the engine's fields if the engine answers."""

    version: str
    status: str
    uptime_seconds: float
    config: dict[str, Any]
    build: dict[str, str]
    generation_defaults: NotRequired[dict[str, Any]]
    engine_config: NotRequired[dict[str, Any]]
    parsing: NotRequired[ParsingInfo]
    media: NotRequired[MediaInfo]
    stats: NotRequired[dict[str, Any]]
    replicas: NotRequired[list[ReplicaInfo]]
