"""`/mcp/...`: tools, prompts and resources of MCP servers, for the chat page.

A call runs a program on this machine, or one that a user's token opens. So only the page may make
calls, and only with its user's consent: each call repeats the name and the arguments that were
shown. Besides the servers of ``serve --mcp``, there are those that a user adds on the page
(`page_mcp`), which sends them with each request.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.errors import MlxPagedError
from mlx_paged.server.bodies import Body
from mlx_paged.server.context import request_log_of, server_context_of
from mlx_paged.server.errors import ApiError, shorten
from mlx_paged.server.requests import read_body
from mlx_paged.server.sites import check_origin
from mlx_paged.server.streaming import unless_disconnected

if TYPE_CHECKING:
    from mlx_paged.mcp import McpServers
    from mlx_paged.server.page_mcp import PageServers

_START_SECONDS = 3.0  # that a list of tools waits for servers that are starting
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_NAME = r"[A-Za-z0-9-]+(_[A-Za-z0-9-]+)*"  # "__" separates it from the name of a tool.


def _checked_headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{shorten(name, 64)!r} is not the name of a header")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"the value of {name!r} has characters that no header may have")
    return headers


class PageServer(Body):
    """A server that a user has added on the page."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=f"^{_NAME}$", max_length=32)
    url: str = Field(pattern="^https?://[^/@\\s]+(/\\S*)?$", max_length=2048)
    headers: Annotated[dict[str, str], AfterValidator(_checked_headers)] = Field(
        default_factory=dict, max_length=32
    )


class ToolsBody(Body):
    """The servers of a page."""

    servers: list[PageServer] = Field(max_length=32)


class Consent(Body):
    """The call the page showed when its user approved."""

    name: str
    arguments: str


class CallBody(Body):
    """A call of a tool."""

    name: str = Field(description="Of a tool, as /mcp/tools has it.")
    arguments: str = Field(description="JSON text of an object.")
    consent: Consent
    server: PageServer | None = Field(None, description="That has the tool, if it is the page's.")


class PromptBody(Body):
    """A prompt and its arguments."""

    server: str | PageServer = Field(description="Name of a server of --mcp, or one of the page.")
    name: str
    arguments: dict[str, str] = Field(default_factory=dict)


class ResourceBody(Body):
    """A resource."""

    server: str | PageServer = Field(description="Name of a server of --mcp, or one of the page.")
    uri: str


async def tools(request: Request) -> Response:
    """Lists servers and their offers: `GET` those of --mcp, `POST` also the page's."""
    check_origin(request.headers)  # whatever --allowed-origins has
    context = server_context_of(request)
    found = [] if context.mcp_servers is None else _offers(context.mcp_servers, is_own=False)
    if request.method == "POST":
        body = await read_body(request, ToolsBody)
        taken = {server["name"] for server in found}
        for i, server in enumerate(body.servers):
            if server.name in taken:
                raise ApiError(
                    400, f"there are two servers named {server.name!r}", param=f"servers[{i}].name"
                )
            taken.add(server.name)
        pages = _page_servers(request)
        specs = [pages.spec_of(each.name, each.url, each.headers) for each in body.servers]
        await pages.started(specs, _START_SECONDS)
        for spec in specs:
            async with pages.using(spec) as servers:
                found += _offers(servers, is_own=True)
    return JSONResponse({"servers": found}, headers={"Cache-Control": "no-store"})


def _offers(servers: McpServers, *, is_own: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "status": status.value,
            "error": servers.errors.get(name),
            "is_own": is_own,
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
            "prompts": [
                {
                    "name": prompt.name,
                    "title": prompt.title,
                    "description": prompt.description,
                    "arguments": [
                        {"name": argument, "description": about, "required": required}
                        for argument, about, required in prompt.arguments
                    ],
                }
                for prompt in servers.prompts
                if prompt.server == name
            ],
            "resources": [
                {
                    "uri": resource.uri,
                    "name": resource.name,
                    "title": resource.title,
                    "description": resource.description,
                    "type": resource.mime_type,
                    "size": resource.size,
                }
                for resource in servers.resources
                if resource.server == name
            ],
        }
        for name, status in servers.statuses.items()
    ]


async def call(request: Request) -> Response:
    """Runs a tool; errors of the tool and of its server are results."""
    from mlx_paged.mcp import read_arguments

    check_origin(request.headers)  # whatever --allowed-origins has
    body = await read_body(request, CallBody)
    request_log_of(request).fields["tool"] = shorten(body.name, 64)
    if (body.consent.name, body.consent.arguments) != (body.name, body.arguments):
        raise ApiError(
            403, "consent must be for the same name and arguments", param="consent",
            code="no_consent",
        )  # fmt: skip
    answer: dict[str, Any]
    try:
        arguments = read_arguments(body.arguments)
        async with _using(request, body.server or "") as servers:
            result = await unless_disconnected(request, servers.call(body.name, arguments))
        answer = {"text": result.text, "is_error": result.is_error}
        if result.images:
            answer["images"] = [{"type": kind, "data": data} for kind, data in result.images]
    except MlxPagedError as error:
        answer = {"text": str(error), "is_error": True}
    return JSONResponse(answer)


async def prompt(request: Request) -> Response:
    """The text of a prompt."""
    check_origin(request.headers)  # whatever --allowed-origins has
    body = await read_body(request, PromptBody)
    async with _using(request, body.server) as servers:
        with _errors_of_servers():
            text = await unless_disconnected(
                request, servers.prompt(_name_of(body.server), body.name, body.arguments)
            )
    return JSONResponse({"text": text})


async def resource(request: Request) -> Response:
    """The contents of a resource, each with `text` or with `data` in base64."""
    check_origin(request.headers)  # whatever --allowed-origins has
    body = await read_body(request, ResourceBody)
    async with _using(request, body.server) as servers:
        with _errors_of_servers():
            contents = await unless_disconnected(
                request, servers.read(_name_of(body.server), body.uri)
            )
    found = [
        {"uri": each.uri, "type": each.mime_type}
        | ({"data": each.data} if each.text is None else {"text": each.text})
        for each in contents
    ]
    return JSONResponse({"contents": found})


def _name_of(server: str | PageServer) -> str:
    return server if isinstance(server, str) else server.name


@contextlib.asynccontextmanager
async def _using(request: Request, server: str | PageServer) -> AsyncIterator[McpServers]:
    """Returns the connections that include a server: those of --mcp, or the page's one."""
    if isinstance(server, str):
        servers = server_context_of(request).mcp_servers
        if servers is None:
            raise ApiError(404, "there are no servers of --mcp", param="server")
        yield servers
        return
    pages = _page_servers(request)
    spec = pages.spec_of(server.name, server.url, server.headers)
    async with pages.using(spec) as own:
        yield own


@contextlib.contextmanager
def _errors_of_servers() -> Iterator[None]:
    try:
        yield
    except MlxPagedError as error:
        raise ApiError(502, str(error), code="mcp_server_error") from error


def _page_servers(request: Request) -> PageServers:
    pages = server_context_of(request).page_servers
    if pages is None:
        raise ApiError(
            403, "this server takes no MCP servers from the page: it runs without --page-mcp",
            param="servers", code="no_page_mcp",
        )  # fmt: skip
    return pages
