"""Adapters of experts: against float64, in any company, and inside of executables."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.simd_processes import instruction_sets, run_in_process_of

from mlx_paged import executables, layer_ops, ops, reference

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="on a GPU they are `lora` of pairs"
)

NUM_ADAPTERS, EXPERTS, WIDTH, OUT = 3, 5, 40, 27
# Adapters of rows, and the experts of each.
ROUTES: dict[str, tuple[list[int], list[list[int]]]] = {
    "one row": ([1], [[4, 0]]),
    "rows of one adapter": ([2, 2, 2], [[0, 1], [1, 0], [0, 3]]),
    "several adapters": ([0, 1, 2, 0], [[0, 1], [0, 1], [0, 1], [1, 0]]),
    "rows without one": ([-1, 1, -1, NUM_ADAPTERS], [[0, 1], [2, 3], [4, 0], [1, 2]]),
    "no row with one": ([-1, -1], [[0, 1], [2, 3]]),
    "more pairs than are taken at once": ([1] * 50 + [2] * 50, [[3, 4]] * 100),
    "many pairs": ([1, -1, 0, 2, 2] * 80, [[i % 5, i % 3, 4, i % 2] for i in range(400)]),
    "one expert twice": ([0], [[2, 2]]),
    "experts out of range": ([1, 1], [[EXPERTS, 1], [0, 2**31 - 1]]),
}


class Case:
    """Random operands for a routing.

    Attributes:
        arguments: Of `ops.expert_lora`.
    """

    def __init__(
        self, route: str, *, shares_row: bool = True, rank: int = 8, dtype: mx.Dtype = mx.float32
    ) -> None:
        rng = np.random.default_rng(len(route))
        self.slots, self.experts = map(np.array, ROUTES[route])
        rows, top_k = self.experts.shape
        self.base = rng.standard_normal((rows, top_k, 1, OUT)).astype(np.float32)
        self.x = rng.standard_normal((rows, 1 if shares_row else top_k, 1, WIDTH))
        self.x = self.x.astype(np.float32)
        size = (NUM_ADAPTERS, EXPERTS, rank)
        self.a, self.b = (
            mx.array(rng.standard_normal((*size, width)).astype(np.float32)).astype(dtype)
            for width in (WIDTH, OUT)
        )
        self.arguments = self.of_rows(slice(None))

    def of_rows(self, rows: slice) -> list[mx.array]:
        """The arguments for some of the rows."""
        slots = mx.array(self.slots[rows].astype(np.int32))
        experts = mx.array(self.experts[rows].astype(np.uint32))
        return [mx.array(self.base[rows]), mx.array(self.x[rows]), slots, experts, self.a, self.b]

    def expected(self) -> np.ndarray:
        """The result in float64."""
        base, x = (values.astype(np.float64) for values in (self.base, self.x))
        a, b = (np.array(m.astype(mx.float32)).astype(np.float64) for m in (self.a, self.b))
        return reference.expert_lora(base, x, self.slots.tolist(), self.experts, a, b)


def bits(a: mx.array) -> bytes:
    return np.array(a).tobytes()


@pytest.mark.parametrize("shares_row", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_routes(route: str, shares_row: bool) -> None:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        case = Case(route, shares_row=shares_row, dtype=dtype)
        got = np.array(ops.expert_lora(*case.arguments))
        np.testing.assert_allclose(got, case.expected(), rtol=1e-4, atol=1e-4)
        same = (case.slots < 0) | (case.slots >= NUM_ADAPTERS)
        assert got[same].tobytes() == case.base[same].tobytes(), "rows without an adapter keep bits"


def test_as_adapters_of_pairs() -> None:
    """GPUs run this form."""
    for route in ROUTES:
        for shares_row in (True, False):
            case = Case(route, shares_row=shares_row)
            got = layer_ops.lora_of_pairs(*case.arguments)
            np.testing.assert_allclose(np.array(got), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 8, 24])
def test_bits_do_not_depend_on_other_rows(rank: int) -> None:
    for route in ("several adapters", "rows without one", "more pairs than are taken at once"):
        case = Case(route, rank=rank)
        together = ops.expert_lora(*case.arguments)
        for row in range(0, len(case.slots), 7):
            alone = ops.expert_lora(*case.of_rows(slice(row, row + 1)))
            assert bits(alone[0]) == bits(together[row])


def test_many_pairs_are_shared_among_threads() -> None:
    case = Case("many pairs", rank=32)
    got = ops.expert_lora(*case.arguments)
    np.testing.assert_allclose(np.array(got), case.expected(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shares_row", [True, False])
def test_in_an_executable(shares_row: bool) -> None:
    """The same bits, also for slots that are written later."""
    case = Case("several adapters", shares_row=shares_row)
    *given, a, b = case.arguments
    inputs = executables.placeholders(given)
    base = inputs[0] * 2.0  # not an input of the executable
    program = executables.CpuExecutable(inputs, [ops.expert_lora(base, *inputs[1:], a, b) * 1.0])
    assert not program.foreign
    expected = ops.expert_lora(given[0] * 2.0, *given[1:], a, b)
    assert bits(program(given)[0]) == bits(expected)
    other = [given[0] + 1.0, given[1] * 3.0, given[2][::-1] * 1, given[3]]
    mx.eval(other)
    expected = ops.expert_lora(other[0] * 2.0, *other[1:], a, b)
    assert bits(program(other)[0]) == bits(expected)


def test_none_without_rows() -> None:
    case = Case("one row")
    empty = ops.expert_lora(*case.of_rows(slice(0, 0)))
    assert empty.shape == (0, 2, 1, OUT)
    mx.eval(empty)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("base", lambda a: a.astype(mx.float16), "base must be float32"),
        ("base", lambda a: a[:, :1], "the shape of base"),
        ("x", lambda a: a.astype(mx.float16), "x must be float32"),
        ("x", lambda a: a[:, :, 0], "x must be"),
        ("x", lambda a: mx.concatenate([a] * 3, 1), "one vector for each expert or row"),
        ("adapters", lambda a: a[:2], "adapters"),
        ("adapters", lambda a: a.astype(mx.uint32), "int32"),
        ("experts", lambda a: a.astype(mx.float32), "int32 or uint32"),
        ("experts", lambda a: mx.array(1), "at least one axis"),
        ("a", lambda a: a[..., :8], "a must"),
        ("a", lambda a: a.astype(mx.int32), "a must"),
        ("b", lambda a: a[:1], "b must"),
        ("b", lambda a: a.astype(mx.float16), "b must"),
    ],
)
def test_refusals(name: str, change: Any, message: str) -> None:
    names = ("base", "x", "adapters", "experts", "a", "b")
    given = dict(zip(names, Case("several adapters").arguments))
    given[name] = change(given[name])
    with pytest.raises(ValueError, match="expert_lora") as caught:
        ops.expert_lora(**given)
    assert message in str(caught.value).replace("the shape of a ", "a ").replace(
        "the shape of b ", "b "
    )


def test_this_file_with_several_threads() -> None:
    run_in_process_of(
        instruction_sets()[0], 5, [__file__], "routes or many_pairs or executable or other_rows"
    )
