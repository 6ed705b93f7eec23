"""`mlx-paged serve`: every option, on the command line, in the environment, in a YAML file."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_paged.errors import InvalidParameterError, MlxPagedError

ENV_PREFIX = "MLX_PAGED"


class DType(StrEnum):
    """Of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Policy(StrEnum):
    """Who is served first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class LogLevel(StrEnum):
    """Least severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LogFormat(StrEnum):
    """Form of a log line."""

    TEXT = "text"
    JSON = "json"


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Makes a YAML file's entries the defaults; the command line and the environment win."""
    if path is None:
        return None
    import yaml

    try:
        entries = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise typer.BadParameter(f"{path} must hold options as `name: value`")
    names = {p.name for p in context.command.params} - {"config", None}
    defaults: dict[str, Any] = {}
    for key, value in entries.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise typer.BadParameter(f"{path}: there is no option {key!r}")
        if isinstance(value, (list, tuple)):
            defaults[name] = [str(v) for v in value]
        else:
            defaults[name] = [str(value)] if name in _SEVERAL else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


_SEVERAL = frozenset({"served_model_name", "api_key", "allowed_origins"})


def _option(panel: str, *names: str, help: str, **more: Any) -> Any:
    """An option in a group of ``--help``; its environment variable follows from its name."""
    flag = names[0].partition("/")[0]
    variable = f"{ENV_PREFIX}_{flag.removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(
        *names, help=help, rich_help_panel=panel, envvar=variable, show_envvar=False, **more
    )


_MODEL, _CACHE, _SCHED = "Model", "KV cache and memory", "Scheduling"
_NET, _LIMITS, _LOGS, _API = "Network and access", "Limits", "Logs", "API"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model directory or Hugging Face id.",
            show_default="the embedded model",
            envvar=f"{ENV_PREFIX}_MODEL",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with any of these options; the command line and the environment win.",
            is_eager=True,
            callback=_read_config,
            exists=True,
            dir_okay=False,
            envvar=f"{ENV_PREFIX}_CONFIG",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _option(_MODEL, "--served-model-name", help="Name in the API. Repeatable; the first one is "
                "in answers.", show_default="the model's path or id"),
    ] = None,
    dtype: Annotated[
        DType, _option(_MODEL, "--dtype", help="Type of the weights; auto: as they are, float32 on "
                       "the CPU.")
    ] = DType.AUTO,
    max_model_len: Annotated[
        int | None,
        _option(_MODEL, "--max-model-len", help="Most tokens of prompt and answer.", min=1,
                show_default="what the model was made for"),
    ] = None,
    chat_template: Annotated[
        str | None,
        _option(_MODEL, "--chat-template", help="Jinja file (or source) instead of the model's.",
                show_default="the model's"),
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        _option(_MODEL, "--trust-request-chat-template",
                help="Let requests bring templates of their own: code that may run for ever."),
    ] = False,
    block_size: Annotated[
        int, _option(_CACHE, "--block-size", help="Tokens of a KV block: 8, 16, 32 or 64.")
    ] = 32,
    gpu_memory_utilization: Annotated[
        float | None,
        _option(_CACHE, "--gpu-memory-utilization", help="Share of device memory for weights, "
                "activations and KV cache.", show_default="0.9 on a GPU"),
    ] = None,
    kv_cache_memory: Annotated[
        int | None,
        _option(_CACHE, "--kv-cache-memory", help="Bytes of the KV cache, instead of a share.",
                min=1, show_default="4 GiB on the CPU"),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None,
        _option(_CACHE, "--num-gpu-blocks-override", help="Blocks of the KV cache, instead.",
                min=2, show_default="from memory"),
    ] = None,
    typical_context_len: Annotated[
        int | None,
        _option(
            _CACHE,
            "--typical-context-len",
            help="Tokens of a typical sequence: splits the memory between full attention and "
            "windows or recurrent layers.",
            min=1,
            show_default="4096, or four windows",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        _option(_CACHE, "--enable-prefix-caching/--no-enable-prefix-caching",
                help="Share equal beginnings of prompts."),
    ] = True,
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        _option(
            _CACHE,
            "--disable-hybrid-kv-cache-manager",
            help="Keep blocks that a layer's window has left behind; for comparisons.",
        ),
    ] = False,
    max_num_seqs: Annotated[
        int, _option(_SCHED, "--max-num-seqs", help="Most sequences that run at once.", min=1)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int,
        _option(_SCHED, "--max-num-batched-tokens", help="Most tokens of one step.", min=1),
    ] = 2048,
    enable_chunked_prefill: Annotated[
        bool,
        _option(_SCHED, "--enable-chunked-prefill/--no-enable-chunked-prefill",
                help="Compute long prompts in parts, between the tokens of others."),
    ] = True,
    scheduling_policy: Annotated[
        Policy, _option(_SCHED, "--scheduling-policy", help="Who is served first.")
    ] = Policy.FCFS,
    async_scheduling: Annotated[
        bool,
        _option(_SCHED, "--async-scheduling/--no-async-scheduling",
                help="Plan a step while the one before it runs."),
    ] = True,
    max_queue: Annotated[
        int,
        _option(_LIMITS, "--max-queue", help="Most sequences that may wait; more get 429.", min=1),
    ] = 1024,
    request_timeout: Annotated[
        float | None,
        _option(_LIMITS, "--request-timeout", help="Seconds until an unfinished request gets 408.",
                min=0.001, show_default="no limit"),
    ] = None,
    read_timeout: Annotated[
        float,
        _option(_LIMITS, "--read-timeout", help="Seconds to send a body, or to take a chunk.",
                min=0.1),
    ] = 60.0,
    max_body_size: Annotated[
        int, _option(_LIMITS, "--max-body-size", help="Most bytes of a body; more get 413.", min=1)
    ] = 16 << 20,
    max_logprobs: Annotated[
        int,
        _option(_LIMITS, "--max-logprobs", help="Most alternatives a request may ask for.", min=0,
                max=20),
    ] = 20,
    shutdown_timeout: Annotated[
        float,
        _option(_LIMITS, "--shutdown-timeout", help="Seconds for running requests after SIGTERM.",
                min=0),
    ] = 30.0,
    strict_requests: Annotated[
        bool,
        _option(_API, "--strict-requests", help="Refuse unknown fields instead of logging them."),
    ] = False,
    stream_interval: Annotated[
        int, _option(_API, "--stream-interval", help="Tokens of a streamed chunk.", min=1)
    ] = 1,
    page: Annotated[
        bool, _option(_API, "--page/--no-page", help="Serve the chat page at /.")
    ] = True,
    host: Annotated[str, _option(_NET, "--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, _option(_NET, "--port", help="Port; 0: any that is free.", min=0, max=65535)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        _option(_NET, "--api-key", help="Key that requests need. Repeatable.",
                show_default="none: open to all"),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _option(_NET, "--allowed-origins", help="Origin of browser pages that may call. "
                "Repeatable; '*': any.", show_default="its own"),
    ] = None,
    root_path: Annotated[
        str, _option(_NET, "--root-path", help="Path under which a proxy shows the server.")
    ] = "",
    ssl_keyfile: Annotated[
        Path | None,
        _option(_NET, "--ssl-keyfile", help="Private key, PEM.", exists=True, dir_okay=False),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        _option(_NET, "--ssl-certfile", help="Certificate, PEM: serve HTTPS.", exists=True,
                dir_okay=False),
    ] = None,
    log_requests: Annotated[
        bool,
        _option(_LOGS, "--enable-log-requests/--disable-log-requests",
                help="One line a request."),
    ] = True,
    log_level: Annotated[
        LogLevel, _option(_LOGS, "--log-level", help="Least severity.")
    ] = LogLevel.INFO,
    log_format: Annotated[
        LogFormat, _option(_LOGS, "--log-format", help="Form of a line.")
    ] = LogFormat.TEXT,
    log_config: Annotated[
        Path | None,
        _option(_LOGS, "--log-config", help="Logging configuration, YAML or JSON, instead.",
                exists=True, dir_okay=False),
    ] = None,
) -> None:  # fmt: skip
    """Serve a model with OpenAI's API, and a page to talk to it.

    Examples:
      mlx-paged serve
      mlx-paged serve mlx-community/Qwen3-0.6B-4bit --port 9000 --api-key secret
      MLX_PAGED_MAX_NUM_SEQS=64 mlx-paged serve --config serve.yaml

    Every option can be set in the environment: --max-num-seqs is MLX_PAGED_MAX_NUM_SEQS there,
    and several values are separated by spaces.
    """
    try:
        from mlx_paged.server import logs
        from mlx_paged.server.config import ServerConfig, default_model_name
        from mlx_paged.server.run import serve as run
    except ImportError as error:
        raise MlxPagedError(
            f"the server needs packages that are not installed ({error.name}): "
            "pip install 'mlx-paged[server]'"
        ) from error
    from mlx_paged.engine.async_engine import AsyncEngine
    from mlx_paged.engine.config import EngineConfig

    logs.configure(log_level.value, log_format.value, log_config)
    engine_options: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "kv_cache_memory": kv_cache_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
        "typical_context_len": typical_context_len,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_waiting": max_queue,
        "policy": scheduling_policy.value,
        "enable_prefix_caching": enable_prefix_caching,
        "disable_hybrid_kv_cache_manager": disable_hybrid_kv_cache_manager,
        "enable_chunked_prefill": enable_chunked_prefill,
        "async_scheduling": async_scheduling,
    }
    # What is wrong is told before the model is loaded.
    checked = EngineConfig(**engine_options)
    if max_model_len is not None:
        checked.scheduler_config(max_model_len)
    if (ssl_keyfile is None) != (ssl_certfile is None):
        raise InvalidParameterError("ssl_keyfile", "given together with ssl_certfile", ssl_keyfile)
    server_config = ServerConfig(
        served_model_names=tuple(served_model_name or (default_model_name(model),)),
        api_keys=_keys(api_key),
        chat_template=_template(chat_template),
        trust_request_chat_template=trust_request_chat_template,
        max_logprobs=max_logprobs,
        strict_requests=strict_requests,
        stream_interval=stream_interval,
        request_timeout=request_timeout,
        read_timeout=read_timeout,
        max_body_size=max_body_size,
        shutdown_timeout=shutdown_timeout,
        allowed_origins=tuple(allowed_origins or ()),
        root_path=root_path,
        log_requests=log_requests,
        priority_scheduling=scheduling_policy is Policy.PRIORITY,
        serve_page=page,
    )
    status = run(
        lambda: AsyncEngine.from_model(model, dtype=dtype.value, **engine_options),
        server_config,
        host=host,
        port=port,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )
    sys.exit(status)


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
