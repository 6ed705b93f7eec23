"""ChatTools: tools of MCP servers in a chat, whose calls the user must allow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, TypeVar

from mlx_paged.cli.chat.conversation import Call
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.mcp import McpServers, McpTool, ServerSpec, ToolResult, read_arguments
from mlx_paged.parsing.definitions import Tool

T = TypeVar("T")

Consent = Literal["yes", "no", "always"]
_RESULT_SHOWN = 300  # characters
_REFUSED = "The user refused this call."


def escaped(text: str) -> str:
    """Escapes invisible characters except spaces and line breaks.

    Control and text direction characters could hide a part of what the user is asked to allow.
    """
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) > 0x9F else f"\\u{ord(character):04x}"


class ChatTools:
    """The MCP servers of a chat, which run on a thread of their own. A context manager.

    Args:
        specs: The servers.
        allowed: Names of tools that run without consent.

    Attributes:
        ask: Asks the user whether a described call may run; None: there is no user to ask, and
            calls that need consent are refused.
    """

    def __init__(self, specs: Sequence[ServerSpec], allowed: Collection[str] = ()) -> None:
        self.ask: Callable[[str], Consent] | None = None
        self._servers = McpServers(specs)
        self._configured = frozenset(allowed)  # from the command line
        self._allowed = set(allowed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mlx-paged-mcp", daemon=True
        )

    def __enter__(self) -> ChatTools:
        self._thread.start()
        try:
            self._run(self._servers.__aenter__())
            names = [tool.name for tool in self._servers.tools]
            for name in self._configured.difference(names):
                known = ", ".join(names) or "(there is none)"
                raise InvalidParameterError("--mcp-allow", f"one of {known}", name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._servers.__aexit__(None, None, None))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def errors(self) -> list[str]:
        """Why some servers are not available."""
        found = self._servers.errors
        return [f"the MCP server {name!r} cannot be used: {error}" for name, error in found.items()]

    @property
    def listed(self) -> tuple[McpTool, ...]:
        """The tools of all servers."""
        return self._servers.tools

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools of all servers, as definitions for a model."""
        return tuple(Tool(t.name, t.description, t.parameters) for t in self.listed)

    def is_allowed(self, name: str) -> bool:
        """Returns True if calls of a tool run without consent."""
        return name in self._allowed

    def call(self, call: Call, note: Callable[[str], None]) -> str:
        """Runs a call if that is allowed; returns the result for the model.

        Args:
            note: Shows a line to the user.

        Raises:
            KeyboardInterrupt: The user stopped the call.
        """
        tool = next((tool for tool in self.listed if tool.name == call.name), None)
        try:
            if tool is None:
                raise MlxPagedError(f"there is no tool {call.name!r}")
            arguments = read_arguments(call.arguments)
            if not self._may_run(tool, arguments, note):
                return _REFUSED
            result = self._run(self._servers.call(tool.name, arguments))
        except MlxPagedError as error:
            result = ToolResult(str(error), is_error=True)
        text = escaped(result.text)
        more = "..." if len(text) > _RESULT_SHOWN else ""
        kind = "failed" if result.is_error else "gave"
        note(f"{escaped(call.name)} {kind}: {text[:_RESULT_SHOWN]}{more}")
        return f"The call failed: {result.text}" if result.is_error else result.text

    def _may_run(
        self, tool: McpTool, arguments: dict[str, Any], note: Callable[[str], None]
    ) -> bool:
        shown = escaped(json.dumps(arguments, indent=2, ensure_ascii=False))
        what = f"{tool.name} (server {escaped(tool.server)}) with {shown}"
        if tool.name in self._allowed:
            note(f"calls {what}")
            return True
        if self.ask is None:
            note(
                f"refused: {what}: there is no terminal to ask at "
                f"(--mcp-allow {tool.name} lets it run)"
            )
            return False
        consent = self.ask(f"The model wants to call {what}")
        if consent == "always":
            self._allowed.add(tool.name)
        return consent != "no"

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the servers' thread; Ctrl-C cancels it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            with contextlib.suppress(CancelledError, MlxPagedError):
                future.result()
            raise
