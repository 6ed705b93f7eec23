"""`GET /mcp/tools`, `POST /mcp/call`: tools of MCP servers, for the chat page (``serve --mcp``).

A call runs a program of this machine, so only the page itself may make one, for what its user has
agreed to: each call repeats the name and the arguments that were shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.errors import MlxPagedError
from mlx_paged.server.context import context_of, trace_of
from mlx_paged.server.errors import ApiError, shorten
from mlx_paged.server.requests import Body, read_body
from mlx_paged.server.sites import check_origin
from mlx_paged.server.streaming import unless_disconnected

if TYPE_CHECKING:
    from mlx_paged.mcp import McpServers


class Consent(Body):
    """The call the page showed when its user approved."""

    name: str
    arguments: str


class CallBody(Body):
    """A call of a tool."""

    name: str = Field(description="Of a tool, as /mcp/tools has it.")
    arguments: str = Field(description="JSON text of an object.")
    consent: Consent


async def tools(request: Request) -> Response:
    """The servers and their tools."""
    check_origin(request.headers)  # whatever --allowed-origins has
    servers = _servers(request)
    found = [
        {
            "name": name,
            "status": status.value,
            "error": servers.errors.get(name),
            "tools": [
                {
                    "name": tool.name,
                    "title": tool.title,
                    "description": tool.description,
                    "parameters": tool.parameters,
                }
                for tool in servers.tools
                if tool.server == name
            ],
        }
        for name, status in servers.statuses.items()
    ]
    return JSONResponse({"servers": found}, headers={"Cache-Control": "no-store"})


async def call(request: Request) -> Response:
    """Runs a tool; errors of the tool and of its server are results."""
    from mlx_paged.mcp import read_arguments

    check_origin(request.headers)  # whatever --allowed-origins has
    body = await read_body(request, CallBody)
    trace_of(request).fields["tool"] = shorten(body.name, 64)
    if (body.consent.name, body.consent.arguments) != (body.name, body.arguments):
        raise ApiError(
            403, "consent must be for the same name and arguments", param="consent",
            code="no_consent",
        )  # fmt: skip
    servers = _servers(request)
    answer: dict[str, Any]
    try:
        arguments = read_arguments(body.arguments)
        result = await unless_disconnected(request, servers.call(body.name, arguments))
        answer = {"text": result.text, "is_error": result.is_error}
        if result.images:
            answer["images"] = [{"type": kind, "data": data} for kind, data in result.images]
    except MlxPagedError as error:
        answer = {"text": str(error), "is_error": True}
    return JSONResponse(answer)


def _servers(request: Request) -> McpServers:
    servers = context_of(request).mcp_servers
    assert servers is not None  # (otherwise there is no such path)
    return servers
