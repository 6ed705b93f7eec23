"""Adapters of multimodal models: as models with changed weights, in every family."""

from __future__ import annotations

from pathlib import Path

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")

from support.adapters import check_adapters_of_all_layers, of_all_layers, random_layers, write_mlx
from support.media_cases import Case, vary
from support.media_parity import paged
from support.more_media_models import ALL_CASES as CASES
from support.reference import ON_GPU

from mlx_paged.engine.lora.files import read_adapter
from mlx_paged.errors import AdapterError


def case_of(name: str) -> Case:
    mx.random.seed(0)
    case = CASES[name]()
    vary(case.model)
    return case


@pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")
@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", sorted(CASES))
def test_adapters_of_all_layers(name: str) -> None:
    check_adapters_of_all_layers(lambda: paged(case_of(name), block_size=16))


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
