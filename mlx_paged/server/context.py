"""ServerContext and Context: the state that requests share. RequestLog: one request's log line."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from mlx_paged.server.config import ServerConfig
from mlx_paged.server.documents import Documents
from mlx_paged.server.errors import BODY_MEMORY, shorten, unavailable
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.registry import ModelRegistry
from mlx_paged.server.responses_api.background import BackgroundRuns

if TYPE_CHECKING:
    from mlx_paged.mcp import McpServers
    from mlx_paged.server.batches.manager import BatchManager
    from mlx_paged.server.downloads import Downloads
    from mlx_paged.server.page_mcp import PageServers
    from mlx_paged.server.tracing import Tracing

# Bodies up to this size are not counted, because connections bound their number.
_SMALL_BODY = 1 << 20


@dataclass
class RequestLog:
    """The log line of one HTTP request, written when it has ended.

    Attributes:
        request_id: From the client, or generated.
        status: Status of the response; 0 until there is one.
        fields: Fields of the log line: model, prompt_tokens, cached_tokens, completion_tokens,
            ttft, finish_reason, ...
        held_bytes: Bytes of its body, see `Context.hold_body`.
        background: True for a line of a batch, which yields to other requests.
        is_forwarded: True if another process answers it and writes its log line.
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
    is_forwarded: bool = False

    def log_fields(self) -> dict[str, Any]:
        """Returns all fields of the log line."""
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
class ServerContext(ABC):
    """The state that all requests of a server share, whether it serves one model or several.

    Attributes:
        drained: Set once the server accepts no more requests.
        mcp_servers: Configured MCP servers, which the page may use.
        page_servers: MCP servers that users add on the page; None: not allowed.
        documents: Extracts the text of PDFs.
        batches: Clients' files and batches; None: disabled.
        downloads: Fetches models for clients; None: not allowed.
    """

    config: ServerConfig
    metrics: Metrics
    started: float = field(default_factory=time.time)
    draining: bool = False
    mcp_servers: McpServers | None = None
    page_servers: PageServers | None = None
    documents: Documents = field(default_factory=Documents)
    batches: BatchManager | None = None
    downloads: Downloads | None = None
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    _held_bytes: int = 0
    _arriving: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def is_quiet(self) -> bool:
        """True if no request is unfinished."""
        return not self.metrics.server_load

    @property
    @abstractmethod
    def phase(self) -> Phase:
        """The server's current state."""

    @property
    @abstractmethod
    def max_body_size(self) -> int:
        """Maximum bytes of a body, which must be read before its model is known."""

    @property
    @abstractmethod
    def max_model_len(self) -> int | None:
        """Maximum tokens of prompt and answer of any model; None means no limit."""

    @abstractmethod
    def served_name(self, name: str) -> str:
        """Returns a model's name for the response, given the request's name.

        Raises:
            ApiError: 404, there is no such model.
        """

    @abstractmethod
    def check_runner(self, runner: str, path: str) -> None:
        """Refuses requests that no model of this server could answer.

        Args:
            runner: The engine's runner that they need.

        Raises:
            ApiError: 400.
        """

    def hold_body(self, trace: RequestLog, size: int) -> None:
        """Counts a body of `size` bytes so far among those in memory, until its request ends.

        Raises:
            ApiError: 503, the bodies would exceed their limit. A single body is always accepted.
        """
        more = size - _SMALL_BODY - trace.held_bytes
        if more <= 0:
            return
        others = self._held_bytes - trace.held_bytes
        if others and self._held_bytes + more > self.config.max_body_memory:
            self.metrics.rejected.labels(BODY_MEMORY).inc()
            raise unavailable(
                f"request bodies in memory must be at most {self.config.max_body_memory} bytes "
                f"together, but {self._held_bytes} are in use",
                BODY_MEMORY,
            )
        trace.held_bytes += more
        self._held_bytes += more

    @contextlib.asynccontextmanager
    async def reading_body(self) -> AsyncIterator[None]:
        """Wraps the reading of a body; interrupts it when the server shuts down.

        Raises:
            ApiError: 503, the server is shutting down.
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
        """Accepts no more requests, and stops reading those that are still arriving."""
        self.draining = True
        self.drained.set()
        if self.batches is not None:
            self.batches.stop()
        for arriving in self._arriving:
            if not arriving.expired():
                arriving.reschedule(asyncio.get_running_loop().time())

    def release_body(self, trace: RequestLog) -> None:
        """Stops counting the body of a request that has ended."""
        self._held_bytes -= trace.held_bytes
        trace.held_bytes = 0

    def check_takes_requests(self) -> None:
        """Refuses requests while the model loads, the server shuts down, or the engine is dead.

        Raises:
            ApiError: 503.
        """
        if self.phase is Phase.READY:
            return
        self.metrics.rejected.labels(self.phase.value).inc()
        raise {
            Phase.LOADING: unavailable("the model is still being loaded", "loading"),
            Phase.DRAINING: unavailable("the server is shutting down", "shutting_down"),
            Phase.DEAD: unavailable("the engine has stopped", "engine_unavailable"),
        }[self.phase]


@dataclass
class Context(ServerContext):
    """The state that all requests share: models, options and metrics.

    Attributes:
        models: The models that are served.
        background: Responses that run without a request.
        tracing: Makes OpenTelemetry spans; None: there are none.
        underway: The requests that run in an engine now.
    """

    models: ModelRegistry = field(kw_only=True)
    background: BackgroundRuns = field(init=False)
    underway: set[Work] = field(default_factory=set)
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        config = self.config
        max_responses, max_bytes = config.max_stored_responses, config.max_stored_bytes
        self.background = BackgroundRuns(
            self.metrics, max_responses, max_bytes, log=config.log_requests
        )

    @property
    def phase(self) -> Phase:
        """See `ServerContext`."""
        model = self.models.default
        if self.draining:
            return Phase.DRAINING
        if model.is_dead:
            return Phase.DEAD
        return Phase.READY if model.is_loaded else Phase.LOADING

    @property
    def is_quiet(self) -> bool:
        """See `ServerContext`."""
        return not self.underway and super().is_quiet

    @property
    def max_body_size(self) -> int:
        """See `ServerContext`."""
        return self.models.max_body_size

    @property
    def max_model_len(self) -> int | None:
        """See `ServerContext`."""
        return self.models.max_model_len

    def served_name(self, name: str) -> str:
        """See `ServerContext`."""
        return self.models.find(name).name

    def check_runner(self, runner: str, path: str) -> None:
        """See `ServerContext`."""
        self.models.default.check_runner(runner, path)

    def drain(self) -> None:
        """See `ServerContext`."""
        super().drain()
        self.background.drain()


def server_context_of(request: Request) -> ServerContext:
    """Returns the state that all requests share, of any server."""
    context: ServerContext = request.app.state.context
    return context


def context_of(request: Request) -> Context:
    """Returns the state that all requests share."""
    context: Context = request.app.state.context
    return context


def request_log_of(request: Request) -> RequestLog:
    """Returns this request's log line."""
    trace: RequestLog = request.scope["state"]["trace"]
    return trace
