"""Access control of `serve`: API keys, and features that are off if other machines have access."""

from __future__ import annotations

import importlib.util
import ipaddress
from typing import Any, Literal

from mlx_paged.cli.serve.server_options import DEFAULT_HOST, DEFAULT_PORT, ServerOptions
from mlx_paged.errors import InvalidParameterError
from mlx_paged.extras import needs_extra


def check(options: ServerOptions) -> None:
    """Rejects options that conflict or would expose this machine to others.

    Raises:
        InvalidParameterError: Names the option.
    """
    _check_mcp(options)
    is_default = (options.host, options.port) == (DEFAULT_HOST, DEFAULT_PORT)
    if options.uds is not None and not is_default:
        raise InvalidParameterError("uds", "given without --host and --port", str(options.uds))
    if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
        raise InvalidParameterError(
            "ssl_keyfile", "given together with ssl_certfile", options.ssl_keyfile
        )


def config_fields(options: ServerOptions) -> dict[str, Any]:
    """Returns the fields of `ServerConfig` that differ from the options of the same name."""
    return {
        "api_keys": _keys(options.api_keys),
        "api_key_file": None if options.api_key_file is None else str(options.api_key_file),
        "allowed_origins": tuple(options.allowed_origins or ()),
        "allowed_hosts": tuple(options.allowed_hosts or ()),
        "files_dir": None if options.files_dir is None else str(options.files_dir),
        "mcp_config": None if options.mcp_config is None else str(options.mcp_config),
        "page_mcp": _page_mcp(options),
        "model_changes": _model_changes(options),
    }


def listening(options: ServerOptions) -> dict[str, Any]:
    """Returns the address arguments of `server.run.serve`."""
    names = ("host", "port", "ssl_keyfile", "ssl_certfile", "uds")
    return {name: getattr(options, name) for name in names}


def _check_mcp(options: ServerOptions) -> None:
    """Validates the file of MCP servers; rejects tools that a whole network could call."""
    if options.mcp_config is None:
        return
    with needs_extra("mcp", "--mcp"):
        from mlx_paged.mcp import read_config
    read_config(options.mcp_config)
    if not _is_loopback(options) and not (options.api_keys or options.api_key_file):
        raise InvalidParameterError(
            "mcp", "given with --api-key where --host is not loopback: a call runs programs here",
            str(options.mcp_config),
        )  # fmt: skip


def _page_mcp(options: ServerOptions) -> Literal["off", "public", "private"]:
    """Returns which MCP servers users may add on the page."""
    is_local = _is_local(options)
    if options.page_mcp is None:
        is_installed = all(map(importlib.util.find_spec, ("mcp", "httpx2")))
        return "private" if is_local and is_installed and options.serve_page else "off"
    if not options.page_mcp:
        return "off"
    with needs_extra("mcp", "--page-mcp"):
        import mcp  # noqa: F401
    if not is_local and not (options.api_keys or options.api_key_file):
        raise InvalidParameterError(
            "page_mcp", "given with --api-key where others reach this server: this machine "
            "connects to the servers that users of the page name", options.page_mcp,
        )  # fmt: skip
    return "private" if is_local else "public"


def _model_changes(options: ServerOptions) -> bool:
    """Returns True if clients may fetch and remove models."""
    is_local = _is_local(options)
    if options.model_changes is None:
        return is_local
    if options.model_changes and not is_local and not (options.api_keys or options.api_key_file):
        raise InvalidParameterError(
            "model_changes", "given with --api-key where others reach this server: clients fill "
            "and empty a folder of this machine", options.model_changes,
        )  # fmt: skip
    return options.model_changes


def _is_local(options: ServerOptions) -> bool:
    """True if only this machine can reach the server."""
    # Each of these options suggests a proxy that forwards requests of other machines.
    has_proxy = bool(options.uds or options.root_path or options.allowed_hosts)
    return _is_loopback(options) and not has_proxy


def _is_loopback(options: ServerOptions) -> bool:
    try:
        return ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        return options.host == "localhost"


def _keys(given: list[str] | None) -> tuple[str, ...]:
    keys = tuple(given or ())
    if any(not key.strip() or not key.isprintable() for key in keys):
        raise InvalidParameterError("api_key", "printable and not empty", "(not shown)")
    return keys
