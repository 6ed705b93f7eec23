"""Physical memory: that of pools goes back by page, and weights move into huge pages."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.models import StepDriver, tiny_config, tiny_model
from support.reference import ON_GPU

from mlx_paged import ops
from mlx_paged.model import pages
from mlx_paged.platform import Platform

MIB = 1 << 20
linux_cpu = pytest.mark.skipif(
    ON_GPU or sys.platform != "linux", reason="pages of pools go back on Linux's CPU backend"
)


def resident() -> int:
    """Bytes of this process in physical memory."""
    text = Path("/proc/self/smaps_rollup").read_text()
    [kib] = [line.split()[1] for line in text.splitlines() if line.startswith("Rss:")]
    return int(kib) * 1024


def written(pool: mx.array) -> mx.array:
    """A pool with ones everywhere, in place."""
    ones = mx.ones((pool.shape[0] * pool.shape[1], *pool.shape[2:]), pool.dtype)
    slots = mx.arange(ones.shape[0], dtype=mx.int32)
    pool, _ = ops.write_kv(pool, ops.allocate_pool(*pool.shape, pool.dtype), ones, ones, slots)
    mx.eval(pool)
    del ones
    mx.clear_cache()
    return pool


@linux_cpu
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_runs_of_a_pool_go_back_and_the_rest_stays(dtype) -> None:
    blocks = 64 * MIB // (32 * 4 * 64 * dtype.size)
    pool = written(ops.allocate_pool(blocks, 32, 4, 64, dtype))
    kept = np.array([0, *range(7, 20), blocks - 1])
    free = sorted(set(range(blocks)) - set(kept.tolist()))
    before = resident()
    pages.allow_huge_pages(pool, False)
    pages.discard_rows(pool, blocks, pages.runs_of(free, free))
    assert before - resident() > 48 * MIB
    values = np.array(pool.astype(mx.float32)).reshape(blocks, -1)
    assert (values[kept] == 1).all() and (values[free] == 0).mean() > 0.99
    pool = written(pool)
    assert mx.all(pool == 1).item()
    pages.allow_huge_pages(pool, True)


@linux_cpu
def test_rows_smaller_than_a_page_go_back_together() -> None:
    pool = written(ops.allocate_pool(4096, 8, 1, 8, mx.float32))  # 256 bytes a block
    pages.discard_rows(pool, 4096, [(5, 6), (40, 90)])
    values = np.array(pool).reshape(4096, -1)
    assert (values[:40] == 1).all() and (values[90:] == 1).all()
    assert (values[40:90] == 0).any()


def test_runs() -> None:
    free = [9, 1, 2, 3, 7, 8, 20]
    assert pages.runs_of(free, [2, 20]) == [(1, 4), (20, 21)]
    assert pages.runs_of(free, [9, 7, 8]) == [(7, 10)]
    assert pages.runs_of(free, free) == [(1, 4), (7, 10), (20, 21)]
    assert pages.runs_of(free, []) == pages.runs_of([], []) == []


def test_pages_go_back_on_the_cpu_of_linux_only(monkeypatch) -> None:
    current = Platform.current()
    assert pages.can_discard(current) == (current.on_cpu and sys.platform == "linux")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not pages.can_discard(current)


@linux_cpu
def test_a_larger_pool_takes_only_the_memory_of_its_contents() -> None:
    model = StepDriver(
        tiny_model(tiny_config("llama")), "llama", block_size=8, num_blocks=8
    ).runner.model
    [group_spec] = model.layout.group_specs
    before = resident()
    model.resize(16 * 1024, group_spec)
    assert sum(pool.nbytes for pool in model.pools()) >= 128 * MIB
    assert resident() - before < 32 * MIB


def huge() -> int:
    """Bytes of this process in huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    [kib] = [line.split()[1] for line in text.splitlines() if line.startswith("AnonHugePages:")]
    return int(kib) * 1024


def collapses() -> bool:
    """True if Linux has MADV_COLLAPSE, and huge pages."""
    version = [int(number) for number in platform.release().split(".")[:2] if number.isdigit()]
    return version >= [6, 1] and Path("/sys/kernel/mm/transparent_hugepage").exists()


@linux_cpu
@pytest.mark.skipif(not collapses(), reason="this system cannot move arrays into huge pages")
def test_arrays_move_into_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [mx.random.uniform(shape=(6 * MIB // 4,)), mx.ones((16, 8)), mx.ones((4, 8)).T]
    mx.eval(arrays)
    expected = np.array(arrays[0])
    moved: list[bool] = []

    def advise(*arguments: int) -> None:
        moved.append(ctypes.CDLL(None).madvise(*map(ctypes.c_size_t, arguments)) == 0)

    monkeypatch.setattr(pages, "_advise", advise)
    thread = pages.collapse_pages(arrays)
    assert thread is not None
    thread.join()
    assert len(moved) >= 2 and huge() >= sum(moved) * 2 * MIB
    np.testing.assert_array_equal(np.array(arrays[0]), expected)
    assert pages.collapse_pages(arrays[1:]) is None
    if not any(moved):
        pytest.skip("the system has no free huge page")


def test_huge_pages_that_arrays_fill_with_their_neighbors() -> None:
    page, gap = 2 * MIB, 4096
    ranges = pages._whole_huge_pages
    assert ranges([(0, page)]) == [(0, page)]
    assert ranges([(1, 2 * page)]) == [(page, 2 * page)]
    assert ranges([(page // 2, page), (3 * page, 3 * page + 1)]) == []
    # In two halves, in any order.
    halves = [(page // 2 + gap, page), (0, page // 2)]
    assert ranges(halves) == ranges([*halves, (gap, 2 * gap)]) == [(0, page)]
    assert ranges([(0, page // 2), (page // 2 + page // 4, page)]) == []
