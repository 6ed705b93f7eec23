"""Context: engine, tokenizer, options and metrics of all endpoints. RequestLog: a log line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.media.options import IoOptions
from mlx_paged.engine.media.prompt import media_model_of
from mlx_paged.engine.stats import EngineStats
from mlx_paged.parsing import registry
from mlx_paged.parsing.derived import why_not_derived
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.parsing.hermes import HermesFormat
from mlx_paged.parsing.reasoning import ReasoningFormat
from mlx_paged.server.config import (
    MAX_BODY_SIZE,
    MAX_MEDIA_BODY_SIZE,
    GenerationDefaults,
    ServerConfig,
)
from mlx_paged.server.conversation import Renderer
from mlx_paged.server.documents import Documents
from mlx_paged.server.errors import ApiError, shorten, unavailable
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.responses_api.background import BackgroundRuns
from mlx_paged.server.responses_api.store import ResponseStore

if TYPE_CHECKING:
    from mlx_paged.mcp import McpServers
    from mlx_paged.server.batches.manager import BatchManager
    from mlx_paged.server.page_mcp import PageServers
    from mlx_paged.server.tracing import Tracing

logger = logging.getLogger(__name__)

# Bodies up to this size are not counted: connections bound their number.
_SMALL_BODY = 1 << 20


@dataclass
class RequestLog:
    """The log line of one HTTP request, written when it has ended.

    Attributes:
        request_id: From the client, or generated.
        status: Of the response; 0 until there is one.
        fields: Of the log line: model, prompt_tokens, cached_tokens, completion_tokens, ttft,
            finish_reason, ...; set by the code that knows them.
        held_bytes: Of its body, see `Context.hold_body`.
        background: True for a line of a batch, which is served with what other requests leave.
    """

    request_id: str
    method: str
    path: str
    client: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    held_bytes: int = 0
    background: bool = False

    def log_fields(self) -> dict[str, Any]:
        """Everything, for one line."""
        return {
            "request_id": self.request_id,
            "method": self.method,
            "path": shorten(self.path),
            "client": self.client,
            "status": self.status,
            "seconds": round(time.monotonic() - self.started, 4),
            **self.fields,
        }


class Work(Protocol):
    """The part of a request that runs in the engine."""

    @property
    def trace(self) -> RequestLog: ...

    async def abort(self) -> None:
        """Ends it."""


class Phase(StrEnum):
    """State of the server, from its start to its end."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass
class Context:
    """The state that all requests share: the engine, its tokenizer, options and metrics.

    Attributes:
        response_store: Responses that later requests may go on from.
        background: Responses that run without a request.
        defaults: For fields that a request leaves out; read from the model once it is loaded.
        failure: Why the engine could not be started.
        tracing: Makes OpenTelemetry spans; None: there are none.
        drained: Set when the server takes no more requests.
        tool_format: How the model writes calls; None: not known, or not to be parsed.
        no_tool_format: Why it is not known; "" where it is.
        reasoning_format: How it marks its reasoning; None: it does not.
        mcp_servers: Those of the configuration, which the page may use.
        page_servers: Those that users add on the page; None: they may not.
        documents: Extracts the text of PDFs.
        batches: Files and batches of clients; None: this server has none.
        underway: The requests that run in the engine now.
    """

    engine: AsyncEngine
    config: ServerConfig
    metrics: Metrics
    started: float = field(default_factory=time.time)
    draining: bool = False
    failure: Exception | None = None
    response_store: ResponseStore = field(init=False)
    background: BackgroundRuns = field(init=False)
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    tool_format: ToolFormat | None = None
    no_tool_format: str = ""
    reasoning_format: ReasoningFormat | None = None
    mcp_servers: McpServers | None = None
    page_servers: PageServers | None = None
    documents: Documents = field(default_factory=Documents)
    batches: BatchManager | None = None
    underway: set[Work] = field(default_factory=set)
    tracing: Tracing | None = None
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    _held_bytes: int = 0
    _arriving: set[asyncio.Timeout] = field(default_factory=set)
    _renderer: Renderer | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        config = self.config
        most, most_bytes = config.max_stored_responses, config.max_stored_bytes
        self.response_store = ResponseStore(most, most_bytes)
        self.background = BackgroundRuns(
            self.metrics, most, most_bytes, log=config.log_requests
        )  # fmt: skip

    @property
    def phase(self) -> Phase:
        """The state of the server now."""
        if self.draining:
            return Phase.DRAINING
        if self.failure is not None or not self.engine.is_alive:
            return Phase.DEAD
        return Phase.LOADING if self._renderer is None else Phase.READY

    @property
    def is_loaded(self) -> bool:
        """True if the engine was ever ready."""
        return self._renderer is not None

    @property
    def renderer(self) -> Renderer:
        """Tokenizer and chat template; only once the engine is ready."""
        assert self._renderer is not None
        return self._renderer

    async def start(self) -> None:
        """Waits for the engine, then sets what depends on it; sets `failure` if that fails."""
        try:
            await self.engine.ready()
            engine = self.engine.engine
            self.defaults = GenerationDefaults.of(
                {**engine.generation_config, **self.config.override_generation_config}
            )
            stats = await self.engine.stats()
            limit = engine.max_request_len
            media = None
            if (model := media_model_of(engine)) is not None:
                media = model, self.engine.media_loader
            renderer = Renderer(
                engine.tokenizer, self.config, limit, engine.vocab_size, media, engine.media_reason
            )
            self.metrics.attach(engine, self.config.model_name, limit, stats)
            self.tool_format = _tool_format(self.config, renderer)
            if self.tool_format is None:
                self.no_tool_format = _no_tool_format(self.config, renderer)
            self.reasoning_format = engine.reasoning_format
            _log_capacity(engine, stats)
            self._renderer = renderer
        except Exception as error:
            self.failure = error
        finally:
            self._ready.set()

    async def started_or_failed(self) -> None:
        """Waits until `start` has ended."""
        await self._ready.wait()

    @property
    def media_io(self) -> IoOptions:
        """How media are read where a request says nothing; only once the engine is ready."""
        return self.engine.engine.config.media_options.io

    @property
    def max_body_size(self) -> int:
        """Most bytes of a body; only once the engine is ready."""
        if self.config.max_body_size is not None:
            return self.config.max_body_size
        takes_media = media_model_of(self.engine.engine) is not None
        return MAX_MEDIA_BODY_SIZE if takes_media else MAX_BODY_SIZE

    def hold_body(self, trace: RequestLog, size: int) -> None:
        """Counts a body that has grown to a size among those in memory, until its request ends.

        Raises:
            ApiError: 503, they would be too many bytes. (A body may always be the only one.)
        """
        more = size - _SMALL_BODY - trace.held_bytes
        if more <= 0:
            return
        others = self._held_bytes - trace.held_bytes
        if others and self._held_bytes + more > self.config.max_body_memory:
            self.metrics.rejected.labels("body_memory").inc()
            raise unavailable(
                f"the bodies of requests under way have {self._held_bytes} bytes, and may have at "
                f"most {self.config.max_body_memory}",
                "body_memory",
            )
        trace.held_bytes += more
        self._held_bytes += more

    @contextlib.asynccontextmanager
    async def reading_body(self) -> AsyncIterator[None]:
        """While a body arrives: ends when the server shuts down and would do nothing with it.

        Raises:
            ApiError: 503.
        """
        try:
            async with asyncio.timeout(None) as arriving:
                self._arriving.add(arriving)
                try:
                    yield
                finally:
                    self._arriving.discard(arriving)
        except TimeoutError:
            self.metrics.rejected.labels(Phase.DRAINING.value).inc()
            error = unavailable("the server is shutting down", "shutting_down")
            error.headers["Connection"] = "close"  # the rest of the body is not read
            raise error from None

    def drain(self) -> None:
        """Takes no more requests, nor the rest of those that are still arriving."""
        self.draining = True
        self.drained.set()
        self.background.drain()
        if self.batches is not None:
            self.batches.stop()
        for arriving in self._arriving:
            if not arriving.expired():
                arriving.reschedule(asyncio.get_running_loop().time())

    def release_body(self, trace: RequestLog) -> None:
        """The request has ended."""
        self._held_bytes -= trace.held_bytes
        trace.held_bytes = 0

    def close(self) -> None:
        """Ends the threads of the tokenizer."""
        if self._renderer is not None:
            self._renderer.close()

    def check_takes_requests(self) -> None:
        """503 while the model loads, when the server shuts down, and when the engine is dead."""
        if self.phase is Phase.READY:
            return
        self.metrics.rejected.labels(self.phase.value).inc()
        raise {
            Phase.LOADING: unavailable("the model is still being loaded", "loading"),
            Phase.DRAINING: unavailable("the server is shutting down", "shutting_down"),
            Phase.DEAD: unavailable("the engine has stopped", "engine_unavailable"),
        }[self.phase]

    def check_runner(self, runner: str, path: str) -> None:
        """400 where the engine does not do what an endpoint needs; 503 while it is unknown."""
        self.check_takes_requests()
        own = self.engine.engine.config.runner
        if own != runner:
            does = {"generate": "generates text", "pooling": "embeds texts"}[own]
            raise ApiError(
                400,
                f"{path} needs a server started with --runner {runner}: this one {does}",
                code="wrong_runner",
            )

    def served_name(self, model: str) -> str:
        """The served name that a request means (`ServerConfig.served_name`).

        Raises:
            ApiError: 404, it means no model of this server.
        """
        found = self.config.served_name(model)
        if found is None:
            names = ", ".join(self.config.served_model_names)
            raise ApiError(
                404,
                f"there is no model of that name here, only: {names}",
                param="model",
                code="model_not_found",
            )
        return found


def _tool_format(config: ServerConfig, renderer: Renderer) -> ToolFormat | None:
    if config.tool_template:
        return HermesFormat(renderer.added_tokens)  # (the syntax that it shows)
    if config.tool_call_parser == "auto":
        return registry.detect(renderer.chat_template, renderer.added_tokens)
    if config.tool_call_parser == "none":
        return None
    name, added = config.tool_call_parser, renderer.added_tokens
    return registry.format_of(name, added, renderer.chat_template)


def _no_tool_format(config: ServerConfig, renderer: Renderer) -> str:
    """Why it is not known how the model writes calls."""
    if config.tool_call_parser == "none":
        return "--tool-call-parser is none"
    if not renderer.renders_tools:
        return "the chat template has no place for tools"
    reason = why_not_derived(renderer.chat_template, renderer.added_tokens)
    return f"no listed format fits the chat template, and none can be derived: {reason}"


def _log_capacity(engine: Engine, stats: EngineStats) -> None:
    """The KV cache's configuration, in vLLM's terms."""
    block_size, num_blocks = engine.config.block_size, stats.usage.num_usable_blocks
    limit, model_len = engine.max_request_len, engine.max_model_len
    # (The last token of an answer needs no slot.)
    at_once = num_blocks / max(1, -(-(limit - 1) // block_size))
    logger.info("KV cache size: %s tokens", f"{num_blocks * block_size:,}")
    logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{limit:,}", at_once)
    if model_len is not None and limit < model_len:
        logger.warning(
            "the KV cache is smaller than the context: requests may have at most %s tokens, not "
            "%s; --kv-cache-memory, --gpu-memory-utilization or --num-gpu-blocks-override makes it "
            "larger, --max-model-len the context shorter",
            f"{limit:,}",
            f"{model_len:,}",
        )


def context_of(request: Request) -> Context:
    """Returns the state that all requests share."""
    context: Context = request.app.state.context
    return context


def request_log_of(request: Request) -> RequestLog:
    """Returns this request's log line."""
    trace: RequestLog = request.scope["state"]["trace"]
    return trace
