"""Bytes of blocks, directly and through the device's stream: the same ones, in the right order."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.embedded_llm import make
from support.grouped_models import HYBRIDS, WINDOWED, engine_of
from support.models import embedded_twin

# isort: split
import mlx.core as mx

from mlx_paged import LLM, kernels, ops
from mlx_paged.model import staged_blocks
from mlx_paged.model.block_bytes import BlockBytes, Bytes, NoAccessError
from mlx_paged.model.staged_blocks import StagedBlockBytes


def both(llm: LLM) -> tuple[BlockBytes, StagedBlockBytes]:
    """The two ways to the same pools; on a device with memory of its own, one way twice."""
    assert llm.engine._offloading is not None
    shared = llm.engine._offloading._blocks
    return shared, StagedBlockBytes(shared._model, shared._specs, shared._companion)


def embedded(block_size: int = 8, **options: Any) -> LLM:
    options |= {"num_gpu_blocks_override": 8, "kv_offloading_size": 0.1}
    return make(embedded_twin(), block_size=block_size, **options)


def random_block(num_bytes: int, seed: int) -> Bytes:
    """All bit patterns, so those of NaNs, too."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def read(blocks: BlockBytes, group: int, block: int) -> Bytes:
    out = np.zeros(blocks.num_bytes[group], dtype=np.uint8)
    blocks.read(group, block, out)
    blocks.collect()
    return out


def write(blocks: BlockBytes, group: int, block: int, data: Bytes) -> None:
    blocks.write(group, block, data)
    blocks.begin_writes()
    mx.synchronize()


MODELS: dict[str, Callable[[], LLM]] = {
    name: lambda name=name: engine_of(  # type: ignore[misc]
        name, num_gpu_blocks_override=8, typical_context_len=64, kv_offloading_size=0.1
    )
    for name in [*WINDOWED, *HYBRIDS]
} | {
    kv_format: lambda kv_format=kv_format: embedded(32, kv_cache_dtype=kv_format)  # type: ignore[misc]
    for kv_format in ("auto", "int8", "int8_k_int4_v", "int4", "fp8")
}


@pytest.mark.parametrize("name", MODELS)
def test_both_ways_read_and_write_the_same_bytes(name: str) -> None:
    copies = ops.pool_copies()
    shared, staged = both(MODELS[name]())
    assert shared.num_bytes == staged.num_bytes
    for group, num_bytes in enumerate(shared.num_bytes):
        if not num_bytes:
            continue  # full attention of a model without it
        neighbor = read(shared, group, 2)
        first, second = (random_block(num_bytes, seed) for seed in range(2))
        write(staged, group, 1, first)
        write(shared, group, 3, second)
        for blocks in (shared, staged):
            assert np.array_equal(read(blocks, group, 1), first)
            assert np.array_equal(read(blocks, group, 3), second)
            assert np.array_equal(read(blocks, group, 2), neighbor)
    assert ops.pool_copies() == copies


def test_many_blocks_go_in_several_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, staged = both(embedded())
    [num_bytes] = shared.num_bytes
    monkeypatch.setattr(staged_blocks, "_TRANSFER_BYTES", 2 * num_bytes)
    monkeypatch.setattr(staged_blocks, "_MAX_READS", 2)
    data = [random_block(num_bytes, block) for block in range(1, 8)]
    for block, each in enumerate(data, 1):
        staged.write(0, block, each)
    staged.begin_writes()
    for each in data:
        each[:] = 0  # a buffer may be used again as soon as its write has begun
    mx.synchronize()
    out = [np.zeros(num_bytes, dtype=np.uint8) for _ in data]
    for block, each in enumerate(out, 1):
        staged.read(0, block, each)
    staged.collect()
    for block, each in enumerate(out, 1):
        expected = random_block(num_bytes, block)
        assert np.array_equal(each, expected) and np.array_equal(read(shared, 0, block), expected)


@pytest.mark.parametrize("name", ["auto", "int8_k_int4_v", "qwen3_next"])
def test_a_transfer_takes_few_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write for each pool; everything before is done once for pools of a size."""
    _, staged = both(MODELS[name]())
    graphs: list[str] = []

    def note(arrays: list[mx.array]) -> None:
        graph = io.StringIO()
        mx.export_to_dot(graph, *arrays)
        graphs.append(graph.getvalue())
        mx.eval(arrays)

    monkeypatch.setattr(staged_blocks.mx, "async_eval", note)
    for group, num_bytes in enumerate(staged.num_bytes):
        for block in range(1, 5):
            staged.write(group, block, random_block(num_bytes, block))
        staged.begin_writes()
    for graph, pools in zip(graphs, staged._rows, strict=True):
        operations = Counter(re.findall(r'label ="([^"]+)", shape=rectangle', graph))
        sizes = {rows.end - rows.begin for rows in pools}
        assert operations["write_kv"] == len(pools)
        assert operations["Concatenate"] == 1
        for once in ("Contiguous", "Full", "Arange", "Multiply", "Add"):
            assert 0 < operations[once] <= len(sizes)


def test_a_read_sees_the_block_as_it_was_before_the_next_step() -> None:
    _, staged = both(embedded())
    [num_bytes] = staged.num_bytes
    before, after = random_block(num_bytes, 1), random_block(num_bytes, 2)
    write(staged, 0, 5, before)
    out, ends = np.zeros(num_bytes, dtype=np.uint8), []
    staged.read(0, 5, out, lambda: ends.append(out.copy()))
    staged.begin_reads(7)
    write(staged, 0, 5, after)  # as step 7 would
    staged.collect(6)
    assert not ends
    staged.collect(7)
    assert len(ends) == 1 and np.array_equal(ends[0], before)
    assert np.array_equal(read(staged, 0, 5), after)


def test_what_is_abandoned_does_not_end() -> None:
    _, staged = both(embedded())
    [num_bytes] = staged.num_bytes
    before = read(staged, 0, 5)
    ends: list[int] = []
    for begins in (True, False):
        staged.read(0, 5, np.zeros(num_bytes, dtype=np.uint8), lambda: ends.append(1))
        if begins:
            staged.begin_reads(1)
    staged.write(0, 5, random_block(num_bytes, 3))
    staged.abandon()
    staged.begin_writes()
    staged.collect()
    assert not ends and np.array_equal(read(staged, 0, 5), before)


def test_blocks_of_odd_sizes_are_refused() -> None:
    with pytest.raises(NoAccessError, match=r"1056 bytes.*multiple of 128.*block_size 32"):
        both(embedded(8, kv_cache_dtype="int8"))


def test_a_rejected_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, _ = both(embedded())
    monkeypatch.setattr(kernels, "rejected", frozenset({"write_kv"}))
    with pytest.raises(NoAccessError, match="write_kv"):
        StagedBlockBytes(shared._model, shared._specs)
    with pytest.raises(NoAccessError, match="write_kv"):
        type(shared)(shared._model, shared._specs)
