"""`mlx-paged serve`: options become an engine and a server."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mlx_paged.cli.options import ENV_PREFIX, DType, fields_of, option, read_config, with_options
from mlx_paged.errors import InvalidParameterError
from mlx_paged.extras import needs_extra

_MODEL, _CACHE, _SCHED = "Model", "KV cache and memory", "Scheduling"
_NET, _LIMITS, _LOGS, _API = "Network and access", "Limits", "Logs", "API"
_MEDIA = "Images, videos and sounds"


_HOST, _PORT = "127.0.0.1", 8000

# Options of `EngineConfig` that are mappings.
_JSON_OBJECTS = (
    "hf_overrides", "limit_mm_per_prompt", "media_io_kwargs", "mm_processor_kwargs", "media_limits",
)  # fmt: skip


@dataclass(frozen=True)
class ServeOptions:
    """Fields of `EngineConfig` and `ServerConfig` with the same names, and options of `serve`."""

    served_model_names: Annotated[
        list[str] | None,
        option(
            _MODEL,
            "Name in the API. Repeatable; the first one is in answers.",
            "--served-model-name",
            show_default="the model's path or id",
        ),
    ] = None
    dtype: Annotated[
        DType, option(_MODEL, "Type of the weights; auto: as they are, float32 on the CPU.")
    ] = "auto"
    cpu_activations: Annotated[
        str,
        option(
            _MODEL,
            "On the CPU, what the inputs of linear layers are rounded to: float32 (not at all), "
            "int8 (for weights of 4 or 8 bits) or bfloat16 (for such weights and prompts). These "
            "are faster and less exact.",
        ),
    ] = "float32"
    max_model_len: Annotated[
        int | None,
        option(
            _MODEL,
            "Most tokens of prompt and answer.",
            min=1,
            show_default="the model's own limit",
        ),
    ] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        option(
            _MODEL,
            "generate text, or embed texts (pooling); auto: pooling for models that say how they "
            "are pooled.",
        ),
    ] = "auto"
    pooler_config: Annotated[
        str | None,
        option(
            _MODEL,
            'JSON object: how texts are pooled, such as {"pooling_type": "MEAN", "normalize": '
            'false, "dimensions": 256}.',
            show_default="as the model says, or LAST and normalised",
        ),
    ] = None
    hf_overrides: Annotated[
        str | None,
        option(
            _MODEL,
            'JSON object: that the model is a reranker, such as {"classifier_from_token": ["no", '
            '"yes"]}; its template for pairs is --chat-template.',
            show_default="none",
        ),
    ] = None
    pooling_type: Annotated[
        Literal["LAST", "MEAN"] | None,
        option(
            _MODEL,
            "Embed by the last token's state, or by the mean over all tokens.",
            "--pooler-config.pooling_type",
            case_sensitive=False,
            show_default="as the model says, or LAST",
        ),
    ] = None
    pooling_normalize: Annotated[
        Literal["true", "false"] | None,
        option(
            _MODEL,
            "Whether embeddings are scaled to length 1.",
            "--pooler-config.normalize",
            show_default="as the model says, or true",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        option(
            _MODEL, "Jinja file (or source) instead of the model's.", show_default="the model's"
        ),
    ] = None
    generation_config: Annotated[
        str,
        option(
            _MODEL,
            "Defaults of requests: auto: the model's generation_config.json; vllm: none; or a "
            "directory that has one.",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str,
        option(
            _MODEL,
            'JSON object: entries in place of those, such as {"temperature": 0.5}. '
            "max_new_tokens limits every answer.",
        ),
    ] = "{}"
    trust_request_chat_template: Annotated[
        bool,
        option(
            _MODEL,
            "Let requests bring their own templates: code that may run forever.",
            "--trust-request-chat-template",
        ),
    ] = False
    tool_call_parser: Annotated[
        str,
        option(
            _MODEL,
            "Syntax in which the model writes tool calls, by vLLM's name; auto: what its chat "
            "template shows; none: calls are text.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        option(
            _MODEL,
            "How the model marks its reasoning, by vLLM's name; auto: what its tokens show; none: "
            "reasoning is text.",
        ),
    ] = "auto"
    structured_outputs_timeout: Annotated[
        float, option(_LIMITS, "CPU seconds that compiling a grammar may take; then it is refused.")
    ] = 5.0
    structured_outputs_cache_size: Annotated[
        int, option(_LIMITS, "Compiled grammars that are kept.")
    ] = 256
    tool_template: Annotated[
        bool,
        option(
            _MODEL,
            "Describe tools in a system message, for models whose template has no place for them.",
            "--tool-template",
        ),
    ] = False
    enable_auto_tool_choice: Annotated[
        bool,
        option(_MODEL, "Let the model decide whether it calls a tool, where a request leaves it."),
    ] = True
    limit_mm_per_prompt: Annotated[
        str | None,
        option(
            _MEDIA,
            'JSON object: most items of a prompt, such as {"image": 8, "video": 1, "audio": 0}.',
            show_default="999 of each kind",
        ),
    ] = None
    allowed_local_media_path: Annotated[
        str | None,
        option(
            _MEDIA,
            "Folder whose files every client may have read, by file: URLs.",
            show_default="none",
        ),
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        option(
            _MEDIA,
            "Host that media are fetched from, also where its address is private. Repeatable.",
            "--allowed-media-domains",
            show_default="every public one",
        ),
    ] = None
    media_io_kwargs: Annotated[
        str | None,
        option(
            _MEDIA,
            'JSON object: how media are read, such as {"video": {"num_frames": 16, "fps": 2}}.',
            show_default="32 frames of a video",
        ),
    ] = None
    mm_processor_kwargs: Annotated[
        str | None,
        option(_MEDIA, "JSON object for the model's processor.", show_default="none"),
    ] = None
    media_limits: Annotated[
        str | None,
        option(
            _MEDIA,
            "JSON object: bytes, pixels and seconds that one item may have, such as "
            '{"max_image_pixels": 16000000}; docs/media.md lists them.',
            show_default="as there",
        ),
    ] = None
    max_num_encoder_tokens: Annotated[
        int | None,
        option(
            _MEDIA,
            "Most rows of media that one step encodes.",
            min=1,
            show_default="--max-num-batched-tokens",
        ),
    ] = None
    mm_encoder_cache_bytes: Annotated[
        int, option(_MEDIA, "Bytes for encoded media, which are kept for later requests.", min=1)
    ] = 512 << 20
    block_size: Annotated[int, option(_CACHE, "Tokens of a KV block: 8, 16, 32 or 64.")] = 32
    kv_cache_dtype: Annotated[
        str,
        option(
            _CACHE,
            "Format of the KV cache: auto (as the model computes), int8, int8_k_int4_v (k8v4), "
            "int4 or fp8. The others hold two to three times the tokens.",
        ),
    ] = "auto"
    kv_cache_dtype_skip_layers: Annotated[
        list[str] | None,
        option(
            _CACHE,
            "Layer that keeps the model's own dtype, by number from 0, or sliding_window. "
            "Repeatable.",
            show_default="none",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        option(
            _CACHE,
            "Share of device memory for weights, activations and KV cache.",
            show_default="0.9 on a GPU",
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        option(
            _CACHE,
            "Bytes of the KV cache, instead of a share.",
            min=1,
            show_default="4 GiB on the CPU",
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None,
        option(_CACHE, "Blocks of the KV cache, instead.", min=2, show_default="from memory"),
    ] = None
    typical_context_len: Annotated[
        int | None,
        option(
            _CACHE,
            "Tokens of a typical sequence: splits the memory between full attention and "
            "windows or recurrent layers.",
            min=1,
            show_default="4096, or four windows",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        option(
            _CACHE,
            "Share equal beginnings of prompts.",
            "--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = True
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        option(
            _CACHE,
            "Keep blocks that have left a layer's window; for comparisons.",
            "--disable-hybrid-kv-cache-manager",
        ),
    ] = False
    max_num_seqs: Annotated[int, option(_SCHED, "Most sequences that run at once.", min=1)] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            _SCHED,
            "Most tokens of one step.",
            min=1,
            show_default="2048; up to 8192 on NVIDIA GPUs",
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        int | None,
        option(
            _SCHED,
            "Prompts with more tokens left get at most this many a step; 0: no such limit.",
            min=0,
            show_default="half of --max-num-batched-tokens",
        ),
    ] = None
    watermark: Annotated[
        float, option(_SCHED, "Share of the blocks kept free for running sequences.")
    ] = 0.01
    enable_chunked_prefill: Annotated[
        bool,
        option(
            _SCHED,
            "Compute long prompts in parts, between the tokens of others.",
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
        ),
    ] = True
    policy: Annotated[
        Literal["fcfs", "priority"],
        option(_SCHED, "Which requests are served first.", "--scheduling-policy"),
    ] = "fcfs"
    async_scheduling: Annotated[
        bool,
        option(
            _SCHED,
            "Plan a step while the one before it runs.",
            "--async-scheduling/--no-async-scheduling",
        ),
    ] = True
    enforce_eager: Annotated[
        bool,
        option(
            _SCHED,
            "On a GPU: no warm-up at the start, and decode steps are not repeated as graphs.",
            "--enforce-eager/--no-enforce-eager",
        ),
    ] = False
    max_num_waiting: Annotated[
        int, option(_LIMITS, "Most sequences that may wait; more get 429.", "--max-queue", min=1)
    ] = 1024
    request_timeout: Annotated[
        float | None,
        option(
            _LIMITS,
            "Seconds until an unfinished request gets 422, which clients do not repeat.",
            min=0.001,
            show_default="no limit",
        ),
    ] = None
    read_timeout: Annotated[
        float, option(_LIMITS, "Seconds to send a head, then a body, or to take a chunk.", min=0.1)
    ] = 60.0
    max_body_size: Annotated[
        int | None,
        option(
            _LIMITS,
            "Most bytes of a body; more get 413.",
            min=1,
            show_default="16777216, or 50331648 if the model takes media",
        ),
    ] = None
    max_body_memory: Annotated[
        int,
        option(
            _LIMITS,
            "Most bytes of all bodies of requests under way, beyond a MiB of each; more get 503.",
            min=0,
        ),
    ] = 1 << 30
    max_stored_responses: Annotated[
        int, option(_LIMITS, "Most responses kept for previous_response_id; 0: none.", min=0)
    ] = 1024
    max_stored_bytes: Annotated[
        int, option(_LIMITS, "Most bytes of them; the least recently used are forgotten.", min=0)
    ] = 64 << 20
    max_file_size: Annotated[
        int, option(_LIMITS, "Most bytes of a file of --files-dir; more get 413.", min=1)
    ] = 200 << 20
    max_files_size: Annotated[
        int,
        option(_LIMITS, "Most bytes of all those files; then a further one gets 413.", min=1),
    ] = 10 << 30
    max_batch_lines: Annotated[
        int | None,
        option(
            _LIMITS,
            "Most lines of all batches that are answered at once.",
            min=1,
            show_default="--max-num-seqs and 32 more",
        ),
    ] = None
    max_logprobs: Annotated[
        int, option(_LIMITS, "Most alternatives a request may ask for.", min=0, max=20)
    ] = 20
    shutdown_timeout: Annotated[
        float, option(_LIMITS, "Seconds for running requests after SIGTERM.", min=0)
    ] = 30.0
    strict_requests: Annotated[
        bool, option(_API, "Refuse unknown fields instead of logging them.", "--strict-requests")
    ] = False
    stream_interval: Annotated[int, option(_API, "Tokens of a streamed chunk.", min=1)] = 1
    stream_keepalive_deltas: Annotated[
        bool,
        option(
            _API,
            "Send empty chunks every 15 s while a prompt is computed, for clients that ignore "
            "comments.",
            "--stream-keepalive-deltas",
        ),
    ] = False
    serve_page: Annotated[bool, option(_API, "Serve the chat page at /.", "--page/--no-page")] = (
        True
    )
    mcp_config: Annotated[
        Path | None,
        option(
            _API,
            "JSON file of MCP servers, whose tools the page can use; it asks before each call.",
            "--mcp",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    page_mcp: Annotated[
        bool | None,
        option(
            _API,
            "Users of the page can add MCP servers (HTTP). Where others reach this server (--host "
            "is not loopback, or --uds, --root-path or --allowed-hosts is given), it needs "
            "--api-key, and the MCP servers must have public addresses.",
            "--page-mcp/--no-page-mcp",
            show_default="on unless others reach this server",
        ),
    ] = None
    files_dir: Annotated[
        Path | None,
        option(
            _API,
            "Folder for files and batches, which survive a restart; without it there are none.",
            file_okay=False,
            show_default="none",
        ),
    ] = None
    host: Annotated[str, option(_NET, "Address to listen on.")] = _HOST
    port: Annotated[int, option(_NET, "Port; 0: any that is free.", min=0, max=65535)] = _PORT
    uds: Annotated[
        Path | None,
        option(_NET, "Unix domain socket to listen on, instead of an address.", dir_okay=False),
    ] = None
    api_keys: Annotated[
        list[str] | None,
        option(
            _NET,
            "Key that requests need. Repeatable.",
            "--api-key",
            show_default="none: open to all",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(
            _NET,
            "YAML file: a list of keys, or of {key, requests_per_minute, tokens_per_minute}.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    requests_per_minute: Annotated[
        int | None,
        option(
            _LIMITS,
            "Requests that each key may make, or each address where there are no keys; more get "
            "429.",
            min=1,
            show_default="no limit",
        ),
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        option(
            _LIMITS,
            "Tokens of prompts and answers that each key, or address, may use; then it gets 429.",
            min=1,
            show_default="no limit",
        ),
    ] = None
    metrics_need_key: Annotated[
        bool,
        option(
            _NET,
            "/metrics and /load need a key too, where there are keys.",
            "--metrics-need-key",
        ),
    ] = False
    allowed_origins: Annotated[
        list[str] | None,
        option(
            _NET,
            "Origin of browser pages that may call. Repeatable; '*': any.",
            show_default="its own",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        option(
            _NET,
            "Name by which the server may be called, as Host. Repeatable; '*': any.",
            show_default="its address and localhost; any if --host is not loopback",
        ),
    ] = None
    root_path: Annotated[str, option(_NET, "Path under which a proxy shows the server.")] = ""
    ssl_keyfile: Annotated[
        Path | None, option(_NET, "Private key, PEM.", exists=True, dir_okay=False)
    ] = None
    ssl_certfile: Annotated[
        Path | None, option(_NET, "Certificate, PEM: serve HTTPS.", exists=True, dir_okay=False)
    ] = None
    log_requests: Annotated[
        bool, option(_LOGS, "One line a request.", "--enable-log-requests/--disable-log-requests")
    ] = True
    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            _LOGS,
            "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span of each request.",
            show_default="none",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], option(_LOGS, "Least severity.")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], option(_LOGS, "Form of a line.")] = "text"
    log_config: Annotated[
        Path | None,
        option(_LOGS, "Logging configuration, YAML or JSON, instead.", exists=True, dir_okay=False),
    ] = None


@with_options(environment=True)
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model directory, GGUF file or Hugging Face id.",
            show_default="the embedded model",
            envvar=f"{ENV_PREFIX}_MODEL",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with any of these options; the command line and environment win.",
            is_eager=True,
            callback=read_config,
            exists=True,
            dir_okay=False,
            envvar=f"{ENV_PREFIX}_CONFIG",
        ),
    ] = None,
    options: ServeOptions,
) -> None:
    """Serve a model with OpenAI's API, and a page to talk to it.

    Examples:
      mlx-paged serve
      mlx-paged serve mlx-community/Qwen3-0.6B-4bit --port 9000 --api-key secret
      MLX_PAGED_MAX_NUM_SEQS=64 mlx-paged serve --config serve.yaml

    Every option can be set in the environment: --max-num-seqs is MLX_PAGED_MAX_NUM_SEQS there,
    and several values are separated by spaces.
    """
    with needs_extra("server", "the server"):
        from mlx_paged.server import logs
        from mlx_paged.server.config import (
            ServerConfig,
            default_model_name,
            generation_config_of,
            overrides_of,
        )
        from mlx_paged.server.rate_limits import keys_of
        from mlx_paged.server.run import serve as run
    from mlx_paged.cli.progress import kernel_bar
    from mlx_paged.engine.async_engine import AsyncEngine
    from mlx_paged.engine.config import EngineConfig

    logs.configure(options.log_level, options.log_format, options.log_config)
    with logs.last_line(options.log_format):
        engine_options = fields_of(EngineConfig, options)
        engine_options["pooler_config"] = _pooler_config(options)
        engine_options["kv_cache_dtype_skip_layers"] = options.kv_cache_dtype_skip_layers or ()
        for name in _JSON_OBJECTS:
            engine_options[name] = _json_object(name, getattr(options, name))
        # Wrong options are refused before the model is loaded.
        checked = EngineConfig(**engine_options)
        if options.max_model_len is not None:
            checked.scheduler_config(options.max_model_len)
        _check_mcp(options)
        if options.uds is not None and (options.host, options.port) != (_HOST, _PORT):
            raise InvalidParameterError("uds", "given without --host and --port", str(options.uds))
        if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
            raise InvalidParameterError(
                "ssl_keyfile", "given together with ssl_certfile", options.ssl_keyfile
            )
        server_options = fields_of(ServerConfig, options) | {
            "served_model_names": tuple(options.served_model_names or (default_model_name(model),)),
            "model": model,
            "api_keys": _keys(options.api_keys),
            "api_key_file": None if options.api_key_file is None else str(options.api_key_file),
            "chat_template": _template(options.chat_template),
            "override_generation_config": overrides_of(options.override_generation_config),
            "allowed_origins": tuple(options.allowed_origins or ()),
            "allowed_hosts": tuple(options.allowed_hosts or ()),
            "priority_scheduling": options.policy == "priority",
            "files_dir": None if options.files_dir is None else str(options.files_dir),
            "mcp_config": None if options.mcp_config is None else str(options.mcp_config),
            "page_mcp": _page_mcp(options),
        }
        server_config = ServerConfig(**server_options)
        keys_of(server_config)
        if options.otlp_traces_endpoint is not None:
            with needs_extra("otel", "--otlp-traces-endpoint"):
                from mlx_paged.server.tracing import checked_endpoint
            checked_endpoint(options.otlp_traces_endpoint)
        sampling = generation_config_of(options.generation_config)
        status = run(
            lambda: AsyncEngine.from_model(
                model,
                dtype=options.dtype,
                generation_config=sampling,
                on_kernel=kernel_bar(),
                **engine_options,
            ),
            server_config,
            host=options.host,
            port=options.port,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            uds=options.uds,
        )
    sys.exit(status)


def _check_mcp(options: ServeOptions) -> None:
    """Refuses a wrong file of MCP servers, and their tools for everybody in a network."""
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


def _page_mcp(options: ServeOptions) -> Literal["off", "public", "private"]:
    """Returns the MCP servers that users may add on the page."""
    # Each of these options is a sign of a proxy, which lets users of other machines in.
    has_proxy = bool(options.uds or options.root_path or options.allowed_hosts)
    is_local = _is_loopback(options) and not has_proxy
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


def _is_loopback(options: ServeOptions) -> bool:
    try:
        return ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        return options.host == "localhost"


def _pooler_config(options: ServeOptions) -> dict[str, Any] | None:
    """Combines the options for pooling; None if there are none."""
    found = _json_object("pooler_config", options.pooler_config) or {}
    if options.pooling_type is not None:
        found["pooling_type"] = options.pooling_type
    if options.pooling_normalize is not None:
        found["normalize"] = options.pooling_normalize == "true"
    return found or None


def _json_object(name: str, given: str | None) -> dict[str, Any] | None:
    if given is None:
        return None
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidParameterError(name, "a JSON object", given)
    return found


def _keys(given: list[str] | None) -> tuple[str, ...]:
    keys = tuple(given or ())
    if any(not key.strip() or not key.isprintable() for key in keys):
        raise InvalidParameterError("api_key", "printable and not empty", "(not shown)")
    return keys


def _template(given: str | None) -> str | None:
    """The source of a template: a file's content, or the text itself."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except OSError as error:
        raise InvalidParameterError(
            "chat_template", f"a Jinja file or source ({error.strerror})", given
        ) from error
