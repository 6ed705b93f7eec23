"""Tests which models fit: published sizes, the engine's own rule, measured activations."""

from __future__ import annotations

import pytest

from mlx_paged.doctor.fits import EMBEDDED, MODELS, PRECISIONS, fit, fits
from mlx_paged.doctor.jobs import Memory
from mlx_paged.engine import memory
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.llm import LLM
from mlx_paged.engine.loading import load
from mlx_paged.model.kv_formats import FORMATS

GIB = 1 << 30
BY_NAME = {shape.name: shape for shape in MODELS}


# Differences the shapes cannot show: tied output projections, biases and norms of heads, experts.
TIED = {"embedded model", "Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.2-3B", "Qwen3-4B"}
EXPERTS = {"Qwen3-30B-A3B": 128}


def on(num_bytes: int, utilization: float = 0.9, *, gpu: bool = True) -> Memory:
    return Memory(on_gpu=gpu, device_bytes=num_bytes, utilization=utilization)


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_parameters_are_those_of_the_shape(shape) -> None:
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    experts = EXPERTS.get(shape.name, 0)
    mlp = max(1, experts) * 3 * shape.hidden * shape.intermediate + shape.hidden * experts
    embeddings = shape.vocab * shape.hidden * (1 if shape.name in TIED else 2)
    vectors = 2 * shape.hidden  # norms; and by head those of Qwen3, and the biases of Qwen2.5
    vectors += 2 * shape.head_dim if "Qwen3" in shape.name else 0
    if "Qwen2.5" in shape.name:
        vectors += (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    expected = shape.layers * (attention + mlp + vectors) + embeddings + shape.hidden
    assert shape.parameters == expected


def test_the_embedded_models_shape_is_that_of_its_weights() -> None:
    from mlx.utils import tree_flatten

    model = load(dtype="float32")
    weights = [weight for _, weight in tree_flatten(model.model.parameters())]
    assert EMBEDDED.parameters == sum(weight.size for weight in weights)
    assert EMBEDDED.weight_bytes("float32") == sum(weight.nbytes for weight in weights)
    arguments = model.model.args
    assert (EMBEDDED.layers, EMBEDDED.hidden) == (
        arguments.num_hidden_layers,
        arguments.hidden_size,
    )
    assert (EMBEDDED.heads, EMBEDDED.kv_heads) == (
        arguments.num_attention_heads,
        arguments.num_key_value_heads,
    )
    assert EMBEDDED.max_len == arguments.max_position_embeddings


def test_bytes() -> None:
    llama = BY_NAME["Llama-3.1-8B"]
    assert llama.weight_bytes("16-bit") == 2 * 8_030_261_248
    assert llama.weight_bytes("4-bit") == pytest.approx(4.5 / 8 * 8_030_261_248, rel=1e-3)
    assert llama.kv_bytes_per_token("16-bit") == 128 << 10
    assert llama.kv_bytes_per_token("float32") == 256 << 10
    int8 = llama.kv_bytes_per_token("16-bit", FORMATS["int8"])
    assert int8 == llama.kv_bytes_per_token("float32", FORMATS["int8"]) == 130 << 9


def test_tokens_in_the_formats_of_the_engine() -> None:
    found = fit(BY_NAME["Llama-3.1-8B"], "16-bit", on(24 * GIB), EngineConfig())
    tokens = {name: n / found.num_tokens for name, n in found.quantized_tokens.items()}
    assert tokens["int8"] == pytest.approx(1.97, abs=0.01)
    assert tokens["int8_k_int4_v"] == pytest.approx(2.44, abs=0.01)
    assert set(fit(EMBEDDED, "16-bit", on(1 << 20), EngineConfig()).quantized_tokens.values()) == {
        0
    }


@pytest.mark.parametrize(("rows", "seqs"), [(2048, 256), (1024, 16)])
def test_activations_are_estimated_near_what_the_engine_measures(monkeypatch, rows, seqs) -> None:
    measured: list[int] = []
    measure = memory.measure_activations

    def spy(*arguments):
        measured.append(measure(*arguments))
        return measured[-1]

    monkeypatch.setattr(memory, "measure_activations", spy)
    LLM(None, gpu_memory_utilization=0.5, max_num_batched_tokens=rows, max_num_seqs=seqs)
    estimate = EMBEDDED.activation_bytes(rows, seqs, "float32")
    assert estimate / 2 < measured[0] < 1.5 * estimate


def test_the_cpus_pool_is_what_an_engine_has() -> None:
    llm = LLM()
    found = fits(on(memory.device_memory(), gpu=False))[0]
    assert found.num_blocks == llm.engine._kv.pool.num_blocks


def test_a_gpus_pool_follows_the_engines_rule() -> None:
    shape, config = BY_NAME["Llama-3.1-8B"], EngineConfig()
    memory = on(24 * GIB)
    found = fit(shape, "8-bit", memory, config)
    left = int(24 * GIB * 0.9) - found.weight_bytes - found.activation_bytes
    assert found.num_blocks == left // (config.block_size * (128 << 10))
    assert found.num_tokens == (found.num_blocks - 1) * config.block_size
    tighter = fit(shape, "8-bit", memory, EngineConfig(max_model_len=64, max_num_seqs=8))
    assert tighter.num_blocks == 8 * 2 + 1, "no more than every sequence at full length could use"


def test_what_does_not_fit_says_why() -> None:
    shape, config = BY_NAME["Llama-3.1-8B"], EngineConfig()

    def reason(num_bytes: int) -> str:
        found = fit(shape, "8-bit", on(num_bytes, 1.0), config)
        assert found.num_blocks == found.num_tokens == 0
        return found.reason

    weights = shape.weight_bytes("8-bit")
    activations = shape.activation_bytes(2048, 256, "8-bit")
    block = config.block_size * shape.kv_bytes_per_token("8-bit")
    assert reason(weights - 1) == "the weights alone take 7.9 GiB of 7.9 GiB"
    assert reason(weights + activations).startswith("weights and activations take 9.0 GiB of")
    assert reason(weights + activations + 2 * block - 1).endswith("no two blocks")
    enough = on(weights + activations + 2 * block, 1.0)
    assert fit(shape, "8-bit", enough, config).num_blocks == 2


def test_tokens_that_fit_grow_with_memory_and_shrink_with_precision() -> None:
    shape = BY_NAME["Qwen3-32B"]
    small, large = (on(n * GIB) for n in (64, 128))
    for precision in ("8-bit", "4-bit"):
        tokens = [fit(shape, precision, m, EngineConfig()).num_tokens for m in (small, large)]
        assert 0 < tokens[0] < tokens[1]
    assert (
        fit(shape, "4-bit", large, EngineConfig()).num_tokens
        > fit(shape, "8-bit", large, EngineConfig()).num_tokens
    )


def test_precisions_are_those_of_the_device() -> None:
    on_cpu = fits(on(8 * GIB, gpu=False))
    for shape in MODELS:  # (experts too stay as the checkpoint has them)
        found = {f.precision for f in on_cpu if f.model == shape.name}
        assert found == {"16-bit", "8-bit", "4-bit", "float32"}
    on_gpu = {found.precision for found in fits(on(8 * GIB))}
    assert on_gpu == {"16-bit", "8-bit", "4-bit"} and on_gpu < set(PRECISIONS)
