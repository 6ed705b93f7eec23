"""Adapters of multimodal models: as models with changed weights, in every family."""

from __future__ import annotations

from pathlib import Path

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from support.adapters import Layers, changes_of, random_layers, write_mlx
from support.media_cases import Case, vary
from support.media_parity import paged
from support.more_media_models import ALL_CASES as CASES
from support.parity import Driver
from support.reference import ON_GPU

from mlx_paged.engine.lora.files import read_adapter
from mlx_paged.errors import AdapterError
from mlx_paged.model.paged_model import PagedModel

# Tokens of each sequence in a step. Some of mlx-vlm's layers divide prompts of more than 256.
STEPS = ({"a": 5, "b": 7}, {"a": 1, "b": 1}, {"a": 1, "b": 3, "c": 300}, {"c": 1, "a": 1})


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


def of_all_layers(model: PagedModel) -> Layers:
    targets = model.adapter_targets()
    known = {**targets.linear, **targets.experts}
    names = {path.rpartition(".")[2] for path in known}
    layers = random_layers(model.model, 1, names=names, within="")
    return {path: (a, 0.3 * b) for path, (a, b) in layers.items() if path in known}


@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", sorted(CASES))
def test_adapters_of_all_layers(name: str) -> None:
    rng = np.random.default_rng(0)
    ours, theirs, plain = (paged(case_of(name), block_size=16) for _ in range(3))
    layers = of_all_layers(ours)
    ours.enable_adapters(1, 8)
    ours.load_adapter(1, changes_of(layers))
    with_changes(theirs.model, layers)
    drivers = [Driver(model, num_blocks=120) for model in (ours, theirs, plain)]
    drivers[0].adapter_slot = 1
    for work in STEPS:
        tokens = {sequence: rng.integers(2, 60, count).tolist() for sequence, count in work.items()}
        found, expected, before = (driver.step(tokens) for driver in drivers)
        for sequence in work:
            scale = np.abs(expected[sequence]).max()
            np.testing.assert_allclose(found[sequence], expected[sequence], atol=1e-4 * scale)
            assert np.abs(found[sequence] - before[sequence]).max() > 1e-2 * scale


def test_mixtures_have_adapters_of_their_experts() -> None:
    layers = of_all_layers(paged(case_of("qwen3_vl_moe")))
    assert {a.ndim for a, _ in layers.values()} == {2, 3}


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
