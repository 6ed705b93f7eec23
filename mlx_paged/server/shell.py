"""The parts of an application without its models: pages, tools, middleware and errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from mlx_paged.addresses import Reach
from mlx_paged.errors import MlxPagedError
from mlx_paged.server import mcp_tools, pages
from mlx_paged.server.context import ServerContext, request_log_of
from mlx_paged.server.errors import ApiError, from_engine, shorten
from mlx_paged.server.middleware import (
    KeyMiddleware,
    PrefixMiddleware,
    RequestMiddleware,
    digest,
)
from mlx_paged.server.page_mcp import PageServers
from mlx_paged.server.rate_limits import HEADERS, Limits, RateLimitMiddleware, keys_of
from mlx_paged.server.sites import SiteMiddleware, known_hosts
from mlx_paged.server.streaming import RELAXED

logger = logging.getLogger(__name__)

# Paths that need no key: health checks, and pages without user data.
OPEN_PATHS = ("/health", "/ping", "/live", "/ready", "/", "/web/", "/docs", "/openapi.json")
# Need a key only with `metrics_need_key`: numbers for other programs.
METRICS_PATHS = ("/metrics", "/load")

Endpoint = Callable[[Request], Awaitable[Response]]


def by_method(endpoints: Mapping[str, Endpoint]) -> Endpoint:
    """Returns one endpoint for all methods of a path, so that 405 can name them."""

    async def endpoint(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await endpoints[method](request)

    return endpoint


# Pages and their tools.


def page_routes(context: ServerContext, document: Endpoint) -> list[BaseRoute]:
    """Returns the routes of the pages and of their tools, which are not part of the API.

    Args:
        document: The endpoint of the OpenAPI document.
    """
    routes: list[BaseRoute] = []
    if context.mcp_servers is not None or context.page_servers is not None:
        routes.append(Route("/mcp/tools", mcp_tools.tools, methods=["GET", "POST"]))
        routes.append(Route("/mcp/call", mcp_tools.call, methods=["POST"]))
        routes.append(Route("/mcp/prompt", mcp_tools.prompt, methods=["POST"]))
        routes.append(Route("/mcp/resource", mcp_tools.resource, methods=["POST"]))
    routes.append(Route("/openapi.json", document))
    routes.append(Route("/docs", pages.page("docs.html"), methods=["GET"]))
    # Anthropic's clients first send HEAD here to see if there is a server.
    page = pages.page("index.html") if context.config.serve_page else _no_page
    routes.append(Route("/", page, methods=["GET"]))
    routes.append(Mount("/web", pages.files()))
    return routes


async def _no_page(request: Request) -> Response:
    if request.method == "HEAD":
        return Response()
    raise HTTPException(404)


def add_tools(context: ServerContext) -> None:
    """Adds what the options allow: downloads, MCP servers, and those of users of the page."""
    config = context.config
    if config.model_changes:
        from mlx_paged.server.downloads import Downloads

        context.downloads = Downloads()
    if config.mcp_config is not None:
        from mlx_paged.mcp import McpServers, read_config

        context.mcp_servers = McpServers(
            read_config(Path(config.mcp_config)),
            lambda name, reason: logger.warning("the MCP server %r does not run: %s", name, reason),
        )
    if config.page_mcp != "off":
        reach = Reach.PUBLIC if config.page_mcp == "public" else Reach.NO_METADATA
        context.page_servers = PageServers(reach)


@contextlib.asynccontextmanager
async def running_tools(context: ServerContext) -> AsyncIterator[None]:
    """Runs the MCP servers of a context, which start in the background."""
    if context.mcp_servers is not None:
        starting = asyncio.create_task(context.mcp_servers.__aenter__())
    yield
    if context.mcp_servers is not None:
        starting.cancel()
        await context.mcp_servers.__aexit__(None, None, None)
    if context.page_servers is not None:
        await context.page_servers.close()


# Middleware.


def middleware_of(
    context: ServerContext,
    address: str,
    paths: Sequence[str],
    generating: Sequence[str],
) -> list[Middleware]:
    """Returns the middleware of an application, outermost first.

    Args:
        address: The address that the server listens on.
        paths: All paths.
        generating: Paths that count as load, and for rate limits.
    """
    config = context.config
    middleware = [
        Middleware(PrefixMiddleware, [*paths, "/web"]),
        Middleware(
            RequestMiddleware, context.metrics,
            log=config.log_requests, paths=paths, generating=generating,
            on_end=context.release_body,
        ),
        Middleware(
            SiteMiddleware, known_hosts(address, config.allowed_hosts), config.allowed_origins
        ),
    ]  # fmt: skip
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "request-id", "Retry-After", RELAXED, *HEADERS],
            )
        )
    open_paths = (*OPEN_PATHS, *(() if config.metrics_need_key else METRICS_PATHS))
    keys = keys_of(config)
    middleware.append(Middleware(KeyMiddleware, list(keys), open_paths))
    default = Limits(config.requests_per_minute, config.tokens_per_minute)
    if any(limits != Limits() for limits in (default, *keys.values())):
        by_digest = {digest(key): limits for key, limits in keys.items()}
        middleware.append(
            Middleware(RateLimitMiddleware, by_digest, default, context.metrics, generating)
        )
    return middleware


# Errors.


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request_log_of(request).fields["error"] = error.message
    return error.response(request.scope)


async def _on_engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlxPagedError)
    return await _on_api_error(request, from_engine(error, request_log_of(request).request_id))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shorten(request.url.path)
    message = {
        404: f"there is no {path}",
        405: f"{path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    found = ApiError(error.status_code, message, code=code, headers=error.headers)
    return found.response(request.scope)


#: Handlers of the errors that endpoints raise.
HANDLERS: dict[Any, Any] = {
    ApiError: _on_api_error,
    MlxPagedError: _on_engine_error,
    HTTPException: _on_http_error,
}
