"""Options of `mlx-paged serve` about the server: address, access, limits, APIs and logs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mlx_paged.cli.options import option

_NET, _LIMITS, _LOGS, _API = "Network and access", "Limits", "Logs", "API"

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


@dataclass(frozen=True)
class ServerOptions:
    """Fields of `ServerConfig` with the same names, and options of `server.run.serve`."""

    host: Annotated[str, option(_NET, "Address to listen on.")] = DEFAULT_HOST
    port: Annotated[int, option(_NET, "Port. 0: any free port.", min=0, max=65535)] = DEFAULT_PORT
    api_keys: Annotated[
        list[str] | None,
        option(
            _NET,
            "API key that requests need. Repeatable.",
            "--api-key",
            show_default="none",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(
            _NET,
            "YAML file with a list of keys, or of {key, requests_per_minute, tokens_per_minute}.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        option(
            _NET,
            "Origin of browser pages that may call the API. Repeatable; '*': any.",
            show_default="this server's",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        option(
            _NET,
            "Accepted Host name. Repeatable; '*': any.",
            show_default="loopback names; any if --host is not loopback",
        ),
    ] = None
    uds: Annotated[
        Path | None,
        option(_NET, "Unix domain socket to listen on, instead of host and port.", dir_okay=False),
    ] = None
    root_path: Annotated[
        str, option(_NET, "Path prefix under which a proxy serves this server.")
    ] = ""
    ssl_certfile: Annotated[
        Path | None,
        option(_NET, "TLS certificate, PEM. Enables HTTPS.", exists=True, dir_okay=False),
    ] = None
    ssl_keyfile: Annotated[
        Path | None, option(_NET, "TLS private key, PEM.", exists=True, dir_okay=False)
    ] = None
    metrics_need_key: Annotated[
        bool,
        option(
            _NET,
            "Require an API key for /metrics and /load, too.",
            "--metrics-need-key",
        ),
    ] = False
    frontend_multiprocessing: Annotated[
        bool,
        option(
            _NET,
            "Run the engine in its own process.",
            "--frontend-multiprocessing/--disable-frontend-multiprocessing",
        ),
    ] = False
    request_timeout: Annotated[
        float | None,
        option(
            _LIMITS,
            "Seconds until an unfinished request gets 422, which clients do not retry.",
            min=0.001,
            show_default="no limit",
        ),
    ] = None
    requests_per_minute: Annotated[
        int | None,
        option(
            _LIMITS,
            "Maximum requests per minute and API key, or per address without keys; more get 429.",
            min=1,
            show_default="no limit",
        ),
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        option(
            _LIMITS,
            "Maximum prompt and answer tokens per minute and API key, or per address "
            "without keys; more get 429.",
            min=1,
            show_default="no limit",
        ),
    ] = None
    max_body_size: Annotated[
        int | None,
        option(
            _LIMITS,
            "Maximum bytes of a request body; more get 413.",
            min=1,
            show_default="16777216, or 50331648 if the model takes media",
        ),
    ] = None
    max_body_memory: Annotated[
        int,
        option(
            _LIMITS,
            "Maximum bytes of all request bodies in memory, not counting the first MiB of "
            "each; more get 503.",
            min=0,
        ),
    ] = 1 << 30
    read_timeout: Annotated[
        float,
        option(
            _LIMITS,
            "Seconds a client may take to send headers, to send a body, or to read a chunk.",
            min=0.1,
        ),
    ] = 60.0
    max_logprobs: Annotated[
        int,
        option(_LIMITS, "Maximum logprobs per token that a request may ask for.", min=0, max=20),
    ] = 20
    shutdown_timeout: Annotated[
        float, option(_LIMITS, "Seconds to finish running requests after SIGTERM.", min=0)
    ] = 30.0
    max_stored_responses: Annotated[
        int, option(_LIMITS, "Maximum responses kept for previous_response_id. 0: none.", min=0)
    ] = 1024
    max_stored_bytes: Annotated[
        int,
        option(
            _LIMITS,
            "Maximum bytes of stored responses; the least recently used are dropped.",
            min=0,
        ),
    ] = 64 << 20
    max_file_size: Annotated[
        int, option(_LIMITS, "Maximum bytes of an uploaded file; more get 413.", min=1)
    ] = 200 << 20
    max_files_size: Annotated[
        int,
        option(_LIMITS, "Maximum bytes of all uploaded files; then uploads get 413.", min=1),
    ] = 10 << 30
    max_batch_lines: Annotated[
        int | None,
        option(
            _LIMITS,
            "Maximum batch lines that run at once, over all batches.",
            min=1,
            show_default="--max-num-seqs + 32",
        ),
    ] = None
    serve_page: Annotated[bool, option(_API, "Serve the chat page at /.", "--page/--no-page")] = (
        True
    )
    mcp_config: Annotated[
        Path | None,
        option(
            _API,
            "JSON file of MCP servers for the chat page. The page asks before each tool call.",
            "--mcp",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    page_mcp: Annotated[
        bool | None,
        option(
            _API,
            "Let users of the chat page add HTTP MCP servers. If other machines can reach "
            "this server (--host is not loopback, or --uds, --root-path or --allowed-hosts "
            "is set), this needs --api-key, and MCP servers must have public addresses.",
            "--page-mcp/--no-page-mcp",
            show_default="on if only this machine can reach the server",
        ),
    ] = None
    model_changes: Annotated[
        bool | None,
        option(
            _API,
            "Let clients of Ollama's API fetch models from the Hugging Face hub, and remove them "
            "from its cache on this machine. If other machines can reach this server (see "
            "--page-mcp), this needs --api-key.",
            "--model-changes/--no-model-changes",
            show_default="on if only this machine can reach the server",
        ),
    ] = None
    files_dir: Annotated[
        Path | None,
        option(
            _API,
            "Folder for files and batches, which survive restarts. Enables their APIs.",
            file_okay=False,
            show_default="none",
        ),
    ] = None
    strict_requests: Annotated[
        bool,
        option(
            _API, "Refuse unknown fields in requests instead of logging them.", "--strict-requests"
        ),
    ] = False
    stream_interval: Annotated[int, option(_API, "Tokens per streamed chunk.", min=1)] = 1
    stream_keepalive_deltas: Annotated[
        bool,
        option(
            _API,
            "Send an empty chunk every 15 s of silence, for clients that ignore SSE comments.",
            "--stream-keepalive-deltas",
        ),
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        option(_LOGS, "Minimum severity: debug, info, warning, error or critical."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], option(_LOGS, "Format of log lines: text or json.")
    ] = "text"
    log_requests: Annotated[
        bool,
        option(_LOGS, "Log one line per request.", "--enable-log-requests/--disable-log-requests"),
    ] = True
    log_config: Annotated[
        Path | None,
        option(
            _LOGS,
            "Configuration for Python's dictConfig, YAML or JSON. Overrides level and format.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            _LOGS,
            "URL of an OpenTelemetry collector (OTLP over HTTP); it receives a span per request.",
            show_default="none",
        ),
    ] = None
