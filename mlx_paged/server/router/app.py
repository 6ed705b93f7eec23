"""Builds the router's application: its own endpoints, and forwarding to the model processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from mlx_paged.server import endpoints as common
from mlx_paged.server import lora, responses, shell
from mlx_paged.server.api import API
from mlx_paged.server.batches.runner import SPARE
from mlx_paged.server.batches.setup import add_batches, start_batches
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.ollama import changes as ollama_changes
from mlx_paged.server.openapi import Operation, document_of
from mlx_paged.server.responses_api import websocket as response_websocket
from mlx_paged.server.router import endpoints, forward, websocket
from mlx_paged.server.router.context import RouterContext, router_of
from mlx_paged.server.router.pool import ModelPool
from mlx_paged.server.shell import Endpoint

_STATUSES = ("400", "401", "403", "404", "408", "413", "415", "500", "503")

#: Operations that only a router has, or that differ from those of a one-model server.
OWN = (
    Operation(
        "/v1/models", "GET", endpoints.models, "List the models and their states.",
        endpoints.RoutedModelList,
    ),
    Operation(
        "/v1/models/{model:path}", "GET", endpoints.model, "Get a model and its state.",
        endpoints.RoutedModel, ("401", "403", "404", "500"),
    ),
    Operation(
        "/models", "GET", endpoints.models, "List the models and their states, as in llama.cpp.",
        endpoints.RoutedModelList,
    ),
    Operation(
        "/models/load", "POST", endpoints.load_model, "Load a model, as in llama.cpp.",
        endpoints.Done, _STATUSES, endpoints.ModelBody,
    ),
    Operation(
        "/models/unload", "POST", endpoints.unload_model,
        "Unload a model when its requests have ended, as in llama.cpp.",
        endpoints.Done, _STATUSES, endpoints.ModelBody,
    ),
    Operation(
        "/ready", "GET", endpoints.ready,
        "Readiness: succeeds once the models to preload are loaded.", responses.Status, (),
        refusal=responses.Status,
    ),
    Operation(
        "/metrics", "GET", endpoints.metrics, "Get Prometheus metrics of all models.", None
    ),
    Operation(
        "/server_info", "GET", endpoints.server_info,
        "Get options and state; with ?model= those of a loaded model.", responses.ServerInfo,
        query=("model",),
    ),
)  # fmt: skip
# Operations that the router answers instead of forwarding.
_ANSWERED: dict[str, Endpoint] = {
    "/abort_requests": endpoints.abort_requests,
    "/reset_prefix_cache": endpoints.reset_prefix_cache,
    "/extract_text": common.extract_text,
    "/health": common.health,
    "/ping": common.health,
    "/live": common.live,
    "/version": common.version,
    "/load": common.load,
}
_BATCHES = ("/v1/files", "/v1/batches", "/v1/messages/batches")


def create_router(pool: ModelPool, config: ServerConfig, address: str = "127.0.0.1") -> Starlette:
    """Returns the application for the models of a pool.

    Args:
        pool: The caller closes it.
        address: The address that the server listens on.
    """
    context = RouterContext(config, Metrics(), pool=pool)
    shell.add_tools(context)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        specs = [model.spec for model in pool.models]
        start_batches(context, SPARE + max(s.max_num_seqs * s.num_replicas for s in specs))
        async with shell.running_tools(context):
            yield
        if context.batches is not None:
            await context.batches.close()

    methods: dict[str, dict[str, Endpoint]] = {}
    for operation in operations():
        methods.setdefault(operation.path, {})[operation.method] = operation.endpoint
    routes: list[BaseRoute] = [
        Route(path, shell.by_method(found), methods=list(found)) for path, found in methods.items()
    ]
    routes.append(Route("/models/{model:path}", endpoints.model, methods=["GET"]))
    routes.append(WebSocketRoute(response_websocket.PATH, websocket.responses_socket))
    routes.append(Route("/v1/responses/compact", forward.forward, methods=["POST"]))
    refused = ollama_changes.REFUSED
    routes += [Route(path, ollama_changes.refuse, methods=[method]) for path, method in refused]
    routes += shell.page_routes(context, _document)
    routes.append(WebSocketRoute("/{path:path}", response_websocket.no_socket))
    paths = [route.path for route in routes if isinstance(route, Route)]
    generating = [operation.path for operation in API if operation.needs_runner is not None]
    handlers = dict(shell.HANDLERS)
    if config.files_dir is not None:
        add_batches(context, routes, handlers)
    app = Starlette(
        routes=routes,
        middleware=shell.middleware_of(context, address, paths, generating),
        exception_handlers=handlers,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.context = context
    app.state.catalog = pool
    return app


def operations() -> tuple[Operation, ...]:
    """Returns all operations of a router."""
    own = {(operation.path, operation.method) for operation in OWN}
    others = [o._replace(endpoint=_endpoint_of(o)) for o in API if (o.path, o.method) not in own]
    return (*OWN, *others)


def _endpoint_of(operation: Operation) -> Endpoint:
    """Returns the endpoint with which the router serves an operation of a one-model server."""
    path = operation.path
    if operation.of_catalog:
        return operation.endpoint
    if path in _ANSWERED:
        return _ANSWERED[path]
    if path.startswith(_BATCHES):
        return operation.endpoint
    if operation.endpoint in (lora.load_adapter, lora.unload_adapter):
        return endpoints.change_adapters
    return forward.forward if operation.body is not None else forward.forward_to_owner


async def _document(request: Request) -> Response:
    root = router_of(request).config.root_path or "/"
    return JSONResponse({**document_of(operations()), "servers": [{"url": root}]})
