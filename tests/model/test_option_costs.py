"""Options that make the CPU slow, or have nothing to apply to, say so once at start."""

from __future__ import annotations

import logging

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.reference import ON_GPU

from mlx_paged import LLM, ops
from mlx_paged.engine.loading import load
from mlx_paged.model import option_costs

pytestmark = pytest.mark.skipif(ON_GPU, reason="only the CPU has these costs")


class Model(nn.Module):
    """One linear layer."""

    def __init__(self, bits: int | None = None, group_size: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128, bias=False)
        if bits is not None:
            nn.quantize(self, group_size=group_size, bits=bits)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_slow_on_a_cpu(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    load(dtype=dtype)
    [line] = warnings(caplog)
    assert dtype in line and "'auto'" in line


def test_dequantized_weights_are_named(caplog: pytest.LogCaptureFixture) -> None:
    load(dtype="float32")  # the embedded model has 8 bits
    [line] = warnings(caplog)
    assert "8 bits" in line and "4 times the memory" in line and "'auto'" in line


def test_the_defaults_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    LLM(kv_cache_memory=1 << 25)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("bits", "dtype", "told"),
    [(4, "float32", "8 times"), (None, "float32", None), (4, "auto", None), (None, "auto", None)],
)
def test_costs_of_dtypes(bits: int | None, dtype: str, told: str | None) -> None:
    line = option_costs.of_dtype(Model(bits), dtype)
    assert line is None if told is None else told in (line or "")


@pytest.mark.parametrize("weights", [mx.float16, mx.bfloat16])
def test_widened_weights_are_named(weights: mx.Dtype) -> None:
    model = Model()
    model.set_dtype(weights)
    assert "twice the memory" in (option_costs.of_dtype(model, "float32") or "")
    assert option_costs.of_dtype(model, "auto") is None


def test_activations_need_weights_that_they_apply_to() -> None:
    wide, half = Model(), Model()
    half.set_dtype(mx.bfloat16)
    assert option_costs.of_activations(Model(4), "int8") is None
    assert option_costs.of_activations(Model(8, 32), "int8") is None
    assert option_costs.of_activations(half, "bfloat16") is None
    for model, activations in ((wide, "int8"), (half, "int8"), (Model(6), "int8"),
                               (wide, "bfloat16"), (Model(4), "bfloat16")):  # fmt: skip
        assert "no effect" in (option_costs.of_activations(model, activations) or "")
    assert option_costs.of_activations(wide, "float32") is None


@pytest.mark.skipif("int8" not in ops.activations(), reason="this processor has no int8 products")
def test_an_engine_warns_of_activations_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    LLM(dtype="float32", kv_cache_memory=1 << 25, cpu_activations="int8")
    lines = warnings(caplog)
    assert [("dequantizes" in line, "no effect" in line) for line in lines] == [
        (True, False), (False, True),
    ]  # fmt: skip
    caplog.clear()
    LLM(kv_cache_memory=1 << 25, cpu_activations="int8")
    assert warnings(caplog) == []
