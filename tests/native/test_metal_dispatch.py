"""Tests which kernels are launched, with their threads, threadgroup memory, and the bytes of keys
and values they read. Bytes stand for speed until a Mac confirms it."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from sim import SimLibrary
from support.reference import PagedBatch, bits, make_batch
from support.simulated import (
    METAL_4,
    launches,
    metal_library,
    needs_sim_extension,
    needs_simulator,
    planned_launches,
    sim_ext,
    simulated,
    tensor_library,
)

from mlx_paged import ops
from mlx_paged.extension import ext
from mlx_paged.model.plan import build_plan

pytestmark = needs_sim_extension
KERNELS = ext.kernel_names()
FILES = {host: file for host, file, _ in KERNELS}
MAX_THREADGROUP_MEMORY = 32 * 1024


def described(batch: PagedBatch, plan: ops.AttentionPlan | None = None, **options) -> list[dict]:
    """The launches of a call that is not run."""
    plan = plan or batch.plan()
    return planned_launches(
        *(batch.queries, batch.key_pool, batch.value_pool),
        *(plan.positions, plan.block_tables, plan.work_items, plan.merge_items),
        scale=0.125,
        **options,
    )


def kernel_of(rows: int, group: int, key_dim: int, dtype: mx.Dtype) -> str:
    shape = {"num_q_heads": group, "num_kv_heads": 1, "key_dim": key_dim}
    batch = make_batch(np.random.default_rng(0), [rows], [rows], dtype=dtype, **shape)
    (launch,) = described(batch)
    kernel, dims, size = re.fullmatch(
        r"(\w+)_float\d+_(\d+_\d+)_([qm]\d+)", launch["kernel"]
    ).groups()
    assert dims == f"{key_dim}_{key_dim}"
    return f"{kernel} {size}"


@pytest.mark.parametrize(
    ("rows", "group", "key_dim", "expected"),
    [
        (1, 1, 128, "paged_decode q1"),
        (1, 3, 128, "paged_decode q3"),
        (3, 1, 128, "paged_decode q3"),
        (1, 4, 128, "paged_decode_matrix m8"),
        (1, 8, 128, "paged_decode_matrix m8"),
        (1, 9, 128, "paged_decode_matrix m16"),
        (2, 3, 128, "paged_decode_matrix m8"),
        (8, 1, 128, "paged_decode_matrix m8"),
        (8, 8, 64, "paged_decode_matrix m64"),
        (8, 8, 96, "paged_decode_matrix m32"),
        (8, 8, 128, "paged_decode_matrix m32"),  # two tiles
        (8, 8, 256, "paged_decode_matrix m32"),
        (8, 8, 512, "paged_decode_matrix m16"),
        (1, 2, 512, "paged_decode_matrix m8"),
        (1, 1, 512, "paged_decode q1"),
        (9, 1, 128, "paged_prefill m32"),
        (32, 1, 64, "paged_prefill m32"),
        (32, 4, 64, "paged_prefill m64"),
        (32, 4, 96, "paged_prefill m32"),
        (32, 4, 128, "paged_prefill m32"),
        (32, 4, 192, "paged_decode_matrix m32"),
        (32, 4, 256, "paged_decode_matrix m32"),
        (32, 4, 512, "paged_decode_matrix m16"),
    ],
)
def test_the_rule_that_chooses_a_kernel(rows, group, key_dim, expected) -> None:
    assert kernel_of(rows, group, key_dim, mx.float16) == expected


@pytest.mark.parametrize(
    ("rows", "group", "key_dim", "expected"),
    [
        (8, 8, 64, "paged_decode_matrix m32"),
        (8, 8, 96, "paged_decode_matrix m32"),
        (8, 8, 128, "paged_decode_matrix m16"),
        (8, 8, 256, "paged_decode_matrix m16"),
        (8, 8, 512, "paged_decode_matrix m8"),
        (32, 4, 64, "paged_prefill m32"),
        (32, 4, 128, "paged_prefill m32"),
        (32, 4, 256, "paged_decode_matrix m16"),
    ],
)
def test_fp32_has_half_the_rows_where_they_would_not_fit(rows, group, key_dim, expected) -> None:
    assert kernel_of(rows, group, key_dim, mx.float32) == expected


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_alibi", [False, True])
def test_every_launch_is_compiled_for_its_options(
    rng, window, softcap, has_sinks, has_alibi
) -> None:
    batch = make_batch(rng, [90, 40, 70], [1, 32, 5], num_q_heads=6, key_dim=64)
    sinks = mx.zeros(6) if has_sinks else None
    slopes = mx.zeros(6) if has_alibi else None
    options = {"window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": slopes}
    planned = described(batch, batch.plan(split_tokens=32), **options)
    assert [launch["kernel"].split("_float32")[0] for launch in planned] == [
        *("paged_decode", "paged_decode_matrix", "paged_prefill", "paged_merge")
    ]
    for launch in planned:
        plain = (False,) * 4
        given = (window > 0, softcap > 0, has_sinks, False, has_alibi)
        assert launch["function_constants"] == (*plain, *given)


@needs_simulator
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dims", "group"), [((64, 64), 1), ((64, 64), 7), ((128, 128), 4), ((256, 256), 2)]
)
def test_pipelines_are_foreseen_whatever_the_rows(rng, dims, group, dtype) -> None:
    shape = {"num_q_heads": group, "num_kv_heads": 1, "key_dim": dims[0], "dtype": dtype}
    options = {"window": 50, "sinks": mx.zeros(group)}
    sim_ext.forget_attention_layers()
    ran = set()
    with simulated():
        for rows in (*range(1, 12), 16, 17, 32, 33, 65):
            batch = make_batch(rng, [rows], [rows], **shape)
            pools = (batch.key_pool, batch.value_pool)
            plan = batch.plan(split_tokens=16)
            if rows == 1:  # of it a graph is built, and not run
                ops.paged_attention(batch.queries, *pools, plan, scale=0.125, **options)
                assert not launches()
            for launch in described(batch, plan, **options):
                ran.add((launch["kernel"], launch["function_constants"]))
    foreseen = {(name, constants) for name, constants in sim_ext.pipelines_to_come()}
    assert ran <= foreseen, ran - foreseen
    unused = {name for name, constants in foreseen - ran if constants}
    # Nothing else is compiled in vain; but kernels do not know that a plan's items have at
    # most 32 rows.
    assert all(group == 1 and name.endswith("prefill_bfloat16_64_64_m64") for name in unused)


def test_launches_of_one_step_wait_only_for_what_they_need(rng) -> None:
    batch = make_batch(rng, [90, 40, 70], [1, 32, 5], num_q_heads=6, key_dim=64)
    planned = described(batch, batch.plan(split_tokens=32))
    assert [launch["beside_previous"] for launch in planned] == [False, True, True, False]
    plan = batch.plan()
    partial = planned_launches(  # an item is left out, so the output is filled with zeros before
        *(batch.queries, batch.key_pool, batch.value_pool, plan.positions, plan.block_tables),
        *(plan.work_items[:-1], plan.merge_items),
        scale=0.125,
    )
    assert partial[0]["kernel"] == "fill_zero"
    assert [launch["beside_previous"] for launch in partial[:3]] == [False, False, True]


@needs_simulator
def test_the_table_is_that_of_the_metal_files() -> None:
    of_every_mac = [host for host, file in FILES.items() if not file.startswith("tensor_")]
    assert sorted(of_every_mac) == sorted(metal_library().kernels)
    assert sorted(FILES) == sorted(tensor_library().kernels)


@pytest.mark.one_in(12)
@needs_simulator
@pytest.mark.parametrize("name", sorted({file: host for host, file in FILES.items()}.values()))
def test_the_text_that_mlx_compiles_is_whole(name) -> None:
    """One kernel of each file, as a Mac's run-time compiler gets it: with no folder to look in."""
    source = sim_ext.kernel_source(name)
    assert '#include "' not in source
    defines = METAL_4 if FILES[name].startswith("tensor_") else {}
    library = SimLibrary(source=source, root=Path(__file__).parent / "sim", defines=defines)
    beside = [host for host, file, text in KERNELS if file == FILES[name] and not text]
    assert sorted(library.kernels) == sorted({name, *beside})
    library.compile()


def test_threads_and_threadgroup_memory_of_every_attention_kernel(rng) -> None:
    seen = {}
    dims = [(d, d) for d in (32, 64, 80, 96, 112, 128, 192, 256, 512)] + [(192, 128), (576, 512)]
    for dtype in (mx.float32, mx.bfloat16):
        for key_dim, value_dim in dims:
            for rows, group in ((1, 1), (1, 3), (1, 8), (1, 16), (4, 8), (8, 8), (12, 2), (32, 4)):
                batch = make_batch(
                    *(rng, [rows], [rows]),
                    num_q_heads=group,
                    num_kv_heads=1,
                    key_dim=key_dim,
                    value_dim=value_dim,
                    dtype=dtype,
                )
                for launch in described(batch):
                    seen[launch["kernel"]] = launch["threadgroup_memory"]
                    assert launch["threadgroup"][0] in (128, 256)
                    assert launch["threadgroup"][1:] == (1, 1)
    assert max(seen.values()) <= MAX_THREADGROUP_MEMORY
    wanted = sum(memory <= MAX_THREADGROUP_MEMORY // 2 for memory in seen.values())
    assert wanted / len(seen) > 0.9  # the others: fp32 of the widest heads


@needs_simulator
def test_one_long_sequence_fills_a_large_gpu() -> None:
    tables, lens = [list(range(1, 257))], [8192]
    with simulated():
        plan = build_plan(tables, lens, [1], block_size=32)
    queries = mx.zeros((1, 32, 128), mx.bfloat16)
    pool = mx.zeros((257, 32, 8, 128), mx.bfloat16)
    attend, merge = described(PagedBatch(queries, pool, pool, tables, lens, [1]), plan)
    assert np.prod(attend["grid"]) >= 160
    assert merge["kernel"] == "paged_merge_bfloat16_128"


@needs_simulator
@pytest.mark.parametrize(
    ("num_tokens", "rows", "items", "expected"),
    [
        (1, 1, 1, 384),
        (4096, 1, 1, 384),
        (8192, 1, 1, 384),
        (48 * 384 + 1, 1, 1, 385),
        (65536, 1, 1, 1366),
        (65536, 8, 1, 1366),  # drafts
        (4160, 9, 1, 520),  # a short prefill chunk behind a long prefix
        (4160, 32, 2, 520),
        (4160, 32, 4, 1040),
        (1000, 32, 1, 512),
        (65536, 32, 1, 4096),
        (4096, 32, 16, 4096),  # a long chunk has items enough
        (65536, 32, 64, 65536),
        (131072, 32, 16, 131072),
        (131072, 32, 15, 32768),  # 60 pieces in all
        (131072, 32, 8, 16384),
        (131072, 32, 2, 4096),
    ],
)
def test_the_length_of_a_split(num_tokens, rows, items, expected) -> None:
    """Splits of the last item, which sees all tokens."""

    def num_pieces(others: tuple[tuple[int, int], ...] = ()) -> int:
        lens, query_lens = zip((num_tokens, rows if items == 1 else 32 * items), *others)
        tables = [[1] * -(-n // 32) for n in lens]
        plan = build_plan(tables, lens, query_lens, block_size=32)
        work = np.array(plan.work_items)
        return (work[:, 2] == query_lens[0]).sum()

    with simulated():
        assert num_pieces() == -(-num_tokens // expected)
        assert num_pieces(((7, 1), (100_000, 96))) == -(-num_tokens // expected)
    assert num_pieces() == -(-num_tokens // 4096)  # on the CPU


@needs_simulator
@pytest.mark.parametrize("num_rows", [64, 256, 480, 512, 2048, 8192])
def test_a_chunk_behind_a_long_prefix_needs_little_room(num_rows) -> None:
    """A row's partials of 32 heads of 128 take 16.6 KB."""
    num_tokens = 131_072
    tables = [list(range(1, num_tokens // 32 + 1))]
    with simulated():
        plan = build_plan(tables, [num_tokens], [num_rows], block_size=32)
    is_split = np.array(plan.work_items)[:, 5] >= 0
    assert is_split.any() == (num_rows < 512)
    queries = mx.zeros((num_rows, 32, 128), mx.bfloat16)
    pool = sim_ext.virtual_pool((num_tokens // 32 + 1, 32, 8, 128), mx.bfloat16)
    found = described(PagedBatch(queries, pool, pool, tables, [num_tokens], [num_rows]), plan)
    # (After 7 inputs and the output comes the workspace.)
    workspace = [n for launch in found for operand, _, n in launch["buffers"] if operand == 8]
    assert max(workspace) <= 2048 * 32 * 130 * 4


@needs_sim_extension
def test_a_workspace_is_little_larger_than_asked_for() -> None:
    """So that one that grows is not made anew each time; of any size that memory has."""
    for asked in [*range(1, 10_000, 7), *(3 * 2**k // 2 + 1 for k in range(12, 42)), 5 << 30]:
        shape = sim_ext.workspace_shape(asked)
        size = 4 * int(np.prod(shape, dtype=object))
        assert max(shape) < 2**31
        assert asked <= size <= asked * 9 // 8 + 16384
        # A little more fits into it, or is a full step larger.
        more = 4 * int(np.prod(sim_ext.workspace_shape(size + 1), dtype=object))
        assert more >= min(size * 17 // 16, size + 16384)


@pytest.mark.one_in(3)
@needs_simulator
@pytest.mark.parametrize("heads", [2, 8])
def test_a_row_has_the_same_bits_alone_and_in_company(rng, heads) -> None:
    shape = {"num_q_heads": heads, "num_kv_heads": 2, "key_dim": 32, "dtype": mx.bfloat16}
    lens, rows = [900, 385, 40, 1500, 70], [1, 2, 1, 1, 40]
    batch = make_batch(rng, lens, rows, **shape)
    pools = (batch.key_pool, batch.value_pool)
    starts = np.concatenate([[0], np.cumsum(rows)])
    with simulated():
        together = bits(ops.paged_attention(batch.queries, *pools, batch.plan(), scale=0.125))
        for i, table in enumerate(batch.tables):
            begin, end = starts[i], starts[i + 1]
            plan = build_plan([table], [lens[i]], [rows[i]], block_size=16)
            alone = ops.paged_attention(batch.queries[begin:end], *pools, plan, scale=0.125)
            np.testing.assert_array_equal(bits(alone), together[begin:end])


# --- Bytes ----------------------------------------------------------------------------------------


def kv_bytes_over_fewest(batch: PagedBatch, window: int | None, **limits: int) -> float:
    """Bytes of keys and values that lanes asked for, over those of the keys some row sees."""
    fewest = 0
    for context, rows in zip(batch.context_lens, batch.query_lens):
        first = 0 if window is None else max(0, context - rows - window + 1)
        fewest += context - first
    token = sum(p.nbytes // (p.shape[0] * p.shape[1]) for p in (batch.key_pool, batch.value_pool))
    with simulated():
        plan = batch.plan(**limits)
        pools = (batch.key_pool, batch.value_pool)
        mx.eval(ops.paged_attention(batch.queries, *pools, plan, scale=0.125, window=window))
    read = 0
    for launch in launches():
        if not launch["kernel"].startswith("paged_merge"):
            read += launch["traffic"][1][0] + launch["traffic"][2][0]
    return read / (fewest * token)


@needs_simulator
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("group", range(1, 17))
def test_decode_reads_each_key_and_value_once(rng, group, window) -> None:
    shape = {"num_q_heads": 2 * group, "key_dim": 64, "dtype": mx.bfloat16}
    batch = make_batch(rng, [130, 17, 64], [1, 1, 1], window=window, **shape)
    for split_tokens_ in (32, 4096):
        assert kv_bytes_over_fewest(batch, window, split_tokens=split_tokens_) <= 1.05


@needs_simulator
@pytest.mark.parametrize(("rows", "group"), [(2, 1), (3, 1), (8, 1), (4, 4), (8, 6), (8, 8)])
def test_drafts_read_each_key_and_value_once(rng, rows, group) -> None:
    shape = {"num_q_heads": 2 * group, "key_dim": 64, "dtype": mx.bfloat16}
    batch = make_batch(rng, [130, 40], [rows, rows], **shape)
    assert kv_bytes_over_fewest(batch, None) <= 1.05


@pytest.mark.one_in(4)
@needs_simulator
@pytest.mark.parametrize(("key_dim", "value_dim"), [(80, 80), (128, 128), (576, 512)])
def test_other_head_dims_read_once_too(rng, key_dim, value_dim) -> None:
    for heads in (2, 16):
        shape = {"num_q_heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        batch = make_batch(rng, [70, 17], [1, 1], dtype=mx.float16, **shape)
        assert kv_bytes_over_fewest(batch, None) <= 1.05
