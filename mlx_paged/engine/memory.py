"""Measures the available memory and a step's needs, and sizes the pools."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_paged import macos
from mlx_paged.core import StateMove, StepBatch, StepTable
from mlx_paged.engine.config import EngineConfig, physical_memory
from mlx_paged.engine.kv_cache_config import KVCacheConfig, PoolSizes
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.errors import InvalidParameterError, OutOfMemoryError
from mlx_paged.model.layerwise import LARGE_STEP, MAX_PARTS
from mlx_paged.platform import Platform, is_cpu_default, is_out_of_memory

if TYPE_CHECKING:  # A router needs the rest, but no model.
    from mlx_paged.engine.pool_memory import Companion
    from mlx_paged.engine.runner import ModelRunner

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_DEFAULT_GPU_UTILIZATION = 0.9
# Share of main memory for all models of a server on the CPU.
_CPU_BUDGET = 0.8
# Bytes of a process besides MLX's arrays: the interpreter, its modules, a tokenizer.
_INTERPRETER_BYTES = 350 << 20
# MLX keeps freed buffers for the next step. Without a measured activation peak, it may keep this
# share of the pool, but at least a few arrays of logits and at most a GiB.
_CACHE_SHARE = 4
_LOGITS_KEPT = 4
_MAX_UNMEASURED_CACHE = 1 * _GIB
_MIN_CACHE_LIMIT = 64 << 20
# Maximum tokens of a step on an NVIDIA GPU, and the bytes they need besides the weights.
_STEP_TOKENS = ((8192, 16 * _GIB), (4096, 8 * _GIB))
# Bytes that MLX may run ahead of a device if no step was measured, and the share of the device's
# memory that layers of a large step may take ahead of those that run.
_RUN_AHEAD = 5 * _GIB // 4
_RUN_AHEAD_SHARE = 0.03


@dataclass(frozen=True)
class MemoryUsage:
    """MLX's memory, in bytes.

    Attributes:
        active: Live arrays. An untouched pool counts in full.
        cached: Freed buffers kept for reuse.
        peak: Maximum of `active` so far.
        cache_limit: Maximum of `cached`; None if this package set no limit.
    """

    active: int
    cached: int
    peak: int
    cache_limit: int | None


def live_arrays() -> int:
    """Returns the number of live `mx.array` objects in this process.

    It walks all objects of the interpreter (some ten milliseconds): for tests and for finding a
    leak. Objects frozen by `gc.freeze` are not seen.
    """
    # `isinstance` would ask a weak proxy for its object, which may be gone.
    return sum(issubclass(type(o), mx.array) for o in gc.get_objects())


def available_memory() -> int:
    """Returns the bytes available without swapping; all of main memory if that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return physical_memory()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return min(physical_memory(), int(fields["MemAvailable"].split()[0]) * 1024)


def device_memory() -> int:
    """Returns the bytes that the default device may use."""
    if is_cpu_default():
        return physical_memory()
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return physical_memory()


def with_step_tokens(config: EngineConfig, platform: Platform) -> EngineConfig:
    """Returns the options with a default for the tokens of a step. Call it with weights loaded.

    An NVIDIA GPU computes a long prompt faster in fewer, larger steps: 8% more tokens a second in
    steps of 8192 tokens than of 2048. For a 3B model, a step needs some 60 KB a token for the
    activations of the layers in flight, and with windowed layers as many blocks.
    """
    if config.max_num_batched_tokens is not None or not platform.has_cuda:
        return config
    share = config.gpu_memory_utilization or _DEFAULT_GPU_UTILIZATION
    free = int(device_memory() * share) - mx.get_active_memory()
    for num_tokens, min_free in _STEP_TOKENS:
        if free >= min_free:
            return replace(config, max_num_batched_tokens=num_tokens)
    return config


def default_budget() -> int:
    """Returns the bytes that all models of a server may take together, if no option says so."""
    if is_cpu_default():
        return int(physical_memory() * _CPU_BUDGET)
    return int(device_memory() * _DEFAULT_GPU_UTILIZATION)


def served_memory(memory: MemoryUsage, num_ranks: int, num_processes: int) -> int:
    """Returns the bytes that serving a model takes: the arrays of all ranks, and all else.

    A pool counts in full, although its untouched part takes no memory yet. On NVIDIA GPUs, only the
    arrays of one rank count: each rank has its own GPU, and all else is in another memory.

    Args:
        memory: Of rank 0; the others take as much.
        num_processes: All processes, also those without an engine.
    """
    arrays = memory.active + (memory.cache_limit or memory.cached)
    if Platform.current().has_cuda:
        return arrays
    return num_ranks * arrays + num_processes * _INTERPRETER_BYTES


#: (bytes of the largest step of text, maximum tokens of a prompt or None, maximum bytes for
#: encoders) -> bytes of the largest step.
WithMedia = Callable[[int, int | None, int], int]


def allocate_pools(
    runner: ModelRunner,
    kv_config: KVCacheConfig,
    config: EngineConfig,
    model_limit: int | None,
    with_media: WithMedia | None = None,
    companion: Companion | None = None,
) -> tuple[PoolSizes, int | None]:
    """Allocates a runner's pools of all groups, as large as the configuration allows.

    Args:
        model_limit: Maximum context tokens that the model supports.
        with_media: For a model that takes media.
        companion: Further pools with the blocks of the full group.

    Returns:
        The sizes, and the bytes that the largest step needs if they were measured.
    """

    def allocate(num_blocks: int) -> None:
        sizes = kv_config.sizes(num_blocks)
        runner.allocate(kv_config.blocks_by_group(sizes), sizes.num_state_slots)
        if companion is not None:
            companion.allocate(sizes.num_blocks)

    def measure() -> int:
        activations = measure_activations(runner, config)
        if with_media is None:
            return activations
        # The pool keeps half of the rest, for any media that the options allow.
        utilization = config.gpu_memory_utilization or _DEFAULT_GPU_UTILIZATION
        room = max(0, int(device_memory() * utilization) - mx.get_active_memory()) // 2
        length = config.model_len(model_limit)
        return with_media(activations, length, room)

    kept = runner.model.adapter_bytes
    if with_media is not None:
        kept += config.mm_encoder_cache_bytes
    left_over, activations = left_for_pool(
        config, measure, kept=kept, on_cpu=runner.model.platform.on_cpu
    )
    try:
        wanted = config.num_blocks(
            [
                *(spec.bytes_per_token for spec in runner.model.layout.pooled),
                0 if companion is None else companion.bytes_per_token,
            ],
            model_limit,
            left_over,
            max_blocks=kv_config.max_blocks,
        )
    except InvalidParameterError as error:
        advice = macos.limit_advice_here()
        if not advice or runner.model.platform.on_cpu:
            raise
        expected = f"{error.expected} ({advice})"
        raise InvalidParameterError(error.field, expected, error.actual) from None
    exactly = config.num_gpu_blocks_override is not None
    num_blocks = allocate_fitting(allocate, wanted, exactly=exactly)
    return kv_config.sizes(num_blocks), activations


def left_for_pool(
    config: EngineConfig,
    measure_activations: Callable[[], int],
    *,
    kept: int = 0,
    on_cpu: bool,
) -> tuple[int | None, int | None]:
    """Returns the bytes that `gpu_memory_utilization` leaves to the pool, and the largest step's.

    Returns (None, None) without running the largest step if another option sizes the pool.

    Args:
        measure_activations: Runs the largest step and returns the bytes it needed.
        kept: Bytes that something else will hold.
        on_cpu: True if the model runs on the CPU.
    """
    if config.num_gpu_blocks_override is not None or config.kv_cache_memory is not None:
        return None, None
    utilization = config.gpu_memory_utilization
    if utilization is None:
        if on_cpu:
            return None, None
        utilization = _DEFAULT_GPU_UTILIZATION
    gc.collect()  # Memory of a dropped engine is not in use.
    weights = mx.get_active_memory()
    activations = measure_activations()
    left = int(device_memory() * utilization) - weights - activations - kept
    if on_cpu:
        # Main memory is shared with all other programs; the weights are already taken from it.
        left = min(left, int(available_memory() * utilization) - activations - kept)
    return max(0, left), activations


def allocate_fitting(allocate: Callable[[int], None], num_blocks: int, *, exactly: bool) -> int:
    """Allocates the pool, or a smaller one if memory is short. Returns its number of blocks.

    Args:
        exactly: Raise instead of trying a smaller pool.
    """
    while True:
        try:
            allocate(num_blocks)
            return num_blocks
        except Exception as error:
            if exactly or num_blocks <= 2 or not is_out_of_memory(error):
                advice = macos.limit_advice_here() if is_out_of_memory(error) else ""
                if not advice:
                    raise
                reason = f"a pool of {num_blocks} blocks does not fit: {error}; {advice}"
                raise OutOfMemoryError(reason, getattr(error, "num_bytes", 0)) from error
            logger.warning("no memory for a pool of %d blocks: %s", num_blocks, error)
            mx.clear_cache()
            num_blocks = max(2, num_blocks * 3 // 4)


def measure_activations(runner: ModelRunner, config: EngineConfig) -> int:
    """Returns the bytes that the largest step needs: all its rows, and as many as possible sampled.

    It runs on small temporary pools. On a GPU that takes the step layer by layer, this also
    decides how many layers the host may be ahead, see `model.layerwise`.
    """
    batch = largest_step(config, len(runner.windows), has_states=runner.model.layout.has_states)
    num_blocks = 1 + max(max(table.blocks) for tables in batch.tables for table in tables)
    blocks = dict.fromkeys(runner.model.layout.group_specs, num_blocks)
    runner.allocate(blocks, 1 + batch.num_seqs)
    model = runner.model
    model.parts_ahead = 1
    needed = _peak_of(runner, batch)
    if not (model.platform.has_cuda and batch.num_tokens >= LARGE_STEP):
        return needed
    model.parts_ahead = 2
    part = max(_peak_of(runner, batch) - needed, needed // MAX_PARTS, 1)
    room = int(device_memory() * _RUN_AHEAD_SHARE)
    model.parts_ahead = min(MAX_PARTS, 1 + room // part)
    return needed + part * (model.parts_ahead - 1)


def _peak_of(runner: ModelRunner, batch: StepBatch) -> int:
    """Returns the bytes that a step needs."""
    mx.synchronize()
    gc.collect()  # Otherwise, a collection during the step would distort the measurement.
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.read(runner.launch(batch, None))
    return max(0, mx.get_peak_memory() - before)


def largest_step(
    config: EngineConfig, num_windows: int = 0, *, has_states: bool = False
) -> StepBatch:
    """`max_num_batched_tokens` rows of `max_num_seqs` new sequences."""
    from mlx_paged.engine.synthetic_steps import synthetic_step

    num_seqs = config.max_num_seqs
    num_tokens = max(config.step_tokens, num_seqs)
    bounds = [num_tokens * i // num_seqs for i in range(num_seqs + 1)]
    lengths = [end - begin for begin, end in pairwise(bounds)]
    tables, first_block = [], 1
    for length in lengths:
        num_blocks = -(-length // config.block_size)
        table = StepTable(tuple(range(first_block, first_block + num_blocks)), 0)
        tables.append((table,) * (1 + num_windows))
        first_block += num_blocks
    # The costliest sampling that a request can have without edits of its logits.
    settings = [SamplingRow(1.0, seed=0, position=length) for length in lengths]
    slots = [StateMove(0, 1 + i) for i in range(num_seqs)] if has_states else []
    return synthetic_step(lengths, [0] * num_seqs, tables, settings, slots=slots)


def limit_buffer_cache(activation_bytes: int | None, pool_bytes: int, logits_bytes: int) -> int:
    """Caps MLX's cache of freed buffers to what a step can reuse; returns the limit.

    Steps differ in size, and a buffer serves only arrays of nearly its size. Without a limit, the
    cache would fill with buffers that no step uses. The limit is for the whole process, because MLX
    has one cache.

    Args:
        activation_bytes: Bytes that the largest step needs; None if they were not measured.
        pool_bytes: Bytes of all pools.
        logits_bytes: Bytes of a step's logits in float32.
    """
    if activation_bytes is None:
        wanted = max(_MIN_CACHE_LIMIT, pool_bytes // _CACHE_SHARE, logits_bytes * _LOGITS_KEPT)
        limit = min(wanted, _MAX_UNMEASURED_CACHE, physical_memory() // 8)
    else:
        limit = max(_MIN_CACHE_LIMIT, activation_bytes)
    mx.set_cache_limit(limit)
    return limit


def limit_run_ahead(platform: Platform, step_bytes: int = 0) -> None:
    """Bounds the memory of operations that MLX has encoded but the device has not started.

    MLX encodes operations as fast as it can and allocates their memory right away. With CUDA, all
    layers of a prefill would hold theirs at once, plus those of the next step. Beyond its memory
    limit, MLX waits for the device instead. Weights and pool are live now; a few more layers keep
    the device busy.

    On the CPU, MLX's own limit is a share of the machine's memory. A pool alone may exceed it, and
    then each operation waits for the previous one. So the limit only goes up there.

    The limit is for the whole process. Exceeding it is not an error.

    Args:
        step_bytes: Bytes that the largest step needs, if they were measured.
    """
    is_cpu_only = not mx.is_available(mx.gpu)
    if not (platform.has_cuda or is_cpu_only):
        return
    wanted = mx.get_active_memory() + max(_RUN_AHEAD, step_bytes)
    previous = mx.set_memory_limit(wanted)
    if is_cpu_only and previous > wanted:
        mx.set_memory_limit(previous)


def usage(cache_limit: int | None) -> MemoryUsage:
    """MLX's memory now."""
    return MemoryUsage(
        active=mx.get_active_memory(),
        cached=mx.get_cache_memory(),
        peak=mx.get_peak_memory(),
        cache_limit=cache_limit,
    )
