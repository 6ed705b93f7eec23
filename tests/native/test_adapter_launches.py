"""Adapters of several products in shared launches, on the simulated GPU: as exact as one by one."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from support.simulated import launches, needs_simulator, simulated

from mlx_paged import executables, ops, reference
from mlx_paged.doctor.self_test import exact

pytestmark = needs_simulator

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
NUM_ADAPTERS = 3


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> mx.array:
    values = rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
    return mx.array(values).astype(dtype)


def chosen_of(num_rows: int) -> list[int]:
    """Tiles of one adapter, of several, with some rows that have none, and of such rows alone."""
    pattern = [2, 2, 2, 2, 0, 1, 2, 0, -1, 1, NUM_ADAPTERS, 1, -1, -1, -1, -1, 1]
    return (pattern * (num_rows // len(pattern) + 1))[:num_rows]


@dataclass
class Layers:
    """Linear layers of one input, each with its adapters.

    Attributes:
        x: ``[num_rows, k]``.
        adapters: ``[num_rows]`` int32.
        more: ``[num_rows, n]`` of the first layer.
        weights: ``[n, k]`` each.
        a: ``[NUM_ADAPTERS, rank, k]`` each.
        b: ``[NUM_ADAPTERS, rank, n]`` each.
    """

    x: mx.array
    adapters: mx.array
    more: mx.array
    weights: list[mx.array]
    a: list[mx.array]
    b: list[mx.array]

    @classmethod
    def random(
        cls, num_rows: int, k: int, columns: list[int], rank: int, dtype: mx.Dtype
    ) -> Layers:
        rng = np.random.default_rng(num_rows)
        layers = cls(
            normal(rng, num_rows, k, dtype=dtype) * k**0.5,
            mx.array(chosen_of(num_rows), mx.int32),
            normal(rng, num_rows, columns[0], dtype=dtype),
            [normal(rng, n, k, dtype=dtype) for n in columns],
            [normal(rng, NUM_ADAPTERS, rank, k, dtype=dtype) for _ in columns],
            [normal(rng, NUM_ADAPTERS, rank, n, dtype=dtype) for n in columns],
        )
        mx.eval(vars(layers))
        return layers

    @property
    def inputs(self) -> list[mx.array]:
        return [self.x, self.adapters, self.more]

    def bases(self, x: mx.array, adapters: mx.array, more: mx.array) -> list[mx.array]:
        return [ops.linear(x, weight) for weight in self.weights]

    def adapted(self, x: mx.array, adapters: mx.array, more: mx.array) -> list[mx.array]:
        return [
            ops.lora(base, x, adapters, a, b)
            for base, a, b in zip(self.bases(x, adapters, more), self.a, self.b, strict=True)
        ]

    def gated(self, *inputs: mx.array) -> list[mx.array]:
        return [ops.silu_mul(*self.adapted(*inputs))]

    def added(self, *inputs: mx.array) -> list[mx.array]:
        return [inputs[2] + self.adapted(*inputs)[0]]

    def run(self, build) -> tuple[list[mx.array], list[str]]:
        """The outputs of a program, and the kernels that it launched."""
        with simulated():
            unknown = executables.placeholders(self.inputs)
            program = executables.GpuExecutable(unknown, build(*unknown))
            outputs = program(self.inputs)
            mx.eval(outputs)
            names = [launch["kernel"].partition("_float")[0].partition("_bfloat")[0]
                     for launch in launches()]  # fmt: skip
        return outputs, names


def same_bits(a: mx.array, b: mx.array) -> None:
    np.testing.assert_array_equal(exact(a), exact(b))


SHAPES = [
    # rows, k, columns of each layer, rank, dtype
    (1, 64, [40], 8, mx.bfloat16),
    (5, 2056, [1032, 40], 6, mx.bfloat16),  # two parts of k, several groups of columns
    (19, 1096, [520, 136, 24], 12, mx.float32),
    (33, 128, [64, 24, 36], 64, mx.float16),  # the last one's rows are not chunks
]


@pytest.mark.parametrize(("num_rows", "k", "columns", "rank", "dtype"), SHAPES)
def test_layers_of_one_input_share_launches(
    num_rows: int, k: int, columns: list[int], rank: int, dtype: mx.Dtype
) -> None:
    layers = Layers.random(num_rows, k, columns, rank, dtype)
    bases, plain = layers.run(layers.bases)
    found, kernels = layers.run(layers.adapted)
    assert kernels == ["lora_down", *plain, "lora_up"]
    chosen = chosen_of(num_rows)
    without = mx.array([i for i, slot in enumerate(chosen) if not 0 <= slot < NUM_ADAPTERS])
    for base, out, a, b in zip(bases, found, layers.a, layers.b, strict=True):
        expected = reference.lora(*map(exact, (base, layers.x)), chosen, *map(exact, (a, b)))
        assert reference.relative_errors(exact(out), expected).max() < TOLERANCE[dtype]
        with simulated():
            alone = ops.lora(base, layers.x, layers.adapters, a, b)
            mx.eval(alone)
        same_bits(out, alone)
        if without.size:
            same_bits(out[without], base[without])


def test_a_row_has_the_same_bits_in_any_company() -> None:
    layers = Layers.random(9, 264, [72], 16, mx.bfloat16)
    with simulated():
        together = ops.lora(layers.more, layers.x, layers.adapters, layers.a[0], layers.b[0])
        mx.eval(together)
        for rows in ([0], [6, 4], [8, 7, 6, 5, 4, 3, 2, 1, 0], [4, 4, 4, 4, 4]):
            at = mx.array(rows)
            few = [values[at] for values in (layers.more, layers.x, layers.adapters)]
            mx.eval(few)
            out = ops.lora(*few, layers.a[0], layers.b[0])
            mx.eval(out)
            same_bits(out, together[at])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n", [72, 36])
def test_a_gate_is_part_of_its_adapters_launch(dtype: mx.Dtype, n: int) -> None:
    layers = Layers.random(17, 64, [n, n], 8, dtype)
    if n % 8 and dtype != mx.float32:  # silu_mul alone would not serve such rows
        [gate, up], _ = layers.run(layers.adapted)
        [gated], _ = layers.run(layers.gated)
        gates, ups = exact(gate), exact(up)
        expected = ups * gates / (1 + np.exp(-gates))
        assert reference.relative_errors(exact(gated), expected).max() < TOLERANCE[dtype]
        return
    [gated], kernels = layers.run(layers.gated)
    [apart, *_], more = layers.run(lambda *inputs: [
        ops.silu_mul(*(made := layers.adapted(*inputs))), *made
    ])  # fmt: skip
    assert kernels[-1] == "lora_up" and "silu_mul" in more and "silu_mul" not in kernels
    same_bits(gated, apart)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_residual_is_part_of_its_adapters_launch(dtype: mx.Dtype) -> None:
    layers = Layers.random(17, 64, [40], 8, dtype)
    [added], kernels = layers.run(layers.added)
    assert kernels[-1] == "lora_up"
    [out], _ = layers.run(layers.adapted)
    with mx.stream(mx.cpu):
        same_bits(added, layers.more + out)


def test_adapters_of_other_inputs_have_launches_of_their_own() -> None:
    """Adapters whose base is no product of their x, and those whose matrices have another rank."""
    layers = Layers.random(5, 64, [64, 64], 8, mx.float32)
    layers.a[1], layers.b[1] = (mx.contiguous(m[:, :4]) for m in (layers.a[1], layers.b[1]))
    _, kernels = layers.run(layers.adapted)
    assert [name for name in kernels if "lora" in name] == ["lora_down", "lora_up"] * 2

    def crossed(x: mx.array, adapters: mx.array, more: mx.array) -> list[mx.array]:
        base = ops.linear(more, layers.weights[0])
        return [ops.lora(base, x, adapters, layers.a[0], layers.b[0])]

    [out], kernels = layers.run(crossed)
    assert kernels[-2:] == ["lora_down", "lora_up"]
    [base], _ = layers.run(lambda x, adapters, more: [ops.linear(more, layers.weights[0])])
    a, b = exact(layers.a[0]), exact(layers.b[0])
    expected = reference.lora(exact(base), exact(layers.x), chosen_of(5), a, b)
    assert reference.relative_errors(exact(out), expected).max() < 1e-5


def right(layers: Layers, place: int, out: mx.array, chosen: list[int]) -> None:
    """A layer's result against float64, where its rows chose these adapters."""
    bases, _ = layers.run(layers.bases)
    a, b = exact(layers.a[place]), exact(layers.b[place])
    expected = reference.lora(exact(bases[place]), exact(layers.x), chosen, a, b)
    assert reference.relative_errors(exact(out), expected).max() < 1e-5


def test_rows_may_choose_other_adapters_for_each_layer() -> None:
    layers = Layers.random(9, 64, [40, 40], 8, mx.float32)
    chosen = [chosen_of(9), chosen_of(9)[::-1]]
    others = mx.array(chosen[1], mx.int32)

    def build(x: mx.array, adapters: mx.array, more: mx.array) -> list[mx.array]:
        bases = layers.bases(x, adapters, more)
        return [
            ops.lora(bases[i], x, (adapters, others)[i], layers.a[i], layers.b[i]) for i in range(2)
        ]

    outputs, kernels = layers.run(build)
    assert [name for name in kernels if "lora" in name] == ["lora_down", "lora_up"] * 2
    for place, out in enumerate(outputs):
        right(layers, place, out, chosen[place])


def test_adapters_wait_for_what_chooses_them() -> None:
    """A product of the same x chooses the adapters of the next layer."""
    layers = Layers.random(9, 64, [4, 40], 8, mx.float32)

    def build(x: mx.array, adapters: mx.array, more: mx.array) -> list[mx.array]:
        logits, base = layers.bases(x, adapters, more)
        chosen, *_ = ops.greedy_tokens(logits)
        return [chosen, ops.lora(base, x, chosen, layers.a[1], layers.b[1])]

    [chosen, out], kernels = layers.run(build)
    assert kernels.index("greedy_tokens") < kernels.index("lora_down")
    assert len(set(chosen.tolist())) > 1
    right(layers, 1, out, chosen.tolist())
