"""Prometheus metrics: vLLM's families by name, label and bucket, and some of our own."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mlx_paged.core import FinishReason
from mlx_paged.engine.client import EngineClient
from mlx_paged.engine.memory import live_arrays
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.stats import EngineStats, LoraStats, SpecDecodingStats

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_NEXT_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_NUM_ANSWERS = (1, 2, 5, 10, 20)

# By name: help text, and buckets (None: lengths up to that of the longest request).
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...] | None]] = {
    "request_time_per_output_token_seconds": (
        "Histogram of mean time per output token of a request in seconds.", _NEXT_TOKEN,
    ),
    "request_queue_time_seconds": ("Histogram of time a request waited, in seconds.", _REQUEST),
    "request_prefill_time_seconds": (
        "Histogram of time from admission to first token, in seconds.", _REQUEST,
    ),
    "request_decode_time_seconds": (
        "Histogram of time from first to last token, in seconds.", _REQUEST,
    ),
    "request_inference_time_seconds": (
        "Histogram of time from admission to last token, in seconds.", _REQUEST,
    ),
    "e2e_request_latency_seconds": ("Histogram of whole requests in seconds.", _REQUEST),
    "iteration_tokens_total": ("Histogram of tokens per engine step.", _STEP_TOKENS),
    "request_prompt_tokens": ("Histogram of prompt tokens of a request.", None),
    "request_generation_tokens": ("Histogram of generated tokens of a request.", None),
    "request_max_num_generation_tokens": ("Histogram of the longest answer of a request.", None),
    "request_params_n": ("Histogram of the parameter n.", _NUM_ANSWERS),
    "request_params_max_tokens": ("Histogram of the parameter max_tokens.", None),
}  # fmt: skip

# Observed for every token.
_GAPS = {
    "vllm:inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "vllm:time_per_output_token_seconds": "Inter-token latency under its older name.",
}

# Why a request was refused: by the phase of the server, by the engine, or for its client.
_REFUSALS = (
    *("loading", "draining", "dead", "queue_full", "body_memory", "memory_pressure", "invalid"),
    "rate_limit",
)

_LABELS = ("model_name", "engine")


def _lengths(longest: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to the longest context."""
    steps = (mantissa * 10**exponent for exponent in range(12) for mantissa in (1, 2, 5))
    return [step for step in steps if step <= longest] or [1]


class Metrics:
    """The metrics of one server, in their own registry.

    Before `attach`, there are only rejections, HTTP statuses, and on Linux the process's metrics.

    Attributes:
        rejected: Requests refused, by reason.
        responses: HTTP responses, by path and status.
        server_load: Unfinished requests for answers.
        time_to_first_token: Seconds from a request's parameters to its first token.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rejected = Counter(
            "mlx_paged:requests_rejected", "Requests refused, by reason.", ["reason"],
            registry=self.registry,
        )  # fmt: skip
        for reason in _REFUSALS:  # Created now, so that the first refusal is an increase.
            self.rejected.labels(reason)
        self.responses = Counter(
            "mlx_paged:http_responses", "HTTP responses, by path and status.", ["path", "status"],
            registry=self.registry,
        )  # fmt: skip
        ProcessCollector(registry=self.registry)
        self.server_load = 0
        self._collector: _EngineCollector | None = None
        self._gaps = _GapCollector()

    def attach(self, engine: EngineClient, model_name: str, stats: EngineStats) -> None:
        """Creates the metrics that need an engine."""
        values = (model_name, "0")

        def histogram(name: str, text: str, buckets: Any) -> Histogram:
            made = Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
            return made.labels(*values)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*values)

        lengths = _lengths(engine.info.max_request_len)
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.",
            _FIRST_TOKEN,
        )  # fmt: skip
        self._histograms = {
            name: histogram(name, text, buckets or lengths)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        success = Counter(
            "vllm:request_success", "Requests that ended, by reason.",
            [*_LABELS, "finished_reason"], registry=self.registry,
        )  # fmt: skip
        self._success = {r: success.labels(*values, r.value) for r in FinishReason}
        config = engine.info.config
        info = {
            "block_size": config.block_size,
            "num_gpu_blocks": stats.usage.num_usable_blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
            "cache_dtype": "auto",
            "engine": "0",
        }
        Gauge(
            "vllm:cache_config_info", "Options of the KV cache.", list(info), registry=self.registry
        ).labels(*map(str, info.values())).set(1)
        engine.observe_steps(self._histograms["iteration_tokens_total"].observe)
        self._gaps.attach(values)
        self.registry.register(self._gaps)
        self._collector = _EngineCollector(values, stats)
        self.registry.register(self._collector)

    def render(self, stats: EngineStats | None) -> bytes:
        """Returns all metrics in Prometheus's text format.

        Args:
            stats: Current statistics; None uses the last ones, if the engine did not answer.
        """
        if self._collector is not None and stats is not None:
            self._collector.stats = stats
        return generate_latest(self.registry)

    def tokens(self, seconds: float, count: int) -> None:
        """Records `count` new tokens of a sequence.

        Args:
            seconds: Time since its previous tokens.
        """
        self._gaps.observe(seconds, count)

    def finish(self, output: RequestOutput, reason: FinishReason, max_tokens: int | None) -> None:
        """Records a request of the engine that has ended."""
        times = output.metrics
        counts = [len(answer.token_ids) for answer in output.outputs]
        self._success[reason].inc()
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        self._generation_tokens.inc(sum(counts))
        values: dict[str, float | None] = {
            "params_n": len(counts),
            "params_max_tokens": max_tokens,
            "prompt_tokens": len(output.prompt_token_ids),
            "generation_tokens": sum(counts),
            "max_num_generation_tokens": max(counts),
        }
        first, end = times.first_token_time, times.finished_time
        scheduled = times.scheduled_time
        if first is not None and end is not None and scheduled is not None:  # if it has run
            self._histograms["e2e_request_latency_seconds"].observe(end - times.arrival_time)
            values |= {
                "queue_time_seconds": scheduled - times.arrival_time,
                "prefill_time_seconds": first - scheduled,
                "decode_time_seconds": end - first,
                "inference_time_seconds": end - scheduled,
            }
            if max(counts) > 1:
                values["time_per_output_token_seconds"] = (end - first) / (max(counts) - 1)
        for name, value in values.items():
            if value is not None:
                self._histograms[f"request_{name}"].observe(value)


class _GapCollector(Collector):
    """Histograms of the time between tokens.

    prometheus_client's own cost twice as much per token as everything else here. Observing later,
    all at once, would pause the server: 14 ms for 10,000 tokens on a fast core.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(_NEXT_TOKEN) + 1)  # by bucket; the last has no bound
        self._sum = 0.0
        self._labels: Sequence[str] = ()
        self._created = time.time()

    def attach(self, labels: Sequence[str]) -> None:
        """Sets the values of the labels."""
        self._labels = labels

    def observe(self, seconds: float, count: int) -> None:
        """Adds `count` equal gaps of `seconds` together."""
        self._counts[bisect_left(_NEXT_TOKEN, seconds / count)] += count
        self._sum += seconds

    def collect(self) -> list[Metric]:
        bounds = [*map(str, map(float, _NEXT_TOKEN)), "+Inf"]
        totals = itertools.accumulate(self._counts)
        buckets: list[Any] = [[bound, total] for bound, total in zip(bounds, totals)]
        families: list[Metric] = []
        for name, text in _GAPS.items():
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            family.add_metric(self._labels, buckets, self._sum)
            created = dict(zip(_LABELS, self._labels))
            family.add_sample(f"{name}_created", created, self._created)
            families.append(family)
        return families

    def describe(self) -> list[Metric]:
        return []


class _EngineCollector(Collector):
    """Metrics that the engine counts itself."""

    def __init__(self, values: tuple[str, str], stats: EngineStats) -> None:
        self.stats = stats
        self._values = values

    def collect(self) -> list[Metric]:
        stats, usage, counters = self.stats, self.stats.usage, self.stats.counters
        media = stats.encoder_cache
        used = usage.num_usable_blocks - usage.num_free_blocks - usage.num_cached_blocks
        gauges = (
            ("vllm:num_requests_running", "Sequences that run.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV cache in use; 1 is all of it.",
                used / max(1, usage.num_usable_blocks),
            ),
            ("mlx_paged:blocks_used", "Blocks that sequences hold.", usage.num_used_blocks),
            ("mlx_paged:blocks_cached", "Blocks kept for prefixes.", usage.num_cached_blocks),
            ("mlx_paged:blocks_free", "Empty blocks.", usage.num_free_blocks),
            ("mlx_paged:blocks_shared", "Blocks held more than once.", usage.num_shared_blocks),
            ("mlx_paged:live_arrays", "mx.array objects of this process.", live_arrays()),
            ("mlx_paged:memory_active_bytes", "MLX's live memory.", stats.memory.active),
            ("mlx_paged:memory_cached_bytes", "MLX's freed buffers.", stats.memory.cached),
            ("mlx_paged:memory_peak_bytes", "Most that was live.", stats.memory.peak),
            (
                "mlx_paged:memory_pressure",
                "The system's memory pressure: 0 normal, 1 warning, 2 critical (requests get 503).",
                stats.pressure.level,
            ),
            (
                "mlx_paged:encoder_cache_bytes",
                "Held features of pictures, videos and sounds.",
                media.num_bytes,
            ),
            (
                "mlx_paged:steps_compiled",
                "0: decode steps are not compiled as a whole, which costs time; the log says why.",
                stats.compilation.refused is None,
            ),
        )
        counts = (
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.",
             counters.num_queried_tokens),
            ("vllm:prefix_cache_hits", "Tokens found there.", counters.num_cached_tokens),
            ("vllm:mm_cache_queries", "Pictures, videos and sounds whose features were needed.",
             media.num_queries + media.num_prefix_hits),
            ("vllm:mm_cache_hits", "Those that were not encoded again.",
             media.num_hits + media.num_prefix_hits),
            ("mlx_paged:encoded_rows", "Rows that the towers made.", media.num_encoded_rows),
            ("vllm:num_preemptions", "Sequences that lost their blocks.", stats.num_preemptions),
            ("mlx_paged:steps", "Engine steps.", stats.num_steps),
            ("mlx_paged:step_faults", "Steps that failed and were run again.", stats.num_faults),
            ("mlx_paged:pool_copies", "Whole-pool copies; more than 0 is a bug.",
             stats.pool_copies),
            ("mlx_paged:block_copies", "Blocks copied on write.", counters.num_block_copies),
            ("mlx_paged:evictions", "Cached blocks dropped.", counters.num_evictions),
            ("mlx_paged:memory_given_back_bytes", "Memory given back under memory pressure.",
             stats.pressure.num_bytes),
            ("mlx_paged:blocks_given_back", "Cached blocks dropped under memory pressure.",
             stats.pressure.num_blocks),
        )  # fmt: skip
        families: list[Metric] = []
        for name, text, value in (*gauges, *_offload_gauges(stats)):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._values, value)
            families.append(gauge)
        more = (*_draft_counts(stats.spec_decoding), *_offload_counts(stats))
        more += _transfer_counts(stats)
        for name, text, value in (*counts, *more):
            count = CounterMetricFamily(name, text, labels=_LABELS)
            count.add_metric(self._values, value)
            families.append(count)
        if stats.spec_decoding is not None:
            per_pos = CounterMetricFamily(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Accepted drafts, by place in the draft.",
                labels=[*_LABELS, "position"],
            )
            for position, number in enumerate(stats.spec_decoding.num_accepted_tokens_per_pos):
                per_pos.add_metric([*self._values, str(position)], number)
            families.append(per_pos)
        misses = CounterMetricFamily(
            "mlx_paged:prefix_cache_misses",
            "Prompts that were not cached as far as they could have been.",
            labels=[*_LABELS, "reason"],
        )
        for reason, number in stats.cache_misses.items():
            misses.add_metric([*self._values, reason.value], number)
        families.append(misses)
        foreign = GaugeMetricFamily(
            "mlx_paged:foreign_operations",
            "Operations of a step that MLX runs itself, for which there is no kernel.",
            labels=[*_LABELS, "primitive"],
        )
        for primitive, number in stats.compilation.foreign.items():
            foreign.add_metric([*self._values, primitive], number)
        families.append(foreign)
        if stats.lora is not None:
            families.append(_lora_info(stats.lora))
        return families

    def describe(self) -> list[Metric]:
        return []


def _lora_info(stats: LoraStats) -> Metric:
    """Returns the adapters of unfinished requests. The value is the time, as in vLLM."""
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of requests that run and wait.",
        labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    values = [str(stats.max_loras), ",".join(stats.waiting), ",".join(stats.running)]
    info.add_metric(values, time.time())
    return info


def _offload_gauges(stats: EngineStats) -> tuple[tuple[str, str, int], ...]:
    """Returns (name, help, value) of the memory for evicted blocks, if there is any."""
    if stats.offloading is None:
        return ()
    return (
        ("mlx_paged:kv_offload_memory_bytes", "Evicted blocks in host memory, in bytes.",
         stats.offloading.memory_bytes),
        ("mlx_paged:kv_offload_memory_capacity_bytes", "Host memory for evicted blocks.",
         stats.offloading.memory_capacity),
        ("mlx_paged:kv_offload_disk_bytes", "This model's blocks on disk, in bytes.",
         stats.offloading.disk_bytes),
    )  # fmt: skip


def _offload_counts(stats: EngineStats) -> tuple[tuple[str, str, int], ...]:
    """Returns (name, help, value) of the counters of offloading, if it is on."""
    if stats.offloading is None:
        return ()
    return (
        ("mlx_paged:kv_restored_tokens", "Prompt tokens whose blocks came back.",
         stats.counters.num_restored_tokens),
        ("mlx_paged:kv_refused_tokens", "Stored prompt tokens that were computed sooner.",
         stats.counters.num_refused_tokens),
        ("mlx_paged:kv_offload_stored_blocks", "Evicted blocks kept in host memory.",
         stats.offloading.num_stored_blocks),
        ("mlx_paged:kv_offload_lost_blocks", "Those dropped again for lack of room.",
         stats.offloading.num_lost_blocks),
        ("mlx_paged:kv_offload_skipped_blocks", "Evicted blocks not kept, to keep a step short.",
         stats.offloading.num_skipped_blocks),
        ("mlx_paged:kv_offload_written_bytes", "Bytes written to disk.",
         stats.offloading.num_written_bytes),
        ("mlx_paged:kv_offload_read_bytes", "Bytes read from disk.",
         stats.offloading.num_read_bytes),
        ("mlx_paged:kv_offload_damaged_blocks", "Blocks on disk that could not be read.",
         stats.offloading.num_damaged_blocks),
    )  # fmt: skip


def _transfer_counts(stats: EngineStats) -> tuple[tuple[str, str, int], ...]:
    """Returns (name, help, value) of the counters of prompts that other engines compute, or that
    this one computes for them."""
    transfers = None if stats.offloading is None else stats.offloading.transfers
    if transfers is None:
        return ()
    return (
        ("mlx_paged:kv_transfer_prompts", "Prompts computed for another server, or by one.",
         transfers.num_prompts),
        ("mlx_paged:kv_transfer_failed_prompts", "Those whose blocks did not all travel.",
         transfers.num_failed_prompts),
        ("mlx_paged:kv_transfer_blocks", "Blocks sent or received.", transfers.num_blocks),
        ("mlx_paged:kv_transfer_bytes", "Bytes of these blocks.", transfers.num_bytes),
        ("mlx_paged:kv_transfer_shared_bytes", "Those through memory that both servers share.",
         transfers.num_shared_bytes),
    )  # fmt: skip


def _draft_counts(drafts: SpecDecodingStats | None) -> tuple[tuple[str, str, int], ...]:
    """Returns (name, help, value) of the counters of speculation, if it is on."""
    if drafts is None:
        return ()
    return (
        ("vllm:spec_decode_num_drafts", "Times that drafts were verified.", drafts.num_drafts),
        ("vllm:spec_decode_num_draft_tokens", "Drafts.", drafts.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.", drafts.num_accepted_tokens),
    )
