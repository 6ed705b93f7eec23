"""How the memory is split between the groups of a model."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import pytest

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.kv_cache_config import KVCacheConfig, PoolSizes
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.layout import FULL, CacheLayout, KVCacheGroupSpec, LayerSpec, Mode, StateSpec

MIB = 1 << 20
FULL_LAYER = LayerSpec(2, 64, 64, mx.float16)  # 512 bytes a token
WINDOW_LAYER = LayerSpec(2, 64, 64, mx.float16, window=1024)
STATE_LAYER = StateSpec(((1024, 256),), (mx.float32,))  # 1 MiB


def groups(
    *specs: Any, mode: Mode = Mode.NATIVE, model_len: int | None = None, **options: Any
) -> KVCacheConfig:
    layout = CacheLayout(mode, specs, tuple(range(len(specs))))
    return KVCacheConfig(layout, EngineConfig(**options), model_len)


def test_full_attention_alone_has_no_groups() -> None:
    plain = groups(FULL_LAYER, FULL_LAYER)
    assert plain.windows == () and plain.sizes(100) == PoolSizes(100)
    assert plain.max_blocks(10 * MIB) == 10 * MIB // (32 * 1024)


def test_windows_get_what_sequences_of_typical_length_need() -> None:
    some = groups(FULL_LAYER, *[WINDOW_LAYER] * 5, max_num_batched_tokens=512, max_num_seqs=8)
    assert some.windows == (KVCacheGroupSpec(window=1024),)
    sizes = some.sizes(1280)  # ten sequences of 4096 tokens, each of which sees 33 blocks
    assert sizes.window_blocks == (1 + 16 + 330,)
    blocks = some.blocks_by_group(sizes)
    assert blocks == {FULL: 1280, KVCacheGroupSpec(window=1024): 347}
    assert some.num_bytes(1280) == 32 * 512 * (1280 + 5 * 347)
    most = some.max_blocks(100 * MIB)
    assert some.num_bytes(most) <= 100 * MIB < some.num_bytes(most + 1)
    shorter = groups(*[FULL_LAYER, WINDOW_LAYER], typical_context_len=2048)
    assert shorter.sizes(1280).window_blocks > sizes.window_blocks


def test_windows_never_have_more_blocks_than_the_full_group() -> None:
    assert groups(FULL_LAYER, WINDOW_LAYER).sizes(50).window_blocks == (50,)


@pytest.mark.parametrize(
    "options",
    [{"mode": Mode.GATHERED}, {"model_len": 1024}, {"disable_hybrid_kv_cache_manager": True}],
)
def test_windows_that_never_slide_are_no_groups(options: dict[str, Any]) -> None:
    assert groups(FULL_LAYER, WINDOW_LAYER, **options).windows == ()


def test_states_have_three_slots_a_sequence_and_some_for_snapshots() -> None:
    hybrid = groups(FULL_LAYER, STATE_LAYER, mode=Mode.REGROUPED, max_num_seqs=16)
    sizes = hybrid.sizes(10 * 128)
    assert sizes.num_state_slots == 1 + 3 * 10 + 10
    assert hybrid.num_bytes(1280) == 1280 * 32 * 512 + 41 * MIB
    assert hybrid.sizes(10**5).num_state_slots == 1 + 3 * 16 + 16
    assert hybrid.sizes(2).num_state_slots == 1 + 3 * 2 + 4


def test_states_alone_decide_where_nothing_else_takes_memory() -> None:
    recurrent = groups(STATE_LAYER, mode=Mode.REGROUPED, max_num_seqs=4)
    assert recurrent.windows == () and recurrent.blocks_by_group(recurrent.sizes(9)) == {}
    config = EngineConfig(kv_cache_memory=40 * MIB, max_num_seqs=4)
    # The full group keeps books only: as much of it as all sequences could ever use.
    assert config.num_blocks([], 4096, max_blocks=recurrent.max_blocks) == 4 * 128 + 1


def test_a_full_group_without_layers_is_bounded() -> None:
    recurrent = groups(STATE_LAYER, mode=Mode.REGROUPED, max_num_seqs=4)
    assert recurrent.max_blocks(1 << 40) == 1 + (1 << 14)
    assert groups(WINDOW_LAYER, model_len=1 << 20).max_blocks(1 << 50) == 1 + (1 << 15)


def test_a_window_has_room_for_a_view_wherever_the_full_group_has() -> None:
    some = groups(FULL_LAYER, WINDOW_LAYER, max_num_batched_tokens=8, max_num_seqs=1)
    assert some.sizes(40).window_blocks == (1 + 33,)


def test_memory_for_too_few_blocks_is_refused() -> None:
    hybrid = groups(FULL_LAYER, STATE_LAYER, mode=Mode.REGROUPED)
    config = EngineConfig(kv_cache_memory=5 * MIB)
    with pytest.raises(InvalidParameterError, match="kv_cache_memory must be at least"):
        config.num_blocks([512], None, max_blocks=hybrid.max_blocks)
