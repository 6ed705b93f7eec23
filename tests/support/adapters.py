"""Adapters in mlx-lm's and PEFT's files, and mlx-lm's own models with an adapter fused."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.tuner.utils import load_adapters

from mlx_paged.core import StepBatch
from mlx_paged.model.linear_parts import EXPERTS
from mlx_paged.model.lora_slots import LowRank, features_of
from mlx_paged.model.paged_model import PagedModel
from support.models import StepDriver, dense_logits, tiny_model
from support.parity import Driver

# By path: a [rank, in], b [out, rank]; with a leading axis for experts.
Layers = dict[str, tuple[np.ndarray, np.ndarray]]
ATTENTION = ("q_proj", "v_proj")


def random_layers(
    model: nn.Module,
    seed: int,
    *,
    rank: int = 4,
    names: Collection[str] = ATTENTION,
    within: str = "layers",
) -> Layers:
    """Changes of a model's layers whose paths end in these names; of all their experts.

    They are as large as the weights, so that another adapter gives other tokens.
    """
    rng = np.random.default_rng(seed)
    layers: Layers = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.QuantizedLinear, *EXPERTS)):
            continue
        if path.rpartition(".")[2] in names and within in path:
            *experts, width, out_features = features_of(module)
            a = rng.standard_normal((*experts, rank, width)) / np.sqrt(width)
            b = rng.standard_normal((*experts, out_features, rank)) / np.sqrt(rank)
            layers[path] = a.astype(np.float32), b.astype(np.float32)
    assert layers
    return layers


def changes_of(layers: Layers) -> dict[str, LowRank]:
    """The same as updates of a paged model."""
    return {path: LowRank(a, b.swapaxes(-1, -2)) for path, (a, b) in layers.items()}


def with_adapters(
    driver: StepDriver, config: dict[str, Any], names: Collection[str], slots: dict[int, int]
) -> StepDriver:
    """Gives the sequences of each batch the adapters in these slots, 1 or 2, by their ids."""
    driver.runner.model.enable_adapters(2, 8)
    adapters = {}
    for slot in (1, 2):
        layers = random_layers(tiny_model(config), slot, names=names)
        changes = changes_of(layers)
        adapters[slot] = SimpleNamespace(layers=changes)
    launch = driver.runner.launch

    def adapted(batch: StepBatch, *more: Any) -> Any:
        for i, seq_id in enumerate(batch.seq_ids):
            batch.adapter_ids[i] = slots[seq_id]
        batch.adapters = {slot: adapters[slot] for slot in batch.adapter_ids if slot}
        return launch(batch, *more)

    driver.runner.launch = adapted  # type: ignore[method-assign]
    return driver


def write_mlx(path: Path, layers: Layers, *, scale: float = 2.0, **config: Any) -> Path:
    """Writes an adapter as mlx-lm does."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in layers.items():
        halves = (a, b) if a.ndim == 3 else (a.T, b.T)  # mlx-lm transposes no experts
        tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = map(mx.array, halves)
    rank = next(iter(layers.values()))[0].shape[-2]
    keys = sorted({name.partition("layers.")[2].partition(".")[2] for name in layers})
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    given = {"fine_tune_type": "lora", "num_layers": 64, "lora_parameters": parameters, **config}
    (path / "adapter_config.json").write_text(json.dumps(given))
    mx.save_safetensors(str(path / "adapters.safetensors"), tensors)
    return path


def write_peft(
    path: Path,
    layers: Layers,
    *,
    alpha: float = 8.0,
    dtype: mx.Dtype = mx.float32,
    keeps: Callable[[str], bool] = lambda _: True,
    **config: Any,
) -> Path:
    """Writes an adapter as PEFT does: each expert by itself.

    Args:
        keeps: Of a layer's name: True to write the layer.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in single_experts(layers).items():
        if not keeps(name):
            continue
        tensors[f"base_model.model.{name}.lora_A.weight"] = mx.array(a).astype(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = mx.array(b).astype(dtype)
    rank = next(iter(layers.values()))[0].shape[-2]
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
    (path / "adapter_config.json").write_text(json.dumps(given))
    mx.save_safetensors(str(path / "adapter_model.safetensors"), tensors)
    return path


def single_experts(layers: Layers) -> Layers:
    """Layers of experts as one layer for each, as transformers names them."""
    found: Layers = {}
    for name, (a, b) in layers.items():
        if a.ndim == 2:
            found[name] = a, b
            continue
        block, _, part = name.rsplit(".", 2)
        for expert, pair in enumerate(zip(a, b)):
            found[f"{block}.experts.{expert}.{part}"] = pair
    return found


def adapted(model: nn.Module, path: Path) -> nn.Module:
    """mlx-lm's model with an adapter on top, not fused. The model changes."""
    load_adapters(model, str(path))
    model.eval()
    return model


def fused(model: nn.Module, path: Path) -> nn.Module:
    """mlx-lm's model with an adapter fused, as `mlx_lm.fuse` does it. The model changes."""
    adapted(model, path)
    layers = [(name, m.fuse()) for name, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(layers))
    assert not any(hasattr(m, "lora_a") for _, m in model.named_modules())
    return model


def greedy(model: nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The answer of mlx-lm's own forward, without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dense_logits(model, [tokens]).argmax()))
    return tokens[len(prompt) :]


def quantized(make: Callable[[], nn.Module], bits: int = 4) -> Callable[[], nn.Module]:
    """A maker of the same model with quantized linear layers."""

    def made() -> nn.Module:
        model = make()
        nn.quantize(
            model, group_size=32, bits=bits, class_predicate=lambda _, m: isinstance(m, nn.Linear)
        )
        return model

    return made


# Tokens of each sequence in a step. Some of mlx-vlm's layers divide prompts of more than 256.
STEPS = ({"a": 5, "b": 7}, {"a": 1, "b": 1}, {"a": 1, "b": 3, "c": 300}, {"c": 1, "a": 1})


def of_all_layers(model: PagedModel) -> Layers:
    """Changes of all layers that adapters may change."""
    targets = model.adapter_targets()
    known = {**targets.linear, **targets.experts}
    names = {path.rpartition(".")[2] for path in known}
    layers = random_layers(model.model, 1, names=names, within="")
    return {path: (a, 0.3 * b) for path, (a, b) in layers.items() if path in known}


def check_adapters_of_all_layers(make: Callable[[], PagedModel]) -> None:
    """Compares steps with an adapter with those of a model whose weights it has changed, and one
    sequence without the adapter with the model as it was.

    Args:
        make: Makes the same model each time.
    """
    rng = np.random.default_rng(0)
    ours, theirs, plain = (make() for _ in range(3))
    layers = of_all_layers(ours)
    ours.enable_adapters(1, 8)
    ours.load_adapter(1, changes_of(layers))
    modules = dict(theirs.model.named_modules())
    for path, (a, b) in layers.items():
        modules[path].weight = modules[path].weight + mx.array(b @ a)
    drivers = [Driver(model) for model in (ours, theirs, plain)]
    drivers[0].adapter_slot, drivers[0].without_adapter = 1, {"b"}
    for work in STEPS:
        tokens = {name: rng.integers(2, 60, count).tolist() for name, count in work.items()}
        found, expected, before = (driver.step(tokens) for driver in drivers)
        for name in work:
            scale = np.abs(expected[name]).max()
            assert np.abs(expected[name] - before[name]).max() > 1e-2 * scale
            answer = before if name == "b" else expected
            np.testing.assert_allclose(found[name], answer[name], atol=1e-4 * scale)
