"""Kernels for tensor units (metal/tensor_*.h), executed by the simulator, which has two layouts of
cooperative tensors (docs/dev/metal-without-a-mac.md)."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from sim import METAL, SimLibrary
from sim.checks import checks_of
from sim.mutants import Mutant, judge
from support.quick_mutants import mutant_cases
from support.reference import PagedBatch, assert_close, bits, make_batch
from support.simulated import (
    METAL_4,
    launches,
    needs_simulator,
    sim_ext,
    simulated,
    simulated_tensor_units,
    tensor_library,
)
from support.tensor_mutants import MUTANTS

from mlx_paged import kernels, ops
from mlx_paged.kernels import AttentionLayer

pytestmark = needs_simulator
CHECKS = "support.tensor_checks"
QUICK = {
    "tensor_prefill.h: the causal edge is one token late",
    "tensor_product.h: rows of x past the last are read",
}
DIMS = (32, 64, 80, 96, 112, 128)


@pytest.mark.one_in(21)
@pytest.mark.parametrize("name", list(checks_of(CHECKS)))
def test_the_kernels_pass(name) -> None:
    checks_of(CHECKS)[name](tensor_library())


@pytest.mark.parametrize("mutant", mutant_cases(MUTANTS, QUICK))
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    verdict = judge(mutant, CHECKS)
    assert verdict.caught and verdict.valid, str(verdict)


def attend(batch: PagedBatch, tensor_layout: int) -> mx.array:
    with simulated_tensor_units(tensor_library(tensor_layout=tensor_layout)):
        pools = (batch.key_pool, batch.value_pool)
        out = ops.paged_attention(batch.queries, *pools, batch.plan(), scale=0.125)
        mx.eval(out)
    return out


@pytest.mark.one_in(13)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_every_head_dim(rng, dtype, dim) -> None:
    """Tiles of 32 and of 64 queries."""
    batch = make_batch(rng, [90, 33], [44, 12], num_q_heads=4, key_dim=dim, dtype=dtype)
    assert_close(attend(batch, 1), batch.expected(scale=0.125))
    name = f"tensor_prefill_{str(dtype).split('.')[-1]}_{dim}_{dim}"
    assert [launch["kernel"] for launch in launches()] == [f"{name}_m32", f"{name}_m64"]


def test_results_do_not_depend_on_the_layout(rng) -> None:
    batch = make_batch(rng, [50], [12], num_q_heads=2, key_dim=32, dtype=mx.float16)
    np.testing.assert_array_equal(bits(attend(batch, 0)), bits(attend(batch, 1)))


@pytest.mark.long
def test_every_line_is_executed() -> None:
    library = tensor_library()
    for run in checks_of(CHECKS).values():
        run(library)
    coverage = library.coverage()
    missed = [(Path(f).name, n) for f, n in coverage.missed if Path(f).name.startswith("tensor_")]
    lines = [n for f, n in coverage.lines if Path(f).name.startswith("tensor_")]
    assert len(lines) > 80 and not missed


# --- Which kernel runs ----------------------------------------------------------------------------


def kernel(rows: int, dtype: str = "float16", dim: int = 64, group: int = 4) -> str:
    return kernels.attention_kernel(AttentionLayer(dtype, group, dim, dim, 0, 0, 0), rows)


def test_tensor_units_take_over_prefill_in_16_bits() -> None:
    with simulated_tensor_units():
        assert kernel(1) == "paged_decode_matrix_float16_64_64_m8"
        assert kernel(8) == "paged_decode_matrix_float16_64_64_m32"
        assert kernel(9, group=1) == "tensor_prefill_float16_64_64_m32"
        assert kernel(9) == "tensor_prefill_float16_64_64_m64"
        assert kernel(40, "bfloat16", 128) == "tensor_prefill_bfloat16_128_128_m64"
        assert kernel(9, "float32") == "paged_prefill_float32_64_64_m32"
        assert kernel(9, dim=192) == "paged_decode_matrix_float16_192_192_m32"


def test_they_are_not_used_before_they_are_allowed() -> None:
    with simulated():
        assert kernel(9) == "paged_prefill_float16_64_64_m64"


def test_other_kernels_take_the_place_of_rejected_ones() -> None:
    with simulated_tensor_units():
        try:
            kernels.reject_kernels(["tensor_prefill_float16_64_64_m64"])
            assert kernel(9) == "tensor_prefill_float16_64_64_m32"
            kernels.reject_kernels([f"tensor_prefill_float16_64_64_m{rows}" for rows in (32, 64)])
            assert kernel(9) == "paged_prefill_float16_64_64_m64"
        finally:
            kernels.reject_kernels(())


def test_pipelines_are_foreseen(rng) -> None:
    batch = make_batch(rng, [40], [40], num_q_heads=2, key_dim=64, dtype=mx.float16)
    with simulated_tensor_units():
        sim_ext.forget_attention_layers()
        pools = (batch.key_pool, batch.value_pool)
        ops.paged_attention(batch.queries, *pools, batch.plan(), scale=0.125)
        names = {name for name, _ in sim_ext.pipelines_to_come()}
    assert {f"tensor_prefill_float16_64_64_m{rows}" for rows in (32, 64)} <= names


def test_threadgroup_memory_is_at_most_32_kb(rng) -> None:
    """Twice 16 KB is not possible with the widest heads."""
    sizes = {}
    with simulated_tensor_units():
        for dim in DIMS:
            batch = make_batch(rng, [40], [40], num_q_heads=4, key_dim=dim, dtype=mx.float16)
            plan = batch.plan()
            planned = sim_ext.paged_attention_launches(
                *(batch.queries, batch.key_pool, batch.value_pool, plan.positions),
                *(plan.block_tables, plan.work_items, plan.merge_items),
                scale=0.125,
            )
            launch = next(x for x in planned if x["kernel"].startswith("tensor_prefill_"))
            assert launch["threadgroup"][0] == 128
            sizes[dim] = launch["threadgroup_memory"]
    assert max(sizes.values()) <= 32 * 1024 and sizes[64] <= 22 * 1024


# --- Sources --------------------------------------------------------------------------------------


def test_other_files_do_not_need_metal_4() -> None:
    """Kernels for every Mac include none of these."""
    for path in Path(METAL).glob("*.h"):
        if not path.name.startswith("tensor_"):
            text = path.read_text()
            assert "tensor_units.h" not in text.replace("(tensor_units.h)", ""), path.name
            assert "mpp::" not in text and "<metal_tensor>" not in text, path.name


@pytest.mark.parametrize(
    "name", ["tensor_prefill_float16_128_128_m32", "tensor_prefill_bfloat16_64_64_m64"]
)
def test_the_source_for_mlx_compiles_alone(name) -> None:
    """As MLX compiles it, one kernel from one text."""
    source = sim_ext.kernel_source(name)
    assert "MetalPerformancePrimitives/MetalPerformancePrimitives.h" in source
    assert SimLibrary(source=source, defines=METAL_4).kernels == [name]
