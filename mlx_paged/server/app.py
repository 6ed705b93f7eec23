"""The application: all paths, the middleware of all requests, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from mlx_paged import __version__
from mlx_paged.engine.client import EngineClient
from mlx_paged.server import (
    abort,
    bodies,
    cohere,
    endpoints,
    lm_studio,
    lora,
    pooling,
    pooling_bodies,
    render,
    requests,
    responses,
    shell,
)
from mlx_paged.server.batches import bodies as batch_bodies
from mlx_paged.server.batches import endpoints as batches
from mlx_paged.server.batches import messages as message_batches
from mlx_paged.server.batches.runner import SPARE
from mlx_paged.server.batches.setup import add_batches, start_batches
from mlx_paged.server.catalog import OneModelCatalog
from mlx_paged.server.chat import chat_completions
from mlx_paged.server.completions import completions
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import Context, context_of
from mlx_paged.server.errors import message_status
from mlx_paged.server.messages import answers
from mlx_paged.server.messages import endpoints as anthropic
from mlx_paged.server.messages.bodies import CountBody, MessagesBody
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.ollama import answers as ollama_answers
from mlx_paged.server.ollama import bodies as ollama_bodies
from mlx_paged.server.ollama import changes as ollama_changes
from mlx_paged.server.ollama import embeddings as ollama_embeddings
from mlx_paged.server.ollama import endpoints as ollama
from mlx_paged.server.ollama import models as ollama_models
from mlx_paged.server.registry import ModelRegistry
from mlx_paged.server.responses_api import answers as response_answers
from mlx_paged.server.responses_api import endpoints as response_endpoints
from mlx_paged.server.responses_api import websocket as response_websocket
from mlx_paged.server.responses_api.body import InputTokensBody, ResponseBody
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.shell import Endpoint

logger = logging.getLogger(__name__)

_ERRORS = {
    "400": "A field is wrong; `param` names it.",
    "401": "No valid API key.",
    "403": "Sent by a page of another site, or to an unknown Host.",
    "404": "No such model, stored response, file or batch.",
    "408": "The body arrived too slowly.",
    "413": "The body or the file is too large.",
    "415": "The body has the wrong type, or is compressed.",
    "422": "The answer took longer than this server allows.",
    "429": "The queue is full, or a rate limit is reached; see Retry-After.",
    "500": "The server failed; its log has details under the request's id.",
    "507": "The disk is full or read-only.",
    "503": "Unavailable: loading, shutting down, or failed.",
    "529": "Unavailable: loading, shutting down, or failed.",
}
_NDJSON = "application/x-ndjson"
_GENERATION = tuple(status for status in _ERRORS if status not in ("507", "529"))
# Events of OpenAI's older APIs.
_UNNAMED = (responses.ChatChunk, responses.CompletionAnswer)
_STORED = ("400", "401", "403", "404", "500")
_ON_DISK = (*_STORED, "507")
_BODY = ("400", "401", "403", "404", "408", "413", "415", "500", "503")


class Operation(NamedTuple):
    """One method of one path.

    Attributes:
        answer: Body of status 200; None means text of `answer_type`.
        errors: Statuses with an `ErrorAnswer`.
        chunk: An event of its stream.
        refusal: Body of status 503, if that is no `ErrorAnswer`.
        runner: The runner that the engine must have; None means any. Streams need "generate".
        query: Names that the query may have.
        error: Body of its errors.
        content: Type of its body.
        stream_type: Type of a stream; "application/x-ndjson" has an answer on each line.
        of_catalog: It needs no engine, only the models' states (`server.catalog`), so a server of
            several models answers it itself.
    """

    path: str
    method: str
    endpoint: Endpoint
    summary: str
    answer: type | None
    errors: tuple[str, ...] = ("401", "403", "500")
    body: type[BaseModel] | None = None
    chunk: type | None = None
    refusal: type | None = None
    runner: str | None = None
    query: tuple[str, ...] = ()
    error: type = responses.ErrorAnswer
    content: str = "application/json"
    answer_type: str = "text/plain"
    stream_type: str = "text/event-stream"
    of_catalog: bool = False

    @property
    def needs_runner(self) -> str | None:
        """The runner that the path needs; None: any."""
        generates = self.chunk is not None and not self.of_catalog
        return "generate" if generates else self.runner


def _of_messages(statuses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(message_status(int(status))) for status in statuses)


#: The API, in the order of its documentation.
API = (
    Operation(
        "/v1/chat/completions", "POST", chat_completions, "Answer a conversation.",
        responses.ChatAnswer, _GENERATION, bodies.ChatBody, responses.ChatChunk,
    ),
    Operation(
        "/v1/completions", "POST", completions, "Continue prompts.",
        responses.CompletionAnswer, _GENERATION, bodies.CompletionBody,
        responses.CompletionAnswer,
    ),
    Operation(
        "/v1/chat/completions/render", "POST", render.render_chat,
        "Render a conversation to tokens.", render.GenerateRequest, _BODY,
        bodies.ChatBody, runner="generate",
    ),
    Operation(
        "/v1/completions/render", "POST", render.render_completion,
        "Render prompts to tokens.", list[render.GenerateRequest], _BODY,
        bodies.CompletionBody, runner="generate",
    ),
    Operation(
        "/v1/messages", "POST", anthropic.messages,
        "Answer a conversation, in Anthropic's API.",
        answers.MessageAnswer, _of_messages(_GENERATION), MessagesBody, answers.MessageEvent,
        error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/count_tokens", "POST", anthropic.count_tokens,
        "Count the tokens of a conversation.",
        answers.TokenCount, _of_messages(_BODY), CountBody, error=answers.MessageError,
    ),
    Operation(
        "/v1/responses", "POST", response_endpoints.create,
        "Answer text or items, and store the response.", response_answers.Response, _GENERATION,
        ResponseBody, response_answers.ResponseEvent,
    ),
    Operation(
        "/v1/responses/input_tokens", "POST", response_endpoints.input_tokens,
        "Count the tokens of a response's input.", response_answers.InputTokens, _BODY,
        InputTokensBody,
    ),
    Operation(
        "/v1/responses/{response_id}", "GET", response_endpoints.retrieve,
        "Get a stored response.",
        response_answers.Response, _STORED, query=("stream", "starting_after"),
    ),
    Operation(
        "/v1/responses/{response_id}", "DELETE", response_endpoints.delete,
        "Delete a stored response.", response_answers.Deleted, _STORED,
    ),
    Operation(
        "/v1/responses/{response_id}/input_items", "GET", response_endpoints.input_items,
        "List the input of a stored response.", response_answers.ItemList, _STORED,
        query=("after", "limit", "order"),
    ),
    Operation(
        "/v1/responses/{response_id}/cancel", "POST", response_endpoints.cancel,
        "Cancel a background response.", response_answers.Response, _STORED,
    ),
    Operation(
        "/v1/embeddings", "POST", pooling.embeddings, "Embed texts.",
        pooling_bodies.EmbeddingAnswer, _GENERATION, pooling_bodies.EmbeddingBody,
        runner="pooling",
    ),
    Operation(
        "/v2/embed", "POST", cohere.embed, "Embed texts, in Cohere's API.", cohere.CohereAnswer,
        _GENERATION, cohere.CohereEmbedBody, runner="pooling",
    ),
    Operation(
        "/classify", "POST", pooling.classify, "Classify texts.", pooling_bodies.ClassifyAnswer,
        _GENERATION, pooling_bodies.ClassifyBody, runner="pooling",
    ),
    Operation(
        "/pooling", "POST", pooling.pooling, "Embed texts, in vLLM's form.",
        pooling_bodies.PoolingAnswer, _GENERATION, pooling_bodies.PoolingBody, runner="pooling",
    ),
    *(
        Operation(
            f"{prefix}/score", "POST", pooling.score, "Score the similarity of texts.",
            pooling_bodies.ScoreAnswer, _GENERATION, pooling_bodies.ScoreBody, runner="pooling",
        )
        for prefix in ("", "/v1")
    ),
    *(
        Operation(
            f"{prefix}/rerank", "POST", pooling.rerank,
            "Rank documents by relevance to a query.",
            pooling_bodies.RerankAnswer, _GENERATION, pooling_bodies.RerankBody, runner="pooling",
        )
        for prefix in ("", "/v1", "/v2")
    ),
    Operation(
        "/v1/files", "POST", batches.upload, "Upload a file.", batch_bodies.FileAnswer,
        (*_BODY, "507"), batch_bodies.FileForm, content="multipart/form-data",
    ),
    Operation(
        "/v1/files", "GET", batches.list_files, "List files.", batch_bodies.FileList,
        _STORED, query=("purpose", "limit", "order", "after"),
    ),
    Operation(
        "/v1/files/{file_id}", "GET", batches.retrieve_file, "Get a file's metadata.",
        batch_bodies.FileAnswer, _STORED,
    ),
    Operation(
        "/v1/files/{file_id}/content", "GET", batches.file_content, "Get a file's content.",
        None, _STORED, answer_type="application/octet-stream",
    ),
    Operation(
        "/v1/files/{file_id}", "DELETE", batches.delete_file, "Delete a file.",
        batch_bodies.FileDeleted, _ON_DISK,
    ),
    Operation(
        "/v1/batches", "POST", batches.create_batch, "Create a batch from a file.",
        batch_bodies.BatchAnswer, (*_BODY, "429", "507"), batch_bodies.BatchBody,
    ),
    Operation(
        "/v1/batches", "GET", batches.list_batches, "List batches, newest first.",
        batch_bodies.BatchList, _STORED, query=("limit", "after"),
    ),
    Operation(
        "/v1/batches/{batch_id}", "GET", batches.retrieve_batch, "Get a batch.",
        batch_bodies.BatchAnswer, _STORED,
    ),
    Operation(
        "/v1/batches/{batch_id}/cancel", "POST", batches.cancel_batch, "Cancel a batch.",
        batch_bodies.BatchAnswer, _ON_DISK,
    ),
    Operation(
        "/v1/messages/batches", "POST", message_batches.create,
        "Create a batch of conversations.",
        message_batches.MessageBatch, _of_messages((*_BODY, "429", "507")),
        message_batches.MessageBatchBody, error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches", "GET", message_batches.list_batches,
        "List batches, newest first.", message_batches.MessageBatchList, _STORED,
        query=("limit", "after_id", "before_id"), error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches/{batch_id}", "GET", message_batches.retrieve, "Get a batch.",
        message_batches.MessageBatch, _STORED, error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches/{batch_id}", "DELETE", message_batches.delete,
        "Delete an ended batch.", message_batches.MessageBatchDeleted, _ON_DISK,
        error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches/{batch_id}/cancel", "POST", message_batches.cancel,
        "Cancel a batch.",
        message_batches.MessageBatch, _ON_DISK, error=answers.MessageError,
    ),
    Operation(
        "/v1/messages/batches/{batch_id}/results", "GET", message_batches.results,
        "Get a batch's results, one line per conversation.", None, _STORED,
        error=answers.MessageError, answer_type="application/x-jsonl",
    ),
    Operation(
        "/v1/models", "GET", endpoints.models, "List the served names.", responses.ModelList
    ),
    Operation(
        "/v1/models/{model:path}", "GET", endpoints.model, "Get a served name.",
        responses.Model, ("401", "403", "404", "500"),
    ),
    *(
        Operation(
            f"{prefix}/tokenize", "POST", endpoints.tokenize,
            "Tokenize a prompt or messages.",
            responses.Tokens, _BODY, bodies.TokenizeBody,
        )
        for prefix in ("", "/v1")
    ),
    Operation(
        "/extract_text", "POST", endpoints.extract_text, "Extract the text of a PDF.",
        responses.DocumentText, _BODY, bodies.DocumentBody,
    ),
    *(
        Operation(
            f"{prefix}/detokenize", "POST", endpoints.detokenize, "Detokenize tokens.",
            responses.Text, _BODY, bodies.DetokenizeBody,
        )
        for prefix in ("", "/v1")
    ),
    Operation(
        "/api/chat", "POST", ollama.chat, "Answer a conversation, in Ollama's API.",
        ollama_answers.OllamaChatAnswer, _GENERATION, ollama_bodies.OllamaChatBody,
        ollama_answers.OllamaChatAnswer, error=ollama_answers.OllamaError, stream_type=_NDJSON,
    ),
    Operation(
        "/api/generate", "POST", ollama.generate, "Answer a prompt, in Ollama's API.",
        ollama_answers.GenerateAnswer, _GENERATION, ollama_bodies.GenerateBody,
        ollama_answers.GenerateAnswer, error=ollama_answers.OllamaError, stream_type=_NDJSON,
    ),
    Operation(
        "/api/embed", "POST", ollama_embeddings.embed, "Embed texts, in Ollama's API.",
        ollama_answers.EmbedAnswer, _GENERATION, ollama_bodies.EmbedBody, runner="pooling",
        error=ollama_answers.OllamaError,
    ),
    Operation(
        "/api/embeddings", "POST", ollama_embeddings.embeddings,
        "Embed one text, in Ollama's older API.", ollama_answers.EmbeddingsAnswer, _GENERATION,
        ollama_bodies.EmbeddingsBody, runner="pooling", error=ollama_answers.OllamaError,
    ),
    Operation(
        "/api/tags", "GET", ollama_models.tags, "List the models.", ollama_answers.ModelTags,
        error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/ps", "GET", ollama_models.ps, "List the loaded models.",
        ollama_answers.LoadedModels, error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/show", "POST", ollama_models.show, "Describe a model.", ollama_answers.ShownModel,
        _BODY, ollama_bodies.ShowBody, error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/pull", "POST", ollama_changes.pull, "Fetch a model from the Hugging Face hub.",
        ollama_answers.PullStatus, (*_BODY, "429", "507"), ollama_bodies.PullBody,
        ollama_answers.PullStatus, error=ollama_answers.OllamaError, stream_type=_NDJSON,
        of_catalog=True,
    ),
    Operation(
        "/api/delete", "DELETE", ollama_changes.delete, "Remove a model from the hub's cache.",
        None, _BODY, ollama_bodies.DeleteBody, error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/version", "GET", ollama_models.version, "Get the version of Ollama's API.",
        ollama_answers.OllamaVersion, error=ollama_answers.OllamaError, of_catalog=True,
    ),
    Operation(
        "/api/v0/models", "GET", lm_studio.models, "List the models, in LM Studio's API.",
        lm_studio.StudioModels, of_catalog=True,
    ),
    Operation(
        "/api/v0/models/{model:path}", "GET", lm_studio.model, "Get a model, in LM Studio's API.",
        lm_studio.StudioModel, ("401", "403", "404", "500"), of_catalog=True,
    ),
    Operation(
        "/api/v0/chat/completions", "POST", lm_studio.chat_completions,
        "Answer a conversation, with LM Studio's statistics.", lm_studio.StudioChatAnswer,
        _GENERATION, lm_studio.StudioChatBody, responses.ChatChunk,
    ),
    Operation(
        "/api/v0/completions", "POST", lm_studio.text_completions,
        "Continue prompts, with LM Studio's statistics.", lm_studio.StudioCompletionAnswer,
        _GENERATION, lm_studio.StudioCompletionBody, responses.CompletionAnswer,
    ),
    Operation(
        "/api/v0/embeddings", "POST", pooling.embeddings, "Embed texts, in LM Studio's API.",
        pooling_bodies.EmbeddingAnswer, _GENERATION, pooling_bodies.EmbeddingBody,
        runner="pooling",
    ),
    Operation(
        "/health", "GET", endpoints.health, "Check that requests are answered.", responses.Status,
        (), refusal=responses.Status,
    ),
    *(
        Operation(
            "/ping", method, endpoints.health,
            "Check that requests are answered, for SageMaker.", responses.Status, (),
            refusal=responses.Status,
        )
        for method in ("GET", "POST")
    ),
    Operation(
        "/live", "GET", endpoints.live, "Liveness: fails if the process should be replaced.",
        responses.Status, (), refusal=responses.Status,
    ),
    Operation(
        "/ready", "GET", endpoints.ready,
        "Readiness: succeeds while new requests are accepted.", responses.Status, (),
        refusal=responses.Status,
    ),
    Operation("/version", "GET", endpoints.version, "Get versions.", responses.Version),
    Operation("/metrics", "GET", endpoints.metrics, "Get Prometheus metrics.", None),
    Operation(
        "/load", "GET", endpoints.load, "Count running requests.", responses.Load
    ),
    Operation(
        "/server_info", "GET", endpoints.server_info, "Get options and state.", responses.ServerInfo
    ),
    Operation(
        "/abort_requests", "POST", abort.abort_requests, "Abort requests by id.",
        abort.Aborted, _BODY, abort.AbortBody,
    ),
    Operation(
        "/reset_prefix_cache", "POST", endpoints.reset_prefix_cache,
        "Drop all cached prefixes.",
        responses.Reset, ("401", "403", "500", "503"),
    ),
    Operation(
        "/v1/load_lora_adapter", "POST", lora.load_adapter,
        "Load a LoRA adapter, or replace one.", None, _BODY, lora.LoadLoraBody,
    ),
    Operation(
        "/v1/unload_lora_adapter", "POST", lora.unload_adapter,
        "Unload a LoRA adapter.", None, _BODY, lora.UnloadLoraBody,
    ),
)  # fmt: skip


def create_app(engine: EngineClient, config: ServerConfig, address: str = "127.0.0.1") -> Starlette:
    """Returns the application for an engine.

    It does not wait for the model. While that loads, requests and `/health` get 503.

    Args:
        engine: The caller shuts it down.
        address: The address that the server listens on.
    """
    models = ModelRegistry(ServedModel(engine, config), config)
    context = Context(config, Metrics(), models=models)
    if config.otlp_traces_endpoint is not None:
        from mlx_paged.server.tracing import Tracing

        context.tracing = Tracing(config.otlp_traces_endpoint, config.model_name)
    shell.add_tools(context)

    async def start() -> None:
        model = context.models.default
        await model.start(context.metrics)
        if model.failure is None:
            start_batches(context, model.info.config.max_num_seqs + SPARE)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(start())
        async with shell.running_tools(context):
            yield
            starting.cancel()
            await context.background.close()
        if context.batches is not None:
            await context.batches.close()
        if context.tracing is not None:
            await context.tracing.close()
        for model in context.models:
            model.close()

    methods: dict[str, dict[str, Endpoint]] = {}
    for operation in API:
        methods.setdefault(operation.path, {})[operation.method] = _checked(operation)
    routes: list[BaseRoute] = [
        Route(path, shell.by_method(found), methods=list(found)) for path, found in methods.items()
    ]
    routes.append(WebSocketRoute(response_websocket.PATH, response_websocket.responses_socket))
    routes.append(Route("/v1/responses/compact", response_endpoints.compact, methods=["POST"]))
    refused = ollama_changes.REFUSED
    routes += [Route(path, ollama_changes.refuse, methods=[method]) for path, method in refused]
    routes += shell.page_routes(context, _document)
    routes.append(WebSocketRoute("/{path:path}", response_websocket.no_socket))
    paths = [route.path for route in routes if isinstance(route, Route)]

    generating = [operation.path for operation in API if operation.needs_runner is not None]
    middleware = shell.middleware_of(context, address, paths, generating)
    handlers = dict(shell.HANDLERS)
    if config.files_dir is not None:
        add_batches(context, routes, handlers)
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan
    )
    app.router.redirect_slashes = False
    app.state.context = context
    app.state.catalog = OneModelCatalog(models, config)
    return app


def _checked(operation: Operation) -> Endpoint:
    """Returns the endpoint of an operation with two checks: the engine's runner, and the type of
    bodies that nothing reads."""
    endpoint, runner = operation.endpoint, operation.needs_runner

    async def checked(request: Request) -> Response:
        if operation.body is None and requests.has_body(request):
            requests.check_content(request)
        if runner is not None:
            context = context_of(request)
            context.check_takes_requests()
            context.models.default.check_runner(runner, operation.path)
        return await endpoint(request)

    return checked


# The OpenAPI document.


async def _document(request: Request) -> Response:
    root = context_of(request).config.root_path or "/"
    return JSONResponse({**openapi(), "servers": [{"url": root}]})


def openapi() -> dict[str, Any]:
    """The document of a server of one model, without the servers' address."""
    return document_of(API)


@lru_cache(maxsize=2)
def document_of(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Returns the OpenAPI document of operations, without the servers' address."""
    kinds: dict[type, None] = {}
    for operation in operations:
        used = (
            operation.body, operation.answer, operation.chunk, operation.refusal, operation.error,
        )  # fmt: skip
        kinds |= {_entry(kind): None for kind in used if kind is not None}
    _, schemas = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in kinds],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for operation in operations:
        path = operation.path.replace("{model:path}", "{model}")
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-paged",
            "version": __version__,
            "description": "OpenAI's, Anthropic's and Ollama's APIs, with vLLM's extras.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.answer_type: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = _json(operation.answer)
    if operation.chunk is not None:
        # A chat's last event is not JSON. Events of the other APIs have names.
        ending = ", then [DONE]" if operation.chunk in _UNNAMED else ""
        kind = "Lines" if operation.stream_type == _NDJSON else "Events"
        description = f"{kind} of {operation.chunk.__name__}{ending}."
        content[operation.stream_type] = {"schema": {"description": description}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "Done.", "content": content}},
    }
    for status in operation.errors:
        error = {"description": _ERRORS[status], "content": _json(operation.error)}
        described["responses"][status] = error
    if operation.refusal is not None:
        refusal = {"description": "No.", "content": _json(operation.refusal)}
        described["responses"]["503"] = refusal
    if operation.body is not None:
        content = _json(operation.body, operation.content)
        described["requestBody"] = {"required": True, "content": content}
    in_path = [name.partition(":")[0] for name in re.findall(r"{([^}]+)}", operation.path)]
    parameters = [(name, "path") for name in in_path] + [(n, "query") for n in operation.query]
    if parameters:
        described["parameters"] = [
            {
                "name": name,
                "in": location,
                "required": location == "path",
                "schema": {"type": "string"},
            }
            for name, location in parameters
        ]
    if "401" in operation.errors:
        described["security"] = [{"key": []}, {}]
    return described


def _json(kind: type, content: str = "application/json") -> dict[str, Any]:
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{_entry(kind).__name__}"}
    if _entry(kind) is not kind:
        schema = {"type": "array", "items": schema}
    return {content: {"schema": schema}}


def _entry(kind: type) -> type:
    """The type of a list's entries; any other type itself."""
    return get_args(kind)[0] if get_origin(kind) is list else kind
