"""Client of Model Context Protocol servers: their tools, prompts and resources.

This module never asks for consent; the caller of `McpServers.call` must have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import httpcore2
import httpx2
import mcp
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from mlx_paged.addresses import Reach, addresses_of
from mlx_paged.errors import InvalidParameterError, MlxPagedError

_T = TypeVar("_T")

#: Timeouts in seconds: to start a server and list its tools, and for one call.
START_TIMEOUT = 60.0
CALL_TIMEOUT = 120.0
#: Seconds between health checks of a server.
WATCH_INTERVAL = 30.0
_MAX_CHARACTERS = 100_000  # per result, so that one call cannot fill the context
_MAX_IMAGE_CHARACTERS = 16 << 20  # base64
_MAX_RESOURCE_CHARACTERS = 16 << 20  # text or base64
_LONGEST_NAME = 64  # OpenAI's limit
_MAX_PAGES = 100
_MAX_ANSWER_BYTES = 32 << 20  # of one HTTP answer of a server that a user of the page named
_STDIO = ("command", "args", "env", "cwd")
_HTTP = ("url", "headers")
_BOTH = ("type", "timeout", "disabled")
_TYPES = {"stdio": "command", "http": "url", "streamable-http": "url", "streamableHttp": "url"}


@dataclass(frozen=True)
class ServerSpec:
    """Connection settings of a server: a program to start, or a URL.

    Attributes:
        command: A program that speaks the protocol on stdin and stdout.
        env: Variables in addition to basic ones such as PATH and HOME.
        url: URL of a streamable HTTP server.
        timeout: Timeout of a call in seconds.
        reach: Addresses that the URL may resolve to.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = CALL_TIMEOUT
    reach: Reach = Reach.ANY


@dataclass(frozen=True)
class McpTool:
    """A tool of a server.

    Attributes:
        name: Name for the model: ``server__tool``, with letters, digits, "_" and "-" only.
        server, local_name: The server, and the tool's name there.
        parameters: JSON Schema of the arguments.
    """

    name: str
    server: str
    local_name: str
    title: str | None
    description: str | None
    parameters: dict[str, Any]


@dataclass(frozen=True)
class McpPrompt:
    """A prompt that a server offers.

    Attributes:
        arguments: (name, description, is required) of each argument.
    """

    server: str
    name: str
    title: str | None
    description: str | None
    arguments: tuple[tuple[str, str | None, bool], ...]


@dataclass(frozen=True)
class McpResource:
    """A resource that a server offers.

    Attributes:
        size: Size in bytes, if the server reports it.
    """

    server: str
    uri: str
    name: str
    title: str | None
    description: str | None
    mime_type: str | None
    size: int | None


@dataclass(frozen=True)
class Contents:
    """The contents of a resource: `text`, or `data` in base64."""

    uri: str
    mime_type: str | None
    text: str | None = None
    data: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """The result of a call.

    Attributes:
        text: For the model.
        images: For the user: (MIME type, base64 data).
    """

    text: str
    is_error: bool = False
    images: tuple[tuple[str, str], ...] = ()


def read_config(path: Path) -> tuple[ServerSpec, ...]:
    """Reads servers from a file in the common format ``{"mcpServers": {name: {...}}}``.

    A server is ``{command, args, env, cwd}`` or ``{url, headers}``. Both may have ``type``,
    ``timeout`` in seconds and ``disabled``. Entries next to ``mcpServers`` belong to other programs
    and are ignored.

    Raises:
        MlxPagedError: The file is not readable.
        InvalidParameterError: An entry is invalid or unknown.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MlxPagedError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MlxPagedError(f"{path} is not JSON: {error}") from None
    servers = config.get("mcpServers") if isinstance(config, dict) else None
    if not isinstance(servers, dict):
        raise InvalidParameterError(f"mcpServers of {path}", "an object", servers)
    found = [_spec(f"mcpServers.{name} of {path}", name, entry) for name, entry in servers.items()]
    return tuple(spec for spec in found if spec is not None)


def _spec(where: str, name: str, entry: Any) -> ServerSpec | None:
    """Parses one server; returns None if it is disabled."""
    if not isinstance(entry, dict):
        raise InvalidParameterError(where, "an object", entry)
    if ("command" in entry) == ("url" in entry):
        raise InvalidParameterError(where, "either a command or a url", sorted(entry))
    kind = "command" if "command" in entry else "url"
    known = (*(_STDIO if kind == "command" else _HTTP), *_BOTH)
    for key in entry:
        if key not in known:
            raise InvalidParameterError(where, f"of {', '.join(known)}", key)
    if _TYPES.get(entry.get("type", "stdio" if kind == "command" else "http")) != kind:
        names = [t for t, wanted in _TYPES.items() if wanted == kind]
        raise InvalidParameterError(f"type in {where}", " or ".join(names), entry["type"])

    def checked(key: str, default: Any, fits: Any, expected: str) -> Any:
        value = entry.get(key, default)
        if not fits(value):
            raise InvalidParameterError(f"{key} in {where}", expected, value)
        return value

    def is_text(value: object) -> bool:
        return isinstance(value, str) and bool(value)

    def are_texts(value: object) -> bool:
        return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())

    def is_time(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0

    timeout = checked("timeout", CALL_TIMEOUT, is_time, "seconds, more than 0")
    disabled = checked("disabled", False, lambda v: isinstance(v, bool), "true or false")
    if kind == "command":
        args = checked(
            "args", [], lambda v: isinstance(v, list) and all(isinstance(a, str) for a in v),
            "a list of texts",
        )  # fmt: skip
        spec = ServerSpec(
            name,
            checked("command", "", is_text, "a program"),
            tuple(args),
            checked("env", {}, are_texts, "an object of texts"),
            checked("cwd", None, lambda v: v is None or is_text(v), "a folder"),
            timeout=timeout,
        )
    else:
        url = checked(
            "url", "", lambda v: is_text(v) and v.startswith(("http://", "https://")),
            "a URL that begins with http:// or https://",
        )  # fmt: skip
        headers = checked("headers", {}, are_texts, "an object of texts")
        spec = ServerSpec(name, url=url, headers=headers, timeout=timeout)
    return None if disabled else spec


def read_arguments(text: str) -> dict[str, Any]:
    """Parses the arguments of a call.

    Raises:
        MlxPagedError: The text is not a JSON object, or has a duplicate name. With a duplicate, the
            call could differ from what the user saw.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            raise MlxPagedError("the arguments have a name twice")
        return made

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        found = json.loads(text or "{}", object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise MlxPagedError("the arguments are not a JSON object")
    return found


class Status(StrEnum):
    """State of a server."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


class McpServers:
    """Running servers. A context manager that starts and stops them.

    A server that fails to start is left out; `errors` has the reason. The next call restarts a
    server that has ended.

    Args:
        specs: Connection settings of each server.
        on_failure: Called with the name of a server that failed to start or has ended, and the
            reason.

    Attributes:
        specs: Connection settings of each server.
    """

    def __init__(
        self, specs: Sequence[ServerSpec], on_failure: Callable[[str, str], None] | None = None
    ) -> None:
        self.specs = tuple(specs)
        self._servers = {spec.name: _Server(spec, on_failure) for spec in specs}

    async def __aenter__(self) -> McpServers:
        await asyncio.gather(*(server.start() for server in self._servers.values()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    @property
    def statuses(self) -> dict[str, Status]:
        """State of each server, by name."""
        return {name: server.status for name, server in self._servers.items()}

    @property
    def errors(self) -> dict[str, str]:
        """Reasons why servers do not run, by name."""
        found = {name: server.error for name, server in self._servers.items()}
        return {name: error for name, error in found.items() if error is not None}

    @property
    def tools(self) -> tuple[McpTool, ...]:
        """The tools of all servers, with unique names."""
        found: dict[str, McpTool] = {}
        for server in self._servers.values():
            for tool in server.tools:
                name = _unique(f"{server.spec.name}__{tool.name}", found)
                found[name] = McpTool(
                    name,
                    server.spec.name,
                    tool.name,
                    tool.title,
                    tool.description,
                    dict(tool.input_schema),
                )
        return tuple(found.values())

    @property
    def prompts(self) -> tuple[McpPrompt, ...]:
        """The prompts of all servers."""
        return tuple(
            McpPrompt(
                server.spec.name,
                prompt.name,
                prompt.title,
                prompt.description,
                tuple((a.name, a.description, bool(a.required)) for a in prompt.arguments or ()),
            )
            for server in self._servers.values()
            for prompt in server.prompts
        )

    @property
    def resources(self) -> tuple[McpResource, ...]:
        """The resources of all servers."""
        return tuple(
            McpResource(
                server.spec.name,
                str(resource.uri),
                resource.name,
                resource.title,
                resource.description,
                resource.mime_type,
                resource.size,
            )
            for server in self._servers.values()
            for resource in server.resources
        )

    async def prompt(self, server: str, name: str, arguments: dict[str, str]) -> str:
        """Returns the text of a prompt: its messages, separated by blank lines.

        Raises:
            MlxPagedError: The server does not exist, does not answer, or returns an error.
        """
        result = await self._server(server).ask(
            lambda client: client.get_prompt(name, arguments or None)
        )
        return _limited("\n\n".join(_shown(message.content) for message in result.messages))

    async def read(self, server: str, uri: str) -> tuple[Contents, ...]:
        """Returns the contents of a resource.

        Raises:
            MlxPagedError: The server does not exist, does not answer, or returns an error; or the
                resource is too large.
        """
        result = await self._server(server).ask(lambda client: client.read_resource(uri))
        found = tuple(
            Contents(
                str(part.uri),
                part.mime_type,
                getattr(part, "text", None),
                getattr(part, "blob", None),
            )
            for part in result.contents
        )
        if sum(len(each.text or each.data or "") for each in found) > _MAX_RESOURCE_CHARACTERS:
            raise MlxPagedError(f"the resource has more than {_MAX_RESOURCE_CHARACTERS >> 20} MiB")
        return found

    def _server(self, name: str) -> _Server:
        if name not in self._servers:
            raise MlxPagedError(f"there is no MCP server {name!r}")
        return self._servers[name]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool. Never retries a failed call, because it may have had an effect.

        Args:
            name: A `McpTool.name`.

        Raises:
            MlxPagedError: The tool does not exist, or its server does not answer. The next call
                restarts a server that has ended.
        """
        if all(tool.name != name for tool in self.tools):
            # A server that is starting or has failed may have the tool.
            for server in self._servers.values():
                if name.startswith(_unique(f"{server.spec.name}__", {})):
                    await server.start()
                    if server.error is not None:
                        raise MlxPagedError(
                            f"the MCP server {server.spec.name!r} cannot be started: {server.error}"
                        )
        for tool in self.tools:
            if tool.name == name:
                return await self._servers[tool.server].call(tool.local_name, arguments)
        raise MlxPagedError(f"there is no tool {name!r}")


def _unique(name: str, taken: Mapping[str, object]) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_LONGEST_NAME]
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name[: _LONGEST_NAME - len(str(number)) - 1]}_{number}"
    return found


class _Server:
    """One server, and the task that holds its connection.

    Attributes:
        tools, prompts, resources: The server's offers as of its last start.
        error: Reason why it does not run; None if it runs.
    """

    def __init__(
        self, spec: ServerSpec, on_failure: Callable[[str, str], None] | None = None
    ) -> None:
        self.spec = spec
        self._on_failure = on_failure
        self.status = Status.STARTING
        self.tools: tuple[mcp.types.Tool, ...] = ()
        self.prompts: tuple[mcp.types.Prompt, ...] = ()
        self.resources: tuple[mcp.types.Resource, ...] = ()
        self.error: str | None = None
        self._bad_status: int | None = None  # last HTTP error status; the protocol's code hides it
        self._client: mcp.Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Connects; sets `error` on failure."""
        async with self._starting:
            if self._client is not None:
                return
            await self.close()
            started = asyncio.Event()
            self._closing = asyncio.Event()
            self.status, self.error = Status.STARTING, None
            # The task that opens a connection must also close it.
            self._task = asyncio.create_task(self._hold(started))
            await started.wait()

    async def close(self) -> None:
        """Closes the connection and ends the program."""
        if self._task is not None:
            if self._client is None:
                self._task.cancel()  # starting or failed
            self._closing.set()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _hold(self, started: asyncio.Event) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(START_TIMEOUT):
                        client = await self._connect(stack, log)
                        await self._list(client)
                    self._client, self.status = client, Status.READY
                    started.set()
                    await self._until_closed_or_dead(client)
                    self._client = None
            except Exception as error:
                is_program = isinstance(error, OSError) and self.spec.command is not None
                program = f"{self.spec.command}: " if is_program else ""
                self._fail(f"{program}{self._reason(error)}{_last_line(log)}")
            finally:
                self._client = None
                started.set()

    async def _list(self, client: mcp.Client) -> None:
        """Reads the tools, prompts and resources that the server offers; any may be missing."""
        offers = client.server_capabilities
        self.tools = self.prompts = self.resources = ()
        if offers.tools is not None:
            self.tools = await _pages(client.list_tools, lambda page: page.tools)
        if offers.prompts is not None:
            self.prompts = await _pages(client.list_prompts, lambda page: page.prompts)
        if offers.resources is not None:
            self.resources = await _pages(client.list_resources, lambda page: page.resources)

    async def _until_closed_or_dead(self, client: mcp.Client) -> None:
        """Waits for `close`; checks the server's health at intervals.

        Raises:
            Exception: The server does not answer.
        """
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_INTERVAL):
                    await self._closing.wait()
                    return
            try:
                await client.list_tools(cache_mode="refresh")
            except mcp.MCPError as error:
                if error.code == mcp.types.CONNECTION_CLOSED:
                    raise
                # Any other error is an answer, so the server is alive.

    def _fail(self, reason: str) -> None:
        self.status, self.error = Status.FAILED, reason
        if self._on_failure is not None:
            self._on_failure(self.spec.name, reason)

    async def _connect(self, stack: AsyncExitStack, log: IO[str]) -> mcp.Client:
        spec = self.spec
        transport: Any
        if spec.command is not None:
            parameters = mcp.StdioServerParameters(
                command=spec.command, args=list(spec.args), env=dict(spec.env), cwd=spec.cwd
            )
            # Without `errlog`, its stderr would appear in the middle of a chat.
            transport = stdio_client(parameters, errlog=log)  # type: ignore[arg-type]
        else:
            assert spec.url is not None
            timeout = httpx2.Timeout(30.0, read=max(spec.timeout, 30.0))
            http = httpx2.AsyncClient(
                headers=dict(spec.headers),
                timeout=timeout,
                transport=_transport(spec.reach),
                event_hooks={"response": [self._note_status]},
            )
            await stack.enter_async_context(http)
            transport = streamable_http_client(spec.url, http_client=http)
        client = mcp.Client(transport, read_timeout_seconds=START_TIMEOUT)
        return await stack.enter_async_context(client)

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """See `McpServers.call`."""
        timeout = self.spec.timeout + 1
        result = await self.ask(lambda client: client.call_tool(name, arguments, timeout))
        return ToolResult(_text_of(result), bool(result.is_error), _images_of(result))

    async def ask(self, question: Callable[[mcp.Client], Awaitable[_T]]) -> _T:
        """Returns the server's answer. Restarts the server first if it has ended.

        Raises:
            MlxPagedError: The server does not answer, or returns an error.
        """
        await self.start()
        client, spec = self._client, self.spec
        if client is None:
            raise MlxPagedError(f"the MCP server {spec.name!r} cannot be started: {self.error}")
        try:
            async with asyncio.timeout(spec.timeout):
                return await question(client)
        except TimeoutError:
            raise MlxPagedError(
                f"the MCP server {spec.name!r} did not answer within {spec.timeout:g} s"
            ) from None
        except Exception as error:
            if isinstance(error, mcp.MCPError) and error.code != mcp.types.CONNECTION_CLOSED:
                raise MlxPagedError(f"the MCP server {spec.name!r} says: {error}") from error
            await self.close()
            reason = self._reason(error)
            self._fail(reason)
            raise MlxPagedError(
                f"the connection to the MCP server {spec.name!r} has ended: {reason}"
            ) from error

    async def _note_status(self, response: httpx2.Response) -> None:
        self._bad_status = response.status_code if response.status_code >= 400 else None

    def _reason(self, error: BaseException) -> str:
        status = self._bad_status
        if status is None or isinstance(error, TimeoutError):
            return _reason(error)
        hint = ": it requires authorization, such as a header with a token"
        return f"it answered with status {status}{hint if status in (401, 403) else ''}"


async def _pages(ask: Callable[..., Awaitable[Any]], items: Callable[[Any], list[_T]]) -> Any:
    """Returns the items of all pages of a list."""
    found: list[_T] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await ask(cursor=cursor, cache_mode="refresh")
        found += items(page)
        cursor = page.next_cursor
        if cursor is None:
            break
    return tuple(found)


def _transport(reach: Reach) -> httpx2.AsyncBaseTransport:
    """Returns an HTTP transport that checks addresses and limits answers, unless all are allowed.

    It resolves and checks the address of each connection.
    """
    if reach is Reach.ANY:
        return httpx2.AsyncHTTPTransport()
    # Ignore proxies from the environment, because they would connect to any address.
    transport = httpx2.AsyncHTTPTransport(trust_env=False)
    pool = transport._pool
    assert isinstance(pool, httpcore2.AsyncConnectionPool)
    pool._network_backend = _CheckedNetwork(pool._network_backend, reach)
    return _LimitedTransport(transport)


class _LimitedTransport(httpx2.AsyncBaseTransport):
    """Ends answers that are too large, because the client of the protocol reads them whole."""

    def __init__(self, transport: httpx2.AsyncHTTPTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        # A small compressed answer can grow a thousandfold after it has been counted.
        request.headers["Accept-Encoding"] = "identity"
        response = await self._transport.handle_async_request(request)
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            await response.aclose()
            raise httpx2.ReadError(f"its answer is compressed ({encoding})", request=request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _LimitedStream(response.stream, request)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


class _LimitedStream(httpx2.AsyncByteStream):
    """The body of an answer, which raises an error after `_MAX_ANSWER_BYTES`."""

    def __init__(self, stream: httpx2.AsyncByteStream, request: httpx2.Request) -> None:
        self._stream = stream
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._stream:
            read += len(chunk)
            if read > _MAX_ANSWER_BYTES:
                raise httpx2.ReadError(
                    f"its answer is larger than {_MAX_ANSWER_BYTES >> 20} MB",
                    request=self._request,
                )
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class _CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to the checked address, not to a host name that may resolve differently later."""

    def __init__(self, network: httpcore2.AsyncNetworkBackend, reach: Reach) -> None:
        self._network = network
        self._reach = reach

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        found = await asyncio.to_thread(addresses_of, host, port, self._reach)
        for place, (*_, address) in enumerate(found):
            try:
                return await self._network.connect_tcp(
                    str(address[0]), port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if place == len(found) - 1:
                    raise
        raise AssertionError("a host has an address")

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


def _text_of(result: mcp.types.CallToolResult) -> str:
    """Returns the text of a result, with placeholders for other content."""
    parts = [_shown(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return _limited("\n".join(parts))


def _limited(text: str) -> str:
    if len(text) > _MAX_CHARACTERS:
        left = len(text) - _MAX_CHARACTERS
        text = f"{text[:_MAX_CHARACTERS]}\n[{left} more characters are not shown]"
    return text


def _images_of(result: mcp.types.CallToolResult) -> tuple[tuple[str, str], ...]:
    """Returns the images of a result, up to a total size."""
    found = [(b.mime_type, b.data) for b in result.content if b.type == "image"]
    sizes = itertools.accumulate(len(data) for _, data in found)
    return tuple(image for image, size in zip(found, sizes) if size <= _MAX_IMAGE_CHARACTERS)


def _shown(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return str(text) if text is not None else f"[the resource {block.resource.uri}: not shown]"
    if block.type == "resource_link":
        return f"[a link to the resource {block.uri}: not shown]"
    return f"[{block.type} of type {block.mime_type}: not shown]"


def _reason(error: BaseException) -> str:
    """Formats an error as one line; uses the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it did not answer within {START_TIMEOUT:g} s"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:500] or type(error).__name__


def _last_line(log: IO[str]) -> str:
    """Returns the last line of a program's stderr in parentheses, or an empty string."""
    log.seek(0)
    lines = [line.strip() for line in log.read()[-4000:].splitlines() if line.strip()]
    return f" ({lines[-1][:300]})" if lines else ""
