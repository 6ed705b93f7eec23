"""The application of one model: its routes, its middleware, and its life."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from mlx_paged.engine.client import EngineClient
from mlx_paged.server import requests, shell
from mlx_paged.server.api import API
from mlx_paged.server.batches.runner import SPARE
from mlx_paged.server.batches.setup import add_batches, start_batches
from mlx_paged.server.catalog import OneModelCatalog
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import Context, context_of
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.ollama import changes as ollama_changes
from mlx_paged.server.openapi import Operation, document_of
from mlx_paged.server.registry import ModelRegistry
from mlx_paged.server.responses_api import endpoints as response_endpoints
from mlx_paged.server.responses_api import websocket as response_websocket
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.shell import Endpoint


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


async def _document(request: Request) -> Response:
    root = context_of(request).config.root_path or "/"
    return JSONResponse({**openapi(), "servers": [{"url": root}]})


def openapi() -> dict[str, Any]:
    """Returns the document of a server of one model, without the servers' address."""
    return document_of(API)
