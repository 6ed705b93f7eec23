"""Runs representative steps when an engine starts, so that the first requests are not slow.

On a GPU, the first step of a kind compiles kernels (with CUDA, MLX's take ten seconds or more),
lets libraries choose theirs, and captures repeating decode steps as graphs. So a chain of decode
steps runs for several numbers of sequences, and with CUDA also for prompts. The steps go through
the runner like all others, so everything it prepares for a shape is prepared here. On the CPU there
is nothing to prepare.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.core import StateMove, StepBatch, StepTable
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.lora.files import Adapter
from mlx_paged.engine.runner import LaunchedStep, ModelRunner
from mlx_paged.engine.sampling.logits_processors import ALWAYS, Additions, LogitEdits, Penalties
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.synthetic_steps import synthetic_step
from mlx_paged.model.dense_prefill import PREPARED_MULTIPLE
from mlx_paged.model.graph_runner import padded_decodes
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.platform import Platform

logger = logging.getLogger(__name__)

# Called with the number of kinds of steps that are done, and the total.
OnStep = Callable[[int, int], None]

# A shape is compiled when it first occurs, or by `mx.compile` when it occurs for the third time
# (`model.graph_runner`), and then repeated.
_STEPS = 4
# Tokens of context at which decodes have partial results to merge.
_LONG_CONTEXT = 4096
# Tokens of prompts: few, whose steps repeat like decodes (alone and after a prefix), and as many as
# MLX's own attention handles.
_PROMPTS = (16, 32, 48, 64, 512)
_FEW = 64
# Sequences up to which decodes of every padded size are prepared. A load passes through all of them
# while it grows and shrinks.
_MAX_PADDED = 256
# Steps of decodes and a prompt: (sequences that decode, prompt tokens; 0: the rest of the step).
_MIXED = ((8, 512), (32, 0))
# Numbers of rows of steps with prompts that are prepared, between each power of two and the next.
# cuBLAS has a kernel for nearly every number and loads it on first use, which takes several
# milliseconds for each product.
_ROWS_PER_OCTAVE = 8
_TOKENS_OF_LOAD = 1024  # of each prompt of such a step
# Limit for all of them, and for decodes of many rows that are not device programs, whose graphs MLX
# compiles for seconds each. Large models take longer, and start without the rest.
_SECONDS_OF_OPTIONAL = 6.0
_SLOT = 1  # of the adapter; the scheduler fills this one first


def _ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


# Sampling settings that use further MLX operations. MLX compiles several of them on first use.
# The sequences of a step take turns with the rows of one entry.
_SETTINGS = {
    "top_p beside greedy": (
        SamplingRow(0.0, seed=0, position=0),
        SamplingRow(1.0, seed=0, position=0, top_p=0.9),
    ),
    "top_k beside top_p and min_p": (
        SamplingRow(1.0, seed=0, position=0, top_k=20, top_p=0.9),
        SamplingRow(1.0, seed=0, position=0, top_p=0.9, min_p=0.05),
    ),
    "edits and log-probabilities": (
        SamplingRow(
            1.0,
            seed=0,
            position=0,
            edits=LogitEdits(
                additions=Additions(_ints(1), np.ones(1, np.float32), _ints(ALWAYS)),
                penalties=Penalties(_ints(0, 1), _ints(1, 0), 1.1, 0.1, 0.1),
                allowed=_ints(-1),  # the first 32 tokens
            ),
            logprobs=1,
        ),
        SamplingRow(0.0, seed=0, position=0),
    ),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Steps of one shape.

    Attributes:
        num_sequences: Number of sequences.
        num_tokens: Tokens of each sequence in a step; 1 for decodes.
        context_len: Tokens of each sequence after the first step.
        temperature: Temperature of all sequences; 0 is greedy.
        num_decodes: Further sequences with one token in the step; they are as long as the others.
        at_once: Steps of prompts that are in flight together.
        is_load: True if it is skipped once optional steps have taken `_SECONDS_OF_OPTIONAL`.
        settings: Key of the settings that the sequences have in turn; empty for `temperature`.
    """

    num_sequences: int
    num_tokens: int = 1
    context_len: int = 1
    temperature: float = 0.0
    num_decodes: int = 0
    at_once: int = 1
    is_load: bool = False
    settings: str = ""


def batch_sizes(max_seqs: int, *, padded_from: int | None = None) -> list[int]:
    """Numbers of sequences to prepare: powers of two, and the largest.

    Args:
        padded_from: Also one for each shape of this many to 256 sequences (`padded_decodes`), so
            that none of these numbers of sequences meets a new one. None: no further ones.
    """
    sizes = {1 << i for i in range(max_seqs.bit_length())} | {max_seqs}
    if padded_from is not None:
        padded = range(padded_from, min(max_seqs, _MAX_PADDED) + 1)
        sizes |= {min(padded_decodes(size), max_seqs) for size in padded}
    return sorted(sizes)


def kinds(
    config: EngineConfig,
    max_context_len: int | None,
    *,
    with_cuda: bool,
    padded_from: int | None = None,
) -> list[Kind]:
    """Returns the steps to run, the largest of each sort first, because smaller ones reuse the
    memory; but those of a load smallest first, because they may be cut short.

    Args:
        max_context_len: Maximum tokens of a sequence; None means no limit.
        with_cuda: True if decode steps become graphs, and shapes of prompts are prepared.
        padded_from: See `PagedModel.padded_from`.
    """
    longest = _LONG_CONTEXT
    if max_context_len is not None:  # A chain of steps makes the context longer.
        longest = max(1, min(longest, max_context_len - (_STEPS - 1)))
    max_seqs = min(config.max_num_seqs, config.step_tokens)
    if not with_cuda:
        return [Kind(1, context_len=longest), Kind(1, temperature=1.0)]
    lens = {n for n in _PROMPTS if n < config.step_tokens} | {config.step_tokens}
    prompts = [
        # Two large steps are in flight under load, and their layers take memory.
        Kind(1, n, n, at_once=2 if n == config.step_tokens else 1)
        for n in sorted(lens)
        if max_context_len is None or n <= max_context_len
    ]
    if min(longest, config.step_tokens) > _FEW:
        prompts.append(Kind(1, _FEW, longest))
    for count, context_len in _prepared_chunks(config.step_tokens, max_context_len):
        prompts.append(Kind(1, count, context_len))
    for num_decodes, num_tokens in _MIXED:
        count = num_tokens or config.step_tokens - num_decodes
        fits = num_decodes < max_seqs and _FEW < count <= config.step_tokens - num_decodes
        if fits and count <= longest:
            prompts.append(Kind(1, count, longest, temperature=1.0, num_decodes=num_decodes))
    max_rows = max_seqs
    if config.speculative_config is not None:  # Drafts are rows like decodes.
        max_rows, padded_from = max(max_seqs, min(_FEW, config.step_tokens)), 1
    decodes = [
        kind
        for size in reversed(batch_sizes(max_rows, padded_from=padded_from))
        for kind in (Kind(size), Kind(size, context_len=longest, temperature=1.0))
    ]
    further = [Kind(min(2, max_seqs), settings=name) for name in _SETTINGS]
    loads = _loads(config.step_tokens, max_seqs, max_context_len)
    return [*reversed(prompts), *loads, *decodes, *further]


def _prepared_chunks(step_tokens: int, max_context_len: int | None) -> list[tuple[int, int]]:
    """Chunk sizes of long prompts with the context lengths to prepare for MLX's attention."""
    size = PREPARED_MULTIPLE
    sizes = [n for n in (size, 2 * size) if n <= step_tokens]
    ends = [(n, n * i) for n in sizes for i in (1, 2) if n < step_tokens or i > 1]
    return [(n, end) for n, end in ends if max_context_len is None or end <= max_context_len]


def _loads(step_tokens: int, max_seqs: int, max_context_len: int | None) -> list[Kind]:
    """Steps with prompts and decodes as under load, smallest first, in many sizes.

    Each padded number of sequences occurs, since as many rows have logits.

    Args:
        max_seqs: Maximum sequences of a step.
    """
    rows = []
    size = _FEW
    while size < step_tokens:
        stride = max(1, size // _ROWS_PER_OCTAVE)
        rows += [n for n in range(size + stride, 2 * size + 1, stride) if n <= step_tokens]
        size *= 2
    counts = batch_sizes(max_seqs, padded_from=1)
    loads = []
    for i in range(max(len(rows), len(counts)) if rows else 0):
        num_rows = rows[i * len(rows) // max(len(rows), len(counts))]
        count = min(counts[i * len(counts) // max(len(rows), len(counts))], num_rows // 2)
        num_prompts = min(count, -(-num_rows // _TOKENS_OF_LOAD))
        num_decodes = count - num_prompts
        num_tokens = (num_rows - num_decodes) // num_prompts
        if max_context_len is None or num_tokens <= max_context_len:
            loads.append(
                Kind(num_prompts, num_tokens, num_tokens, num_decodes=num_decodes, is_load=True)
            )
    return loads


def is_needed(config: EngineConfig, platform: Platform) -> bool:
    """True if an engine with these options warms up on this device."""
    return not platform.on_cpu and not config.enforce_eager and config.runner == "generate"


def warm_up(
    runner: ModelRunner,
    config: EngineConfig,
    max_context_len: int | None,
    on_step: OnStep | None = None,
    default: Adapter | None = None,
    named: Sequence[Adapter] = (),
) -> int:
    """Runs the steps in the runner's pools, which no request uses yet. Returns the number of kinds.

    Steps with adapters are programs of their own, the same ones for all adapters. An adapter that
    changes another layer replaces them, so all adapters are loaded first.

    A step that fails is skipped with a warning, because the engine works without it.

    Args:
        max_context_len: Maximum tokens of a sequence; None means no limit.
        on_step: Called before each kind of steps, and after the last.
        default: The adapter of requests that name none; no step is without an adapter then.
        named: Adapters that requests may name.
    """
    start = time.perf_counter()
    _load(runner, named if default is None else [*named, default])
    seconds_of_adapters = time.perf_counter() - start
    adapters = [default] if default is not None else [None, *named[-1:]]
    model = runner.model
    shapes = kinds(
        config,
        max_context_len,
        with_cuda=model.platform.has_cuda,
        padded_from=model.padded_from,
    )
    wanted = [(kind, adapter) for adapter in adapters for kind in shapes]
    seconds_of_optional = 0.0
    slowest = (0.0, "no steps")
    for done, (kind, adapter) in enumerate(wanted):
        if on_step is not None:
            on_step(done, len(wanted))
        if seconds_of_optional >= _SECONDS_OF_OPTIONAL and _is_optional(model, kind):
            continue
        began = time.perf_counter()
        try:
            _run(runner, kind, adapter)
        except Exception as error:
            logger.warning("%s could not be prepared: %s", kind, reason_of(error))
            mx.clear_cache()
        seconds = time.perf_counter() - began
        slowest = max(slowest, (seconds, f"{kind} {'with' if adapter else 'without'} an adapter"))
        if _is_optional(model, kind):  # A program may have been refused just now.
            seconds_of_optional += seconds
    if on_step is not None:
        on_step(len(wanted), len(wanted))
    runner.reset()
    logger.info(
        "warmed up in %.1f s: %.1f s for loading adapters, and at most %.1f s for %s",
        time.perf_counter() - start,
        seconds_of_adapters,
        *slowest,
    )
    return len(wanted)


def _is_optional(model: PagedModel, kind: Kind) -> bool:
    """True if the steps run only while there is time (`_SECONDS_OF_OPTIONAL`)."""
    is_decode = kind.num_tokens == 1 and not kind.num_decodes
    return kind.is_load or (
        is_decode and kind.num_sequences > _FEW and not model.runs_program(kind.num_sequences)
    )


def _load(runner: ModelRunner, adapters: Sequence[Adapter]) -> None:
    """Runs a step with each adapter, which loads it. The last one stays."""
    for adapter in adapters:
        try:
            runner.read(runner.launch(_step(runner, Kind(1), 0, adapter), None))
        except Exception as error:
            logger.warning("%r could not be prepared: %s", adapter.name, reason_of(error))


def _run(runner: ModelRunner, kind: Kind, adapter: Adapter | None) -> None:
    """Runs steps whose tokens come from the step before, which is unread, as in decoding."""
    before: LaunchedStep | None = None
    if kind.num_tokens > _FEW:  # each is the first of its sequences
        step = _step(runner, kind, 0, adapter)
        for launched in [runner.launch(step, None) for _ in range(kind.at_once)]:
            runner.read(launched)
        return
    if kind.num_tokens > 1:
        for _ in range(_STEPS):
            runner.read(runner.launch(_step(runner, kind, 0, adapter), None))
        return
    for i in range(_STEPS):
        launched = runner.launch(_step(runner, kind, i, adapter), before)
        if before is not None:
            runner.read(before)
        before = launched
    assert before is not None
    runner.read(before)


def _step(runner: ModelRunner, kind: Kind, index: int, adapter: Adapter | None) -> StepBatch:
    """Returns step `index` of a chain. It does not write to block 0, which is padding."""
    model, size = runner.model, runner.block_size
    num_seqs = kind.num_sequences + kind.num_decodes
    num_blocks = min((len(c.key_pool) for c in model.attention_caches), default=2) - 1
    end = kind.context_len + index
    num_tokens = 1 if index else kind.num_tokens
    lens = [1] * kind.num_decodes + [num_tokens] * kind.num_sequences
    num_groups = 1 + len(runner.windows)
    tables = []
    for i in range(num_seqs):
        # Any blocks will do, even one for a whole sequence: nothing reads their contents.
        table = StepTable((1 + i % num_blocks,) * -(-end // size), 0)
        tables.append((table,) * num_groups)
    rows = _SETTINGS.get(kind.settings, (SamplingRow(kind.temperature, seed=0, position=0),))
    sampling = [rows[i % len(rows)]._replace(position=end) for i in range(num_seqs)]
    columns: dict[str, Any] = {}
    if index:  # The previous step's tokens are the inputs.
        columns["input_from"] = array("i", range(num_seqs))
    if adapter is not None:
        columns["adapter_ids"] = array("i", [_SLOT]) * num_seqs
        columns["adapters"] = {_SLOT: adapter}
    if model.layout.has_states:  # Each sequence begins without a state and leaves none.
        columns["slots"] = [StateMove(0, -1)] * num_seqs
    return synthetic_step(lens, [end - length for length in lens], tables, sampling, **columns)
