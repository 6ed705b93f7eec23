"""The engine's own way into a step, with llama's relatives in all their variants; refusals; modes.

`test_parity_families.py` has every family once; here a few have everything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.family_configs import config_of
from support.models import (
    StepDriver,
    dense_logits,
    random_tokens,
    rms,
    save_tiny,
    tiny_config,
    tiny_model,
)
from support.parity import Driver, family_model, relative_difference, relative_rms

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from mlx_paged.engine.loading import load
from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.model.families import PROVEN, require_family
from mlx_paged.model.layout import FULL, KVCacheGroupSpec, LayerSpec, Mode, StateSpec, UnusedSpec
from mlx_paged.model.wrap import convert_to_paged

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


@pytest.mark.one_in(2)
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
    # The compared logits are neither flat nor the same for every sequence.
    assert min(rms(e) for e in expected.values()) > 0.1
    assert rms(expected["short"] - expected["prefill"]) > 0.1


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_scaled_rope_takes_a_position_for_each_row(name: str) -> None:
    scaling = {"rope_type": name, **ROPE_SCALINGS[name]}
    model = tiny_model(tiny_config("llama", rope_scaling=scaling))
    driver = StepDriver(model, "llama", block_size=8)
    logits = run_mixed_scenario(driver, np.random.default_rng(2))
    for sequence, got in logits.items():
        expected = dense_logits(model, driver.sequences[sequence].chunks)
        assert rms(got - expected) < TOLERANCE


@pytest.mark.parametrize(("family", "limit"), [("llama", 64), ("internlm3", 60)])
def test_dynamic_rope_is_served_up_to_where_it_changes(family: str, limit: int) -> None:
    """Its base changes with the context, on the host; a step holds many contexts at once."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = family_model(tiny_config(family, rope_scaling=scaling, max_position_embeddings=64))
    paged = convert_to_paged(model, family, block_size=8)
    assert paged.layout.mode is Mode.NATIVE
    assert paged.layout.max_context_len == limit
    driver = Driver(paged)
    assert max(relative_difference(model, driver, 96).values()) < TOLERANCE
    tokens = list(range(limit))
    [got] = driver.step({"full": tokens}).values()
    assert relative_rms(got, dense_logits(model, [tokens])) < TOLERANCE
    with pytest.raises(ValueError, match=f"at most {limit}.*{limit + 1}"):
        driver.step({"full": [1]})
    # Past it, the answer of mlx-lm depends on where the prompt is cut.
    tokens = list(range(80))
    whole, cut = dense_logits(model, [tokens]), dense_logits(model, [tokens[:40], tokens[40:]])
    assert relative_rms(whole, cut) > 1e-2


def test_the_rope_that_changes_first_sets_the_limit() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = family_model(tiny_config("llama", rope_scaling=scaling, max_position_embeddings=64))
    model.layers[2].self_attn.rope.max_position_embeddings = 48
    assert convert_to_paged(model, "llama", block_size=8).layout.max_context_len == 48


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


def test_the_layout_is_read_off_the_model() -> None:
    model = tiny_model(tiny_config("llama", num_key_value_heads=1, head_dim=24, **SLIDING))
    layout = convert_to_paged(model, "llama", block_size=8).layout
    assert layout.mode is Mode.NATIVE
    assert layout.specs == 2 * (
        LayerSpec(1, 24, 24, mx.float32, window=WINDOW),
        LayerSpec(1, 24, 24, mx.float32),
    )
    assert layout.group_specs == (KVCacheGroupSpec(window=WINDOW), FULL)
    assert layout.bytes_per_token() == 4 * (24 + 24) * 4
    assert layout.bytes_per_token(FULL) == 2 * (24 + 24) * 4
    assert not layout.has_states and layout.bytes_per_slot == 0


def test_the_layout_of_a_hybrid_has_states() -> None:
    """Two caches in every layer: falcon_h1's attention and its state-space model side by side."""
    layout = convert_to_paged(
        family_model(config_of("falcon_h1")), "falcon_h1", block_size=8
    ).layout
    assert layout.mode is Mode.REGROUPED
    assert layout.tree == ((0, 1), (2, 3), (4, 5), (6, 7))
    conv, ssm = 2 * (64 + 2 * 2 * 16), 4 * 16 * 16
    states = StateSpec(((2, 64 + 2 * 2 * 16), (4, 16, 16)), (mx.float32, mx.float32))
    assert layout.specs == 4 * (states, LayerSpec(2, 16, 16, mx.float32))
    assert layout.bytes_per_slot == 4 * (conv + ssm) * 4
    assert layout.group_specs == (FULL,)


def test_the_layout_of_latent_attention() -> None:
    layout = convert_to_paged(
        family_model(config_of("deepseek_v3")), "deepseek_v3", block_size=8
    ).layout
    assert set(layout.specs) == {LayerSpec(1, 16 + 8, 16, mx.float32, latent=True)}


# --- Refusals -------------------------------------------------------------------------------------


def assert_names_family_and_supported(error: UnsupportedModelError, model_type: str) -> None:
    assert error.model_type == model_type
    assert set(PROVEN) <= set(error.supported)
    assert repr(model_type) in str(error)
    assert "docs/models.md" in str(error) and len(str(error)) < 400


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v41", "cache of their own"),
        ("phi3small", "where a prompt is cut"),
        ("switch_layers", "has not been proven"),
        ("no-such", "no such model"),
        ("", "no such model"),
    ],
)
def test_other_families_are_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        require_family({"model_type": model_type})
    assert_names_family_and_supported(caught.value, model_type)


@pytest.mark.parametrize(
    ("model_type", "module"),
    [("mistral", "llama"), ("xverse", "llama"), ("kimi_k2", "deepseek_v3"), ("llama", "llama")],
)
def test_families_that_mlx_lm_runs_with_the_same_code_are_one(model_type: str, module: str) -> None:
    assert require_family({"model_type": model_type}).name == module


def test_an_architecture_may_name_another_module() -> None:
    config = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}
    assert require_family(config).name == "bailing_moe_v3"


@pytest.mark.parametrize("model_type", ["deepseek_v41", "olmo"])
def test_a_directory_of_another_family_is_refused_by_its_config(
    tmp_path: Any, model_type: str
) -> None:
    save_tiny(tmp_path, tiny_config("llama") | {"model_type": model_type}, tiny_llama())
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path)
    assert_names_family_and_supported(caught.value, model_type)
    assert not isinstance(caught.value, ModelLoadError)


def tiny_llama() -> Any:
    return tiny_model(tiny_config("llama"))


@pytest.mark.parametrize(
    "cache",
    [QuantizedKVCache(), RotatingKVCache(max_size=16, keep=4)],
    ids=lambda cache: type(cache).__name__,
)
def test_layers_of_another_kind_are_refused_by_name(cache: Any) -> None:
    model = tiny_llama()
    model.__class__ = type("Odd", (type(model),), {"make_cache": lambda self: [cache] * 4})
    with pytest.raises(UnsupportedModelError, match=type(cache).__name__) as caught:
        convert_to_paged(model, "llama", block_size=8)
    assert caught.value.model_type == "llama"


def test_a_window_that_the_cache_does_not_know_of_is_masked() -> None:
    """mlx-lm's smollm3 masks sliding layers but gives them full caches: no plan says that."""
    model = family_model(tiny_config("smollm3", **SLIDING))
    with pytest.raises(UnsupportedModelError, match=r"smollm3.*window"):
        convert_to_paged(model, "smollm3", modes=[Mode.NATIVE], block_size=8)
    paged = convert_to_paged(model, "smollm3", block_size=8)
    assert paged.layout.mode is Mode.GATHERED
    assert max(relative_difference(model, Driver(paged), 96).values()) < TOLERANCE


def test_a_layer_that_does_not_use_its_cache_has_no_pool() -> None:
    model = tiny_llama()
    attend = type(model.layers[2]).__call__
    skips = True

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return x if skips else attend(self, x, mask, cache)

    model.layers[2].__class__ = type("Skip", (type(model.layers[2]),), {"__call__": call})
    paged = convert_to_paged(model, "llama", block_size=8)
    assert paged.layout.specs[2] == UnusedSpec()
    driver = Driver(paged)
    assert max(relative_difference(model, driver, 96).values()) < TOLERANCE
    skips = False
    with pytest.raises(RuntimeError, match="had not used"):
        driver.step({"short": [1]})


def test_what_does_not_run_in_any_mode_says_why_for_each() -> None:
    model = tiny_llama()

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None and not hasattr(cache, "step"):
            raise TypeError("only with my own cache")
        return base(self, x, mask, cache)

    base = type(model.layers[1]).__call__
    model.layers[1].__class__ = type("Odd", (type(model.layers[1]),), {"__call__": call})
    with pytest.raises(UnsupportedModelError) as caught:
        convert_to_paged(model, "llama", block_size=8)
    message = str(caught.value)
    assert message.count("only with my own cache") == 3
    assert all(str(mode) in message for mode in Mode)


def test_a_model_without_an_output_module_makes_all_logits() -> None:
    """The rows are selected after the forward then, instead of before the last product."""
    config = tiny_config("qwen2", tied=False)
    expected = family_model(config)
    model = family_model(config)
    weight = model.lm_head.weight
    del model.lm_head
    inner = model.model
    call = {"__call__": lambda self, x, cache=None: inner(x, cache) @ weight.T}
    model.__class__ = type("Headless", (type(model),), call)
    driver = Driver(convert_to_paged(model, "qwen2", block_size=8))
    assert max(relative_difference(expected, driver, 96).values()) < TOLERANCE


def test_blocks_are_copied_in_the_layers_of_one_reach() -> None:
    """A block id means another block in each group."""
    paged = convert_to_paged(tiny_model(tiny_config("llama", **SLIDING)), "llama", block_size=8)
    paged.allocate(4)
    for cache in paged.attention_caches:
        cache.key_pool = mx.arange(4.0).reshape(4, 1, 1, 1) + mx.zeros(cache.key_pool.shape)
    paged.copy_blocks(mx.array([[3, 1]], dtype=mx.int32), KVCacheGroupSpec(window=WINDOW))
    held = [cache.key_pool[:, 0, 0, 0].tolist() for cache in paged.attention_caches]
    assert held == [[0, 3, 2, 3], [0, 1, 2, 3]] * 2
    paged.copy_blocks(mx.array([[2, 0]], dtype=mx.int32))
    held = [cache.key_pool[:, 0, 0, 0].tolist() for cache in paged.attention_caches]
    assert held == [[2, 3, 2, 3], [2, 1, 2, 3]] * 2


def test_what_a_token_costs_is_what_its_pools_hold() -> None:
    spec = LayerSpec(num_kv_heads=3, key_dim=100, value_dim=4, dtype=mx.float16)
    assert spec.bytes_per_token == 3 * (104 + 8) * 2
    states = StateSpec(((4, 2), None, (3,)), (mx.float32, mx.float32, mx.bfloat16))
    assert states.bytes_per_slot == 8 * 4 + 3 * 2


def test_latents_are_stored_once() -> None:
    spec = LayerSpec(num_kv_heads=1, key_dim=576, value_dim=512, dtype=mx.bfloat16, latent=True)
    assert spec.pool_dims == (576, 8)
    assert spec.bytes_per_token == (576 + 8) * 2
    assert LayerSpec(2, 100, 4, mx.float32).pool_dims == (104, 8)


@pytest.mark.parametrize("head_dim", [10, 20, 100])
def test_head_dims_that_the_kernels_do_not_take_are_padded(head_dim: int) -> None:
    model = family_model(tiny_config("llama", head_dim=head_dim))
    driver = Driver(convert_to_paged(model, "llama", block_size=8))
    assert max(relative_difference(model, driver, 96).values()) < TOLERANCE


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"]])
def test_architectures_may_say_nothing(architectures: Any) -> None:
    config = {"model_type": "llama", "architectures": architectures}
    assert require_family(config).name == "llama"


@pytest.mark.parametrize("family", ["llama", "gemma2", "llama4", "qwen3_next", "deepseek_v3"])
def test_a_model_may_be_paged_again(family: str) -> None:
    """The last to page it has it: what was changed for those before is out of use."""
    model = family_model(config_of(family))
    tokens = mx.array([[1, 2, 3, 4]])
    dense = np.array(model(tokens))
    first = convert_to_paged(model, family, block_size=8)
    again = convert_to_paged(model, family, block_size=16)
    assert again.layout == first.layout
    assert max(relative_difference(model, Driver(again), 96).values()) < TOLERANCE
    assert np.array_equal(np.array(model(tokens)), dense)
