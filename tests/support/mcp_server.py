"""A Model Context Protocol server for tests: `python mcp_server.py [stdio | PORT_FILE]`.

With a file, it serves streamable HTTP on a free loopback port, which it writes to the file.
"""

from __future__ import annotations

import base64
import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer
from mcp_files import PIXEL  # beside this script

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool(name="say.it")
def say(text: str, times: int = 1) -> str:
    """Repeat a text."""
    return text * times


@server.tool()
def note(path: str, text: str) -> str:
    """Write a text to the end of a file."""
    with Path(path).open("a") as file:
        file.write(text)
    return "written"


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=base64.b64decode(PIXEL), format="png")


@server.tool()
def fails() -> str:
    """Fail."""
    raise ValueError("it went wrong")


@server.tool()
def dies() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def hangs(path: str) -> str:
    """Write to a file, and never answer."""
    Path(path).write_text("hangs")
    time.sleep(600)
    return ""


@server.tool()
def long(count: int) -> str:
    """A text of many characters."""
    return "x" * count


@server.tool()
def environment(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "(not set)")


@server.prompt(title="Review code")
def review(code: str, language: str = "Python") -> str:
    """Ask for a review."""
    return f"Review this {language} code:\n{code}"


@server.resource("notes://today", title="Notes of today", mime_type="text/plain")
def notes() -> str:
    """Notes of today."""
    return "Buy a ladder."


@server.resource("pixel://red", mime_type="image/png")
def pixel() -> bytes:
    """A picture."""
    return base64.b64decode(PIXEL)


def serve_http(port_file: Path) -> None:
    import socket

    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = server.streamable_http_app()
        config = uvicorn.Config(app, log_level="warning")

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                port_file.write_text(str(listener.getsockname()[1]))

        Server(config).run(sockets=[listener])


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] != "stdio":
        serve_http(Path(sys.argv[1]))
    else:
        server.run("stdio")
