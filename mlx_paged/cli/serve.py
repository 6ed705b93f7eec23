"""`mlx-paged serve`: options become an engine and a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mlx_paged.cli import serve_options as options
from mlx_paged.cli.serve_options import DType, LogFormat, LogLevel, Policy
from mlx_paged.errors import InvalidParameterError, MlxPagedError


def serve(
    model: options.Model = None,
    config: options.ConfigFile = None,
    served_model_name: options.ServedModelName = None,
    dtype: options.WeightType = DType.AUTO,
    max_model_len: options.MaxModelLen = None,
    chat_template: options.ChatTemplate = None,
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = "{}",
    trust_request_chat_template: options.TrustRequestChatTemplate = False,
    block_size: options.BlockSize = 32,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    kv_cache_memory: options.KvCacheMemory = None,
    num_gpu_blocks_override: options.NumGpuBlocksOverride = None,
    typical_context_len: options.TypicalContextLen = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    disable_hybrid_kv_cache_manager: options.DisableHybridKvCacheManager = False,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    enable_chunked_prefill: options.EnableChunkedPrefill = True,
    scheduling_policy: options.SchedulingPolicy = Policy.FCFS,
    async_scheduling: options.AsyncScheduling = True,
    max_queue: options.MaxQueue = 1024,
    request_timeout: options.RequestTimeout = None,
    read_timeout: options.ReadTimeout = 60.0,
    max_body_size: options.MaxBodySize = 16 << 20,
    max_logprobs: options.MaxLogprobs = 20,
    shutdown_timeout: options.ShutdownTimeout = 30.0,
    strict_requests: options.StrictRequests = False,
    stream_interval: options.StreamInterval = 1,
    page: options.Page = True,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    api_key: options.ApiKey = None,
    allowed_origins: options.AllowedOrigins = None,
    root_path: options.RootPath = "",
    ssl_keyfile: options.SslKeyfile = None,
    ssl_certfile: options.SslCertfile = None,
    log_requests: options.LogRequests = True,
    log_level: options.Severity = LogLevel.INFO,
    log_format: options.LineFormat = LogFormat.TEXT,
    log_config: options.LogConfig = None,
) -> None:
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
        from mlx_paged.server.config import (
            ServerConfig,
            default_model_name,
            generation_config_of,
            overrides_of,
        )
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
        generation_config=generation_config,
        override_generation_config=overrides_of(override_generation_config),
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
    sampling = generation_config_of(generation_config)
    status = run(
        lambda: AsyncEngine.from_model(
            model, dtype=dtype.value, generation_config=sampling, **engine_options
        ),
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
