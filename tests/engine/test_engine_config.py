"""Engine options: every value that cannot be honoured is refused, with its name."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import embedded_twin, tiny_config, tiny_model

from mlx_paged.engine import config as config_module
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel

INVALID: dict[str, list[Any]] = {
    "block_size": [0, 1, 7, 12, 24, 128, -16, "32", None, 32.0],
    "num_gpu_blocks_override": [0, 1, -5, 2.5, "64"],
    "kv_cache_memory": [0, -1, "1GB", 0.5],
    "max_model_len": [0, -1, "4096", 10.5],
    "max_num_seqs": [0, -1, None, "8", 1.5],
    "max_num_batched_tokens": [0, -1, "2048", 100.5],
    "max_step_time_ms": [-1, 0.5, 3_600_001, "50", True, float("nan"), float("inf")],
}
GIB = 1 << 30


def build(config: EngineConfig) -> Engine:
    return Engine(embedded_twin(), config)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in INVALID.items() for value in values]
)
def test_an_invalid_value_is_refused_with_its_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        EngineConfig(**{field: value}).scheduler_config(None)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} must be ")


def test_a_limited_step_time_needs_chunks() -> None:
    options = {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}
    for allowed in (None, 0):
        EngineConfig(**options, max_step_time_ms=allowed)
    with pytest.raises(InvalidParameterError, match=r"max_step_time_ms must be None or 0 .* 50"):
        EngineConfig(**options, max_step_time_ms=50)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="gpu_memory"):
        EngineConfig(gpu_memory=1)  # type: ignore[call-arg]


def test_defaults_are_valid_and_fit_the_embedded_model() -> None:
    engine = build(EngineConfig(kv_cache_memory=1 << 24))
    assert engine.max_model_len == 4096
    engine.check_integrity()


def test_the_models_length_bounds_max_model_len() -> None:
    assert EngineConfig().model_len(512) == 512
    assert EngineConfig().model_len(None) is None
    assert EngineConfig(max_model_len=100).model_len(512) == 100
    assert EngineConfig(max_model_len=100).model_len(None) == 100
    assert EngineConfig(max_model_len=512).model_len(512) == 512
    with pytest.raises(InvalidParameterError, match=r"max_model_len must be at most 512.* 513"):
        EngineConfig(max_model_len=513).model_len(512)
    with pytest.raises(InvalidParameterError, match="max_model_len"):
        build(EngineConfig(max_model_len=1 << 20))


def test_an_explicit_token_budget_below_max_num_seqs_is_not_silently_raised() -> None:
    """The budget that is in force is the one that was given, or the option is refused."""
    config = EngineConfig(max_num_batched_tokens=16, max_num_seqs=8).scheduler_config(None)
    assert config.max_num_batched_tokens == 16
    try:
        config = EngineConfig(max_num_batched_tokens=16, max_num_seqs=64).scheduler_config(None)
    except InvalidParameterError as error:
        assert error.field == "max_num_batched_tokens"
    else:
        assert config.max_num_batched_tokens == 16


def test_the_number_of_blocks_may_be_given() -> None:
    config = EngineConfig(num_gpu_blocks_override=7, kv_cache_memory=1)
    assert config.num_blocks([10**9], 4096) == 7


def test_blocks_fill_the_memory() -> None:
    config = EngineConfig(block_size=16, kv_cache_memory=16 * 300 * 10 + 5)
    assert config.num_blocks([100, 200], None) == 10


def test_no_more_blocks_than_all_sequences_can_use() -> None:
    config = EngineConfig(block_size=32, max_num_seqs=4, kv_cache_memory=GIB)
    # 100 tokens are four blocks; four sequences, and block 0.
    assert config.num_blocks([1], 100) == 17
    assert EngineConfig(
        block_size=32, max_num_seqs=4, max_model_len=64, kv_cache_memory=GIB
    ).num_blocks([1], 100) == 9  # fmt: skip


@pytest.mark.parametrize("memory", [1, 32 * 300, 2 * 32 * 300 - 1])
def test_memory_for_less_than_two_blocks_is_refused(memory: int) -> None:
    with pytest.raises(InvalidParameterError, match=r"kv_cache_memory must be .*9600 bytes"):
        EngineConfig(kv_cache_memory=memory).num_blocks([100, 200], None)
    assert EngineConfig(kv_cache_memory=2 * 32 * 300).num_blocks([100, 200], None) == 2


def test_the_default_memory_is_half_of_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    block = 32 * 1024
    monkeypatch.setattr(config_module, "physical_memory", lambda: 2 * GIB)
    assert EngineConfig().num_blocks([1024], None) == GIB // block
    monkeypatch.setattr(config_module, "physical_memory", lambda: 64 * GIB)
    assert EngineConfig().num_blocks([1024], None) == 4 * GIB // block


def test_a_model_that_names_no_length_is_bounded_by_the_pool() -> None:
    config = tiny_config("llama", max_position_embeddings=None)
    source = embedded_twin()
    model = LoadedModel(tiny_model(config), source.tokenizer, config, "tiny")
    engine = Engine(model, EngineConfig(block_size=8, num_gpu_blocks_override=5))
    assert engine.max_model_len is None
    assert engine.stats().usage.num_usable_blocks == 4
