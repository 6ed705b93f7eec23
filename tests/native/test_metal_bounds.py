"""Plans with bounds on the simulated GPU: the same kernels, compiled for bounds."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.reference import (
    DTYPES,
    PagedBatch,
    alibi_slopes,
    assert_close,
    bits,
    make_batch,
    spans_of,
)
from support.simulated import launches, needs_simulator, planned_launches, sim_ext, simulated

from mlx_paged import ops

pytestmark = needs_simulator


def run(batch: PagedBatch, limits: dict[str, int] | None = None, **options) -> mx.array:
    options.setdefault("scale", 0.125)
    with simulated():
        pools = (batch.key_pool, batch.value_pool)
        out = ops.paged_attention(batch.queries, *pools, batch.plan(**(limits or {})), **options)
        mx.eval(out)
    return out


def check(batch: PagedBatch, limits: dict[str, int] | None = None, **options) -> list[str]:
    """Compares with the oracle and returns the names of the kernels that ran."""
    options.setdefault("scale", 0.125)
    assert_close(run(batch, limits, **options), batch.expected(**options))
    ran = launches()
    assert all(launch["function_constants"][7] for launch in ran)
    return [launch["kernel"] for launch in ran]


def batch_of(rng, lens: list[int], rows: list[int], spans, **shape) -> PagedBatch:
    return make_batch(rng, lens, rows, bounds=spans_of(lens, rows, spans), **shape)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dims", [(64, 64), (112, 112), (192, 128), (256, 256)], ids=str)
def test_every_kernel_sees_the_spans(rng, dims, window) -> None:
    """A step of a decode, drafts and chunks; the last item of a chunk is a single row."""
    dtype = DTYPES[(dims[0] // 16 + (window or 0)) % 3]  # each of them with a window and without
    lens, rows = [50, 60, 90, 33], [1, 5, 65, 12]
    spans = [[], [(56, 58)], [(30, 50), (51, 89)], [(25, 32)]]
    shape = {"num_q_heads": 6, "key_dim": dims[0], "value_dim": dims[1], "dtype": dtype}
    batch = batch_of(rng, lens, rows, spans, window=window, **shape)
    names = check(batch, {"split_tokens": 40}, window=window)
    kernels = {name.split(f"_{str(dtype).split('.')[-1]}")[0] for name in names}
    prefill = {"paged_prefill"} if dims[0] <= 128 else set()
    assert kernels == {"paged_decode", "paged_decode_matrix", "paged_merge"} | prefill


@pytest.mark.parametrize("group", [1, 3, 4, 16])
def test_groups_with_all_options(rng, group) -> None:
    shape = {"num_q_heads": 2 * group, "key_dim": 64, "dtype": mx.bfloat16}
    batch = batch_of(rng, [90, 33], [44, 2], [[(50, 80)], [(31, 32)]], window=30, **shape)
    options = {"sinks": mx.arange(2 * group) - 1.0, "alibi_slopes": alibi_slopes(2 * group)}
    check(batch, {"window": 30}, window=30, softcap=2.0, **options)


def test_wide_heads(rng) -> None:
    shape = {"num_q_heads": 6, "key_dim": 576, "value_dim": 512, "dtype": mx.float16}
    check(batch_of(rng, [50], [12], [[(40, 48)]], **shape))


@pytest.mark.parametrize("window", [None, 30])
def test_rows_beside_a_picture_keep_their_bits(rng, window) -> None:
    lens, rows = [450, 90, 60], [1, 40, 5]
    bounds = spans_of(lens, rows, [[], [(55, 85)], []])
    shape = {"num_q_heads": 6, "key_dim": 64, "dtype": mx.bfloat16, "window": window}
    batch = make_batch(rng, lens, rows, bounds=bounds, **shape)
    options = {"window": window} if window else {}
    beside = bits(run(batch, options, **options))
    alone = bits(run(replace(batch, bounds=None), options, **options))
    assert not any(launch["function_constants"][7] for launch in launches())
    text = np.r_[0:1, 41:46]
    np.testing.assert_array_equal(beside[text], alone[text])
    assert (beside[1:41] != alone[1:41]).any()


# --- Launches -------------------------------------------------------------------------------------


def described(batch: PagedBatch, **options) -> list[dict]:
    plan = batch.plan()
    positions = plan.positions if plan.bounds is None else plan.bounds
    arrays = (positions, plan.block_tables, plan.work_items, plan.merge_items)
    pools = (batch.key_pool, batch.value_pool)
    return planned_launches(batch.queries, *pools, *arrays, scale=0.125, **options)


def test_bounds_change_what_a_launch_is_compiled_for(rng) -> None:
    lens, queries = [50, 90], [1, 40]
    shape = {"num_q_heads": 6, "key_dim": 64, "dtype": mx.bfloat16}
    none = make_batch(rng, lens, queries, **shape)
    spans = replace(none, bounds=spans_of(lens, queries, [[], [(60, 80)]]))
    for text, media in zip(described(none), described(spans), strict=True):
        assert text["kernel"] == media["kernel"] and text["grid"] == media["grid"]
        assert not text["function_constants"][7] and media["function_constants"][7]
        assert text["buffers"][3][2] == 4 * 41 and media["buffers"][3][2] == 3 * 4 * 41
        # (Before the formats of the pools' keys and values.)
        rows = {name: launch["constants"][44:48] for name, launch in (("t", text), ("m", media))}
        assert rows == {"t": bytes(4), "m": (41).to_bytes(4, "little")}


def test_pipelines_for_bounds_are_foreseen_once_a_graph_has_some(rng) -> None:
    sim_ext.forget_attention_layers()
    batch = batch_of(rng, [40], [20], [[(25, 35)]], key_dim=64)
    pools = (batch.key_pool, batch.value_pool)

    def foreseen() -> set[bool]:
        return {constants[7] for _, constants in sim_ext.pipelines_to_come() if constants}

    with simulated():
        plan = replace(batch, bounds=None).plan()
        ops.paged_attention(batch.queries, *pools, plan, scale=0.125)
        assert foreseen() == {False}
        ops.paged_attention(batch.queries, *pools, batch.plan(), scale=0.125)
        assert foreseen() == {False, True}
    sim_ext.forget_attention_layers()


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 8])
def test_a_picture_reads_each_key_and_value_once(rng, group) -> None:
    """Eight rows of a picture share one pass over all that it sees, drafts' kernels or decode's."""
    shape = {"num_q_heads": 2 * group, "key_dim": 64, "dtype": mx.bfloat16}
    batch = batch_of(rng, [130, 40], [8, 1], [[(122, 129)], []], **shape)
    run(batch)
    token = 2 * 2 * 64 * 2
    read = sum(launch["traffic"][buffer][0] for launch in launches() for buffer in (1, 2))
    assert read <= 1.05 * (130 + 40) * token


def test_a_tile_reads_no_more_than_its_rows_see(rng) -> None:
    """32 rows of fp16 are a tile: three items of a chunk, of which one is within the picture."""
    shape = {"num_q_heads": 2, "key_dim": 64, "dtype": mx.float16, "block_size": 8}
    batch = batch_of(rng, [200], [96], [[(136, 167)]], window=16, **shape)
    run(batch, {"window": 16}, window=16)
    token = 2 * 2 * 64 * 2
    read = sum(launch["traffic"][buffer][0] for launch in launches() for buffer in (1, 2))
    seen = [(104 - 15, 135), (136 - 15, 167), (168 - 15, 199)]
    assert read == sum(last + 1 - first for first, last in seen) * token
