"""Experts as checkpoints have them: on the CPU they stay so, and steps give mlx-lm's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load as load_dense
from mlx_lm.utils import quantize_model, save_config, save_model
from support.family_configs import config_of
from support.models import StepDriver, embedded, tiny_model
from support.parity import Driver, family_model, relative_difference
from support.reference import ON_GPU

from mlx_paged import ops
from mlx_paged.engine.loading import load
from mlx_paged.model import patches
from mlx_paged.model.loader import LoadedModel, convert
from mlx_paged.model.wrap import convert_to_paged

pytestmark = pytest.mark.skipif(ON_GPU, reason="GPUs multiply these with MLX's own kernels")

TOLERANCE = 1e-5
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
FORMATS: dict[str, dict[str, Any] | str] = {
    "4 bits": {"bits": 4, "group_size": 32, "mode": "affine"},
    "3 bits": {"bits": 3, "group_size": 64, "mode": "affine"},
    "8 bits": {"bits": 8, "group_size": 32, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    "bfloat16": "bfloat16",
    "float16": "float16",
}
CASES = [
    ("mixtral", "4 bits"),
    ("mixtral", "bfloat16"),
    ("qwen2_moe", "8 bits"),
    ("qwen3_moe", "4 bits"),
    ("qwen3_moe", "3 bits"),
    ("qwen3_moe", "float16"),
    ("olmoe", "nvfp4"),
    ("olmoe", "mxfp8"),
    ("gpt_oss", "mxfp4"),
    ("gpt_oss", "bfloat16"),
    ("granitemoe", "4 bits"),
    ("deepseek_v3", "4 bits"),
    ("phimoe", "4 bits"),
]


def directory(path: Path, config: dict[str, Any], form: str) -> Path:
    model = family_model(config)
    kind = FORMATS[form]
    model.set_dtype(getattr(mx, kind) if isinstance(kind, str) else mx.bfloat16)
    if isinstance(kind, dict):
        model, config = quantize_model(model, dict(config), **kind)
    path.mkdir()
    save_model(path, model)
    save_config(dict(config), path / "config.json")
    embedded().tokenizer.save_pretrained(path)
    return path


def experts(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (SwitchLinear, QuantizedSwitchLinear))]


def size(arrays: Any) -> int:
    return sum(a.nbytes for _, a in tree_flatten(arrays))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("family", "form"), CASES)
def test_they_stay_as_they_are_and_give_mlx_lms_logits(
    tmp_path: Path, family: str, form: str
) -> None:
    config = config_of(family)
    config |= {name: number for name, number in WIDE.items() if name in config}
    path = directory(tmp_path / "model", config, form)
    loaded = load(path)
    stored = load_dense(str(path))[0]
    found = experts(loaded.model)
    assert found and len(found) == len(experts(stored))
    for ours, theirs in zip(found, experts(stored), strict=True):
        for name in ("weight", "scales", "biases"):
            if theirs.get(name) is not None:
                assert ours[name].dtype == theirs[name].dtype, name
                assert mx.array_equal(ours[name].view(mx.uint8), theirs[name].view(mx.uint8))
    driver = Driver(convert_to_paged(loaded.model, family, block_size=8))
    assert max(relative_difference(loaded.model, driver, 96).values()) < TOLERANCE


def moe(tmp_path: Path, form: str) -> LoadedModel:
    """A model with nearly all bytes in its experts."""
    fields = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 16}
    config = config_of("qwen3_moe") | fields | {"num_hidden_layers": 2}
    return load(directory(tmp_path / "model", config, form))


@pytest.mark.parametrize("form", ["4 bits", "bfloat16"])
def test_no_other_copy_of_them_is_made(tmp_path: Path, form: str) -> None:
    loaded = moe(tmp_path, form)
    widened = 2 * 3 * 16 * 256 * 512 * 4  # bytes of them in float32
    held = size([module.parameters() for module in experts(loaded.model)])
    assert held <= widened * {"4 bits": 5.0, "bfloat16": 16}[form] / 32
    driver = StepDriver(loaded.model, "qwen3_moe", block_size=8)
    rng = np.random.default_rng(0)
    for count in (1, 20, 90):
        prompt = rng.integers(0, 96, count).tolist()
        driver.step({f"{count}": prompt})
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        driver.step({f"{count} more": prompt})
        # Less than a matrix of half of a layer's experts. (Arrays of 90 rows have a third of that.)
        assert mx.get_peak_memory() - before < 16 * 256 * 512 * 4 / 2
    assert size([module.parameters() for module in experts(loaded.model)]) == held


@pytest.mark.parametrize("form", ["4 bits", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_activations_of_16_bits(tmp_path: Path, family: str, form: str) -> None:
    """As mlx-lm loads a model, in whose place the drop-in runs it."""
    config = config_of(family) | WIDE
    path = directory(tmp_path / "model", config, form)
    stored, exact = load_dense(str(path))[0], load(path, dtype="float32").model
    rng = np.random.default_rng(0)
    work = {str(i): rng.integers(0, 96, 1 + i % 4).tolist() for i in range(11)}
    found, expected = (StepDriver(m, family, block_size=8).step(work) for m in (stored, exact))
    errors = [
        np.linalg.norm(found[name] - truth) / np.linalg.norm(truth)
        for name, truth in expected.items()
    ]
    assert 1e-5 < np.median(errors) < 0.03  # (of a row here and there another expert is chosen)


def test_float32_widens_them(tmp_path: Path) -> None:
    config = config_of("mixtral") | WIDE
    loaded = load(directory(tmp_path / "model", config, "4 bits"), dtype="float32")
    found = experts(loaded.model)
    assert found and all(type(m) is SwitchLinear and m.weight.dtype == mx.float32 for m in found)


def test_experts_with_a_scale_of_their_own() -> None:
    """Tests nvfp4 with a scale per expert, which MLX multiplies on GPUs only."""
    model = family_model(config_of("mixtral") | WIDE)
    exact = family_model(config_of("mixtral") | WIDE)
    for ours, theirs in zip(experts(model), experts(exact), strict=True):
        ours.weight, theirs.weight = ours.weight * 3.0, theirs.weight * 3.0
    for layer, widened in zip(model.layers, exact.layers, strict=True):
        ours, theirs = layer.block_sparse_moe.switch_mlp, widened.block_sparse_moe.switch_mlp
        for name in ("gate_proj", "up_proj", "down_proj"):
            packed = ours[name].to_quantized(16, 4, "nvfp4", global_scale=True)
            ours[name] = packed
            theirs[name].weight = mx.stack(
                [
                    mx.dequantize(
                        packed.weight[e], packed.scales[e], None, 16, 4, "nvfp4",
                        global_scale=packed.global_scale[e],
                    )
                    for e in range(packed.num_experts)
                ]
            )  # fmt: skip
    convert(model, "auto", keeps_weights=True)
    assert all(module.get("global_scale") is not None for module in experts(model))
    work = {"a": [1, 2, 3, 4, 5], "b": [6]}
    found, expected = (StepDriver(m, "mixtral", block_size=8).step(work) for m in (model, exact))
    for name in work:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "phixtral"])
def test_outside_of_steps_they_are_mlxs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's operations have gradients."""
    patches.install()
    model = tiny_model(config_of(family))
    monkeypatch.setattr(ops, "expert_linear", None)
    monkeypatch.setattr(ops, "layer_norm", None)
    monkeypatch.setattr(ops, "gelu", None)
    tokens = mx.array([[1, 2, 3]])
    gradient = nn.value_and_grad(model, lambda model: model(tokens).square().sum())
    _, found = gradient(model)
    mx.eval(found)
    assert any(mx.abs(a).max().item() > 0 for name, a in tree_flatten(found) if "mlp" in name)


def test_more_matrices_than_a_cuda_grid_has_room_for(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, with the same results. (tests/native/test_cuda_quantized.py has so many.)"""
    patches.install()
    layer = QuantizedSwitchLinear(64, 32, 4, bias=True)
    layer.bias = mx.array(rng.standard_normal((4, 32)).astype(np.float32))
    x = mx.array(rng.standard_normal((13, 1, 64)).astype(np.float32))
    indices = mx.array(np.sort(rng.integers(0, 4, 13)).astype(np.uint32))
    want = np.array(layer(x, indices, sorted_indices=True))
    sizes = []

    def part(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
        sizes.append(len(indices))
        return plain(self, x, indices, sorted_indices)

    plain = patches._mlx_quantized_expert_linear
    monkeypatch.setattr(patches, "_mlx_quantized_expert_linear", part)
    monkeypatch.setattr(patches, "_MAX_CUDA_MATRICES", 5)
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    np.testing.assert_array_equal(np.array(layer(x, indices, sorted_indices=True)), want)
    assert sizes == [5, 5, 3]
