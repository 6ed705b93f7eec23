"""Available memory, what a step needs of it, and the size of the pools."""

from __future__ import annotations

import gc
import logging
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.core import StateMove, StepBatch, StepTable
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.engine.config import EngineConfig, physical_memory
from mlx_paged.engine.faults import is_out_of_memory
from mlx_paged.engine.kv_cache_config import KVCacheConfig, PoolSizes
from mlx_paged.engine.media.items import VideoFrames
from mlx_paged.engine.media.options import IoOptions, MediaOptions
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling.sampler import SamplingMetadata
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.model.media import MediaInputs
from mlx_paged.model.media_kinds import Kind
from mlx_paged.platform import Platform, is_cpu_default

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_DEFAULT_GPU_UTILIZATION = 0.9
# MLX keeps freed buffers for the next step. Without a measured activation peak, this share of the
# pool is kept, but a few arrays of logits, and no more than a GiB.
_CACHE_SHARE = 4
_LOGITS_KEPT = 4
_MOST_UNMEASURED_CACHE = 1 * _GIB
_LEAST_CACHE_LIMIT = 64 << 20
# Most tokens of a step on an NVIDIA GPU, and the bytes beside the weights that they need.
_STEP_TOKENS = ((8192, 16 * _GIB), (4096, 8 * _GIB))
_RUN_AHEAD = 5 * _GIB // 4
# Pixels of each side of the larger item with which a tower's memory is measured.
_PROFILED: dict[Kind, int] = {"image": 1024, "video": 256}
# Pixels of a frame for which memory is kept: processors take seconds for clips at the limits.
_PROFILED_FRAME_PIXELS = 512 * 512


@dataclass(frozen=True)
class MemoryUsage:
    """MLX's memory, in bytes.

    Attributes:
        active: In live arrays (an untouched pool counts in full).
        cached: In freed buffers kept for reuse.
        peak: Most that was active.
        cache_limit: Most that is kept for reuse; None where this package set no limit.
    """

    active: int
    cached: int
    peak: int
    cache_limit: int | None


def live_arrays() -> int:
    """Number of live `mx.array` objects in this process.

    It walks all objects of the interpreter (some ten milliseconds): for tests and for finding a
    leak. Objects frozen by `gc.freeze` are not seen.
    """
    # (`isinstance` would ask a weak proxy for its object, which may be gone.)
    return sum(issubclass(type(o), mx.array) for o in gc.get_objects())


def available_memory() -> int:
    """Bytes of main memory available without swapping; all of it where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return physical_memory()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return min(physical_memory(), int(fields["MemAvailable"].split()[0]) * 1024)


def device_memory() -> int:
    """Bytes that the default device may use."""
    if is_cpu_default():
        return physical_memory()
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return physical_memory()


def with_step_tokens(config: EngineConfig, platform: Platform) -> EngineConfig:
    """The same, with the tokens of a step chosen where they are not given. Weights are loaded.

    An NVIDIA GPU takes a long prompt in fewer, larger steps: of 8192 tokens it computes 8% more a
    second than of 2048. A step needs some 60 KB a token of a model of 3B for the activations of the
    layers under way, and a step of windowed layers as many blocks.
    """
    if config.max_num_batched_tokens is not None or not platform.has_cuda:
        return config
    share = config.gpu_memory_utilization or _DEFAULT_GPU_UTILIZATION
    free = int(device_memory() * share) - mx.get_active_memory()
    for num_tokens, least in _STEP_TOKENS:
        if free >= least:
            return replace(config, max_num_batched_tokens=num_tokens)
    return config


def allocate_pools(
    runner: ModelRunner,
    kv_config: KVCacheConfig,
    config: EngineConfig,
    model_limit: int | None,
    media: Any = None,
) -> tuple[PoolSizes, int | None]:
    """Gives a runner the pools of all groups, as large as the configuration allows.

    Args:
        model_limit: most tokens of context that the model supports.
        media: what the model takes besides text (`model.media_processor.MediaModel`).

    Returns:
        The sizes, and the bytes that the largest step needs where they were measured.
    """

    def allocate(num_blocks: int) -> None:
        sizes = kv_config.sizes(num_blocks)
        runner.allocate(kv_config.blocks_by_reach(sizes), sizes.num_state_slots)

    def measure() -> int:
        activations = measure_activations(runner, config)
        if media is None:
            return activations
        # (Half of what is left stays with the pool, whatever is let in.)
        utilization = config.gpu_memory_utilization or _DEFAULT_GPU_UTILIZATION
        room = max(0, int(device_memory() * utilization) - mx.get_active_memory()) // 2
        length = config.model_len(model_limit)
        return with_media(activations, runner, config, media, model_len=length, room=room)

    kept = 0 if media is None else config.mm_encoder_cache_bytes
    left_over, activations = left_for_pool(
        config, measure, kept=kept, on_cpu=runner.model.platform.on_cpu
    )
    wanted = config.num_blocks(
        [spec.bytes_per_token for spec in runner.model.layout.attention],
        model_limit,
        left_over,
        most_blocks=kv_config.most_blocks,
    )
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
    """Bytes that `gpu_memory_utilization` leaves to the pool, and those the largest step needs.

    (None, None) where it does not set the pool's size; the largest step is not run then.

    Args:
        measure_activations: runs the largest step and returns the bytes it needed.
        kept: bytes that something else will hold.
        on_cpu: the model runs on the CPU.
    """
    if config.num_gpu_blocks_override is not None or config.kv_cache_memory is not None:
        return None, None
    utilization = config.gpu_memory_utilization
    if utilization is None:
        if on_cpu:
            return None, None
        utilization = _DEFAULT_GPU_UTILIZATION
    gc.collect()  # (what an engine that was dropped held is not in use)
    weights = mx.get_active_memory()
    activations = measure_activations()
    left = int(device_memory() * utilization) - weights - activations - kept
    if on_cpu:
        # Main memory is shared with all other programs; the weights are already taken from it.
        left = min(left, int(available_memory() * utilization) - activations - kept)
    return max(0, left), activations


def allocate_fitting(allocate: Callable[[int], None], num_blocks: int, *, exactly: bool) -> int:
    """Allocates the pool; where memory is short, a smaller one. Returns its number of blocks.

    Args:
        exactly: raise instead of trying a smaller pool.
    """
    while True:
        try:
            allocate(num_blocks)
            return num_blocks
        except Exception as error:
            if exactly or num_blocks <= 2 or not is_out_of_memory(error):
                raise
            logger.warning("no memory for a pool of %d blocks: %s", num_blocks, error)
            mx.clear_cache()
            num_blocks = max(2, num_blocks * 3 // 4)


def measure_activations(runner: ModelRunner, config: EngineConfig) -> int:
    """Bytes that the largest step needs: all its rows, and as many as possible sampled.

    It runs on small temporary pools.
    """
    batch = largest_step(config, len(runner.windows), has_states=runner.model.layout.has_states)
    num_blocks = 1 + max(max(table.blocks) for tables in batch.tables for table in tables)
    blocks = dict.fromkeys(runner.model.layout.reaches, num_blocks)
    runner.allocate(blocks, 1 + batch.num_seqs)
    mx.synchronize()
    gc.collect()  # what it would free during the step must not count
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.read(runner.launch(batch, None))
    return max(0, mx.get_peak_memory() - before)


def with_media(
    activations: int,
    runner: ModelRunner,
    config: EngineConfig,
    media: Any,
    *,
    model_len: int | None = None,
    room: int | None = None,
) -> int:
    """Bytes that the largest step needs of a model that takes more than text.

    Args:
        activations: of the largest step of text.
        media: what the model takes (`model.media_processor.MediaModel`).
        model_len: most tokens of a prompt, its items' included; None: no limit.
        room: most bytes for towers; None: no limit.
    """
    if any(media.is_atomic(kind) for kind in media.kinds):
        # A chunk that is not cut may exceed max_num_batched_tokens by as many decodes as there are.
        activations += activations * config.max_num_seqs // config.step_tokens
    # (A step encodes before its forward, and what it needed for that is free by then.)
    options = config.media_options
    for kind in _PROFILED:
        if kind not in media.kinds or not options.most(kind):
            continue
        needed = tower_bytes(runner, media, kind, options, model_len)
        if room is not None and needed > room:
            logger.warning(
                "the tower may need %.1f GiB for the largest %s that is let in, and %.1f GiB are "
                "kept for it: larger ones may fail for want of memory. mm_processor_kwargs (for "
                "many models max_pixels) or media_limits make them smaller",
                needed / _GIB,
                kind,
                room / _GIB,
            )
            needed = room
        activations = max(activations, needed)
    return activations


def tower_bytes(
    runner: ModelRunner, media: Any, kind: Kind, options: MediaOptions, model_len: int | None
) -> int:
    """Bytes that encoding an item of a kind needs: of the largest that limits, the processor and
    the context let in.

    Two smaller ones are run. What a tower needs grows with the rows of an item, or with their
    square, where it has a mask for all pairs. A processor or a tower that takes neither measures
    nothing: its models are served all the same.
    """
    side, measured = _PROFILED[kind], dict[int, int]()  # bytes by rows
    try:
        for each in (side // 2, side):
            inputs, _ = _profile_item(media, kind, each, options)
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(*runner.model.encode(inputs).arrays())
            measured[inputs.num_rows] = max(0, mx.get_peak_memory() - before)
            del inputs
        if len(measured) == 1:  # (the processor makes all items of one size)
            return max(measured.values())
        return int(_extrapolated(measured, _most_rows(media, kind, options, model_len)))
    except Exception as error:  # (a processor's, or the tower's)
        logger.warning("the memory of the tower for a %s was not measured: %s", kind, error)
        return max(measured.values(), default=0)


def _extrapolated(measured: dict[int, int], rows: int) -> float:
    """Bytes for a number of rows, from those for one or two other numbers."""
    (small, least), (large, most) = min(measured.items()), max(measured.items())
    if rows <= large:
        return most
    squares = 0.0 if small == large else (most / large - least / small) / (large - small)
    # (Not more than if all of it grew with the square; not less than if nothing did.)
    squares = min(max(squares, 0.0), most / large**2)
    return (most / large + squares * (rows - large)) * rows


def _most_rows(media: Any, kind: Kind, options: MediaOptions, model_len: int | None) -> int:
    """Rows of the largest item that there can be in a prompt, or of a clip of usual frames."""
    pixels, found = options.limits.max_image_pixels, 0
    if kind == "video":
        pixels = min(
            pixels, options.limits.max_video_pixels // _frames(options), _PROFILED_FRAME_PIXELS
        )
    side, most = _PROFILED[kind], max(1, math.isqrt(pixels))
    while True:
        side = min(side, most)
        inputs, num_tokens = _profile_item(media, kind, side, options)
        if model_len is not None and num_tokens >= model_len:
            return model_len
        # (Processors make large ones smaller.)
        if inputs.num_rows <= found or side == most:
            return max(found, inputs.num_rows)
        found = inputs.num_rows
        side *= 2


def _frames(options: MediaOptions) -> int:
    return options.io.num_frames if options.io.num_frames > 0 else IoOptions().num_frames


def _profile_item(
    media: Any, kind: Kind, side: int, options: MediaOptions
) -> tuple[MediaInputs, int]:
    """Returns the processor's output for a gray square, and the tokens of its prompt."""
    from PIL import Image

    item: Any = Image.new("RGB", (side, side), (127, 127, 127))
    if kind == "video":
        shape = (_frames(options), side, side, 3)  # (one pixel for all)
        item = VideoFrames(np.broadcast_to(np.uint8(127), shape))
    prompt = media.process(media.placeholder(kind, 1), **{f"{kind}s": [item]})
    return prompt.inputs[0], len(prompt.token_ids)


def largest_step(
    config: EngineConfig, num_windows: int = 0, *, has_states: bool = False
) -> StepBatch:
    """`max_num_batched_tokens` rows of `max_num_seqs` new sequences."""
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
    return StepBatch(
        seq_ids=[-1 - i for i in range(num_seqs)],
        token_ids=array(TOKEN_TYPE, [0]) * num_tokens,
        starts=array("q", [0]) * num_seqs,
        query_lens=array("q", lengths),
        samples=[True] * num_seqs,
        is_decode=num_tokens == num_seqs,
        input_from=array("i", [-1]) * num_seqs,
        num_drafts=array("i", [0]) * num_seqs,
        adapter_ids=array("i", [0]) * num_seqs,
        tables=tables,
        slots=[StateMove(0, 1 + i) for i in range(num_seqs)] if has_states else [],
        block_copies=((),) * (1 + num_windows),
        sampling=SamplingMetadata.of(settings),
    )


def limit_buffer_cache(activation_bytes: int | None, pool_bytes: int, logits_bytes: int) -> int:
    """Caps what MLX keeps of freed buffers at what a step can use again; returns the limit.

    Steps differ in size, and a buffer serves only arrays of nearly its size: without a limit the
    cache grows by buffers that no step uses. The limit holds for the whole process: MLX has one
    cache.

    Args:
        activation_bytes: what the largest step needs; None where that was not measured.
        pool_bytes: of all pools.
        logits_bytes: of the logits of a step, in float32.
    """
    if activation_bytes is None:
        wanted = max(_LEAST_CACHE_LIMIT, pool_bytes // _CACHE_SHARE, logits_bytes * _LOGITS_KEPT)
        limit = min(wanted, _MOST_UNMEASURED_CACHE, physical_memory() // 8)
    else:
        limit = max(_LEAST_CACHE_LIMIT, activation_bytes)
    mx.set_cache_limit(limit)
    return limit


def limit_run_ahead(platform: Platform) -> None:
    """Bounds the activations of operations that the device has not started yet.

    MLX encodes operations as fast as it can, and each takes its memory then: with CUDA, all layers
    of a prefill hold theirs at once, and those of the next step. Beyond its memory limit MLX waits
    for the device instead. Live now are weights and pool; a few more layers keep the device busy.

    On the CPU MLX's own limit is a share of the machine's memory, which a pool alone may exceed;
    each operation would wait for the one before it. There the limit only goes up.

    The limit holds for the whole process; exceeding it is no error.
    """
    is_cpu_only = not mx.is_available(mx.gpu)
    if not (platform.has_cuda or is_cpu_only):
        return
    wanted = mx.get_active_memory() + _RUN_AHEAD
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
