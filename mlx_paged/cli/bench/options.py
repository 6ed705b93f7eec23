"""Options that several benchmarks share, with vLLM's names where it has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from mlx_paged.bench.datasets import DATA
from mlx_paged.bench.figures import EngineName
from mlx_paged.cli.options import (
    ENGINE,
    AsyncScheduling,
    CPUActivations,
    DType,
    KVCacheDType,
    KVCacheMemory,
    MaxNumSeqs,
    MaxStepTime,
    Model,
    PipelineParallelSize,
    Speculative,
    TensorParallelSize,
    option,
)
from mlx_paged.errors import InvalidParameterError

_REPORT = "Report"


@dataclass(frozen=True)
class EngineOptions:
    """The engines of an offline benchmark, their model and their options."""

    engine: Annotated[
        list[EngineName],
        option(
            ENGINE,
            "Engine to measure. Repeat it to compare: each engine runs in its own process, "
            "in turn.",
        ),
    ] = field(default_factory=lambda: [EngineName.MLX_PAGED])
    model: Model = None
    dtype: Annotated[
        DType, option(ENGINE, "Data type of the weights. auto: as stored, float32 on the CPU.")
    ] = "auto"
    temperature: Annotated[float, option(ENGINE, "0 is greedy.", min=0.0)] = 0.0
    ignore_eos: Annotated[
        bool,
        option(ENGINE, "Generate every answer to its full length.", "--ignore-eos/--no-ignore-eos"),
    ] = True
    disable_detokenize: Annotated[
        bool, option(ENGINE, "Do not time detokenization.", "--disable-detokenize")
    ] = False
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            ENGINE,
            "mlx-paged: maximum tokens per step.",
            min=1,
            show_default="2048; up to 8192 on NVIDIA GPUs",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        option(
            ENGINE,
            "mlx-paged: maximum tokens of prompt and answer. With --max-num-seqs it bounds "
            "the KV cache.",
            min=1,
            show_default="the longest request",
        ),
    ] = None
    block_size: Annotated[int, option(ENGINE, "mlx-paged: tokens per KV block.")] = 32
    kv_cache_memory: KVCacheMemory = None
    kv_cache_dtype: KVCacheDType = "auto"
    cpu_activations: CPUActivations = "float32"
    gpu_memory_utilization: Annotated[
        float | None,
        option(
            ENGINE,
            "mlx-paged: share of device memory.",
            show_default="0.9 on a GPU",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        option(
            ENGINE,
            "mlx-paged: reuse KV blocks of prompts with a common prefix.",
            "--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = True
    async_scheduling: AsyncScheduling = True
    max_step_time_ms: MaxStepTime = None
    speculative_config: Speculative = None
    tensor_parallel_size: TensorParallelSize = 1
    pipeline_parallel_size: PipelineParallelSize = 1


NumAnswers = Annotated[int, option(ENGINE, "Answers per prompt.", "--n", min=1)]
Seed = Annotated[int, option(DATA, "Random seed.", "--seed")]
MetricPercentiles = Annotated[str, option(_REPORT, "Comma-separated percentiles of latencies.")]


@dataclass(frozen=True)
class ReportOptions:
    """Content and file of the report."""

    metric_percentiles: MetricPercentiles = "50,90,99"
    output_json: Annotated[
        Path | None, option(_REPORT, "JSON file for results and environment.")
    ] = None


# --- Options that take lists ----------------------------------------------------------------------

ListOf = list[str] | None
#: Arguments of `parse_list`: a description of valid values, and a function that parses one.
Values = tuple[str, Callable[[str], Any]]
BLOCK_SIZES = (8, 16, 32, 64)


def list_option(panel: str | None, help: str, default: str) -> Any:
    """Declares an option that may be repeated and takes commas; the help shows `default`."""
    return option(panel, help, show_default=default, metavar="LIST")


def parse_list(
    field: str, given: Sequence[str] | None, expected: str, read: Callable[[str], Any]
) -> list[Any]:
    """Parses an option that may be repeated and takes commas; drops duplicates.

    Args:
        expected: Description of valid values, for errors.
        read: Parses one value, or raises ValueError.

    Raises:
        InvalidParameterError: A value is invalid.
    """
    words = [word.strip() for part in given or () for word in part.split(",")]
    values = []
    for word in words:
        try:
            values.append(read(word))
        except ValueError:
            raise InvalidParameterError(field, expected, word) from None
    return list(dict.fromkeys(values))


def at_least(minimum: int) -> Values:
    """Accepts integers of at least `minimum`."""
    expected = f"integers of at least {minimum}"
    return expected, lambda word: _require(int(word), lambda v: v >= minimum)


def one_of(values: Collection[Any], kind: type = str) -> Values:
    """Accepts values of a collection, after conversion to `kind`."""
    expected = "of " + ", ".join(map(str, values))
    return expected, lambda word: _require(kind(word), lambda v: v in values)


def _require(value: Any, holds: Callable[[Any], bool]) -> Any:
    if not holds(value):
        raise ValueError
    return value
