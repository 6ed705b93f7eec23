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

from mlx_paged.cli.options import (
    DTYPE_HELP,
    ENV_PREFIX,
    KV_CACHE_DTYPE_HELP,
    MAX_STEP_TIME_DEFAULT,
    MAX_STEP_TIME_HELP,
    OFFLOAD_DIR_HELP,
    OFFLOAD_GIB_HELP,
    OFFLOADING_HELP,
    SPECULATIVE_HELP,
    DType,
    fields_of,
    option,
    read_config,
    with_options,
)
from mlx_paged.errors import InvalidParameterError
from mlx_paged.extras import needs_extra

_MODEL, _CACHE, _SCHED = "Model", "KV cache and memory", "Scheduling"
_NET, _LIMITS, _LOGS, _API = "Network and access", "Limits", "Logs", "API"
_MEDIA = "Images, videos and audio"
_LORA = "LoRA adapters"


_HOST, _PORT = "127.0.0.1", 8000

# Options of `EngineConfig` that are mappings.
_JSON_OBJECTS = (
    "hf_overrides", "limit_mm_per_prompt", "media_io_kwargs", "mm_processor_kwargs", "media_limits",
    "speculative_config",
)  # fmt: skip


@dataclass(frozen=True)
class ServeOptions:
    """Fields of `EngineConfig` and `ServerConfig` with the same names, and options of `serve`."""

    served_model_names: Annotated[
        list[str] | None,
        option(
            _MODEL,
            "Model name in the API. Repeatable; answers use the first.",
            "--served-model-name",
            show_default="the model's path or id",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        option(
            _MODEL,
            "Maximum tokens of prompt and answer together.",
            min=1,
            show_default="the model's own limit",
        ),
    ] = None
    dtype: Annotated[DType, option(_MODEL, DTYPE_HELP)] = "auto"
    chat_template: Annotated[
        str | None,
        option(_MODEL, "Jinja chat template, as a file or as source.", show_default="the model's"),
    ] = None
    tool_call_parser: Annotated[
        str,
        option(
            _MODEL,
            "Tool call format, by vLLM's name. auto: detect it from the chat template; "
            "none: leave calls as text.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        option(
            _MODEL,
            "Reasoning format, by vLLM's name. auto: detect it; none: leave reasoning as text.",
        ),
    ] = "auto"
    tool_template: Annotated[
        bool,
        option(
            _MODEL,
            "Describe tools in a system message, for models whose chat template has no "
            "place for them.",
            "--tool-template",
        ),
    ] = False
    enable_auto_tool_choice: Annotated[
        bool,
        option(_MODEL, "Accept tool_choice auto, which lets the model decide."),
    ] = True
    generation_config: Annotated[
        str,
        option(
            _MODEL,
            "Source of sampling defaults: the model's generation_config.json (auto), none "
            "(vllm), or a directory with such a file.",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str,
        option(
            _MODEL,
            'Sampling defaults that replace those, as a JSON object: {"temperature": 0.5}. '
            "max_new_tokens limits every answer.",
        ),
    ] = "{}"
    trust_request_chat_template: Annotated[
        bool,
        option(
            _MODEL,
            "Accept chat templates in requests. They are programs, and may never end.",
            "--trust-request-chat-template",
        ),
    ] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        option(
            _MODEL,
            "generate text, or embed it (pooling). auto: pooling for models whose files "
            "configure it.",
        ),
    ] = "auto"
    pooler_config: Annotated[
        str | None,
        option(
            _MODEL,
            'How to pool texts, as a JSON object: {"pooling_type": "MEAN", "normalize": '
            'false, "dimensions": 256}.',
            show_default="the model's, or LAST and normalized",
        ),
    ] = None
    pooling_type: Annotated[
        Literal["LAST", "MEAN"] | None,
        option(
            _MODEL,
            "Pool the last token's state, or the mean over all tokens.",
            "--pooler-config.pooling_type",
            case_sensitive=False,
            show_default="the model's, or LAST",
        ),
    ] = None
    pooling_normalize: Annotated[
        Literal["true", "false"] | None,
        option(
            _MODEL,
            "Scale embeddings to length 1.",
            "--pooler-config.normalize",
            show_default="the model's, or true",
        ),
    ] = None
    hf_overrides: Annotated[
        str | None,
        option(
            _MODEL,
            'Declares a reranker, as a JSON object: {"classifier_from_token": ["no", '
            '"yes"]}. --chat-template renders its pairs.',
            show_default="none",
        ),
    ] = None
    cpu_activations: Annotated[
        str,
        option(
            _MODEL,
            "CPU only: format of the inputs of linear layers: float32 (exact), int8 (for 4-bit and "
            "8-bit weights) or bfloat16 (for bfloat16 weights, in prompts). The last two are "
            "faster and less exact.",
        ),
    ] = "float32"
    host: Annotated[str, option(_NET, "Address to listen on.")] = _HOST
    port: Annotated[int, option(_NET, "Port. 0: any free port.", min=0, max=65535)] = _PORT
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
    kv_cache_dtype: Annotated[str, option(_CACHE, KV_CACHE_DTYPE_HELP)] = "auto"
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
            "Bytes for the KV cache. Overrides the share of memory.",
            min=1,
            show_default="4 GiB on the CPU",
        ),
    ] = None
    memory_pressure: Annotated[
        Literal["auto", "off"],
        option(
            _CACHE,
            "When the system is short of main memory: auto: give unused KV blocks back, and answer "
            "503 while it is critically short; off: ignore it.",
        ),
    ] = "auto"
    kv_offloading_size: Annotated[
        float | None, option(_CACHE, OFFLOADING_HELP, show_default="none")
    ] = None
    kv_offload_dir: Annotated[str | None, option(_CACHE, OFFLOAD_DIR_HELP, show_default="none")] = (
        None
    )
    kv_offload_gib: Annotated[float, option(_CACHE, OFFLOAD_GIB_HELP)] = 32.0
    enable_prefix_caching: Annotated[
        bool,
        option(
            _CACHE,
            "Reuse KV blocks of prompts with a common prefix.",
            "--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = True
    block_size: Annotated[int, option(_CACHE, "Tokens per KV block: 8, 16, 32 or 64.")] = 32
    num_gpu_blocks_override: Annotated[
        int | None,
        option(
            _CACHE,
            "Blocks in the KV cache. Overrides its bytes.",
            min=2,
            show_default="from memory",
        ),
    ] = None
    kv_cache_dtype_skip_layers: Annotated[
        list[str] | None,
        option(
            _CACHE,
            "Layer that keeps the model's own dtype: a number from 0, or sliding_window. "
            "Repeatable.",
            show_default="none",
        ),
    ] = None
    typical_context_len: Annotated[
        int | None,
        option(
            _CACHE,
            "Tokens of a typical sequence. Splits memory between full attention and windows "
            "or recurrent layers.",
            min=1,
            show_default="4096, or four windows",
        ),
    ] = None
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        option(
            _CACHE,
            "Keep KV blocks that have left a layer's window. For comparisons.",
            "--disable-hybrid-kv-cache-manager",
        ),
    ] = False
    max_num_seqs: Annotated[int, option(_SCHED, "Maximum sequences that run at once.", min=1)] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            _SCHED,
            "Maximum tokens per step.",
            min=1,
            show_default="2048; up to 8192 on NVIDIA GPUs",
        ),
    ] = None
    policy: Annotated[
        Literal["fcfs", "priority"],
        option(
            _SCHED,
            "fcfs: first come, first served; priority: lower values of the field priority first.",
            "--scheduling-policy",
        ),
    ] = "fcfs"
    enable_chunked_prefill: Annotated[
        bool,
        option(
            _SCHED,
            "Compute long prompts in chunks, between decode tokens of other requests.",
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
        ),
    ] = True
    long_prefill_token_threshold: Annotated[
        int | None,
        option(
            _SCHED,
            "Maximum tokens per step for a prompt with more tokens left. 0: no limit.",
            min=0,
            show_default="half of --max-num-batched-tokens",
        ),
    ] = None
    max_step_time_ms: Annotated[
        float | None,
        option(_SCHED, MAX_STEP_TIME_HELP, show_default=MAX_STEP_TIME_DEFAULT),
    ] = None
    speculative_config: Annotated[
        str | None, option(_SCHED, SPECULATIVE_HELP, show_default="none")
    ] = None
    watermark: Annotated[
        float, option(_SCHED, "Share of KV blocks kept free for running sequences.")
    ] = 0.01
    async_scheduling: Annotated[
        bool,
        option(
            _SCHED,
            "Schedule the next step while the current one runs.",
            "--async-scheduling/--no-async-scheduling",
        ),
    ] = True
    enforce_eager: Annotated[
        bool,
        option(
            _SCHED,
            "GPU only: no warm-up, and no graphs for decode steps.",
            "--enforce-eager/--no-enforce-eager",
        ),
    ] = False
    calibrate: Annotated[
        Literal["auto", "off", "force"],
        option(
            _SCHED,
            "GPU only: check and time the kernels. auto: at the first start on an Apple GPU; off; "
            "force: again. docs/metal-kernels.md",
        ),
    ] = "auto"
    max_num_waiting: Annotated[
        int, option(_LIMITS, "Maximum waiting sequences; more get 429.", "--max-queue", min=1)
    ] = 1024
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
    structured_outputs_timeout: Annotated[
        float, option(_LIMITS, "CPU seconds for compiling a grammar before it is refused.")
    ] = 5.0
    structured_outputs_cache_size: Annotated[int, option(_LIMITS, "Compiled grammars to keep.")] = (
        256
    )
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
    limit_mm_per_prompt: Annotated[
        str | None,
        option(
            _MEDIA,
            'Maximum items per prompt, as a JSON object: {"image": 8, "video": 1, "audio": 0}.',
            show_default="999 of each kind",
        ),
    ] = None
    allowed_local_media_path: Annotated[
        str | None,
        option(
            _MEDIA,
            "Folder whose files all clients may use through file: URLs.",
            show_default="none",
        ),
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        option(
            _MEDIA,
            "Host to fetch media from, even at a private address. Repeatable; others are "
            "then refused.",
            "--allowed-media-domains",
            show_default="all public hosts",
        ),
    ] = None
    media_io_kwargs: Annotated[
        str | None,
        option(
            _MEDIA,
            'How to read media, as a JSON object: {"video": {"num_frames": 16, "fps": 2}}.',
            show_default="32 frames per video",
        ),
    ] = None
    mm_processor_kwargs: Annotated[
        str | None,
        option(
            _MEDIA, "Arguments for the model's processor, as a JSON object.", show_default="none"
        ),
    ] = None
    media_limits: Annotated[
        str | None,
        option(
            _MEDIA,
            "Maximum bytes, pixels and seconds per item, as a JSON object: "
            '{"max_image_pixels": 16000000}. docs/media.md lists them.',
            show_default="see there",
        ),
    ] = None
    max_num_encoder_tokens: Annotated[
        int | None,
        option(
            _MEDIA,
            "Maximum encoder tokens of media per step.",
            min=1,
            show_default="--max-num-batched-tokens",
        ),
    ] = None
    mm_encoder_cache_bytes: Annotated[
        int, option(_MEDIA, "Bytes for the cache of encoded media.", min=1)
    ] = 512 << 20
    enable_lora: Annotated[
        bool,
        option(
            _LORA,
            "Serve LoRA adapters on top of the model. docs/lora.md",
            "--enable-lora/--no-enable-lora",
        ),
    ] = False
    lora_modules: Annotated[
        list[str] | None,
        option(
            _LORA,
            "Adapter that requests may name as their model: name=path, or a JSON object with name "
            "and path. Takes several, and is repeatable.",
            "--lora-modules",
            show_default="none",
        ),
    ] = None
    max_loras: Annotated[int, option(_LORA, "Maximum different adapters in a step.", min=1)] = 1
    max_lora_rank: Annotated[int, option(_LORA, "Maximum rank of an adapter.", min=1)] = 16
    lora_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        option(
            _LORA,
            "Dtype of adapters on the device. auto: the dtype of activations. On the CPU, float16 "
            "and bfloat16 halve the memory and are faster.",
        ),
    ] = "auto"
    max_cpu_loras: Annotated[
        int | None,
        option(_LORA, "Maximum adapters in main memory.", min=1, show_default="--max-loras"),
    ] = None
    adapter_path: Annotated[
        Path | None,
        option(
            _LORA,
            "Directory of an adapter for all requests that name none.",
            show_default="none",
        ),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        option(
            _LORA,
            "Let clients load and unload adapters, from any directory of this machine.",
            "--allow-runtime-lora-updating",
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
            help="YAML file with any of these options. The command line and the environment "
            "override it.",
            is_eager=True,
            callback=read_config,
            exists=True,
            dir_okay=False,
            envvar=f"{ENV_PREFIX}_CONFIG",
        ),
    ] = None,
    options: ServeOptions,
) -> None:
    """Serve a model with OpenAI's and Anthropic's APIs and a chat page.

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
        from mlx_paged.server.lora_modules import lora_modules_of
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
        if options.lora_modules and not options.enable_lora:
            expected = "given with --enable-lora"
            raise InvalidParameterError("lora_modules", expected, options.lora_modules)
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
            "lora_modules": lora_modules_of(options.lora_modules or ()),
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
