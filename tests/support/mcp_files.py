"""Path of the MCP server for tests, and the picture that it answers with."""

from __future__ import annotations

from pathlib import Path

MCP_SERVER = Path(__file__).with_name("mcp_server.py")
PIXEL = (  # a PNG
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
