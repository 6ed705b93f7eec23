"""The application: every path, and what all requests pass through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.errors import MlxPagedError
from mlx_paged.server import info, openapi, tokens
from mlx_paged.server.chat import chat_completions
from mlx_paged.server.completions import completions
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import Context
from mlx_paged.server.errors import ApiError, from_engine
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.middleware import KeyMiddleware, RequestMiddleware

_WEB = Path(__file__).parent / "web"
# What needs no key: whether the server lives, and pages without anybody's data.
OPEN_PATHS = ("/health", "/live", "/ready", "/", "/web/", "/docs", "/openapi.json")

Endpoint = Callable[[Request], Awaitable[Response]]

#: (path, method, endpoint): the API, in the order of its documentation.
API: tuple[tuple[str, str, Endpoint], ...] = (
    ("/v1/chat/completions", "POST", chat_completions),
    ("/v1/completions", "POST", completions),
    ("/v1/models", "GET", info.models),
    ("/v1/models/{model:path}", "GET", info.model),
    ("/tokenize", "POST", tokens.tokenize),
    ("/detokenize", "POST", tokens.detokenize),
    ("/health", "GET", info.health),
    ("/live", "GET", info.live),
    ("/ready", "GET", info.ready),
    ("/version", "GET", info.version),
    ("/metrics", "GET", info.metrics),
    ("/server_info", "GET", info.server_info),
    ("/reset_prefix_cache", "POST", info.reset_prefix_cache),
)


def create_app(engine: AsyncEngine, config: ServerConfig) -> Starlette:
    """The application in front of an engine.

    Nothing is waited for: while the model loads, requests get 503 and `/health` says so.

    Args:
        engine: its end is its maker's business.
        config: options.
    """
    context = Context(engine, config, Metrics())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(context.start())
        yield
        starting.cancel()
        context.close()

    routes: list[BaseRoute] = [
        Route(path, endpoint, methods=[method]) for path, method, endpoint in API
    ]
    routes.append(Route("/openapi.json", openapi.document))
    routes.append(Route("/docs", _file("docs.html")))
    if config.serve_page:
        routes.append(Route("/", _file("index.html")))
    routes.append(Mount("/web", StaticFiles(directory=_WEB)))
    paths = [route.path for route in routes if isinstance(route, Route)]

    middleware = [
        Middleware(RequestMiddleware, context.metrics, log=config.log_requests, paths=paths)
    ]
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    middleware.append(Middleware(KeyMiddleware, config.api_keys, OPEN_PATHS))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: _on_api_error,
            MlxPagedError: _on_engine_error,
            HTTPException: _on_http_error,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return app


def _file(name: str) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        headers = {
            # Only what this server sends; so it works offline, and nothing foreign runs.
            "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
            "style-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
            "Cache-Control": "no-cache",
        }
        return FileResponse(_WEB / name, media_type="text/html", headers=headers)

    return endpoint


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["state"]["trace"].fields["error"] = error.message
    return error.response()


async def _on_engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlxPagedError)
    request_id = request.scope["state"]["trace"].request_id
    return await _on_api_error(request, from_engine(error, request_id))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()
