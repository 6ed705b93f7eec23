"""Checks of attention, movement in pools, and masks, that mutants of metal/ must fail.

Each is small and has few kernels.

The head dim of 80 leaves lanes without a chunk and gives SIMD-groups unequal slices; contexts end
inside blocks and tiles; slots that must not be read hold NaN.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
from sim import Buffer, SimLibrary
from sim.checks import check

from mlx_paged import ops, plain_ops
from support import big_pools, reference
from support.quantized import (
    FORMATS,
    decoded,
    empty_pools,
    keys_of,
    quantized,
    raw,
    steps,
)
from support.reference import PagedBatch, alibi_slopes, assert_close, make_batch, spans_of, to_numpy
from support.simulated import launches, simulated

mx.set_default_device(mx.cpu)


def attend(
    library: SimLibrary, batch: PagedBatch, limits: dict[str, int] | None = None, **options
) -> mx.array:
    plan = batch.plan(**(limits or {}))
    pools = (batch.key_pool, batch.value_pool)
    with simulated(library):
        out = ops.paged_attention(batch.queries, *pools, plan, scale=0.125, **options)
        mx.eval(out)
    return out


def compare(library: SimLibrary, batch: PagedBatch, limits=None, **options) -> None:
    out = attend(library, batch, limits, **options)
    assert_close(out, batch.expected(scale=0.125, **options))


def batch_of(rows: list[int], heads: int, window: int | None = None, **shape) -> PagedBatch:
    rng = np.random.default_rng(0)
    shape = {"key_dim": 80, "dtype": mx.float32, **shape}
    lens = [150, 33, 1][: len(rows)]
    return make_batch(rng, lens, rows, num_q_heads=heads, window=window, **shape)


def sinks_for(batch: PagedBatch) -> mx.array:
    return mx.array(np.linspace(-2, 3, batch.queries.shape[1]).astype(np.float32))


def tokens_read(library: SimLibrary, batch: PagedBatch, **options) -> float:
    """Number of tokens whose keys and values are read, counting every read."""
    attend(library, batch, **options)
    token = 2 * 80 * batch.key_pool.dtype.size * batch.key_pool.shape[2]
    return sum(x["traffic"][buffer][0] for x in launches() for buffer in (1, 2)) / token


def reads_once(library: SimLibrary, batch: PagedBatch) -> None:
    assert tokens_read(library, batch) <= 1.05 * sum(batch.context_lens)


# --- Vector units ---------------------------------------------------------------------------------


@check
def decode(library: SimLibrary) -> None:
    batch = batch_of([1, 1, 1], 6, window=60)
    compare(library, batch, window=60)


@check
def decode_options(library: SimLibrary) -> None:
    batch = batch_of([1, 1, 1], 6, dtype=mx.float16)  # a SIMD-group reads two tokens at a time
    compare(library, batch, sinks=sinks_for(batch), softcap=1.5)
    reads_once(library, batch)


@check
def decode_splits(library: SimLibrary) -> None:
    batch = batch_of([1, 1, 1], 6, window=61)  # the first split has 7 tokens, less than a step
    compare(library, batch, {"split_tokens": 40}, sinks=sinks_for(batch), window=61)


@check
def decode_drafts(library: SimLibrary) -> None:
    compare(library, batch_of([3, 3], 2, window=20), window=20)


@check
def decode_of_a_chunk_beside_others(library: SimLibrary) -> None:
    """Other launches must handle items of other sizes."""
    batch = batch_of([1, 2, 1], 2)
    compare(library, batch)
    reads_once(library, batch)


# --- Matrix units ---------------------------------------------------------------------------------


@check
def matrix(library: SimLibrary) -> None:
    batch = batch_of([1, 1, 1], 22, window=60)
    compare(library, batch, window=60)


@check
def matrix_options(library: SimLibrary) -> None:
    batch = batch_of([1, 1, 1], 22)
    compare(library, batch, sinks=sinks_for(batch), softcap=1.5)
    reads_once(library, batch)


@check
def matrix_splits(library: SimLibrary) -> None:
    batch = batch_of([1, 1, 1], 22, window=60)
    compare(library, batch, {"split_tokens": 40}, sinks=sinks_for(batch), window=60)


@check
def matrix_drafts(library: SimLibrary) -> None:
    compare(library, batch_of([6, 7, 1], 4, window=20), window=20)


@check
def matrix_tiles(library: SimLibrary) -> None:
    compare(library, batch_of([8], 40))


# --- Prefill --------------------------------------------------------------------------------------


@check
def prefill(library: SimLibrary) -> None:
    compare(library, batch_of([27, 9], 6, window=20), window=20)


@check
def prefill_options(library: SimLibrary) -> None:
    batch = batch_of([27, 9], 6)
    compare(library, batch, sinks=sinks_for(batch), softcap=1.5)


@check
def prefill_splits(library: SimLibrary) -> None:
    batch = batch_of([27, 9], 6, window=60)  # so that tiles and blocks begin at different tokens
    compare(library, batch, {"split_tokens": 40}, sinks=sinks_for(batch), window=60)


@check
def prefill_of_64_rows(library: SimLibrary) -> None:
    """A SIMD-group has two bands of 8 rows."""
    batch = batch_of([27, 9], 6, key_dim=64, dtype=mx.float16)
    compare(library, batch)
    assert any(launch["kernel"].endswith("_m64") for launch in launches())


@check
def prefill_window(library: SimLibrary) -> None:
    """A tile reads only tokens that its rows see: 32 queries are rows 0 to 10 of a group of 3."""
    batch = batch_of([27], 6, window=20)  # the last row is token 149
    rows = [(123, 133), (133, 144), (144, 149)]
    assert tokens_read(library, batch, window=20) == sum(b + 1 - (a - 19) for a, b in rows)


# --- Bounds ---------------------------------------------------------------------------------------


def bounded(rows: list[int], heads: int, window: int | None = None, **shape) -> PagedBatch:
    """The first row sees the last token, and the second last row sees the tenth, with a span in
    between. The rows of the second sequence are within a span that begins before them."""
    lens = [150, 33][: len(rows)]
    bounds = spans_of(lens, rows, [[(150 - rows[0] + 1, 148)], [(5, 31)]][: len(rows)])
    bounds[1, 0] = 149
    bounds[0, rows[0] - 2] = 10
    return batch_of(rows, heads, window, bounds=bounds, **shape)


@check
def bounds_decode(library: SimLibrary) -> None:
    compare(library, bounded([3, 3], 2))
    compare(library, bounded([3, 3], 2, window=2), window=2)


@check
def bounds_matrix(library: SimLibrary) -> None:
    compare(library, bounded([8, 5], 8))
    compare(library, bounded([8, 5], 8, window=3), window=3)


@check
def bounds_prefill(library: SimLibrary) -> None:
    compare(library, bounded([27, 9], 6))
    compare(library, bounded([27, 9], 6, window=5), window=5)


# --- ALiBi ----------------------------------------------------------------------------------------


def compare_alibi(library: SimLibrary, batch: PagedBatch, **options) -> None:
    """With sinks, because without them a row's position does not matter."""
    slopes = alibi_slopes(batch.queries.shape[1])
    limits = {"split_tokens": 40}
    compare(library, batch, limits, sinks=sinks_for(batch), alibi_slopes=slopes, **options)
    compare(library, batch, alibi_slopes=slopes, **options)


@check
def alibi_decode(library: SimLibrary) -> None:
    compare_alibi(library, batch_of([3, 3], 2, window=60), window=60)


@check
def alibi_matrix(library: SimLibrary) -> None:
    compare_alibi(library, batch_of([6, 7, 1], 8))


@check
def alibi_prefill(library: SimLibrary) -> None:
    compare_alibi(library, batch_of([27, 9], 6))


@check
def alibi_with_bounds(library: SimLibrary) -> None:
    compare_alibi(library, bounded([8, 5], 8), softcap=1.5)


# --- All of them ----------------------------------------------------------------------------------


@check
def many_splits(library: SimLibrary) -> None:
    batch = make_batch(np.random.default_rng(0), [700], [1], num_q_heads=6, key_dim=80)
    compare(library, batch, {"split_tokens": 16})


@check
def a_mixed_step(library: SimLibrary) -> None:
    """Items of three kernels, and tiles that only some of them need."""
    rng = np.random.default_rng(0)
    batch = make_batch(rng, [40, 90, 40, 40], [1, 32, 5, 12], num_q_heads=6, key_dim=80)
    compare(library, batch, {"rows_per_item": 32})
    batch = make_batch(rng, [40, 40], [8, 4], num_q_heads=40, key_dim=80)
    compare(library, batch)


@check
def bfloat(library: SimLibrary) -> None:
    compare(library, batch_of([1, 1, 1], 6, dtype=mx.bfloat16))


@check
def no_key_seen(library: SimLibrary) -> None:
    """A query whose logits are all NaN stays NaN; rows without an item are zero."""
    batch = batch_of([1, 1, 1], 6)
    poisoned = mx.array(batch.queries)
    poisoned[0, 0, 0] = float("nan")
    out = to_numpy(attend(library, replace(batch, queries=poisoned), {"split_tokens": 40}))
    assert np.isnan(out[0, 0]).all() and not np.isnan(out[0, 1:]).any()
    plan = batch.plan()
    begin = plan.work_items[0, 1].item()
    with simulated(library):
        pools = (batch.key_pool, batch.value_pool)
        some = replace(plan, work_items=plan.work_items[1:])
        out = ops.paged_attention(batch.queries, *pools, some, scale=0.125)
        mx.eval(out)
    assert (to_numpy(out)[begin] == 0).all()


@check
def a_sink_alone(library: SimLibrary) -> None:
    """With logits of -inf, only the sink is left: the result is zero, not NaN."""
    batch = batch_of([1, 1, 1], 6)
    keys = mx.where(mx.isnan(batch.key_pool), batch.key_pool, mx.full((), -3e38))
    queries = mx.full(batch.queries.shape, 3e38)
    out = attend(library, replace(batch, key_pool=keys, queries=queries), sinks=sinks_for(batch))
    assert (to_numpy(out) == 0).all()


# --- Movement -------------------------------------------------------------------------------------


def pools_of(rng: np.random.Generator, blocks: int, heads: int, *dims: int) -> list[mx.array]:
    shape = (blocks, 16, heads)
    return [mx.array(rng.standard_normal((*shape, d)).astype(np.float32)) for d in dims]


@check
def write(library: SimLibrary) -> None:
    rng = np.random.default_rng(0)
    pools = pools_of(rng, 5, 3, 72, 40)
    rows = [mx.array(rng.standard_normal((4, 3, d)).astype(np.float32)) for d in (72, 40)]
    slots = [3, -1, 79, 16]
    expected = [reference.write_kv(to_numpy(p), to_numpy(r), slots) for p, r in zip(pools, rows)]
    with simulated(library):
        written = ops.write_kv(*pools, *rows, mx.array(slots, mx.int32))
        mx.eval(written)
    for out, want in zip(written, expected):
        np.testing.assert_array_equal(to_numpy(out), want)


@check
def copy(library: SimLibrary) -> None:
    pools = pools_of(np.random.default_rng(0), 6, 3, 200, 24)
    pairs = [(1, 4), (1, 2), (5, 0)]
    expected = [reference.copy_blocks(to_numpy(p), pairs) for p in pools]
    with simulated(library):
        copied = ops.copy_blocks(pools, mx.array(pairs, mx.int32))
        mx.eval(copied)
    for out, want in zip(copied, expected):
        np.testing.assert_array_equal(to_numpy(out), want)


@check
def gather(library: SimLibrary) -> None:
    pools = pools_of(np.random.default_rng(0), 9, 2, 64, 24)
    tables, lens = [[3, 1, 7, 8], [2, 6, 0, 0], [5, 0, 0, 0]], [49, 32, 0]
    expected = [reference.gather_kv(to_numpy(p), tables, lens, 53) for p in pools]
    with simulated(library):
        dense = ops.gather_kv(*pools, mx.array(tables), mx.array(lens), 53)
        mx.eval(dense)
    for out, want in zip(dense, expected):
        np.testing.assert_array_equal(to_numpy(out), want)


@check
def strided(library: SimLibrary) -> None:
    """Launches the kernel directly, because the CPU makes an array dense in its own way."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**16, (3, 8, 5, 16)).astype(np.uint16)
    view = base.transpose(2, 1, 0, 3)[..., ::2]
    out = np.empty(view.shape, np.uint16)
    params = struct.pack("ii4q", *view.shape[2:], *(s // 2 for s in view.strides))
    library.launch(
        "copy_strided_16",
        {0: Buffer(base), 1: Buffer(out, "write")},
        grid=(1, view.shape[1], view.shape[0]),
        threads=256,
        constants={2: params},
    )
    np.testing.assert_array_equal(out, view)


# --- Masks ----------------------------------------------------------------------------------------


@check
def bitmask(library: SimLibrary) -> None:
    """Copied and in place; the last threadgroup and a row's last word extend past its end."""
    rng = np.random.default_rng(0)
    for dtype in (mx.float32, mx.bfloat16):
        numbers = rng.standard_normal((5, 1100)).astype(np.float32)
        numbers[:, ::100], numbers[:, 7::100] = np.inf, np.nan
        values = mx.array(numbers).astype(dtype)
        masks = rng.integers(-(2**31), 2**31, (3, 35)).astype(np.int32)
        rows = [3, 0, 4]
        expected = to_numpy(values)
        allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :1100]
        is_kept = (allowed == 1) | ~np.isfinite(expected[rows])
        expected[rows] = np.where(is_kept, expected[rows], -np.inf)
        place = mx.array(rows, mx.int32)
        with simulated(library):
            copied = ops.apply_token_bitmask(values, mx.array(masks), place)
            mx.eval(copied)
            in_place = ops.apply_token_bitmask(values + 0, mx.array(masks), place)
            mx.eval(in_place)
        np.testing.assert_array_equal(to_numpy(copied), expected)
        np.testing.assert_array_equal(to_numpy(in_place), expected)


@check
def edits(library: SimLibrary) -> None:
    """More additions and tokens than threads; bans that follow the newest token, which is new to
    one row, known to another and not in flight for a third. Rows and elements of batches."""
    rng = np.random.default_rng(0)
    numbers = mx.array(rng.normal(0, 5, (4, 1000)).astype(np.float32))
    tokens = np.stack([rng.permutation(1000)[:700] for _ in range(3)])
    table = np.stack([tokens, rng.integers(0, 3, tokens.shape)], axis=2).astype(np.int32)
    table[:, :350, 1] = np.resize([-1, 5, 6], 350)
    table[:, 300:350, 0] = table[:, :50, 0]  # biased, and banned, too
    values = np.zeros(tokens.shape, np.float32)
    values[:, :300], values[:, 300:350] = 1.5, -np.inf
    rows = [[3, 1, 0, 350, 700], [0, 0, 700, 1050, 1400], [2, -1, 1400, 1750, 2100]]
    settings = (
        mx.array(rows, mx.int32),
        mx.array([[1.3, 0.5, 0.37], [0.7, 0.0, 0.1], [1.1, 0.2, 0.0]]),
        mx.array(table.reshape(-1, 2)),
        mx.array(values.reshape(-1)),
        mx.array([5, int(tokens[0, 600])], mx.int32),
    )
    expected = plain_ops.edit_logits(numbers, *settings)
    ids = [mx.array([3, 0, 3], mx.int32), mx.array(rng.integers(0, 1000, (4, 90)), mx.int32)]
    taken = [numbers[ids[0]], mx.take_along_axis(numbers, ids[1], axis=1)]
    mx.eval(numbers, settings, expected, ids, taken)
    with simulated(library):
        found = ops.edit_logits(numbers, *settings)
        rows_found = [ops.take_rows(numbers, places) for places in ids]
        mx.eval(found, rows_found)
    np.testing.assert_array_equal(np.array(found), np.array(expected))
    for got, want in zip(rows_found, taken):
        np.testing.assert_array_equal(np.array(got), np.array(want))


# --- Pools that do not fit 32 bits ----------------------------------------------------------------


@check
def big_write(library: SimLibrary) -> None:
    pools = big_pools.make()
    rows = [mx.random.normal((2, big_pools.HEADS, big_pools.DIM)).astype(mx.float16)] * 2
    mx.eval(rows)
    slots = [block * big_pools.SIZE + 5 for block in big_pools.BLOCKS]
    with simulated(library):
        pools = ops.write_kv(*pools, *rows, mx.array(slots, mx.int32))
        mx.eval(pools)
    for pool, row in zip(pools, rows):
        written = mx.stack([pool[block, 5] for block in big_pools.BLOCKS])
        np.testing.assert_array_equal(to_numpy(written), to_numpy(row))


@check
def big_copy(library: SimLibrary) -> None:
    _, big = big_pools.fill(np.random.default_rng(0), big_pools.make(), [70], [1])
    pools, (first, second) = [big.key_pool, big.value_pool], big_pools.BLOCKS
    for pair in ([first, 4], [4, second]):
        with simulated(library):
            pools = ops.copy_blocks(pools, mx.array([pair], mx.int32))
            mx.eval(pools)
    for pool in pools:
        for block in (4, second):
            np.testing.assert_array_equal(to_numpy(pool[block]), to_numpy(pool[first]))


@check
def big_gather(library: SimLibrary) -> None:
    batch, big = big_pools.fill(np.random.default_rng(0), big_pools.make(), [70], [1])
    with simulated(library):
        tables, lens = mx.array([big.tables[0]], mx.int32), mx.array([70], mx.int32)
        dense = ops.gather_kv(big.key_pool, big.value_pool, tables, lens, 70)
        mx.eval(dense)
    for out, pool in zip(dense, (batch.key_pool, batch.value_pool)):
        want = reference.gather_kv(to_numpy(pool), batch.tables, [70], 70)
        np.testing.assert_array_equal(to_numpy(out), want)


def _attend_in_big_pools(library: SimLibrary, rows: int, group: int) -> None:
    pools = big_pools.make()
    batch, big = big_pools.fill(np.random.default_rng(0), pools, [70], [rows], group)
    assert_close(attend(library, big), batch.expected(scale=0.125))


@check
def big_decode(library: SimLibrary) -> None:
    _attend_in_big_pools(library, 1, 1)


@check
def big_matrix(library: SimLibrary) -> None:
    _attend_in_big_pools(library, 1, 6)


@check
def big_prefill(library: SimLibrary) -> None:
    _attend_in_big_pools(library, 9, 1)


# --- Quantized pools ------------------------------------------------------------------------------


def compare_quantized(library: SimLibrary, plain: PagedBatch, name: str, **options) -> None:
    limits = options.pop("limits", {})
    batch = quantized(plain, name)
    with simulated(library):
        out = batch.attend(plain.plan(**limits), scale=0.125, **options)
        mx.eval(out)
    expected = batch.expected(scale=0.125, **options)
    assert_close(out, expected, 5e-5 if plain.queries.dtype == mx.float32 else None)


@check
def quantized_decode(library: SimLibrary) -> None:
    for name in FORMATS:
        compare_quantized(library, batch_of([1, 1, 1], 6, window=60), name, window=60)
        compare_quantized(library, batch_of([1, 1, 1], 6, dtype=mx.float16), name)


@check
def quantized_matrix(library: SimLibrary) -> None:
    for name in FORMATS:
        compare_quantized(library, batch_of([1, 2, 1], 12), name, limits={"split_tokens": 64})
        compare_quantized(library, batch_of([1, 2, 1], 12, key_dim=64, dtype=mx.bfloat16), name)


@check
def quantized_prefill(library: SimLibrary) -> None:
    for name in FORMATS:
        compare_quantized(library, batch_of([40, 20], 4), name)
        compare_quantized(library, batch_of([40, 20], 4, key_dim=64, dtype=mx.float16), name)


@check
def quantized_bytes(library: SimLibrary) -> None:
    """Vector and matrix units must read codes and scales only once."""
    for name in FORMATS:
        for heads in (2, 8):
            plain = batch_of([1], heads, key_dim=128, dtype=mx.float16)
            batch = quantized(plain, name)
            with simulated(library):
                mx.eval(batch.attend(plain.plan(), scale=0.125))
            read = [x["traffic"] for x in launches() if "paged_decode" in x["kernel"]]
            for buffer, pool in ((1, batch.key_pool), (2, batch.value_pool)):
                token = pool.nbytes / (pool.shape[0] * pool.shape[1])
                assert sum(x[buffer][0] for x in read) <= 1.001 * 150 * token


@check
def quantized_write(library: SimLibrary) -> None:
    """Same codes as the CPU; a few round the other way, because a GPU's division is less exact."""
    rng = np.random.default_rng(0)
    for name in FORMATS:
        for dims in ((80, 128), (576, 24)):
            batch = make_batch(rng, [20], [1], num_kv_heads=3, num_q_heads=3, key_dim=dims[0],
                               value_dim=dims[1])  # fmt: skip
            rows = rng.standard_normal((6, 3, 576)) * 10.0 ** rng.uniform(-6, 2, (6, 3, 1))
            rows[0] = np.abs(rows[0]) + 1  # the zeros past a head are smaller
            rows[2, 1, :8] = 1.1875  # halfway between two e4m3 numbers
            rows[2, 0] = 0
            rows[3, 1, 5], rows[4, 2, 7] = np.nan, -np.inf
            rows[5, 0, 3] = 1e9
            keys, values = (mx.array(rows[..., :d].astype(np.float32)) for d in dims)
            slots = mx.array([3, -1, 17, 31, 0, 20], mx.int32)
            wanted = ops.write_kv(*empty_pools(batch, name), keys, values, slots)
            mx.eval(*wanted)
            with simulated(library):
                written = ops.write_kv(*empty_pools(batch, name), keys, values, slots)
                mx.eval(*written)
            for got, want, dim in zip(written, wanted, dims):
                assert (raw(got) != raw(want)).mean() < 2e-3
                held, known = decoded(got, dim), decoded(want, dim)
                np.testing.assert_array_equal(np.isnan(held), np.isnan(known))
                step = 0 if name == "fp8" else np.nan_to_num(steps(want, dim))
                assert (np.nan_to_num(np.abs(held - known)) <= 1.01 * step + 1e-7).all()


@check
def quantized_gather(library: SimLibrary) -> None:
    lens = mx.array([151, 33], mx.int32)  # the first is one more than was written: a NaN
    mx.eval(lens)
    for name in FORMATS:
        for dim in (80, 512):
            batch = quantized(batch_of([1, 1], 2, key_dim=dim), name)
            plan = batch.plain.plan()
            with simulated(library):
                dense = ops.gather_kv(
                    batch.key_pool, batch.value_pool, plan.block_tables, lens, 155,
                    dtype=mx.float32,
                )  # fmt: skip
                mx.eval(*dense)
            pools = (keys_of(batch.key_pool, dim), decoded(batch.value_pool, dim))
            for got, pool in zip(dense, pools):
                wanted = reference.gather_kv(pool, batch.plain.tables, [151, 33], 155)
                assert np.isnan(wanted[0, :, 150]).all() and np.isfinite(wanted[0, :, :150]).all()
                np.testing.assert_allclose(to_numpy(got), wanted, atol=5e-6)
