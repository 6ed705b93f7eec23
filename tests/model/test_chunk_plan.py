"""Chunked attention as causal attention over slices of the block table."""

from __future__ import annotations

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.family_config_parts import LLAMA4, VOCAB_SIZE, text
from support.family_configs import config_of
from support.models import dense_logits
from support.parity import Driver, family_model, relative_difference, relative_rms

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.caches import StepContext
from mlx_paged.model.layout import FULL, CacheLayout, KVCacheGroupSpec, LayerSpec, Mode
from mlx_paged.model.output_rows import OutputRows
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.plan import StepInputs, build_chunk_plan, build_plan
from mlx_paged.model.wrap import convert_to_paged


def test_each_chunk_of_a_sequence_is_a_sequence() -> None:
    tables, contexts, rows = [[3, 1, 4, 5, 9], [2, 6, 8]], [37, 17], [23, 1]
    plan = build_chunk_plan(tables, contexts, rows, chunk=16, block_size=8)
    absolute = build_plan(tables, contexts, rows, block_size=8)
    # Positions 14-15, 16-31 and 32-36 of the first, 16 of the second.
    assert plan.query_starts.tolist() == [0, 2, 18, 23, 24]
    assert plan.context_lens.tolist() == [16, 16, 5, 1]
    assert plan.positions.tolist() == [14, 15, *range(16), *range(5), 0]
    assert [t[:2] for t in plan.block_tables.tolist()] == [[3, 1], [4, 5], [9, 0], [8, 0]]
    assert plan.slot_mapping.tolist() == absolute.slot_mapping.tolist()


def test_a_chunk_is_a_whole_number_of_blocks() -> None:
    for chunk in (12, 0, -8):
        with pytest.raises(ValueError, match=f"multiple of block_size 8 but got {chunk}"):
            build_chunk_plan([[1]], [1], [1], chunk=chunk, block_size=8)


def test_what_a_reach_sees() -> None:
    assert [KVCacheGroupSpec(window=4).first_visible(p) for p in (0, 3, 4, 9)] == [0, 0, 1, 6]
    assert [KVCacheGroupSpec(chunk=4).first_visible(p) for p in (0, 3, 4, 9)] == [0, 0, 4, 8]
    assert FULL.first_visible(1000) == 0


@pytest.mark.parametrize("block_size", [8, 16])
def test_llama4_over_many_chunks(block_size: int) -> None:
    model = family_model(config_of("llama4"))
    driver = Driver(convert_to_paged(model, "llama4", block_size=block_size))
    rng = np.random.default_rng(0)
    for count in (13, 3, 16, 50, 1, 1, 13, 1):
        tokens = rng.integers(0, VOCAB_SIZE, count).tolist()
        logits = driver.step({"a": tokens, "b": tokens[:1]})
        for name, got in logits.items():
            expected = dense_logits(model, driver.sequences[name].chunks)
            assert relative_rms(got, expected) < 1e-5


@pytest.mark.parametrize(
    "reaches",
    [
        [KVCacheGroupSpec(chunk=16)],
        [KVCacheGroupSpec(window=5)],
        [KVCacheGroupSpec(chunk=16), FULL],
    ],
)
def test_positions_count_in_the_sequence_whatever_layers_see(
    reaches: list[KVCacheGroupSpec],
) -> None:
    specs = tuple(LayerSpec(1, 8, 8, mx.float32, window=r.window, chunk=r.chunk) for r in reaches)
    layout = CacheLayout(Mode.NATIVE, specs, tuple(range(len(specs))))
    context = StepContext()
    paged = PagedModel(
        nn.Module(), layout, context=context, output_rows=OutputRows(None, context), block_size=8
    )
    lens, rows = np.array([37, 17]), np.array([3, 1])
    inputs = StepInputs(lens, rows, [[3, 1, 4, 5, 9], [2, 6, 8]], np.array([2, 3]))
    step = paged._planner.plan(inputs, paged.repetition_of(inputs))
    assert step.plan.positions.tolist() == [34, 35, 36, 16]
    for reach in reaches:
        positions = step.plan_for(reach).positions.tolist()
        assert positions == ([2, 3, 4, 0] if reach.chunk else [34, 35, 36, 16])


def test_chunks_that_are_no_whole_blocks_are_gathered() -> None:
    config = text(model_type="llama4", **{**LLAMA4, "attention_chunk_size": 20})
    model = family_model({**config_of("llama4"), **config})
    with pytest.raises(UnsupportedModelError, match="chunk must be a multiple"):
        convert_to_paged(model, "llama4", modes=[Mode.NATIVE], block_size=8)
    driver = Driver(convert_to_paged(model, "llama4", block_size=8))
    assert driver.paged.layout.mode.is_gathered
    assert max(relative_difference(model, driver, VOCAB_SIZE).values()) < 1e-5
