"""Checks of the kernels of metal/, through the primitives, against the float64 oracle.

Small on purpose: they run on every mutant. tests/test_metal_*.py hold the kernels to much more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import reference
from reference import assert_close, bits, make_batch
from simulated import launches, simulated

from mlx_paged import ops

from .abi import Buffer
from .checks import check
from .library import SimLibrary


def _attend(
    library: SimLibrary,
    kernel: str,
    context_lens: list[int],
    query_lens: list[int],
    heads: int,
    limits: dict[str, int] | None = None,
    seed: int = 0,
    key_dim: int = 64,
    value_dim: int | None = None,
    dtype: mx.Dtype = mx.float16,
    window: int | None = None,
    sinks: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """One step over two KV heads some of whose rows go to `kernel`, compared with the oracle.
    Returns the launches."""
    rng = np.random.default_rng(seed)
    batch = make_batch(
        *(rng, context_lens, query_lens),
        num_q_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        window=window,
    )
    options["scale"] = options.get("scale", 0.125)
    if window is not None:
        options["window"] = window
    if sinks:
        options["sinks"] = mx.array(np.linspace(-3, 9, heads).astype(np.float32))
    with simulated(library):
        plan = batch.plan(**(limits or {}))
        out = ops.paged_attention(batch.queries, batch.key_pool, batch.value_pool, plan, **options)
        mx.eval(out)
    launched = launches()
    ran = {launch["kernel"] for launch in launched}
    assert any(name.startswith(f"{kernel}_{str(dtype).split('.')[-1]}") for name in ran), ran
    assert_close(out, batch.expected(**options))
    return launched


def _all_options(library: SimLibrary, kernel: str, rows: list[int], heads: int, **more: Any) -> None:
    lens = [75, 41]
    _attend(library, kernel, lens, rows, heads, **more)
    _attend(library, kernel, lens, rows, heads, window=19, sinks=True, **more)
    split = {"split_tokens": 16}
    _attend(library, kernel, lens, rows, heads, split, seed=1, sinks=True, softcap=2.0, **more)
    _attend(library, kernel, lens, rows, heads, split, seed=2, window=33, **more)


@check
def decode(library: SimLibrary) -> None:
    _all_options(library, "paged_decode", [1, 1], 6)


@check
def decode_of_drafts(library: SimLibrary) -> None:
    _attend(library, "paged_decode", [40, 33], [3, 2], 2, dtype=mx.bfloat16)
    _attend(library, "paged_decode", [40, 33], [3, 2], 2, dtype=mx.bfloat16, window=9)


@check
def decode_of_odd_heads(library: SimLibrary) -> None:
    _attend(library, "paged_decode", [70, 17], [1, 1], 2, key_dim=80)
    _attend(library, "paged_decode", [40, 9], [1, 1], 4, key_dim=192, value_dim=128, dtype=mx.float32)


@check
def decode_matrix(library: SimLibrary) -> None:
    _all_options(library, "paged_decode_matrix", [3, 5], 8)


@check
def decode_matrix_of_two_tiles(library: SimLibrary) -> None:
    """Eight rows of 16 heads are two tiles of queries, four are one."""
    _attend(library, "paged_decode_matrix", [40, 33], [8, 4], 32)


@check
def decode_matrix_of_odd_heads(library: SimLibrary) -> None:
    _attend(library, "paged_decode_matrix", [40, 17], [1, 1], 10, key_dim=80, dtype=mx.bfloat16)


@check
def prefill(library: SimLibrary) -> None:
    _all_options(library, "paged_prefill", [30, 12], 6)  # two tiles of queries, and one


@check
def a_mixed_step(library: SimLibrary) -> None:
    """Each kernel reads the keys of its own rows and of no others."""
    tokens = {"paged_decode": 50, "paged_decode_matrix": 30, "paged_prefill": 2 * 40}  # two tiles
    launched = _attend(library, "paged_prefill", [50, 40, 30], [1, 32, 5], 6)
    for launch in launched:
        own = tokens[launch["kernel"].split("_float16")[0]]
        read, _ = launch["traffic"][1]
        assert read <= own * 2 * 64 * 2, f"{launch['kernel']} reads {read} bytes of keys"
    assert len(launched) == len(tokens)


@check
def merge_of_many_splits(library: SimLibrary) -> None:
    _attend(library, "paged_merge", [600], [1], 2, {"split_tokens": 16}, sinks=True)


@check
def rows_without_work(library: SimLibrary) -> None:
    """Rows that no item serves are zero, which fill_zero sees to."""
    batch = make_batch(np.random.default_rng(0), [40, 20], [1, 1], key_dim=64, dtype=mx.float16)
    plan = batch.plan()
    _, begin, end, *_ = plan.work_items[0].tolist()
    with simulated(library):
        out = ops.paged_attention(
            batch.queries, batch.key_pool, batch.value_pool,
            replace(plan, work_items=plan.work_items[1:]), scale=0.125,
        )  # fmt: skip
        mx.eval(out)
    expected = batch.expected(scale=0.125)
    expected[begin:end] = 0
    assert_close(out, expected)


def _pool(rng: np.random.Generator, *shape: int) -> mx.array:
    words = rng.integers(0, 2**16, shape, dtype=np.uint16)
    return mx.array(words).view(mx.float16)


@check
def write(library: SimLibrary) -> None:
    rng = np.random.default_rng(0)
    pools = [_pool(rng, 5, 16, 3, d) for d in (64, 24)]
    rows = [_pool(rng, 5, 3, d) for d in (64, 24)]
    slots = [3, -1, 79, 0, 41]
    expected = [reference.write_kv(bits(p), bits(r), slots) for p, r in zip(pools, rows)]
    with simulated(library):
        written = ops.write_kv(*pools, *rows, mx.array(slots, mx.int32))
        mx.eval(written)
    for out, want in zip(written, expected):
        np.testing.assert_array_equal(bits(out), want)


@check
def copy(library: SimLibrary) -> None:
    rng = np.random.default_rng(0)
    pools = [_pool(rng, 6, 16, 2, d) for d in (64, 24, 320)]
    pairs = [(1, 4), (1, 2), (5, 0)]
    expected = [reference.copy_blocks(bits(p), pairs) for p in pools]
    with simulated(library):
        copied = ops.copy_blocks(pools, mx.array(pairs, mx.int32))
        mx.eval(copied)
    for out, want in zip(copied, expected):
        np.testing.assert_array_equal(bits(out), want)


@check
def gather(library: SimLibrary) -> None:
    rng = np.random.default_rng(0)
    pools = [_pool(rng, 9, 16, 2, d) for d in (64, 24)]
    tables, lens, longest = [[3, 1, 7, 8], [2, 6, 0, 0], [5, 0, 0, 0]], [49, 32, 0], 53
    expected = [reference.gather_kv(bits(p), tables, lens, longest) for p in pools]
    with simulated(library):
        dense = ops.gather_kv(*pools, mx.array(tables), mx.array(lens), longest)
        mx.eval(dense)
    for out, want in zip(dense, expected):
        np.testing.assert_array_equal(bits(out), want)


@check
def strided(library: SimLibrary) -> None:
    """copy_strided, which only a GPU's arrays need."""
    params = [(f"shape_{i}", np.int32) for i in (2, 3)] + [(f"stride_{i}", np.int64) for i in range(4)]
    for dtype in (np.uint16, np.uint32):
        base = np.arange(3 * 2 * 9 * 40).astype(dtype).reshape(3, 2, 9, 40)
        view = base[:, :, 1:8, ::2].swapaxes(1, 2)
        out = np.zeros(view.shape, dtype)
        strides = [s // view.itemsize for s in view.strides]
        offset = 40 * view.itemsize
        library.launch(
            f"copy_strided_{8 * view.itemsize}",
            {0: Buffer(base, offset=offset), 1: Buffer(out, "write")},
            grid=(-(-view.shape[2] * view.shape[3] // 32), view.shape[1], view.shape[0]),
            threads=32,
            constants={2: np.array([(*view.shape[2:], *strides)], params)},
        )
        np.testing.assert_array_equal(out, view)
