"""Which models fit: published parameter counts, the engine's own rule, measured activations."""

from __future__ import annotations

import pytest

from mlx_paged.demo import model_path
from mlx_paged.doctor import shapes
from mlx_paged.doctor.fits import Memory, fit, fits
from mlx_paged.doctor.shapes import WELL_KNOWN, embedded
from mlx_paged.engine import memory, pools
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.llm import LLM
from mlx_paged.model.loader import load

GIB = 1 << 30
BY_NAME = {shape.name: shape for shape in WELL_KNOWN}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the weight files of the published models say
        ("Qwen3-0.6B", 596_049_920),
        ("Llama-3.2-1B", 1_235_814_400),
        ("Llama-3.2-3B", 3_212_749_824),
        ("Qwen3-4B", 4_022_468_096),
        ("Mistral-7B-v0.3", 7_248_023_552),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Qwen2.5-14B", 14_770_033_664),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen3-32B", 32_762_123_264),
        ("Llama-3.3-70B", 70_553_706_496),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, parameters) -> None:
    assert BY_NAME[name].parameters == parameters


def test_the_embedded_models_shape_is_that_of_its_weights() -> None:
    from mlx.utils import tree_flatten

    model = load()
    shape = embedded(model_path())
    weights = [weight for _, weight in tree_flatten(model.model.parameters())]
    assert shape.parameters == sum(weight.size for weight in weights)
    assert shape.weight_bytes("float32") == sum(weight.nbytes for weight in weights)


def test_bytes() -> None:
    llama = BY_NAME["Llama-3.1-8B"]
    assert llama.weight_bytes("16-bit") == 2 * 8_030_261_248
    assert llama.weight_bytes("4-bit") == pytest.approx(4.5 / 8 * 8_030_261_248, rel=1e-3)
    assert llama.kv_bytes_per_token("16-bit") == 128 << 10
    assert llama.kv_bytes_per_token("float32") == 256 << 10


@pytest.mark.parametrize(("rows", "seqs"), [(2048, 256), (1024, 16)])
def test_activations_are_estimated_near_what_the_engine_measures(monkeypatch, rows, seqs) -> None:
    measured: list[int] = []
    measure = pools.measure_activations

    def spy(*arguments):
        measured.append(measure(*arguments))
        return measured[-1]

    monkeypatch.setattr(pools, "measure_activations", spy)
    LLM(None, gpu_memory_utilization=0.5, max_num_batched_tokens=rows, max_num_seqs=seqs)
    estimate = embedded(model_path()).activation_bytes(rows, seqs, "float32")
    assert estimate / 2 < measured[0] < 1.5 * estimate


def test_the_cpus_pool_is_what_an_engine_has() -> None:
    llm = LLM()
    [found] = fits([embedded(model_path())], Memory(False, memory.device_memory(), 0.9))
    assert found.num_blocks == llm.engine._kv.pool.num_blocks


def test_a_gpus_pool_follows_the_engines_rule() -> None:
    shape, config = BY_NAME["Llama-3.1-8B"], EngineConfig()
    memory = Memory(True, 24 * GIB, 0.9)
    found = fit(shape, "8-bit", memory, config)
    left = int(24 * GIB * 0.9) - found.weight_bytes - found.activation_bytes
    assert found.num_blocks == left // (config.block_size * (128 << 10))
    assert found.num_tokens == (found.num_blocks - 1) * config.block_size
    tighter = fit(shape, "8-bit", memory, EngineConfig(max_model_len=64, max_num_seqs=8))
    assert tighter.num_blocks == 8 * 2 + 1, "no more than every sequence at full length could use"


def test_what_does_not_fit_says_why() -> None:
    shape, config = BY_NAME["Llama-3.1-8B"], EngineConfig()

    def reason(num_bytes: int) -> str:
        found = fit(shape, "8-bit", Memory(True, num_bytes, 1.0), config)
        assert found.num_blocks == found.num_tokens == 0
        return found.reason

    weights = shape.weight_bytes("8-bit")
    activations = shape.activation_bytes(2048, 256, "8-bit")
    block = config.block_size * shape.kv_bytes_per_token("8-bit")
    assert reason(weights - 1) == "the weights alone take 7.9 GiB of 7.9 GiB"
    assert reason(weights + activations).startswith("weights and activations take 9.0 GiB of")
    assert reason(weights + activations + 2 * block - 1).endswith("no two blocks")
    enough = Memory(True, weights + activations + 2 * block, 1.0)
    assert fit(shape, "8-bit", enough, config).num_blocks == 2


def test_tokens_that_fit_grow_with_memory_and_shrink_with_precision() -> None:
    shape = BY_NAME["Qwen3-32B"]
    small, large = (Memory(True, n * GIB, 0.9) for n in (64, 128))
    for precision in ("8-bit", "4-bit"):
        tokens = [fit(shape, precision, m, EngineConfig()).num_tokens for m in (small, large)]
        assert 0 < tokens[0] < tokens[1]
    assert (
        fit(shape, "4-bit", large, EngineConfig()).num_tokens
        > fit(shape, "8-bit", large, EngineConfig()).num_tokens
    )


def test_precisions_are_those_of_the_device() -> None:
    [shape, *_] = WELL_KNOWN
    assert [f.precision for f in fits([shape], Memory(False, 8 * GIB, 0.9))] == ["float32"]
    on_gpu = [f.precision for f in fits([shape], Memory(True, 8 * GIB, 0.9))]
    assert on_gpu == ["16-bit", "8-bit", "4-bit"]
    assert set(on_gpu) < set(shapes.PRECISIONS)
