"""Multimodal mixtures of experts: mlx-vlm's layers as mlx-lm's."""

from __future__ import annotations

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
from support.media_cases import vary
from support.media_parity import paged
from support.more_media_models import ALL_CASES as CASES
from support.parity import Driver
from support.reference import ON_GPU

from mlx_paged.multimodal.mixtures import CombiningSwitchGLU, use_mlx_lm_mixtures

ROWS, WIDTH, HIDDEN, EXPERTS, TOP_K = 5, 64, 96, 6, 3
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
    case = CASES[name]()
    vary(case.model)
    model = paged(case)
    driver = Driver(model)
    driver.step({"a": PROMPT})
    driver.step({"a": [3]})
    assert model.compilation.refused is None
    assert not {"GatherMM", "GatherQMM"} & {*model.compilation.foreign}
    around = [m for m in model.model.modules() if isinstance(m, switch_layers.SwitchGLU)]
    assert around and all(type(m) is CombiningSwitchGLU for m in around)
