"""Response types of Ollama's API. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.


class OllamaError(TypedDict):
    """An error, as a whole body or as a line of a stream."""

    error: str


class CalledFunction(TypedDict):
    """The function of a tool call."""

    index: int
    name: str
    arguments: dict[str, Any]


class Call(TypedDict):
    """A tool call in an answer."""

    id: str
    function: CalledFunction


class Message(TypedDict):
    """An answer to a chat, or a piece of one."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class TokenLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob):
    """A token of the answer, with alternatives."""

    top_logprobs: NotRequired[list[TokenLogprob]]


class Ending(TypedDict):
    """Fields of every answer and of every line of a stream; the optional ones come at the end."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    logprobs: NotRequired[list[Logprob]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaChatAnswer(Ending):
    """An answer to `POST /api/chat`, or a line of its stream."""

    message: Message


class GenerateAnswer(Ending):
    """An answer to `POST /api/generate`, or a line of its stream."""

    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class EmbedAnswer(TypedDict):
    """An answer to `POST /api/embed`."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsAnswer(TypedDict):
    """An answer to `POST /api/embeddings`."""

    embedding: list[float]


class Details(TypedDict):
    """A model's format, family and size."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(TypedDict):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]


class ModelTags(TypedDict):
    """An answer to `GET /api/tags`."""

    models: list[ListedModel]


class LoadedModel(TypedDict):
    """A model in memory."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class LoadedModels(TypedDict):
    """An answer to `GET /api/ps`."""

    models: list[LoadedModel]


class ShownModel(TypedDict):
    """An answer to `POST /api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    """An answer to `GET /api/version`."""

    version: str


class PullStatus(TypedDict):
    """A line of `POST /api/pull`, or its whole answer.

    total, completed: Bytes of the model's files, and of those that are on this machine.
    """

    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]
