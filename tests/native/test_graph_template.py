"""GraphTemplate: a graph made again for other sizes is the one that its code would build."""

from __future__ import annotations

from collections.abc import Callable

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.reference import ON_GPU

from mlx_paged import ops
from mlx_paged.executables import GraphTemplate, placeholders

pytestmark = pytest.mark.skipif(ON_GPU, reason="some operations here are for the CPU")

WIDTH, HEADS = 48, 4
DIM = WIDTH // HEADS
WEIGHT = mx.array(np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32))
mx.eval(WEIGHT)
Code = Callable[[mx.array, mx.array], mx.array]  # [rows, WIDTH] and [picked] int32


def inputs_of(rows: int, picked: int) -> list[mx.array]:
    rng = np.random.default_rng(rows)
    x = mx.array(rng.standard_normal((rows, WIDTH)).astype(np.float32))
    return [x, mx.array(rng.integers(0, rows, picked).astype(np.int32))]


def learned(code: Code, first: tuple[int, int] = (3, 2), last: tuple[int, int] = (50, 9)):
    ends = [placeholders(inputs_of(*sizes)) for sizes in (first, last)]
    (a, b) = ([code(*inputs)] for inputs in ends)
    return GraphTemplate(ends[0], a, ends[1], b)


def heads(x: mx.array, at: mx.array) -> mx.array:
    """Attention's way to its heads and back, with rows in the middle."""
    h = x[:, None] @ WEIGHT.T
    h = h.reshape(h.shape[0], 1, HEADS, -1).transpose(0, 2, 1, 3).squeeze(2)
    h = mx.expand_dims(h * 2, 2).transpose(0, 2, 1, 3).reshape(x.shape[0], 1, -1)
    return (h + x[:, None])[at]


CODE: dict[str, Code] = {
    "heads": heads,
    "norms": lambda x, at: ops.rms_norm(
        ops.rms_norm(x[:, None], WEIGHT[0], 1e-5).reshape(-1, HEADS, DIM), None, 1e-5
    ).flatten(1),
    "a norm of other rows": lambda x, at: ops.rms_norm(
        x.reshape(-1, DIM), WEIGHT[0, :DIM], 1e-5
    ).reshape(x.shape),
    "sums": lambda x, at: (x[:, None] + (x * 2).reshape(-1, 1, WIDTH)).squeeze(1),
    "sums of two shapes": lambda x, at: x[:, None] + (x * 2)[None].reshape(-1, 1, WIDTH)[:, :, :1],
    "activations": lambda x, at: ops.silu_mul((x * 2)[:, None], x[:, None]),
    "several results": lambda x, at: mx.concatenate(mx.split(x * 2, 2, axis=-1)[::-1], -1),
    "columns": lambda x, at: (x * 2)[:, 1::2],
    "as many of more": lambda x, at: (x.reshape(-1, DIM) * 2)[: x.shape[0]],
    "a broadcast weight": lambda x, at: mx.broadcast_to(WEIGHT[0], x.shape) * x,
    "numbers": lambda x, at: nn.gelu_approx(x) / 3.5,
    "turned": lambda x, at: (x * 2).T.reshape(HEADS, DIM, -1).transpose(2, 1, 0).flatten(1),
    "a view of views": lambda x, at: mx.unflatten((x * 2)[:, None, None].flatten(1), 1, (2, -1)),
    "an input": lambda x, at: x[:, None],
    "multiples": lambda x, at: mx.unflatten(x.reshape(-1, DIM) * 2, 0, (x.shape[0], HEADS))[at],
}


@pytest.mark.parametrize("name", CODE)
def test_results_are_those_of_the_code(name: str) -> None:
    code = CODE[name]
    template = learned(code)
    for sizes in ((3, 2), (4, 9), (17, 1), (50, 5), (WIDTH, HEADS), (9, 9)):
        inputs = inputs_of(*sizes)
        expected, [actual] = code(*inputs), template(inputs)
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        np.testing.assert_array_equal(np.array(actual), np.array(expected))


def test_changes_of_shape_are_few() -> None:
    assert learned(heads).num_nodes <= 9, "of 17"
    # The number for all rows, a multiple, the activation, and its shape.
    assert learned(CODE["activations"]).num_nodes == 4
    assert learned(CODE["an input"]).num_nodes == 1


def test_its_weights_are_shared() -> None:
    template = learned(lambda x, at: x @ WEIGHT.T)
    mx.eval(template(inputs_of(5, 1)))
    before = mx.get_active_memory()
    made = template(inputs_of(6, 1))
    mx.eval(made)
    assert mx.get_active_memory() - before < WEIGHT.nbytes


REFUSED: dict[str, tuple[Code, str]] = {
    "another graph for many rows": (
        lambda x, at: mx.exp(x) if x.shape[0] > 10 else mx.sin(x),
        "differ",
    ),
    "another number for many rows": (lambda x, at: x * (2 if x.shape[0] > 10 else 3), "changes"),
    "one operation more": (
        lambda x, at: mx.exp(mx.exp(x)) if x.shape[0] > 10 else mx.exp(x),
        "differ",
    ),
    "another weight": (lambda x, at: x * WEIGHT[int(x.shape[0] > 10)], "changes|differ|parameters"),
    "a number of the rows": (lambda x, at: x / x.shape[0], "an array that changes"),
    "a position": (lambda x, at: mx.arange(x.shape[0])[:, None] * x, "parameters that change"),
    "all rows but one": (lambda x, at: (x * 2)[1:], "no multiple"),
    "half of the rows": (lambda x, at: (x * 2)[: x.shape[0] // 2], "no multiple"),
    "a large constant": (lambda x, at: x[:, :1] * mx.zeros((1 << 19,)), "a large constant"),
    "a random number": (lambda x, at: x * mx.random.normal((WIDTH,)), "changes|differ"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_changes_are_refused(name: str) -> None:
    code, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"cannot make this graph again: .*({reason})"):
        learned(code)


def test_inputs_must_fit() -> None:
    template = learned(lambda x, at: x[at])
    x, at = inputs_of(5, 2)
    for wrong in ([x], [x[:, :8], at], [x[None], at], [x, at.astype(mx.int64)]):
        with pytest.raises(ValueError, match="do not fit"):
            template(wrong)
    # Both inputs have the rows here.
    same = learned(lambda x, at: x * at[:, None], (3, 3), (50, 50))
    with pytest.raises(ValueError, match="do not fit"):
        same(inputs_of(5, 4))


def test_nothing_of_a_graph_stays_alive() -> None:
    template = learned(heads)
    mx.eval(template(inputs_of(2000, 4)))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.eval(template(inputs_of(2000, 4)))
    assert mx.get_active_memory() - before < 10_000
