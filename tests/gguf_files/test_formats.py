"""Formats of GGUF: MLX's arrays have the values that the `gguf` package computes."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from support.gguf_files import random_blocks

from mlx_paged.gguf import formats
from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.formats import Packed, Rounding
from mlx_paged.gguf.types import TYPES, Tensor

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "MXFP4")
ROUNDED = {"Q6_K": 0.006, "Q3_K": 0.006, "Q2_K": 0.004}  # relative errors


def random_tensor(name: str, shape: tuple[int, ...] = (6, 512), seed: int = 0) -> Tensor:
    """A tensor of random blocks, with scales of a model's size."""
    [kind] = [kind for kind in TYPES.values() if kind.name == name]
    rows = random_blocks(GGMLQuantizationType[name], shape, seed)
    if name == "MXFP4":
        scales = np.random.RandomState(seed).randint(100, 140, shape[-1] // 32)
        rows.reshape(*shape[:-1], -1, kind.nbytes)[..., 0] = scales
    return Tensor("blk.0.ffn_up.weight", kind, rows)


def reference(tensor: Tensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.rows, GGMLQuantizationType[tensor.type.name])


def unpacked(packed: Packed) -> np.ndarray:
    """The values that MLX computes from an array: float32."""
    affine = packed.biases is not None
    return np.array(
        mx.dequantize(
            packed.weight,
            packed.scales.astype(mx.float32) if affine else packed.scales,
            packed.biases.astype(mx.float32) if affine else None,
            group_size=32,
            bits=packed.bits,
            mode=packed.mode,
            dtype=mx.float32,
        )
    )


def test_the_table_is_that_of_the_package() -> None:
    ours = {number: (kind.name, kind.block, kind.nbytes) for number, kind in TYPES.items()}
    theirs = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert ours == theirs


@pytest.mark.parametrize("shape", [(6, 512), (3, 4, 256)], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_values_stay_the_same(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(name, shape)
    packed = formats.pack(tensor)
    expected = reference(tensor)
    assert np.abs(expected).max() > 0
    # A product and a sum are rounded once or twice.
    np.testing.assert_allclose(unpacked(packed), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(formats.values(tensor), expected, rtol=0, atol=1e-6)
    assert packed.scales.shape == (*shape[:-1], shape[-1] // 32)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0"])
def test_scales_too_large_for_a_float16_bias_are_float32(name: str) -> None:
    tensor = random_tensor(name)
    blocks = tensor.blocks.copy()
    blocks[..., :2] = np.array([30000.0], np.float16).view(np.uint8)
    tensor = tensor.with_rows(blocks.reshape(tensor.rows.shape))
    packed = formats.pack(tensor)
    assert packed.scales.dtype == packed.biases.dtype == mx.float32
    expected = reference(tensor)
    np.testing.assert_allclose(unpacked(packed), expected, rtol=1e-6, atol=0.5)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_1", "Q6_K"])
def test_a_tensor_of_many_chunks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tensor = random_tensor(name, (40, 512))
    whole = formats.pack(tensor)
    monkeypatch.setattr(formats, "_RECODED", 1024)
    parts = formats.pack(tensor)
    for field in ("weight", "scales", "biases"):
        assert mx.array_equal(getattr(whole, field), getattr(parts, field)).item(), field


@pytest.mark.parametrize("name", ROUNDED)
def test_the_error_of_rounding_is_measured(name: str) -> None:
    tensor, roundings = random_tensor(name, (32, 1024)), dict[str, Rounding]()
    expected = reference(tensor)
    np.testing.assert_allclose(formats.values(tensor), expected, rtol=0, atol=1e-6)
    found = unpacked(formats.pack(tensor, roundings))
    error = np.sqrt(np.square(found - expected).mean() / np.square(expected).mean())
    assert 0 < error < ROUNDED[name]
    assert roundings[name].tensors == 1
    assert roundings[name].relative_error == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F32, mx.float32),
        (GGMLQuantizationType.F16, mx.float16),
        (GGMLQuantizationType.BF16, mx.bfloat16),
    ],
)
def test_plain_types_keep_their_dtype(kind: GGMLQuantizationType, dtype: mx.Dtype) -> None:
    values = np.random.RandomState(0).standard_normal((3, 8)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    tensor = Tensor("w", TYPES[kind.value], np.ascontiguousarray(stored).view(np.uint8))
    found = formats.plain(tensor)
    assert found.dtype == dtype and tensor.shape == found.shape == (3, 8)
    expected = gguf.quants.dequantize(stored, kind)
    assert np.array_equal(np.array(found.astype(mx.float32)), expected)
    assert np.array_equal(formats.values(tensor), expected)


@pytest.mark.parametrize(
    "name", [k.name for k in TYPES.values() if k.name.startswith(("IQ", "TQ", "NVFP4", "Q1_0"))]
)
def test_types_without_an_array_of_mlx_are_refused_by_name(name: str) -> None:
    [kind] = [kind for kind in TYPES.values() if kind.name == name]
    tensor = Tensor("blk.0.ffn_up.weight", kind, np.zeros((2, kind.nbytes), np.uint8))
    with pytest.raises(GGUFError, match=rf"'blk.0.ffn_up.weight' is quantized as {name}, .*Q4_K_M"):
        formats.pack(tensor)
