"""EngineConfig: the engine's options. Names and defaults follow vLLM's where it has the option."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_paged import cgroups
from mlx_paged.core import SchedulerConfig, SchedulingPolicy
from mlx_paged.engine.pooling.params import (
    LAST,
    RUNNERS,
    PoolerConfig,
    overridden,
    pooler_config_of,
    runner_of,
)
from mlx_paged.engine.speculation.config import HEADS, SpeculativeConfig, speculative_config_of
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.kv_formats import KVFormat, format_named, skipped_layers
from mlx_paged.multimodal.options import MediaLimits, MediaOptions
from mlx_paged.parsing.reasoning import REASONING_FORMATS

_GIB = 1 << 30
_DEFAULT_KV_CACHE_MEMORY = 4 * _GIB
_MAX_SECONDS = 3600
_MAX_LORA_RANK = 512
_MAX_OFFLOADING = 1 << 20  # GiB
_MAX_RANKS = 1024
_MAX_PORT = 65535
ROLES = ("prefill", "decode")
DEFAULT_STEP_TOKENS = 2048
_SMOOTH_STEP_MS = 50
CALIBRATE = ("auto", "off", "force")
MEMORY_PRESSURE = ("auto", "off")
LORA_DTYPES = ("auto", "float32", "float16", "bfloat16")
CPU_ACTIVATIONS = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class EngineConfig:
    """Options for the engine's memory, model and scheduling.

    Attributes:
        runner: "generate" for tokens, "pooling" for embeddings (`LLM.embed`). "auto" is "pooling"
            for models with sentence-transformers' files, which configure it.
        tensor_parallel_size: Number of ranks that share every layer, each a process with its own
            device; see docs/distributed.md (vLLM's name).
        pipeline_parallel_size: Number of ranks that hold consecutive whole layers (vLLM's name).
            Saves memory, not time. With both sizes, there are as many ranks as their product.
        pooler_config: How to pool texts: a `PoolerConfig`, or a mapping with its fields. None uses
            the model's own settings. Only for the pooling runner.
        hf_overrides: vLLM's way to mark a model as a reranker: a mapping with
            `classifier_from_token`, see `PoolerConfig`.
        block_size: Tokens of a KV block: 8, 16, 32 or 64.
        kv_cache_dtype: Format of keys and values. "auto" is the model's dtype; "int8",
            "int8_k_int4_v" (or "k8v4"), "int4" and "fp8" hold more tokens in the same memory. Only
            "int8" is nearly lossless; see docs/kv-store.md. Latents and recurrent states keep the
            model's dtype.
        kv_cache_dtype_skip_layers: Layers that keep the model's dtype, by number from 0;
            "sliding_window" stands for all layers with a window (vLLM's name).
        cpu_activations: Format of the inputs of linear layers on the CPU: "float32" is exact;
            "int8" (weights of 4 or 8 bits) and "bfloat16" (weights in bfloat16, steps of many rows)
            are faster and less accurate; see docs/architecture.md. GPUs support only "float32".
        num_gpu_blocks_override: Number of blocks in the pool, regardless of memory (vLLM's name;
            applies to every backend).
        kv_cache_memory: Bytes for the pool. Allocated but not touched, so unused blocks take no
            physical memory.
        gpu_memory_utilization: Share of the device's memory for weights, activations and pool. The
            largest step runs once to measure the activations. None: 0.9 on a GPU. On the CPU, the
            pool gets 4 GiB, or half of the machine's memory if that is less, without a measurement.
        typical_context_len: Tokens of a typical sequence. If a model combines full attention with
            sliding windows or recurrent layers, it determines how they share memory: the shorter,
            the less full attention gets. None: 4096, or four windows if that is more.
        max_model_len: Maximum tokens of prompt and answer together; None: the model's own limit.
        max_num_seqs: Maximum running sequences; never more than max_num_batched_tokens.
        max_num_batched_tokens: Maximum tokens of one step; longer prompts are prefilled in chunks.
            None: 2048; on an NVIDIA GPU 4096 or 8192 if the weights leave enough memory.
        long_prefill_token_threshold: A prompt with more remaining tokens is long. It gets at most
            this many tokens per step, and all long prompts together leave short ones the tokens
            they need, up to half of the step. None: half of max_num_batched_tokens, at most 1376 if
            the others only decode, or all of it for a prompt without competitors; 0 treats all
            prompts alike.
        max_step_time_ms: Target maximum of milliseconds for a step with prompts, whose chunks are
            sized by measured times; see docs/scheduling.md. None: 50 on Metal, where long steps
            make the screen stutter, and no limit elsewhere. 0: no limit.
        watermark: Share of the blocks that admission leaves free for running sequences to grow.
        max_num_waiting: Maximum waiting sequences; more are refused with `EngineOverloadedError`.
            None means no limit.
        policy: "fcfs", or "priority" (lower `priority` first).
        enable_prefix_caching: Share common prefixes between requests, and keep them for later ones.
        kv_offloading_size: GiB of host memory for evicted blocks (vLLM's name), from which later
            prompts restore their prefixes; see docs/kv-offloading.md. None: drop evicted blocks.
        kv_offload_dir: Folder for blocks worth keeping, which survive restarts; see
            docs/kv-offloading.md. Prompts can be reconstructed from its files. Several processes
            and models may share it. None: no disk.
        kv_offload_gib: Maximum GiB of all files in that folder.
        role: "prefill" also computes prompts for other engines; "decode" sends long prompts to such
            an engine; see docs/disaggregation.md. None: everything runs here.
        prefill_address: HOST:PORT where the prefill engine listens and the decode engine connects.
            Keys and values are not encrypted: use a trusted network.
        prefill_secret_file: File of at least 16 bytes that both engines share.
        prefill_min_tokens: Prompts with fewer uncached tokens are computed here.
        disable_hybrid_kv_cache_manager: Keep the blocks of all attention layers as long as their
            sequence, even after a layer's window has moved on (vLLM's name). For comparisons.
        enable_chunked_prefill: Split prompts that do not fit in a step. If False,
            max_num_batched_tokens must be at least the context length.
        async_scheduling: Plan and launch a step while the previous one still runs. Tokens do not
            change.
        enforce_eager: On a GPU, skip the warm-up and build every decode step instead of
            replaying graphs (vLLM's name).
        calibrate: "auto" checks and times the kernels at the first start on an Apple GPU, in at
            most 10 s, and saves the result; "force" repeats it, on any GPU; "off" skips it, and
            whole steps then do not run on Metal.
        memory_pressure: "auto" follows the system's memory pressure if the pools are in main
            memory: returns unused blocks, and refuses new requests with `MemoryPressureError` while
            memory is critically short. "off" ignores it.
        speculative_config: Speculative decoding: a `SpeculativeConfig`, or a mapping with its
            fields, such as {"method": "suffix"}. Tokens do not change. None: off.
        reasoning_parser: Format of the model's reasoning, by vLLM's name
            (`parsing.reasoning.REASONING_FORMATS`). It determines where a grammar begins and which
            tokens `thinking_token_budget` counts. "auto" detects it by vocabulary and template;
            "none" or "" turns it off.
        structured_outputs_timeout: Maximum CPU seconds to compile a grammar before its request is
            refused.
        structured_outputs_cache_size: Maximum number of compiled grammars to keep.
        limit_mm_per_prompt: Maximum items of each kind in one prompt: a mapping of "image", "video"
            and "audio". The default is vLLM's 999.
        allowed_local_media_path: Folder whose files `file:` URLs may name; None: no local files.
        allowed_media_domains: Hosts to fetch media from, including private ones; None: any host
            with a public address.
        media_io_kwargs: How to read media, as in vLLM: {"video": {"num_frames": 32, "fps": -1},
            "image": {"rgba_background_color": [255, 255, 255]}}.
        mm_processor_kwargs: Options for the model's processor.
        media_limits: Fields of `MediaLimits` that replace its defaults.
        max_num_encoder_tokens: Maximum rows of images, video and audio that one step encodes; a
            larger item is encoded alone. None: max_num_batched_tokens.
        mm_encoder_cache_bytes: Bytes for cached encoder outputs.
        enable_lora: Accept requests with a `LoRARequest`.
        max_loras: Maximum number of different adapters in a step. Requests for others wait.
        max_lora_rank: Maximum rank of an adapter. Adapters take memory and time in proportion.
        lora_dtype: Dtype of adapters on the device. "auto" is the dtype of activations. On the CPU,
            which computes in float32, "float16" and "bfloat16" halve the memory and the time to
            read adapters.
        max_cpu_loras: Maximum number of adapters in main memory; None: max_loras.
        adapter_path: Directory of the adapter for requests that name none (mlx-lm's name). Its rank
            may exceed max_lora_rank.
        warm_up_loras: Directories of adapters whose steps the engine prepares at startup, on a GPU.
    """

    runner: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pooler_config: PoolerConfig | Mapping[str, Any] | None = None
    hf_overrides: Mapping[str, Any] | None = None
    block_size: int = 32
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: Sequence[int | str] = ()
    cpu_activations: str = "float32"
    num_gpu_blocks_override: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    typical_context_len: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    max_step_time_ms: float | None = None
    watermark: float = 0.01
    max_num_waiting: int | None = None
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    kv_offloading_size: float | None = None
    kv_offload_dir: str | Path | None = None
    kv_offload_gib: float = 32.0
    role: str | None = None
    prefill_address: str | None = None
    prefill_secret_file: str | Path | None = None
    prefill_min_tokens: int = 1024
    disable_hybrid_kv_cache_manager: bool = False
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    enforce_eager: bool = False
    calibrate: str = "auto"
    memory_pressure: str = "auto"
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    reasoning_parser: str = "auto"
    structured_outputs_timeout: float = 5.0
    structured_outputs_cache_size: int = 256
    limit_mm_per_prompt: Mapping[str, Any] | None = None
    allowed_local_media_path: str | Path | None = None
    allowed_media_domains: Sequence[str] | None = None
    media_io_kwargs: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    media_limits: Mapping[str, Any] | MediaLimits | None = None
    max_num_encoder_tokens: int | None = None
    mm_encoder_cache_bytes: int = 512 << 20
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_dtype: str = "auto"
    max_cpu_loras: int | None = None
    adapter_path: str | Path | None = None
    warm_up_loras: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise InvalidParameterError("runner", " or ".join(map(repr, RUNNERS)), self.runner)
        given = None if self.pooler_config is None else PoolerConfig.of(self.pooler_config)
        object.__setattr__(self, "pooler_config", overridden(given, self.hf_overrides))
        self._check_pooler()
        self._check_integers()
        if type(self.block_size) is not int or self.block_size not in (8, 16, 32, 64):
            raise InvalidParameterError("block_size", "8, 16, 32 or 64", self.block_size)
        format_named(self.kv_cache_dtype)
        skipped = skipped_layers(self.kv_cache_dtype_skip_layers)
        object.__setattr__(self, "kv_cache_dtype_skip_layers", skipped)
        if self.cpu_activations not in CPU_ACTIVATIONS:
            expected = " or ".join(map(repr, CPU_ACTIVATIONS))
            raise InvalidParameterError("cpu_activations", expected, self.cpu_activations)
        self._check_flags()
        speculative_config = speculative_config_of(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculative_config)
        if speculative_config is not None and self.runner == "pooling":
            expected = "None for the runner 'pooling', which generates nothing"
            raise InvalidParameterError("speculative_config", expected, self.speculative_config)
        if self.calibrate not in CALIBRATE:
            raise InvalidParameterError("calibrate", "'auto', 'off' or 'force'", self.calibrate)
        if self.memory_pressure not in MEMORY_PRESSURE:
            raise InvalidParameterError("memory_pressure", "'auto' or 'off'", self.memory_pressure)
        self._check_shares()
        self._check_offloading()
        self._check_role()
        self._check_step_time()
        timeout = self.structured_outputs_timeout
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout <= _MAX_SECONDS:
            expected = f"a number of seconds in (0, {_MAX_SECONDS}]"
            raise InvalidParameterError("structured_outputs_timeout", expected, timeout)
        parsers = ["auto", "none", "", *REASONING_FORMATS]
        if not isinstance(self.reasoning_parser, str) or self.reasoning_parser not in parsers:
            expected = f"one of {', '.join(map(repr, parsers))}"
            raise InvalidParameterError("reasoning_parser", expected, self.reasoning_parser)
        policies = [policy.value for policy in SchedulingPolicy]
        if self.policy not in policies:
            raise InvalidParameterError("policy", " or ".join(map(repr, policies)), self.policy)
        self._check_adapters()
        self._check_ranks()
        _ = self.media_options

    def _check_integers(self) -> None:
        for name, minimum in (
            ("tensor_parallel_size", 1),
            ("pipeline_parallel_size", 1),
            ("num_gpu_blocks_override", 2),
            ("kv_cache_memory", 1),
            ("typical_context_len", 1),
            ("max_model_len", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("long_prefill_token_threshold", 0),
            ("max_num_waiting", 1),
            ("prefill_min_tokens", 1),
            ("structured_outputs_cache_size", 0),
            ("max_num_encoder_tokens", 1),
            ("mm_encoder_cache_bytes", 1),
            ("max_loras", 1),
            ("max_lora_rank", 1),
            ("max_cpu_loras", 1),
        ):
            value = getattr(self, name)
            optional = "None or " if type(self).__dataclass_fields__[name].default is None else ""
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise InvalidParameterError(
                    name, f"{optional}an integer of at least {minimum}", value
                )

    def _check_flags(self) -> None:
        for name in (
            "enable_prefix_caching",
            "disable_hybrid_kv_cache_manager",
            "enable_chunked_prefill",
            "async_scheduling",
            "enforce_eager",
            "enable_lora",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(name, "True or False", getattr(self, name))

    def _check_shares(self) -> None:
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise InvalidParameterError("gpu_memory_utilization", "None or in (0, 1]", share)
        if (
            not isinstance(self.watermark, (int, float))
            or isinstance(self.watermark, bool)
            or not 0 <= self.watermark < 1
        ):
            raise InvalidParameterError("watermark", "a number in [0, 1)", self.watermark)

    @cached_property
    def kv_format(self) -> KVFormat | None:
        """The format of keys and values; None means the model's dtype."""
        return format_named(self.kv_cache_dtype)

    @cached_property
    def kv_salt(self) -> str | None:
        """The salt that separates blocks with these options from others; None for defaults."""
        rounded = None if self.cpu_activations == "float32" else f"x={self.cpu_activations}"
        if self.kv_format is None:
            return rounded
        skipped = ",".join(map(str, self.kv_cache_dtype_skip_layers))
        return f"{self.kv_format.name}/{skipped}" + (f"/{rounded}" if rounded else "")

    def salted(self, cache_salt: str | None) -> str | None:
        """Returns a request's cache salt combined with the format of keys and values."""
        if self.kv_salt is None or cache_salt is None:
            return self.kv_salt or cache_salt
        is_salt = isinstance(cache_salt, str) and cache_salt != ""  # `Request` refuses others.
        return f"{self.kv_salt}/{cache_salt}" if is_salt else cache_salt

    @cached_property
    def media_options(self) -> MediaOptions:
        """The media options, validated."""
        return MediaOptions.of(
            limit_mm_per_prompt=self.limit_mm_per_prompt,
            allowed_local_media_path=self.allowed_local_media_path,
            allowed_media_domains=self.allowed_media_domains,
            media_io_kwargs=self.media_io_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
            media_limits=self.media_limits,
        )

    def _check_offloading(self) -> None:
        for name, minimum in (("kv_offloading_size", 0.0), ("kv_offload_gib", 1 / 16)):
            size = getattr(self, name)
            if size is None and name == "kv_offloading_size":
                continue
            is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
            if not is_number or not minimum < size <= _MAX_OFFLOADING:
                optional = "None or " if name == "kv_offloading_size" else ""
                expected = f"{optional}GiB in ({minimum:g}, {_MAX_OFFLOADING}]"
                raise InvalidParameterError(name, expected, size)
        folder = self.kv_offload_dir
        if folder is not None and (not isinstance(folder, (str, Path)) or not str(folder)):
            raise InvalidParameterError("kv_offload_dir", "None or a folder", folder)
        for name in ("kv_offloading_size", "kv_offload_dir"):
            if getattr(self, name) is not None and not self.enable_prefix_caching:
                expected = "None where enable_prefix_caching is False"
                raise InvalidParameterError(name, expected, getattr(self, name))

    def _check_role(self) -> None:
        if self.role not in (None, *ROLES):
            expected = f"None, {' or '.join(map(repr, ROLES))}"
            raise InvalidParameterError("role", expected, self.role)
        for name, expected in (
            ("prefill_address", "HOST:PORT"),
            ("prefill_secret_file", "a file that both engines have"),
        ):
            value = getattr(self, name)
            if self.role is None and value is not None:
                raise InvalidParameterError(name, "None without a role", value)
            if self.role is not None and (not isinstance(value, (str, Path)) or not str(value)):
                raise InvalidParameterError(name, f"{expected}, for a role", value)
        if self.role is not None:
            _ = self.prefill_host_and_port
            if not self.enable_prefix_caching:
                expected = "None where enable_prefix_caching is False"
                raise InvalidParameterError("role", expected, self.role)

    @property
    def prefill_host_and_port(self) -> tuple[str, int]:
        """Host and port of `prefill_address`; only with a role."""
        host, _, port = str(self.prefill_address).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_port = port.isdecimal() and len(port) <= len(str(_MAX_PORT))
        least = 0 if self.role == "prefill" else 1  # 0 is for a server that chooses one
        if not _is_host(host) or not is_port or not least <= int(port) <= _MAX_PORT:
            raise InvalidParameterError("prefill_address", "HOST:PORT", self.prefill_address)
        return host, int(port)

    @property
    def kv_offloading_bytes(self) -> int:
        """Bytes of host memory for evicted blocks; 0 drops them."""
        return int((self.kv_offloading_size or 0) * _GIB)

    @property
    def kv_offload_bytes(self) -> int:
        """Maximum bytes of the files in `kv_offload_dir`."""
        return int(self.kv_offload_gib * _GIB)

    def _check_step_time(self) -> None:
        limit = self.max_step_time_ms
        if limit is None:
            return
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if not is_number or not (limit == 0 or 1 <= limit <= 1000 * _MAX_SECONDS):
            expected = f"None, 0 or milliseconds in [1, {1000 * _MAX_SECONDS}]"
            raise InvalidParameterError("max_step_time_ms", expected, limit)
        if limit and not self.enable_chunked_prefill:
            expected = "None or 0 where enable_chunked_prefill is False"
            raise InvalidParameterError("max_step_time_ms", expected, limit)

    def _check_adapters(self) -> None:
        if self.max_lora_rank > _MAX_LORA_RANK:
            expected = f"at most {_MAX_LORA_RANK}"
            raise InvalidParameterError("max_lora_rank", expected, self.max_lora_rank)
        if self.lora_dtype not in LORA_DTYPES:
            expected = " or ".join(map(repr, LORA_DTYPES))
            raise InvalidParameterError("lora_dtype", expected, self.lora_dtype)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            expected = f"None or at least max_loras ({self.max_loras})"
            raise InvalidParameterError("max_cpu_loras", expected, self.max_cpu_loras)
        path = self.adapter_path
        if path is not None and (not isinstance(path, (str, Path)) or not str(path)):
            raise InvalidParameterError("adapter_path", "None or a directory", path)
        object.__setattr__(self, "adapter_path", None if path is None else str(path))
        if self.warm_up_loras and not self.enable_lora:
            expected = "empty unless enable_lora is True"
            raise InvalidParameterError("warm_up_loras", expected, self.warm_up_loras)

    @property
    def num_ranks(self) -> int:
        """Number of processes that run the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_option(self) -> str:
        """The options that ask for several ranks, for errors."""
        names = ("tensor_parallel_size", "pipeline_parallel_size")
        return " * ".join(name for name in names if getattr(self, name) > 1) or names[0]

    def _check_ranks(self) -> None:
        option = self.ranks_option
        if self.num_ranks > _MAX_RANKS:
            raise InvalidParameterError(option, f"at most {_MAX_RANKS}", self.num_ranks)
        if self.num_ranks == 1:
            return
        speculative = self.speculative_config
        method = speculative.method if isinstance(speculative, SpeculativeConfig) else None
        for name, is_refused in (
            ("kv_offloading_size", self.kv_offloading_size is not None),
            ("kv_offload_dir", self.kv_offload_dir is not None),
            ("role", self.role is not None),
            ("speculative_config", method in HEADS and self.pipeline_parallel_size > 1),
        ):
            if is_refused:
                default = type(self).__dataclass_fields__[name].default
                expected = repr(default)
                if name == "speculative_config":
                    expected = f"a method other than {', '.join(HEADS)}"
                expected += f" where {option} is above 1"
                raise InvalidParameterError(name, expected, getattr(self, name))

    @property
    def num_adapter_slots(self) -> int:
        """Number of adapter slots on the device; 0 if adapters are off."""
        return self.max_loras if self.enable_lora else int(self.adapter_path is not None)

    def _check_pooler(self) -> None:
        if self.runner == "generate" and self.pooler_config is not None:
            expected = "None for the runner 'generate', which pools nothing"
            raise InvalidParameterError("pooler_config", expected, self.pooler_config)

    @property
    def pooler(self) -> PoolerConfig | None:
        """How the engine pools; None if it generates. Only valid after `for_model`."""
        given = self.pooler_config
        return given if isinstance(given, PoolerConfig) and self.runner == "pooling" else None

    def for_model(
        self, directory: Path | None, config: Mapping[str, Any], *, classifies: bool = False
    ) -> EngineConfig:
        """Returns these options with runner and pooling resolved for a model.

        Args:
            directory: Directory of the model's files; None if unknown.
            config: Its ``config.json``.
            classifies: True if it has a classification layer.

        Raises:
            InvalidParameterError: The model generates but has a pooler config, or it classifies and
                the pooler config contradicts that.
            UnsupportedModelError: The model cannot be pooled.
        """
        given = self.pooler_config
        assert given is None or isinstance(given, PoolerConfig)
        runner = runner_of(self.runner, directory, given, classifies=classifies)
        if runner == "generate":
            return replace(self, runner=runner)  # This refuses a pooler config.
        pooler = pooler_config_of(given, directory, config)
        # A mean needs the hidden states of all tokens, which the cache does not hold.
        caches = self.enable_prefix_caching and pooler.pooling_type == LAST
        return replace(self, runner=runner, pooler_config=pooler, enable_prefix_caching=caches)

    def with_step_time(self, *, draws_screen: bool) -> EngineConfig:
        """Returns these options with a default for `max_step_time_ms`.

        Args:
            draws_screen: True if the device of the model also draws the screen.
        """
        if self.max_step_time_ms is not None:
            return self
        is_limited = draws_screen and self.enable_chunked_prefill
        return replace(self, max_step_time_ms=_SMOOTH_STEP_MS if is_limited else 0)

    def model_len(self, model_limit: int | None) -> int | None:
        """Returns the context limit in effect, given the model's own.

        Raises:
            InvalidParameterError: `max_model_len` exceeds the model's own limit.
        """
        if self.max_model_len is None:
            return model_limit
        if model_limit is not None and self.max_model_len > model_limit:
            raise InvalidParameterError(
                "max_model_len",
                f"at most {model_limit}, the model's own limit,",
                self.max_model_len,
            )
        return self.max_model_len

    @property
    def step_tokens(self) -> int:
        """Maximum tokens of one step: `max_num_batched_tokens`, or its default without a GPU."""
        return self.max_num_batched_tokens or DEFAULT_STEP_TOKENS

    def scheduler_config(
        self,
        model_limit: int | None,
        encoder_bytes_per_row: int | None = None,
        *,
        encodes_slowly: bool = False,
    ) -> SchedulerConfig:
        """Returns the scheduler's configuration.

        Args:
            encoder_bytes_per_row: Estimated bytes of one row's features; None if unknown.
            encodes_slowly: True if the encoders run on the CPU, where an image takes as long as
                several decode steps.
        """
        more = {} if not encoder_bytes_per_row else {"encoder_bytes_per_row": encoder_bytes_per_row}
        model_len = self.model_len(model_limit)
        if self.runner == "pooling" and model_len is not None:
            model_len += 1  # the token that ends a prompt is never computed
        return SchedulerConfig(
            # A running sequence takes at least one token of every step.
            max_num_seqs=min(self.max_num_seqs, self.step_tokens),
            max_num_batched_tokens=self.step_tokens,
            max_model_len=model_len,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            watermark=self.watermark,
            max_num_waiting=self.max_num_waiting,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=SchedulingPolicy(self.policy),
            max_num_encoder_tokens=self.max_num_encoder_tokens,
            max_encoder_items_with_decodes=1 if encodes_slowly else None,
            encoder_cache_bytes=self.mm_encoder_cache_bytes,
            max_loras=self.num_adapter_slots,
            **more,
        )

    def num_blocks(
        self,
        bytes_per_token: Sequence[int],
        model_limit: int | None,
        left_over: int | None = None,
        *,
        max_blocks: Callable[[int], int] | None = None,
    ) -> int:
        """Returns the number of blocks in the pool, including block 0, which is never handed out.

        Args:
            bytes_per_token: Bytes of K and V of one token, for each layer.
            left_over: Bytes that `gpu_memory_utilization` leaves for the pool, if it applies.
            max_blocks: Returns the number of blocks that fit in some bytes, for models whose
                layers have different numbers of blocks.

        Raises:
            InvalidParameterError: The memory does not hold two blocks.
        """
        if self.num_gpu_blocks_override is not None:
            return self.num_gpu_blocks_override
        block_bytes = self.block_size * sum(bytes_per_token)
        memory = self.kv_cache_memory or left_over
        if memory is None:
            memory = min(_DEFAULT_KV_CACHE_MEMORY, physical_memory() // 2)
        fitting = memory // block_bytes if max_blocks is None else max_blocks(memory)
        if fitting < 2:
            expected = f"at least two blocks of {block_bytes} bytes"
            if max_blocks is not None:
                expected += " and what goes with them in windows and states"
            if self.kv_cache_memory is None and left_over is not None:
                given = f"{self.gpu_memory_utilization}, which leaves {left_over} bytes"
                raise InvalidParameterError(
                    "gpu_memory_utilization", f"enough for {expected}", given
                )
            raise InvalidParameterError("kv_cache_memory", expected, memory)
        limit = self.model_len(model_limit)
        if limit is None:
            return fitting
        # No more than every sequence at full length could use.
        return min(fitting, self.max_num_seqs * -(-limit // self.block_size) + 1)


def physical_memory() -> int:
    """Returns the bytes of main memory, or of this process's control groups if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroups.current().memory_bytes
    return total if limit is None else min(total, limit)


def _is_host(text: str) -> bool:
    """True if a host can be looked up; otherwise sockets raise something else than `OSError`."""
    try:
        return bool(text.encode("idna")) and "\0" not in text
    except UnicodeError:
        return False
