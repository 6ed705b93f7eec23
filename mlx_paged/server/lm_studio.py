"""LM Studio's API, `/api/v0`: lists models, and adds statistics to OpenAI's answers."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged import __version__
from mlx_paged.server import chat, completions, responses
from mlx_paged.server.bodies import ChatBody, CompletionBody
from mlx_paged.server.catalog import ModelState, ModelStatus, catalog_of
from mlx_paged.server.generation import Generation
from mlx_paged.server.model_details import ModelDetails, details_of
from mlx_paged.server.streaming import respond
from mlx_paged.server.turn import PreparedTurn

# --- Bodies and answers ---------------------------------------------------------------------------

# LM Studio's -1 means no limit.
_MaxTokens = Annotated[int, Field(ge=-1, lt=1 << 31)]
_TTL = "How long a model stays that a request has loaded; no effect here."


class StudioChatBody(ChatBody):
    """`POST /api/v0/chat/completions`."""

    max_tokens: _MaxTokens | None = Field(
        None, description="null and -1: as many as the context allows."
    )
    ttl: Annotated[int, Field(ge=0)] | None = Field(None, description=_TTL)

    @model_validator(mode="after")
    def _take_no_limit(self) -> StudioChatBody:
        self.max_tokens = None if self.max_tokens == -1 else self.max_tokens
        return self


class StudioCompletionBody(CompletionBody):
    """`POST /api/v0/completions`."""

    ttl: Annotated[int, Field(ge=0)] | None = Field(None, description=_TTL)


class StudioModel(TypedDict):
    """A model."""

    id: str
    object: Literal["model"]
    type: Literal["llm", "vlm", "embeddings"]
    publisher: str
    arch: str
    compatibility_type: Literal["mlx", "gguf"]
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int
    loaded_context_length: NotRequired[int]
    capabilities: NotRequired[list[Literal["tool_use"]]]


class StudioModels(TypedDict):
    """All models."""

    object: Literal["list"]
    data: list[StudioModel]


class Stats(TypedDict):
    """Speed of an answer. Times are in seconds."""

    tokens_per_second: float
    time_to_first_token: float
    generation_time: float
    stop_reason: Literal["eosFound", "stopStringFound", "maxPredictedTokensReached", "toolCalls"]


class ModelInfo(TypedDict):
    """The model that answered."""

    arch: str
    quant: str
    format: Literal["mlx", "gguf"]
    context_length: int


class Runtime(TypedDict):
    """The program that answered."""

    name: Literal["mlx-paged"]
    version: str
    supported_formats: list[str]


class Extras(TypedDict):
    """Fields that LM Studio adds to OpenAI's answers. In a stream, the last chunk of a choice has
    them."""

    stats: Stats
    model_info: ModelInfo
    runtime: Runtime


class StudioChatAnswer(responses.ChatAnswer, Extras):
    """An answer to `POST /api/v0/chat/completions`."""


class StudioCompletionAnswer(responses.CompletionAnswer, Extras):
    """An answer to `POST /api/v0/completions`."""


# --- Models ---------------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    """Lists all models, loaded or not."""
    data = [await _model(status, status.name) for status in catalog_of(request).statuses()]
    return JSONResponse(StudioModels(object="list", data=data))


async def model(request: Request) -> Response:
    """Describes one model."""
    name = request.path_params["model"]
    return JSONResponse(await _model(catalog_of(request).status(name), name))


async def _model(status: ModelStatus, name: str) -> StudioModel:
    details = await asyncio.to_thread(details_of, status)
    is_loaded = status.state is ModelState.LOADED
    reads_images = "image" in status.input_modalities or "vision" in details.modalities
    found: StudioModel = {
        "id": name,
        "object": "model",
        "type": "embeddings" if details.embeds else "vlm" if reads_images else "llm",
        "publisher": _publisher(status.path),
        "arch": details.family,
        "compatibility_type": _format(details),
        "quantization": details.quantization,
        "state": "loaded" if is_loaded else "not-loaded",
        "max_context_length": details.context_len or status.max_model_len or 0,
    }
    if is_loaded and status.max_model_len:
        found["loaded_context_length"] = status.max_model_len
    if details.takes_tools:
        found["capabilities"] = ["tool_use"]
    return found


def _publisher(path: str | None) -> str:
    """Returns the owner of a hub id; "" for a path."""
    owner, slash, rest = (path or "").partition("/")
    return owner if slash and "/" not in rest and owner not in ("", ".", "..", "~") else ""


def _format(details: ModelDetails) -> Literal["mlx", "gguf"]:
    return "gguf" if details.format == "gguf" else "mlx"


# --- Answers --------------------------------------------------------------------------------------


async def chat_completions(request: Request) -> Response:
    """Answers a conversation, with statistics."""
    body, turn, generation = await chat.prepared_generation(request, StudioChatBody)
    info = await _info(request, body.model)
    adapter = StudioChatAdapter(generation, turn, body, info)
    return await respond(request, adapter, stream=bool(body.stream))


async def text_completions(request: Request) -> Response:
    """Continues prompts, with statistics."""
    body, echoes, generation = await completions.prepared_generation(request, StudioCompletionBody)
    info = await _info(request, body.model)
    adapter = StudioCompletionAdapter(generation, body, echoes, info)
    return await respond(request, adapter, stream=bool(body.stream))


async def _info(request: Request, name: str | None) -> ModelInfo:
    status = catalog_of(request).status(name)
    details = await asyncio.to_thread(details_of, status)
    return {
        "arch": details.family,
        "quant": details.quantization,
        "format": _format(details),
        "context_length": status.max_model_len or details.context_len,
    }


class StudioChatAdapter(chat.ChatAdapter):
    """Adds statistics to a chat answer.

    Args:
        info: The model that answers.
    """

    def __init__(
        self, generation: Generation, turn: PreparedTurn, body: ChatBody, info: ModelInfo
    ) -> None:
        super().__init__(generation, turn, body)
        self._info = info

    def whole(self) -> StudioChatAnswer:
        return {**super().whole(), **self._extras()}

    def chunk(self, choices: list[Any]) -> Any:
        chunk = super().chunk(choices)
        return {**chunk, **self._extras()} if _ends(choices) else chunk

    def _extras(self) -> Extras:
        extras = _extras(self.generation, self._info)
        if extras["stats"]["stop_reason"] == "eosFound" and self.has_calls:
            extras["stats"]["stop_reason"] = "toolCalls"
        return extras


class StudioCompletionAdapter(completions.CompletionAdapter):
    """Adds statistics to completions.

    Args:
        info: The model that answers.
    """

    def __init__(
        self, generation: Generation, body: CompletionBody, echoes: list[str], info: ModelInfo
    ) -> None:
        super().__init__(generation, body, echoes)
        self._info = info

    def whole(self) -> StudioCompletionAnswer:
        return {**super().whole(), **_extras(self.generation, self._info)}

    def chunk(self, choices: list[Any]) -> Any:
        chunk = super().chunk(choices)
        return {**chunk, **_extras(self.generation, self._info)} if _ends(choices) else chunk


def _ends(choices: list[Any]) -> bool:
    """True for the chunk that ends a choice. Choices of a whole answer are lazy, and not a list."""
    return isinstance(choices, list) and any(choice["finish_reason"] for choice in choices)


def _extras(generation: Generation, info: ModelInfo) -> Extras:
    return {
        "stats": _stats(generation),
        "model_info": info,
        "runtime": {
            "name": "mlx-paged",
            "version": __version__,
            "supported_formats": ["mlx", "gguf"],
        },
    }


def _stats(generation: Generation) -> Stats:
    """Measures the first answer to the first prompt."""
    output = generation.outputs[0]
    answer, times, now = output.outputs[0], output.metrics, time.monotonic()
    first = times.first_token_time or now
    took = max(1e-9, (times.finished_time or now) - first)
    reason = "eosFound"
    if answer.finish_reason is not None and answer.finish_reason.value == "length":
        reason = "maxPredictedTokensReached"
    elif isinstance(answer.stop_reason, str):
        reason = "stopStringFound"
    return {
        "tokens_per_second": len(answer.token_ids) / took,
        "time_to_first_token": first - times.arrival_time,
        "generation_time": took,
        "stop_reason": cast(Any, reason),
    }
