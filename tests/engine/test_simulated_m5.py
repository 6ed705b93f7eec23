"""An engine on a simulated M5: calibration finds the kernels for tensor units right and faster, a
long prompt runs through them, and the tokens are the same as without."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.interpreters import python_path
from support.models import embedded, save_tiny, tiny_config, tiny_model
from support.planted_kernels import MLX, TENSOR_UNITS, VARIABLE, simulated_with_faults
from support.simulated import launches, needs_simulator, sim_ext

from mlx_paged import LLM, SamplingParams, kernels
from mlx_paged.calibration import calibrate as calibration
from mlx_paged.calibration import cases, machine, tensor_units

pytestmark = needs_simulator
TESTS = Path(__file__).resolve().parents[1]
FORM = {"group_size": 32, "bits": 4}
ATTENTION = [f"tensor_prefill_float16_32_32_m{rows}" for rows in (32, 64)]
PRODUCTS = {rows: f"tensor_product_float16_affine_4_m{rows}" for rows in (32, 64, 128)}
# A chunk of 64 tokens and one of 10. With three query heads per KV head, attention takes the large
# tile for 16 rows and the small one for 10.
PROMPT, CHUNK = [7 + i * i % 300 for i in range(64 + 10)], 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model in float16 with quantized weights. Its last layer computes no attention of a
    prompt's first chunk."""
    heads = {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
    size = {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": embedded().vocab_size}
    config = tiny_config("llama", **heads, **size, quantization=FORM)
    made = tiny_model(config)
    made.set_dtype(mx.float16)
    nn.quantize(made, **FORM)
    path = tmp_path_factory.mktemp("m5") / "model"
    save_tiny(path, config, made)
    return str(path)


def generate(model: str, calibrate: str) -> tuple[int, ...]:
    llm = LLM(model, num_gpu_blocks_override=12, max_num_batched_tokens=CHUNK, calibrate=calibrate,
              enable_prefix_caching=False, dtype="float16")  # fmt: skip
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    [output] = llm.generate([PROMPT], params)
    return tuple(output.outputs[0].token_ids)


def test_long_prompts_run_on_tensor_units(monkeypatch, tmp_path, model) -> None:
    expected = generate(model, "off")
    monkeypatch.setattr(machine, "is_needed", lambda platform: True)
    monkeypatch.setattr(tensor_units, "unavailable", lambda *info: None)
    monkeypatch.setattr(calibration, "MODULE", "support.calibration_child")
    monkeypatch.setattr(cases, "TIMED_ROWS", (16, 64))
    monkeypatch.setattr(cases, "STEP_ROWS", ())  # this model does not run as whole steps
    monkeypatch.setattr(cases, "PRODUCT_ROWS", (1, 16, 128))
    # The kernels that sample or move blocks take a second each to compile for the simulator.
    # test_calibrated_start.py has them checked.
    monkeypatch.setattr(cases, "_data_checks", lambda needs: ())
    monkeypatch.setattr(cases, "PIECE_TOKENS", (0,))
    monkeypatch.setattr(calibration, "SECONDS", 300.0)
    monkeypatch.setattr(calibration, "SECONDS_PER_JOB", 60.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", python_path(TESTS.parent, TESTS))
    monkeypatch.setenv(TENSOR_UNITS, "1")
    # One of the tiles is wrong and one is slow; MLX is slower still.
    faults = {PRODUCTS[128]: "wrong", PRODUCTS[64]: "slow", MLX: "slow"}
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    sim_ext.forget_attention_layers()
    with simulated_with_faults():
        assert generate(model, "auto") == expected
        ran = {launch["kernel"] for launch in launches()}
        assert PRODUCTS[128] in kernels.rejected
    assert {*ATTENTION, PRODUCTS[32]} <= ran
    assert not ran & {PRODUCTS[64], PRODUCTS[128]}
    assert not any(name.startswith("paged_prefill") for name in ran)
    assert any(name.startswith("product_rows_float16_affine_4_m") for name in ran), "the decodes"
