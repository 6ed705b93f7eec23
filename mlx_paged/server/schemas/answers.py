"""The bodies of answers, for the OpenAPI document and for the tests that hold us to it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's error body."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of `prompt_tokens`."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TokenLogprob(BaseModel):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ContentLogprob(TokenLogprob):
    """A token of an answer, with its likeliest alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat's choice."""

    content: list[ContentLogprob] | None
    refusal: None = None


class AnswerMessage(BaseModel):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class Answer(BaseModel):
    """What all answers begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatAnswer(Answer):
    """`POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Delta(BaseModel):
    """What a choice gained."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """A part of a choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Answer):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None


class CompletionLogprobsAnswer(BaseModel):
    """Log-probabilities of a plain completion's choice: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One of n answers to one of the prompts, or in a stream a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionAnswer(Answer):
    """`POST /v1/completions`, and an event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """A name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """`POST /tokenize`."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    """`POST /detokenize`."""

    prompt: str


class Status(BaseModel):
    """`/health`, `/live`, `/ready`."""

    status: Literal["loading", "ready", "draining", "dead"]


class Version(BaseModel):
    """`GET /version`."""

    version: str
    mlx_version: str
    mlx_lm_version: str
    backends: str


class Reset(BaseModel):
    """`POST /reset_prefix_cache`."""

    num_blocks: int


class ServerInfo(BaseModel):
    """`GET /server_info`."""

    version: str
    status: str
    uptime_seconds: float
    config: dict[str, Any]
    build: dict[str, str]
    generation_defaults: dict[str, Any] | None = None
    engine_config: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None
