"""Every proven family against mlx-lm's dense cache, and every other one refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models import (
    StepDriver,
    dense_logits,
    random_tokens,
    rms,
    save_tiny,
    tiny_config,
    tiny_model,
)

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from mlx_paged.attention.step import StepContext
from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.models.families import PROVEN, layer_specs, require_proven
from mlx_paged.models.load import load
from mlx_paged.models.output_rows import select_output_rows

TOLERANCE = 1e-5  # RMS of the logit difference, float32
WINDOW = 12
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
# Fields that only some families have; each changes what reaches attention.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-sliding": ("llama", SLIDING),
    "llama-traditional-rope": ("llama", {"rope_traditional": True}),
    "mistral": ("mistral", {}),
    "mistral-sliding": ("mistral", SLIDING),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {}),
}
ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0],
    },
}


def run_mixed_scenario(driver: StepDriver, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Brings four sequences to one mixed step and returns its logits.

    That step computes a prefill, two decodes, the second chunk of a chunked prompt, and the rest of
    a prompt whose head came from another sequence: whole blocks shared, the last one copied while
    its owner goes on writing to it.
    """

    def new(count: int) -> list[int]:
        return random_tokens(rng, count)

    # The first chunk alone: a step that samples nothing still fills the pools.
    driver.launch(driver.schedule("chunked", new(21), samples=False))
    driver.step({"long": new(37)})
    driver.step({"short": new(5), "long": new(1)})
    driver.step({"long": new(1), "short": new(1)})
    driver.fork("forked", "long", 30)
    return driver.step(
        {
            "long": new(1),
            "short": new(1),
            "prefill": new(17),
            "forked": new(9),
            "chunked": new(10),
        }
    )


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mixed_step_matches_the_dense_cache(
    variant: str, tied: bool, block_size: int, record_property: Any
) -> None:
    model_type, fields = VARIANTS[variant]
    model = tiny_model(tiny_config(model_type, tied=tied, **fields))
    driver = StepDriver(model, model_type, block_size=block_size)
    logits = run_mixed_scenario(driver, np.random.default_rng(1))
    assert set(logits) == {"long", "short", "prefill", "forked", "chunked"}

    expected = {name: dense_logits(model, driver.sequences[name].chunks) for name in logits}
    differences = {name: rms(logits[name] - expected[name]) for name in logits}
    record_property("rms", max(differences.values()))
    # Each by itself: `max` may step over a NaN.
    assert all(difference < TOLERANCE for difference in differences.values()), differences
    # What is compared is neither flat nor the same for every sequence.
    assert min(rms(e) for e in expected.values()) > 0.1
    assert rms(expected["short"] - expected["prefill"]) > 0.1


@pytest.mark.parametrize("model_type", sorted(PROVEN))
def test_every_proven_family_is_tried(model_type: str) -> None:
    assert model_type in {family for family, _ in VARIANTS.values()}


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_scaled_rope_takes_a_position_for_each_row(name: str) -> None:
    scaling = {"rope_type": name, **ROPE_SCALINGS[name]}
    model = tiny_model(tiny_config("llama", rope_scaling=scaling))
    driver = StepDriver(model, "llama", block_size=8)
    logits = run_mixed_scenario(driver, np.random.default_rng(2))
    for sequence, got in logits.items():
        expected = dense_logits(model, driver.sequences[sequence].chunks)
        assert rms(got - expected) < TOLERANCE


def test_rope_that_depends_on_the_length_of_the_sequence_is_refused() -> None:
    """Its base changes with the context, on the host; a step holds many contexts at once."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = tiny_model(tiny_config("llama", rope_scaling=scaling))
    with pytest.raises(UnsupportedModelError, match=r"llama.*(rope|dynamic)"):
        StepDriver(model, "llama", block_size=8)


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_contexts_longer_than_the_window(family: str, block_size: int) -> None:
    model = tiny_model(tiny_config(family, **SLIDING))
    driver = StepDriver(model, family, block_size=block_size)
    assert [cache.spec.window for cache in driver.caches] == [WINDOW, None, WINDOW, None]
    rng = np.random.default_rng(3)
    # 70 tokens in chunks longer and shorter than the window, then decodes that slide it.
    for count in (29, 3, 38, *[1] * 6):
        got = driver.step({"a": random_tokens(rng, count), "b": random_tokens(rng, 1)})
        for name in got:
            expected = dense_logits(model, driver.sequences[name].chunks)
            assert rms(got[name] - expected) < TOLERANCE
    windowless = tiny_model(tiny_config(family))
    full = dense_logits(windowless, driver.sequences["a"].chunks)
    assert rms(full - dense_logits(model, driver.sequences["a"].chunks)) > 0.05, "it matters"


def test_exactly_the_slots_of_the_tokens_are_written() -> None:
    driver = StepDriver(tiny_model(tiny_config("llama")), "llama", block_size=8)
    run_mixed_scenario(driver, np.random.default_rng(4))
    shared = 24  # of the 30 tokens that were forked: three full blocks; the rest was copied
    num_tokens = sum(len(seq.tokens) for seq in driver.sequences.values()) - shared
    # The copy brought all that the source block held: 8 tokens, 6 of them wanted, 2 overwritten.
    assert driver.num_written_slots() == [(num_tokens, num_tokens)] * 4


def test_many_steps_stay_as_close_as_one() -> None:
    model = tiny_model(tiny_config("qwen3"))
    driver = StepDriver(model, "qwen3", block_size=8)
    rng = np.random.default_rng(5)
    driver.step({"a": random_tokens(rng, 13)})
    for _ in range(40):
        logits = driver.step({"a": random_tokens(rng, 1)})
    assert rms(logits["a"] - dense_logits(model, driver.sequences["a"].chunks)) < TOLERANCE


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_models_keep_half_precision_pools(dtype: mx.Dtype) -> None:
    model = tiny_model(tiny_config("llama"))
    model.set_dtype(dtype)
    driver = StepDriver(model, "llama", block_size=8)
    assert {c.spec.dtype for c in driver.caches} == {dtype}
    logits = run_mixed_scenario(driver, np.random.default_rng(6))
    for name, got in logits.items():
        expected = dense_logits(model, driver.sequences[name].chunks)
        scale = rms(expected) * (2e-2 if dtype == mx.float16 else 1e-1)
        assert rms(got - expected) < scale


def test_layer_specs_are_read_off_the_model() -> None:
    model = tiny_model(tiny_config("llama", num_key_value_heads=1, head_dim=24, **SLIDING))
    specs = layer_specs(model, "llama")
    assert [s.window for s in specs] == [WINDOW, None, WINDOW, None]
    assert {(s.num_kv_heads, s.key_dim, s.value_dim, s.dtype) for s in specs} == {
        (1, 24, 24, mx.float32)
    }
    assert specs[0].bytes_per_token == 1 * (24 + 24) * 4


# --- Refusals -------------------------------------------------------------------------------------


def assert_names_family_and_supported(error: UnsupportedModelError, model_type: str) -> None:
    assert error.model_type == model_type
    assert error.supported == tuple(sorted(PROVEN))
    assert repr(model_type) in str(error)
    assert all(family in str(error) for family in PROVEN)


@pytest.mark.parametrize(
    "model_type", ["gemma2", "mamba", "deepseek_v3", "gpt2", "llama4", "phi3small", "no-such", ""]
)
def test_other_families_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        require_proven(model_type)
    assert_names_family_and_supported(caught.value, model_type)


@pytest.mark.parametrize("model_type", ["gemma2", "mamba", "deepseek_v3", "iquestcoder", "xverse"])
def test_a_directory_of_another_family_is_refused_by_its_config(
    tmp_path: Any, model_type: str
) -> None:
    # Also those that mlx-lm would run with llama's code: their weights were never tried.
    save_tiny(tmp_path, tiny_config("llama") | {"model_type": model_type}, tiny_llama())
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path)
    assert_names_family_and_supported(caught.value, model_type)
    assert not isinstance(caught.value, ModelLoadError)


def tiny_llama() -> Any:
    return tiny_model(tiny_config("llama"))


@pytest.mark.parametrize(
    "cache",
    [ArraysCache(2), ChunkedKVCache(16), RotatingKVCache(max_size=16, keep=4)],
    ids=lambda cache: type(cache).__name__,
)
def test_layers_of_another_kind_are_refused_by_name(cache: Any) -> None:
    model = tiny_llama()
    model.__class__ = type("Odd", (type(model),), {"make_cache": lambda self: [cache] * 4})
    with pytest.raises(UnsupportedModelError, match=type(cache).__name__) as caught:
        layer_specs(model, "llama")
    assert caught.value.model_type == "llama"


def test_a_window_that_the_cache_does_not_know_of_is_refused() -> None:
    """mlx-lm's smollm3 masks sliding layers but gives them full caches: wrong either way."""
    model = tiny_model(tiny_config("smollm3", **SLIDING))
    with pytest.raises(UnsupportedModelError, match=r"smollm3.*window"):
        layer_specs(model, "smollm3")


def test_a_layer_that_does_not_use_its_cache_is_refused() -> None:
    model = tiny_llama()
    layer = model.layers[2]
    skip = {"__call__": lambda self, x, mask=None, cache=None: x}
    layer.__class__ = type("Skip", (type(layer),), skip)
    with pytest.raises(UnsupportedModelError, match="layer 2"):
        layer_specs(model, "llama")


def test_a_model_without_an_output_projection_is_refused() -> None:
    model = tiny_llama()
    model.model.embed_tokens = lambda x: x
    with pytest.raises(UnsupportedModelError, match="neither lm_head nor"):
        select_output_rows(model, StepContext())
