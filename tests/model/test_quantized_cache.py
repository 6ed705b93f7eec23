"""Models on quantized pools: against mlx-lm's dense caches that keep what the codes stand for.

(Later chunks of a prompt read quantized keys and values, so where it is cut changes logits: caches
in 16 bits are no oracle.)
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
from support import models
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.parity import Driver, family_model, mixed_step, relative_difference, relative_rms
from support.plain import plain_caches
from support.quantized import FORMATS, holding, quantizing

# isort: split
import mlx.core as mx
import numpy as np

from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.families import require_family
from mlx_paged.model.kv_formats import FORMATS as KV_FORMATS
from mlx_paged.model.kv_formats import format_named, skipped_layers
from mlx_paged.model.layout import LayerSpec
from mlx_paged.model.wrap import convert_to_paged

# RMS of the logits' difference over that of the logits, against caches that hold the same codes.
EXACT = 1e-5
# Against caches that quantize by themselves. Sums are added up in another order there, so a number
# between two codes may become the other one, which is a large step for few bits.
TOLERANCE = {"int8": 5e-3, "int8_k_int4_v": 5e-3, "int4": 2e-2, "fp8": 1e-2}
# Full attention, windows, sinks, soft-caps, recurrent states, dense copies, chunks.
MODULES = ("llama", "qwen3", "gpt_oss", "gemma2", "gemma3_text", "lfm2", "plamo", "llama4")


@contextmanager
def dense_caches_that_quantize(name: str, skip: tuple[int, ...] = ()):
    with mock.patch.object(
        models, "plain_caches", lambda model: quantizing(plain_caches(model), name, skip)
    ):
        yield


def differences(module: str, name: str, skip: tuple[int, ...] = ()) -> dict[str, float]:
    config = config_of(module)
    model = family_model(config)
    paged = convert_to_paged(model, module, modes=require_family(config).modes, block_size=16)
    paged.layout = paged.layout.with_kv_format(KV_FORMATS[name], skip)
    with dense_caches_that_quantize(name, skip):
        return relative_difference(model, Driver(paged), VOCAB_SIZE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("module", "name"),
    [(m, "int8") for m in MODULES] + [(m, n) for m in ("llama", "gpt_oss") for n in FORMATS][1:],
)
def test_logits_are_those_of_a_dense_cache_that_quantizes(module, name) -> None:
    for sequence, difference in differences(module, name).items():
        assert difference < TOLERANCE[name], sequence


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("module", "name"),
    [(m, "int8") for m in MODULES] + [(m, n) for m in ("llama", "gpt_oss") for n in FORMATS][1:],
)
def test_logits_are_those_of_a_dense_cache_that_holds_the_same_codes(module, name) -> None:
    config = config_of(module)
    model = family_model(config)
    paged = convert_to_paged(model, module, modes=require_family(config).modes, block_size=16)
    paged.layout = paged.layout.with_kv_format(KV_FORMATS[name])
    driver = Driver(paged)
    rng = np.random.default_rng(1)
    logits = mixed_step(driver, lambda count: rng.integers(0, VOCAB_SIZE, count).tolist())
    for sequence, got in logits.items():
        tracked = driver.sequences[sequence]
        slots = np.concatenate([16 * block + np.arange(16) for block in tracked.blocks])
        with mock.patch.object(
            models,
            "plain_caches",
            lambda model: holding(plain_caches(model), paged.attention_caches, slots),  # noqa: B023
        ):
            expected = models.dense_logits(model, tracked.chunks)
        assert relative_rms(got, expected) < EXACT, sequence


def test_layers_that_are_skipped_are_not_quantized() -> None:
    for sequence, difference in differences("llama", "int4", (0, 3)).items():
        assert difference < TOLERANCE["int4"], sequence


def layout_of(module: str, skip: tuple[int | str, ...] = (), name: str = "int8"):
    config = config_of(module)
    paged = convert_to_paged(
        family_model(config), module, modes=require_family(config).modes, block_size=16
    )
    return paged.layout, paged.layout.with_kv_format(KV_FORMATS[name], skip)


def test_latents_stay_as_they_are() -> None:
    before, after = layout_of("deepseek_v3")
    assert after == before


def test_windows_can_be_skipped() -> None:
    _, after = layout_of("gemma3_text", ("sliding_window",))
    kinds = {(spec.window is None, spec.kv_format is None) for spec in after.attention}
    assert kinds == {(True, False), (False, True)}


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype_skip_layers must be layers"):
        layout_of("llama", (17,))


@pytest.mark.parametrize(
    ("name", "least"), [("int8", 1.94), ("int8_k_int4_v", 2.42), ("int4", 3.2), ("fp8", 2.0)]
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bytes_of_a_token_against_16_bits(name, least, dim) -> None:
    plain = LayerSpec(8, dim, dim, mx.bfloat16)
    packed = LayerSpec(8, dim, dim, mx.bfloat16, kv_format=KV_FORMATS[name])
    assert plain.bytes_per_token / packed.bytes_per_token >= least - 0.005


def test_names() -> None:
    assert format_named("auto") is None
    assert format_named("k8v4") is KV_FORMATS["int8_k_int4_v"]
    assert format_named("int8_per_token_head") is KV_FORMATS["int8"]
    for name in ("int3", "", None, 8):
        with pytest.raises(InvalidParameterError, match="kv_cache_dtype must be one of auto, int8"):
            format_named(name)


def test_skipped_layers() -> None:
    assert skipped_layers(["0", 3, "sliding_window"]) == (0, 3, "sliding_window")
    for layers in (["first"], [-1], [True], "0", None, [1.0]):
        with pytest.raises(InvalidParameterError, match="kv_cache_dtype_skip_layers must be"):
            skipped_layers(layers)
