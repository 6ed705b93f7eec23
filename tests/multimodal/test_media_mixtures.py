"""Multimodal mixtures of experts: mlx-vlm's layers as mlx-lm's, and their adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from mlx_lm.models import switch_layers
from mlx_vlm.models import switch_layers as of_vlm
from support.adapters import Layers, changes_of, random_layers, write_mlx
from support.media_cases import Case, vary
from support.media_parity import paged
from support.more_media_models import ALL_CASES as CASES
from support.parity import Driver
from support.reference import ON_GPU

from mlx_paged.engine.lora.files import read_adapter
from mlx_paged.errors import AdapterError
from mlx_paged.multimodal.mixtures import CombiningSwitchGLU, use_mlx_lm_mixtures

ROWS, WIDTH, HIDDEN, EXPERTS, TOP_K = 5, 64, 96, 6, 3
NAMES = ("q_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = list(range(2, 32))


class Around(nn.Module):
    """A model of one module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def made(kind: type[nn.Module], bits: int, bias: bool) -> nn.Module:
    mx.random.seed(3)
    inner = kind(WIDTH, HIDDEN, EXPERTS, bias=bias)
    if bias:
        for module in of_experts(inner):
            module.bias = mx.random.normal(module.bias.shape)
    if bits:
        nn.quantize(inner, group_size=32, bits=bits)
    inner.eval()
    return Around(inner)


def of_experts(inner: nn.Module) -> list[nn.Module]:
    return [module for module in inner.children().values() if "weight" in module]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("kind", [of_vlm.SwitchGLU, of_vlm.SwitchMLP])
def test_layers_compute_the_same(kind: type[nn.Module], bits: int, bias: bool) -> None:
    theirs, ours = made(kind, bits, bias), made(kind, bits, bias)
    use_mlx_lm_mixtures(ours)
    assert all(type(m).__module__ == switch_layers.__name__ for m in of_experts(ours.inner))
    for rows in (ROWS, 40):  # mlx-lm sorts 64 pairs and more
        x = mx.random.normal((rows, 1, WIDTH))
        indices = mx.random.randint(0, EXPERTS, (rows, 1, TOP_K))
        more: tuple[Any, ...] = ()
        if kind is of_vlm.SwitchGLU:
            more = mx.random.uniform(shape=indices.shape), mx.random.normal(x.shape)
        for given in ((), more):
            np.testing.assert_allclose(
                np.array(ours.inner(x, indices, *given)),
                np.array(theirs.inner(x, indices, *given)),
                rtol=1e-4,
                atol=1e-5,
            )


def test_subclasses_keep_their_own_calls() -> None:
    class Other(of_vlm.SwitchGLU):  # type: ignore[misc]
        pass

    model = made(Other, 0, False)
    use_mlx_lm_mixtures(model)
    assert type(model.inner) is Other
    assert type(model.inner.up_proj) is switch_layers.SwitchLinear


@pytest.mark.skipif(ON_GPU, reason="of the CPU's programs")
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "kimi_vl", "llama4", "qwen3_omni_moe"])
def test_steps_leave_no_experts_to_mlx(name: str) -> None:
    """MLX multiplies experts one by one on a single thread."""
    model = paged(case_of(name))
    driver = Driver(model)
    driver.step({"a": PROMPT})
    driver.step({"a": [3]})
    assert model.compilation.refused is None
    assert not {"GatherMM", "GatherQMM"} & {*model.compilation.foreign}
    around = [m for m in model.model.modules() if isinstance(m, switch_layers.SwitchGLU)]
    assert around and all(type(m) is CombiningSwitchGLU for m in around)


def case_of(name: str) -> Case:
    mx.random.seed(0)
    case = CASES[name]()
    vary(case.model)
    return case


def with_changes(model: nn.Module, layers: Layers) -> None:
    """Adds an adapter's changes to the weights."""
    modules = dict(model.named_modules())
    for path, (a, b) in layers.items():
        modules[path].weight = modules[path].weight + mx.array(b @ a)


@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "kimi_vl", "llama4", "qwen3_5_moe"])
def test_adapters_of_experts(name: str) -> None:
    """Sorted pairs or not, in one pass or regrouped: as the changed weights."""
    ours, theirs, plain = (paged(case_of(name)) for _ in range(3))
    layers = random_layers(ours.model, 1, names=NAMES)
    layers = {path: pair for path, pair in layers.items() if "language_model" in path}
    assert {a.ndim for a, _ in layers.values()} == {2, 3}
    ours.enable_adapters(1, 8)
    ours.load_adapter(1, changes_of(layers))
    with_changes(theirs.model, layers)
    drivers = [Driver(model) for model in (ours, theirs, plain)]
    drivers[0].adapter_slot = 1
    for tokens in (PROMPT, [3], [4]):
        found, expected, before = (driver.step({"a": tokens})["a"] for driver in drivers)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
        assert np.abs(found - before).max() > 0.1


def test_adapters_of_encoders_are_refused_by_name(tmp_path: Path) -> None:
    """Towers run outside of steps, where no row has an adapter."""
    model = paged(case_of("qwen3_vl"))
    layers = random_layers(model.model, 1, names=("linear_fc1",), within="")
    [path, *_] = layers
    targets = model.adapter_targets()
    assert path in targets.refused and not {*targets.linear} & {*layers}
    with pytest.raises(AdapterError, match="but got a layer of an encoder"):
        read_adapter("x", write_mlx(tmp_path, layers), targets)


def test_files_of_older_versions_of_mlx_vlm(tmp_path: Path) -> None:
    model = paged(case_of("qwen3_vl"))
    layers = random_layers(model.model, 1, names=("q_proj",))
    targets = model.adapter_targets()
    path = write_mlx(tmp_path / "mlx", layers, scale=0.5)
    expected = read_adapter("x", path, targets)
    tensors = mx.load(str(path / "adapters.safetensors"))
    assert isinstance(tensors, dict)
    older = tmp_path / "older"
    older.mkdir()
    renamed = {
        name.replace("vlm.", "").replace("lora_a", "A").replace("lora_b", "B"): tensor
        for name, tensor in tensors.items()
    }
    mx.save_safetensors(str(older / "adapters.safetensors"), renamed)
    config = older / "adapter_config.json"
    config.write_text('{"rank": 4, "alpha": 2, "dropout": 0.1}')
    found = read_adapter("x", older, targets)
    assert found.layers.keys() == expected.layers.keys()
    for layer, change in found.layers.items():
        for ours, theirs in zip(change, expected.layers[layer], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    config.write_text('{"rank": 8, "alpha": 2}')
    with pytest.raises(AdapterError, match=r"must be rank \(8\) but got 4"):
        read_adapter("x", older, targets)
    config.write_text('{"rank": 4}')
    with pytest.raises(AdapterError, match="alpha must be a number but got None"):
        read_adapter("x", older, targets)
