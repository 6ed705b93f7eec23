"""Options of `mlx-paged serve` about a model: files, memory, scheduling, media and adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mlx_paged.cli.options import (
    DTYPE_HELP,
    KV_CACHE_DTYPE_HELP,
    MAX_STEP_TIME_DEFAULT,
    MAX_STEP_TIME_HELP,
    OFFLOAD_DIR_HELP,
    OFFLOAD_GIB_HELP,
    OFFLOADING_HELP,
    RANKS_HELP,
    SPECULATIVE_HELP,
    STAGES_HELP,
    DType,
    follow_first,
    option,
)

_MODEL, _CACHE, _SCHED = "Model", "KV cache and memory", "Scheduling"
_LIMITS, _MEDIA, _LORA = "Limits", "Images, videos and audio", "LoRA adapters"


@dataclass(frozen=True)
class ModelOptions:
    """Options of one model: fields of `EngineConfig` and `ServerConfig` with the same names.

    With several models, the command line sets the defaults of all.
    """

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
    tensor_parallel_size: Annotated[
        int,
        option(_MODEL, RANKS_HELP, "--tensor-parallel-size", "-tp", min=1, callback=follow_first),
    ] = 1
    data_parallel_size: Annotated[
        int,
        option(
            _MODEL,
            "Serve the model from this many processes, each with its own devices or a share of "
            "the cores. docs/replicas.md",
            "--data-parallel-size",
            "-dp",
            min=1,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        option(
            _MODEL, STAGES_HELP, "--pipeline-parallel-size", "-pp", min=1, callback=follow_first
        ),
    ] = 1
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
    role: Annotated[
        Literal["prefill", "decode"] | None,
        option(
            _CACHE,
            "prefill: compute prompts for other servers, too; decode: have that server compute "
            "long prompts. docs/disaggregation.md",
            show_default="both here",
        ),
    ] = None
    prefill_address: Annotated[
        str | None,
        option(
            _CACHE,
            "HOST:PORT where --role prefill listens for --role decode. Blocks are not encrypted.",
            show_default="none",
        ),
    ] = None
    prefill_secret_file: Annotated[
        str | None,
        option(_CACHE, "File of at least 16 bytes that both servers have.", show_default="none"),
    ] = None
    prefill_min_tokens: Annotated[
        int,
        option(_CACHE, "Prompts with fewer tokens that are not cached are computed here.", min=1),
    ] = 1024
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
            show_default="half of --max-num-batched-tokens, 1376 beside decodes alone",
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
    structured_outputs_timeout: Annotated[
        float, option(_LIMITS, "CPU seconds for compiling a grammar before it is refused.")
    ] = 5.0
    structured_outputs_cache_size: Annotated[int, option(_LIMITS, "Compiled grammars to keep.")] = (
        256
    )
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

    @property
    def num_ranks(self) -> int:
        """Number of processes over which each replica is distributed."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
