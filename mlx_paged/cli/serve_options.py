"""The options of `mlx-paged serve`: names, types, groups and help."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlx_paged.cli.env_options import ENV_PREFIX, option, read_config

_MODEL, _CACHE, _SCHED = "Model", "KV cache and memory", "Scheduling"
_NET, _LIMITS, _LOGS, _API = "Network and access", "Limits", "Logs", "API"


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


Model = Annotated[
    str | None,
    typer.Argument(
        help="Model directory or Hugging Face id.",
        show_default="the embedded model",
        envvar=f"{ENV_PREFIX}_MODEL",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with any of these options; the command line and the environment win.",
        is_eager=True,
        callback=read_config,
        exists=True,
        dir_okay=False,
        envvar=f"{ENV_PREFIX}_CONFIG",
    ),
]
ServedModelName = Annotated[
    list[str] | None,
    option(
        _MODEL,
        "--served-model-name",
        help="Name in the API. Repeatable; the first one is in answers.",
        show_default="the model's path or id",
    ),
]
WeightType = Annotated[
    DType,
    option(_MODEL, "--dtype", help="Type of the weights; auto: as they are, float32 on the CPU."),
]
MaxModelLen = Annotated[
    int | None,
    option(
        _MODEL,
        "--max-model-len",
        help="Most tokens of prompt and answer.",
        min=1,
        show_default="what the model was made for",
    ),
]
ChatTemplate = Annotated[
    str | None,
    option(
        _MODEL,
        "--chat-template",
        help="Jinja file (or source) instead of the model's.",
        show_default="the model's",
    ),
]
GenerationConfig = Annotated[
    str,
    option(
        _MODEL,
        "--generation-config",
        help="Defaults of requests: auto: the model's generation_config.json; vllm: none; or a "
        "directory that has one.",
    ),
]
OverrideGenerationConfig = Annotated[
    str,
    option(
        _MODEL,
        "--override-generation-config",
        help='JSON object: entries in place of those, such as {"temperature": 0.5}. '
        "max_new_tokens limits every answer.",
    ),
]
TrustRequestChatTemplate = Annotated[
    bool,
    option(
        _MODEL,
        "--trust-request-chat-template",
        help="Let requests bring templates of their own: code that may run for ever.",
    ),
]
BlockSize = Annotated[
    int, option(_CACHE, "--block-size", help="Tokens of a KV block: 8, 16, 32 or 64.")
]
GpuMemoryUtilization = Annotated[
    float | None,
    option(
        _CACHE,
        "--gpu-memory-utilization",
        help="Share of device memory for weights, activations and KV cache.",
        show_default="0.9 on a GPU",
    ),
]
KvCacheMemory = Annotated[
    int | None,
    option(
        _CACHE,
        "--kv-cache-memory",
        help="Bytes of the KV cache, instead of a share.",
        min=1,
        show_default="4 GiB on the CPU",
    ),
]
NumGpuBlocksOverride = Annotated[
    int | None,
    option(
        _CACHE,
        "--num-gpu-blocks-override",
        help="Blocks of the KV cache, instead.",
        min=2,
        show_default="from memory",
    ),
]
TypicalContextLen = Annotated[
    int | None,
    option(
        _CACHE,
        "--typical-context-len",
        help="Tokens of a typical sequence: splits the memory between full attention and "
        "windows or recurrent layers.",
        min=1,
        show_default="4096, or four windows",
    ),
]
EnablePrefixCaching = Annotated[
    bool,
    option(
        _CACHE,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Share equal beginnings of prompts.",
    ),
]
DisableHybridKvCacheManager = Annotated[
    bool,
    option(
        _CACHE,
        "--disable-hybrid-kv-cache-manager",
        help="Keep blocks that a layer's window has left behind; for comparisons.",
    ),
]
MaxNumSeqs = Annotated[
    int, option(_SCHED, "--max-num-seqs", help="Most sequences that run at once.", min=1)
]
MaxNumBatchedTokens = Annotated[
    int,
    option(_SCHED, "--max-num-batched-tokens", help="Most tokens of one step.", min=1),
]
EnableChunkedPrefill = Annotated[
    bool,
    option(
        _SCHED,
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        help="Compute long prompts in parts, between the tokens of others.",
    ),
]
SchedulingPolicy = Annotated[
    Policy, option(_SCHED, "--scheduling-policy", help="Who is served first.")
]
AsyncScheduling = Annotated[
    bool,
    option(
        _SCHED,
        "--async-scheduling/--no-async-scheduling",
        help="Plan a step while the one before it runs.",
    ),
]
MaxQueue = Annotated[
    int,
    option(_LIMITS, "--max-queue", help="Most sequences that may wait; more get 429.", min=1),
]
RequestTimeout = Annotated[
    float | None,
    option(
        _LIMITS,
        "--request-timeout",
        help="Seconds until an unfinished request gets 408.",
        min=0.001,
        show_default="no limit",
    ),
]
ReadTimeout = Annotated[
    float,
    option(
        _LIMITS,
        "--read-timeout",
        help="Seconds to send a head, then a body, or to take a chunk.",
        min=0.1,
    ),
]
MaxBodySize = Annotated[
    int, option(_LIMITS, "--max-body-size", help="Most bytes of a body; more get 413.", min=1)
]
MaxLogprobs = Annotated[
    int,
    option(
        _LIMITS, "--max-logprobs", help="Most alternatives a request may ask for.", min=0, max=20
    ),
]
ShutdownTimeout = Annotated[
    float,
    option(
        _LIMITS, "--shutdown-timeout", help="Seconds for running requests after SIGTERM.", min=0
    ),
]
StrictRequests = Annotated[
    bool,
    option(_API, "--strict-requests", help="Refuse unknown fields instead of logging them."),
]
StreamInterval = Annotated[
    int, option(_API, "--stream-interval", help="Tokens of a streamed chunk.", min=1)
]
Page = Annotated[bool, option(_API, "--page/--no-page", help="Serve the chat page at /.")]
Host = Annotated[str, option(_NET, "--host", help="Address to listen on.")]
Port = Annotated[int, option(_NET, "--port", help="Port; 0: any that is free.", min=0, max=65535)]
ApiKey = Annotated[
    list[str] | None,
    option(
        _NET,
        "--api-key",
        help="Key that requests need. Repeatable.",
        show_default="none: open to all",
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    option(
        _NET,
        "--allowed-origins",
        help="Origin of browser pages that may call. Repeatable; '*': any.",
        show_default="its own",
    ),
]
RootPath = Annotated[
    str, option(_NET, "--root-path", help="Path under which a proxy shows the server.")
]
SslKeyfile = Annotated[
    Path | None,
    option(_NET, "--ssl-keyfile", help="Private key, PEM.", exists=True, dir_okay=False),
]
SslCertfile = Annotated[
    Path | None,
    option(
        _NET, "--ssl-certfile", help="Certificate, PEM: serve HTTPS.", exists=True, dir_okay=False
    ),
]
LogRequests = Annotated[
    bool,
    option(_LOGS, "--enable-log-requests/--disable-log-requests", help="One line a request."),
]
Severity = Annotated[LogLevel, option(_LOGS, "--log-level", help="Least severity.")]
LineFormat = Annotated[LogFormat, option(_LOGS, "--log-format", help="Form of a line.")]
LogConfig = Annotated[
    Path | None,
    option(
        _LOGS,
        "--log-config",
        help="Logging configuration, YAML or JSON, instead.",
        exists=True,
        dir_okay=False,
    ),
]
