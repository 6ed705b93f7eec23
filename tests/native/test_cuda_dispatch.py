"""Tests which launches use NVIDIA's own kernels. The rule needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.platforms import CUDA, platform_with
from support.quantized import FORMATS, quantized
from support.reference import DTYPES, GPU_HEAD_DIMS, make_batch, spans_of
from support.simulated import (
    needs_sim_extension,
    planned_launches,
    planned_writes,
    shared_rows_with_cuda,
    sim_ext,
)

from mlx_paged import ops
from mlx_paged.model.plan import build_plan

pytestmark = needs_sim_extension


def described(
    batch, plan: ops.AttentionPlan | None = None, tma: str = "any", **options: Any
) -> list[dict]:
    plan = plan or batch.plan()
    positions = plan.positions if plan.bounds is None else plan.bounds
    return planned_launches(
        *(batch.queries, batch.key_pool, batch.value_pool),
        *(positions, plan.block_tables, plan.work_items, plan.merge_items),
        scale=0.125,
        cuda=True,
        tma=tma,
        **options,
    )


@pytest.mark.parametrize(
    ("rows", "group", "dims", "expected"),
    [
        (1, 1, (128, 128), "paged_decode_tensor_float16_128_n1"),
        (1, 8, (128, 128), "paged_decode_tensor_float16_128_n1"),
        (1, 9, (128, 128), "paged_decode_tensor_float16_128_n2"),
        (4, 4, (64, 64), "paged_decode_tensor_float16_64_n2"),
        (8, 1, (256, 256), "paged_decode_tensor_float16_256_n1"),
        (1, 16, (256, 256), "paged_decode_matrix_float16_256_256_m16"),
        (1, 17, (128, 128), "paged_decode_tensor_float16_128_n3"),
        (1, 25, (128, 128), "paged_decode_matrix_float16_128_128_m32"),
        (4, 8, (64, 64), "paged_decode_tensor_float16_64_n4"),
        (8, 8, (128, 128), "paged_decode_matrix_float16_128_128_m64"),
        (8, 8, (256, 256), "paged_decode_matrix_float16_256_256_m64"),
        (8, 8, (576, 512), "paged_decode_matrix_float16_576_512_m32"),
        (1, 3, (512, 512), "paged_decode_float16_512_512_q3"),
        (32, 4, (96, 96), "paged_prefill_float16_96_96_m64"),
        (32, 4, (256, 256), "paged_prefill_float16_256_256_m32"),
        (1, 2, (80, 80), "paged_decode_float16_80_80_q2"),
        (1, 4, (192, 128), "paged_decode_matrix_float16_192_128_m8"),
        (9, 1, (128, 128), "paged_prefill_tensor_float16_128_w2"),
        (32, 1, (64, 64), "paged_prefill_tensor_float16_64_w2"),
        (32, 3, (128, 128), "paged_prefill_tensor_float16_128_w6"),
        (32, 8, (128, 128), "paged_prefill_tensor_float16_128_w8"),
        (9, 1, (96, 96), "paged_prefill_float16_96_96_m32"),
        (9, 1, (192, 128), "paged_prefill_float16_192_128_m32"),
    ],
)
def test_the_rule_that_chooses_a_kernel(rng, rows, group, dims, expected) -> None:
    shape = {"num_q_heads": group, "num_kv_heads": 1, "key_dim": dims[0], "value_dim": dims[1]}
    (launch,) = described(make_batch(rng, [rows], [rows], dtype=mx.float16, **shape))
    assert launch["kernel"] == expected


@pytest.mark.parametrize(
    ("name", "rows", "group", "dim", "expected"),
    [
        ("int8", 1, 4, 128, "paged_decode_tensor_float16_128_n1_int8"),
        ("int8_k_int4_v", 1, 9, 64, "paged_decode_tensor_float16_64_n2_int8_int4"),
        ("int8", 1, 17, 128, "paged_decode_matrix_float16_128_128_m32_quantized"),
        ("int8", 1, 2, 256, "paged_decode_float16_256_256_q2_quantized"),
        ("int4", 1, 4, 128, "paged_decode_tensor_float16_128_n1_int4"),
        ("int4", 1, 4, 80, "paged_decode_matrix_float16_80_80_m8_quantized"),
        ("fp8", 1, 1, 64, "paged_decode_tensor_float16_64_n1_fp8"),
        ("int8", 9, 1, 128, "paged_prefill_float16_128_128_m32_quantized"),
    ],
)
def test_quantized_pools(rng, name, rows, group, dim, expected) -> None:
    shape = {"num_q_heads": group, "num_kv_heads": 1, "key_dim": dim, "value_dim": dim}
    batch = quantized(make_batch(rng, [rows], [rows], dtype=mx.float16, **shape), name)
    pools = {"key_pool": batch.key_pool, "value_pool": batch.value_pool}
    launches = described(replace(batch.plain, **pools), batch.plain.plan())
    assert [x["kernel"] for x in launches if "rotate" not in x["kernel"]] == [expected]


@pytest.mark.parametrize(
    ("dim", "name", "expected", "grid"),
    [
        (128, "int8", "rotate_rows_float16_128", 2),  # 13 rows of 16 lanes, 128 threads a block
        (64, "int8_k_int4_v", "rotate_rows_float16_64", 1),
        (256, "int4", "rotate_rows_float16_256", 4),
        (80, "int8", "rotate_queries_float16_128", 2),
        (64, "fp8", None, 0),
    ],
)
def test_queries_are_rotated(rng, dim, name, expected, grid) -> None:
    shape = {"num_q_heads": 13, "num_kv_heads": 1, "key_dim": dim, "value_dim": dim}
    batch = quantized(make_batch(rng, [1], [1], dtype=mx.float16, **shape), name)
    pools = {"key_pool": batch.key_pool, "value_pool": batch.value_pool}
    first, *others = described(replace(batch.plain, **pools), batch.plain.plan())
    assert not any("rotate" in launch["kernel"] for launch in others)
    assert ("rotate" in first["kernel"]) == (expected is not None)
    if expected:
        assert (first["kernel"], first["grid"][0]) == (expected, grid)


@pytest.mark.parametrize(
    ("name", "dims", "dtype", "expected", "grid"),
    [
        # 5 tokens x 3 heads of 16 lanes, 128 threads a block; keys, and values.
        ("int8", (128, 128), mx.bfloat16, "quantize_rows_bfloat16_128_int8", [2, 2, 1]),
        ("int8_k_int4_v", (64, 64), mx.float16, "quantize_rows_float16_64_int8_int4", [1, 2, 1]),
        ("int4", (256, 256), mx.float32, "quantize_rows_float32_256_int4", [4, 2, 1]),
        ("fp8", (128, 128), mx.bfloat16, "quantize_rows_bfloat16_128_fp8", [2, 2, 1]),
        ("int8", (80, 80), mx.bfloat16, "quantize_kv_bfloat16_128", [1, 5, 1]),
        ("int8", (192, 128), mx.bfloat16, "quantize_kv_bfloat16_256", [1, 5, 1]),
        ("int4", (24, 40), mx.float32, "quantize_kv_float32_64", [1, 5, 1]),
        ("fp8", (576, 576), mx.float16, "quantize_kv_float16_576", [1, 5, 1]),
    ],
)
def test_quantized_rows_are_written(name, dims, dtype, expected, grid) -> None:
    pools = [ops.allocate_pool(2, 16, 3, dim, d) for dim, d in zip(dims, FORMATS[name])]
    rows = [mx.zeros((5, 3, dim), dtype) for dim in dims]
    (launch,) = planned_writes(*pools, *rows, mx.array(np.arange(5, dtype=np.int32)), cuda=True)
    assert (launch["kernel"], list(launch["grid"])) == (expected, grid)


# --- Bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", GPU_HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_portable_kernel_has_one_for_bounds(rng, dtype, dims) -> None:
    shape = {"num_kv_heads": 1, "key_dim": dims[0], "value_dim": dims[1], "dtype": dtype}
    lens, rows = [40, 9, 3], [40, 5, 1]
    text = make_batch(rng, lens, rows, num_q_heads=3, **shape)
    media = replace(text, bounds=spans_of(lens, rows, [[(3, 30)], [], []]))
    before, after = described(text), described(media)
    assert not any(launch["kernel"].endswith("_bounds") for launch in before)
    for old, new in zip(before, after, strict=True):
        if "_tensor_" in old["kernel"]:  # they look at the bounds themselves
            assert new["kernel"] == old["kernel"] and new["grid"] == old["grid"]
            continue
        function = "paged_prefill" if "prefill" in old["kernel"] else "paged_decode_matrix"
        name = f"{function}_{str(dtype).split('.')[-1]}_{dims[0]}_{dims[1]}_m"
        assert new["kernel"].startswith(name) and new["kernel"].endswith("_bounds")
        tile = int(new["kernel"].removeprefix(name).removesuffix("_bounds"))
        queries = 3 * int.from_bytes(new["constants"][24:28], "little")  # max_rows
        assert new["grid"] == (*old["grid"][:2], -(-queries // tile))


@pytest.mark.parametrize(
    ("rows", "dims", "threads", "memory"),
    [
        (32, (256, 256), 128, 2 * 8 * (256 + 8) * 2),
        (8, (512, 512), 256, None),
        (1, (80, 80), 128, None),
    ],
)
def test_launches_with_bounds_are_those_of_the_tiles(rng, rows, dims, threads, memory) -> None:
    shape = {"num_q_heads": 4, "num_kv_heads": 1, "key_dim": dims[0], "dtype": mx.float16}
    batch = make_batch(rng, [90], [rows], **shape)
    bounds = spans_of([90], [rows], [[(0, 89)]])
    bounds[0] = 0
    launch = described(replace(batch, bounds=bounds))[0]
    assert launch["threadgroup"] == (threads, 1, 1)
    if rows == 1:  # its span begins before it and its position is the last: without a window
        assert launch["kernel"] == "paged_decode_matrix_float16_80_80_m64_bounds"
    if memory:
        assert launch["threadgroup_memory"] == memory


@pytest.mark.parametrize("dims", GPU_HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tma", ["any", "wgmma"])
def test_alibi_runs_on_kernels_that_serve_all_options(rng, dtype, dims, tma) -> None:
    shape = {"num_kv_heads": 1, "key_dim": dims[0], "value_dim": dims[1], "dtype": dtype}
    batch = make_batch(rng, [40, 9, 3], [40, 5, 1], num_q_heads=3, **shape)
    plan = batch.plan(split_tokens=16)
    launches = described(batch, plan, tma=tma, alibi_slopes=mx.ones(3))
    attend = [x for x in launches if "merge" not in x["kernel"]]
    assert attend and all(x["kernel"].endswith("_general") for x in attend)
    without = described(batch, plan, tma=tma)
    assert not any(x["kernel"].endswith("_general") for x in without)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("rows", [1, 9])
def test_alibi_of_quantized_pools(rng, name, rows) -> None:
    shape = {"num_q_heads": 4, "num_kv_heads": 1, "key_dim": 128, "value_dim": 128}
    batch = quantized(make_batch(rng, [rows], [rows], dtype=mx.float16, **shape), name)
    pools = {"key_pool": batch.key_pool, "value_pool": batch.value_pool}
    given = replace(batch.plain, **pools)
    launches = described(given, batch.plain.plan(), alibi_slopes=mx.ones(4))
    kernels = [x["kernel"] for x in launches if "rotate" not in x["kernel"]]
    assert kernels and all(kernel.endswith("_general") for kernel in kernels)


# --- Products -------------------------------------------------------------------------------------


def product(rows: int, outputs: list[int], k: int, **options: Any) -> dict[str, Any]:
    given = {"dtype": "bfloat16", "is_gated": False, "tma": "any"}
    return sim_ext.product_launch(rows, outputs, k, **(given | options))


@pytest.mark.parametrize(
    ("outputs", "k", "is_gated", "cluster", "blocks"),
    [
        # Tiles of 64 rows; columns are divided while that makes no more than 264 blocks.
        ([3072, 1024, 1024], 3072, False, 2, 80 * 2),
        ([3072], 3072, False, 4, 48 * 4),
        ([3072], 8192, False, 4, 48 * 4),
        ([8192, 8192], 3072, True, 0, 256),  # 32 rows of each
        ([128256], 3072, False, 0, 2004),
        ([1024], 2048, False, 8, 16 * 8),
        ([1024], 512, False, 2, 16 * 2),  # eight chunks of columns, of which each has four
        ([1024, 80], 224, False, 0, 16 + 2),
        ([80, 80], 64, True, 0, 3),
    ],
)
def test_products_by_clusters(outputs, k: int, is_gated: bool, cluster: int, blocks: int) -> None:
    for rows, tiles in ((1, 1), (8, 1), (9, 2), (17, 4), (32, 4), (33, 8), (64, 8)):
        launch = product(rows, outputs, k, is_gated=is_gated)
        assert launch["kernel"] == f"linear_stream_bfloat16_{tiles}"
        assert (launch["cluster"], launch["grid"]) == (cluster, (blocks, 1, 1))
        assert launch["threadgroup"] == (160, 1, 1)  # one warp copies, four multiply
        assert launch["threadgroup_memory"] + 1024 <= 99 * 1024  # (all that sm_120 has)
        x, *weights = launch["maps"]
        assert x == (0, 2, rows, k, k, 8 * tiles, 64, True)
        assert weights == [(2 + 3 * i, 2, n, k, k, 32, 64, True) for i, n in enumerate(outputs)]


def test_products_of_four_warps() -> None:
    """On sm_90a, of as many rows as make them faster; all else is the same."""
    for rows in (1, 32, 33, 64):
        for dtype in ("bfloat16", "float16"):
            launch, other = (
                product(rows, [3072], 3072, dtype=dtype, tma=tma) for tma in ("wgmma", "any")
            )
            wgmma = "wgmma_" if rows > 32 else ""
            assert (
                launch.pop("kernel")
                == f"linear_stream_{wgmma}{dtype}_{8 if rows > 32 else 4 if rows > 16 else 1}"
            )
            assert (
                other.pop("kernel")
                == f"linear_stream_{dtype}_{8 if rows > 32 else 4 if rows > 16 else 1}"
            )
            if rows > 32:  # (sums of parts that registers have no room for)
                memory = launch.pop("threadgroup_memory")
                assert memory == other.pop("threadgroup_memory") + 64 * 64 * 4
                assert 2 * (memory + 1024) <= 228 * 1024, "two blocks to a multiprocessor"
            assert launch == other


def test_products_without_clusters() -> None:
    for rows, kernel, grid in (
        (1, "linear_float16_1_1", (192, 1, 1)),
        (9, "linear_float16_2_1", (192, 1, 1)),
        (64, "linear_float16_4_2", (96, 2, 1)),
    ):
        launch = product(rows, [3072], 3072, dtype="float16", tma="none")
        assert (launch["kernel"], launch["grid"]) == (kernel, grid)
        assert launch["cluster"] == 0 and not launch["maps"]
    assert product(8, [64, 64], 64, is_gated=True, tma="none")["grid"] == (4, 1, 1)


# --- The rest -------------------------------------------------------------------------------------


def test_fp32_and_small_blocks_stay_with_the_portable_kernels(rng) -> None:
    shape = {"num_q_heads": 4, "num_kv_heads": 1, "key_dim": 128}
    for other in ({"dtype": mx.float32}, {"dtype": mx.bfloat16, "block_size": 8}):
        (launch,) = described(make_batch(rng, [40], [1], **shape, **other))
        assert launch["kernel"].startswith("paged_decode_matrix_")


def test_the_grid_has_a_block_for_every_item_and_head(rng) -> None:
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "key_dim": 128, "dtype": mx.bfloat16}
    batch = make_batch(rng, [100, 40, 7], [1, 1, 3], **shape)
    plan = batch.plan(split_tokens=32)
    attend, merge = described(batch, plan)
    items = plan.work_items.shape[0]
    assert attend["kernel"] == "paged_decode_tensor_bfloat16_128_n2"
    assert attend["grid"] == (items * 2, 1, 1)
    assert attend["threadgroup"] == (128, 1, 1)
    # Four warps: two tiles of 16 tokens, keys and values, 8 KB each; maxima and sums of 16 queries.
    assert attend["threadgroup_memory"] == 4 * (2 * 8192 + 16 * 2 * 4)
    assert merge["kernel"] == "merge_splits_bfloat16_128"
    assert merge["grid"] == (plan.merge_items.shape[0] * 2, 1, 1)  # four heads a block


@pytest.mark.parametrize(
    ("context_lens", "query_lens", "expected"),
    [
        ([700, 30, 9], [1, 1, 1], 1),
        ([700], [2], 2),
        ([700, 30], [3, 1], 4),
        ([30, 700], [1, 33], 64),  # the last item of the second has one row, and 32 before it
        ([30, 700, 20], [0, 1, 1], 1 << 30),  # unknown
        ([30, 700], [0, 2], 1 << 30),
    ],
)
def test_keys_that_the_step_writes_are_not_read_early(
    rng, context_lens: list[int], query_lens: list[int], expected: int
) -> None:
    """Of a decode it is its own key only. All items know how many these are at most."""
    shape = {"num_q_heads": 4, "num_kv_heads": 1, "key_dim": 128, "value_dim": 128}
    launches = described(make_batch(rng, context_lens, query_lens, dtype=mx.float16, **shape))
    found = [o["constants"] for o in launches if o["kernel"].startswith("paged_")]
    assert found
    for constants in found:
        assert int.from_bytes(constants[-4:], "little") == expected


@pytest.mark.parametrize("shared_rows", [1, 8])
def test_keys_of_earlier_drafts_are_not_read_early(rng, shared_rows: int) -> None:
    """Rows that are planned as sequences see each other's keys, also where none share an item: the
    last row begins a block."""
    shape = {"num_q_heads": 4, "num_kv_heads": 1, "key_dim": 128, "dtype": mx.float16}
    batch = make_batch(rng, [161, 30], [5, 1], block_size=32, **shape)
    tables = [*batch.tables[:1] * 5, batch.tables[1]]
    plan = build_plan(
        tables, [*range(157, 162), 30], [1] * 6, block_size=32, shared_rows=shared_rows
    )
    launch, *_ = described(batch, plan)
    assert launch["kernel"] == f"paged_decode_tensor_float16_128_n{min(shared_rows, 2)}"
    assert int.from_bytes(launch["constants"][-4:], "little") == 8


def test_steps_with_other_numbers_of_drafts_have_the_same_launches(rng) -> None:
    """Then the launches that are captured as a graph serve them, too."""
    shape = {"num_q_heads": 6, "num_kv_heads": 2, "key_dim": 128, "dtype": mx.bfloat16}
    found = []
    for rows in (3, 4):
        lens = [*range(600 - rows, 600), 90]
        batch = make_batch(rng, [599, 90], [rows, 1], block_size=32, **shape)
        tables = [*batch.tables[:1] * rows, batch.tables[1]]
        plan = build_plan(
            tables, lens, [1] * len(lens), block_size=32, shared_rows=8,
            platform=platform_with(**CUDA, plans_for_gpu=True),
        )  # fmt: skip
        attend, merge = described(batch, plan)
        assert attend["kernel"] == "paged_decode_tensor_bfloat16_128_n2"
        same = ("kernel", "grid", "threadgroup", "threadgroup_memory")
        found.append([attend[name] for name in same] + [merge[name] for name in same])
        # num_q_heads, num_kv_heads, block_shift, max_blocks, num_partials, min_rows, max_rows
        assert np.frombuffer(attend["constants"], np.int32)[5:7].tolist() == [1, 5]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "group", "dim", "expected"),
    [
        ("bfloat16", 3, 128, 8),
        ("bfloat16", 4, 128, 6),
        ("bfloat16", 8, 128, 3),
        ("bfloat16", 4, 64, 8),
        ("bfloat16", 8, 64, 4),
        ("bfloat16", 2, 256, 4),
        ("bfloat16", 32, 128, 1),
        ("bfloat16", 4, 96, 1),
        ("float32", 4, 128, 1),
        ("int8", 3, 128, 5),
        ("fp8", 4, 64, 4),
        ("int8", 2, 256, 1),
    ],
)
def test_how_many_rows_share_a_pass(rng, name: str, group: int, dim: int, expected: int) -> None:
    """As many as kernels hold that sum in the order of single rows."""
    shape = {"num_q_heads": group, "num_kv_heads": 1, "key_dim": dim}
    dtype = {"float32": mx.float32}.get(name, mx.bfloat16)
    for rows in range(1, 10):
        batch = make_batch(rng, [20], [rows], dtype=dtype, **shape)
        if name in FORMATS:
            made = quantized(batch, name)
            batch = replace(made.plain, key_pool=made.key_pool, value_pool=made.value_pool)
        pools = batch.queries, batch.key_pool, batch.value_pool
        assert shared_rows_with_cuda(*pools) == expected
        kernel = described(batch)[-1]["kernel"]
        if expected > 1:
            assert kernel.startswith("paged_decode_tensor") == (rows <= expected)
    assert shared_rows_with_cuda(*pools, has_alibi=True) == 1
    assert ops.max_shared_rows(*pools) == 1, "not on the simulated GPU"


def test_small_blocks_share_no_pass(rng) -> None:
    batch = make_batch(rng, [20], [1], key_dim=128, block_size=8, dtype=mx.bfloat16)
    assert shared_rows_with_cuda(batch.queries, batch.key_pool, batch.value_pool) == 1


def test_buffers_and_constants_stay_as_they_were(rng) -> None:
    batch = make_batch(rng, [700], [1], key_dim=64, dtype=mx.bfloat16)
    plan = batch.plan(split_tokens=64)
    arrays = (batch.queries, batch.key_pool, batch.value_pool, plan.positions, plan.block_tables)
    portable = planned_launches(*arrays, plan.work_items, plan.merge_items, scale=0.125)
    for theirs, ours in zip(portable, described(batch, plan), strict=True):
        assert ours["kernel"] != theirs["kernel"]
        assert ours["buffers"] == theirs["buffers"]
        assert ours["constants"] == theirs["constants"]
        assert np.prod(ours["threadgroup"]) % 32 == 0


def test_a_prefill_tile_has_sixteen_queries_a_warp(rng) -> None:
    shape = {"num_q_heads": 24, "num_kv_heads": 2, "key_dim": 128, "dtype": mx.bfloat16}
    (launch,) = described(make_batch(rng, [40, 32], [32, 32], **shape))
    assert launch["kernel"] == "paged_prefill_tensor_bfloat16_128_w8"
    assert launch["grid"] == (2, 2, 3)  # 32 rows x 12 heads in tiles of 128
    assert launch["threadgroup"] == (256, 1, 1)
    # Two tiles of 64 tokens, keys and values.
    assert launch["threadgroup_memory"] == 2 * 2 * 64 * 128 * 2


# --- Prefill on sm_90a ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "group", "dim", "dtype", "warps", "tiles"),
    [
        (17, 1, 128, mx.float16, 4, 1),
        (32, 2, 128, mx.bfloat16, 4, 1),
        (32, 3, 128, mx.bfloat16, 8, 1),
        (32, 3, 64, mx.float16, 8, 1),
        (32, 5, 64, mx.bfloat16, 8, 2),
        (32, 12, 128, mx.float16, 8, 3),
    ],
)
@pytest.mark.parametrize("bounded", [False, True], ids=["text", "bounds"])
def test_prefill_by_four_warps(rng, rows, group, dim, dtype, warps, tiles, bounded) -> None:
    shape = {"num_q_heads": 2 * group, "num_kv_heads": 2, "key_dim": dim, "value_dim": dim}
    batch = make_batch(rng, [rows + 40], [rows], dtype=dtype, block_size=32, **shape)
    if bounded:
        batch = replace(batch, bounds=spans_of([rows + 40], [rows], [[(3, 30)]]))
    plan = batch.plan(split_tokens=32)
    launch, *others = described(batch, plan, tma="wgmma")
    before, *others_before = described(batch, plan)
    assert others == others_before and before["maps"] == []
    name = str(dtype).split(".")[-1]
    assert launch["kernel"] == f"paged_prefill_wgmma_{name}_{dim}_w{warps}"
    assert launch["grid"] == (plan.work_items.shape[0], 2, tiles)
    assert launch["threadgroup"] == (32 * (warps + 4), 1, 1)  # four warps copy
    # Tiles of 64 tokens, keys and values, and two barriers for each.
    stages = {64: 6, 128: 4}[dim]
    assert launch["threadgroup_memory"] == stages * (2 * 64 * dim * 2 + 16)
    assert launch["threadgroup_memory"] <= 227 * 1024
    blocks, _, heads, _ = batch.key_pool.shape
    for buffer, found in zip((1, 2), launch["maps"], strict=True):
        assert launch["buffers"][buffer][0] == buffer  # of keys, of values
        # Sixteen tokens x 64 dims: a row of 128 bytes, of which no box has two heads.
        assert found == (buffer, 2, blocks * 32, heads * dim, heads * dim, 16, 64, True)
    for same in ("buffers", "constants", "cluster"):
        assert launch[same] == before[same]


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (16, {"num_q_heads": 1, "key_dim": 128}),  # one warp's queries
        (8, {"num_q_heads": 8, "key_dim": 128}),
        (1, {"num_q_heads": 4, "key_dim": 64}),
        (32, {"num_q_heads": 4, "key_dim": 96}),
        (32, {"num_q_heads": 4, "key_dim": 192, "value_dim": 128}),
        (32, {"num_q_heads": 4, "key_dim": 128, "block_size": 8}),
        (32, {"num_q_heads": 4, "key_dim": 128, "dtype": mx.float32}),
    ],
)
def test_all_else_is_the_same_on_sm_90a(rng, rows, shape) -> None:
    batch = make_batch(rng, [40], [rows], **({"num_kv_heads": 1, "dtype": mx.float16} | shape))
    assert described(batch, tma="wgmma") == described(batch)
