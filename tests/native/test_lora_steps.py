"""Whole steps with adapters as one list of launches, on the simulated GPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.adapters import changes_of, random_layers, with_adapters
from support.gpu_executables import with_programs
from support.models import StepDriver, random_tokens, tiny_config, tiny_model
from support.simulated import launches, needs_simulator, simulated

from mlx_paged.model.lora_slots import AdaptedLayer

pytestmark = needs_simulator

NUM_LAYERS = 2
LLAMA = tiny_config("llama", head_dim=32, num_hidden_layers=NUM_LAYERS)
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def driver_of() -> StepDriver:
    return StepDriver(tiny_model(LLAMA), "llama", block_size=8)


@pytest.mark.parametrize("slots", [{0: 1, 1: 2, 2: 0}, {0: 2, 1: 2, 2: 2}], ids=str)
def test_a_step_with_adapters_gives_what_its_graph_gives(
    rng: np.random.Generator, slots: dict[int, int]
) -> None:
    """Steps of three sequences: a prompt, decodes, and decodes alone."""
    ours, graphs = (with_adapters(driver_of(), LLAMA, TARGETS, slots) for _ in range(2))
    alone = driver_of()
    steps = with_programs(ours)
    for work in ({"a": 7, "b": 1, "c": 2}, {"a": 1, "b": 1, "c": 1}):
        tokens = {name: random_tokens(rng, count) for name, count in work.items()}
        expected, plain = graphs.step(tokens), alone.step(tokens)
        with simulated():
            actual = ours.step(tokens)
            kernels = [launch["kernel"].rpartition("_")[0] for launch in launches()]
        # For each layer: its queries and values; attention's output; its gate and up; and its down.
        assert kernels.count("lora_down") == kernels.count("lora_up") == 4 * NUM_LAYERS
        assert "silu_mul" not in kernels
        for (name, logits), slot in zip(expected.items(), slots.values()):
            np.testing.assert_allclose(actual[name], logits, atol=5e-5)
            is_plain = np.allclose(actual[name], plain[name], atol=5e-5)
            assert is_plain == (slot == 0)
    assert len(steps.made) == 2


def test_slots_are_written_in_place() -> None:
    """Programs hold the stacks as constants, so loading another adapter must not move them."""
    model = driver_of().runner.model
    model.enable_adapters(2, 8)
    layer = "model.layers.0.self_attn.q_proj"
    loaded = [random_layers(tiny_model(LLAMA), seed) for seed in (1, 2)]
    kept: list[mx.array] = []
    for layers in loaded:
        model.load_adapter(2, changes_of(layers))
        assert model.adapter_layers is not None
        stacks = model.adapter_layers._layers[layer]
        kept = kept or [stacks.a, stacks.b]
        for stack, values in zip(kept, (layers[layer][0], layers[layer][1].T), strict=True):
            found = np.array(stack)
            np.testing.assert_array_equal(found[1, : len(values)], values)
            assert not found[1, len(values) :].any() and not found[0].any()


def test_a_load_that_failed_leaves_no_graphs_without_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = driver_of().runner.model
    model.enable_adapters(2, 8)
    adapters = model.adapter_layers
    assert adapters is not None
    changes = changes_of(random_layers(tiny_model(LLAMA), 1))
    with monkeypatch.context() as patch:
        patch.setattr(AdaptedLayer, "write", raise_memory_error)
        with pytest.raises(MemoryError):
            adapters.load(0, changes)
    assert adapters.load(0, changes), "graphs from before the layers had slots are not valid"
    assert not adapters.load(1, changes)


def raise_memory_error(*_: object) -> None:
    raise MemoryError
