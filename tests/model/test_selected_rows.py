"""Rows that nothing is sampled from are not computed where nothing else needs them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import LLM, SamplingParams, ops
from mlx_paged.demo import model_path
from mlx_paged.model import caches

ROWS, SIZE, HEADS, DIM = 12, 16, 4, 8
WANTED = [3, 11]


def normal(*shape: int, seed: int = 0) -> mx.array:
    rng = np.random.default_rng([seed, *shape])
    array = mx.array(rng.standard_normal(shape).astype(np.float32))
    mx.eval(array)
    return array


def wanted() -> mx.array:
    return mx.array(WANTED, dtype=mx.int32)


WEIGHT = normal(SIZE, SIZE, seed=1)
QUANTIZED = mx.quantize(normal(SIZE, 64, seed=2), group_size=32, bits=4)
ROTATIONS = normal(ROWS, 2, DIM // 2, seed=3)
swiglu = mx.compile(lambda gate, x: nn.silu(gate) * x, shapeless=True)

# [ROWS, 1, SIZE] -> [ROWS, ...]. Of those up to "views" each row depends on itself alone. (Where a
# name begins with "our" they are for the CPU.)
BY_ROWS: dict[str, Callable[[mx.array], mx.array]] = {
    "elements": lambda x: mx.maximum(x * x - x, 0.5 * x) / (1 + mx.exp(-mx.abs(x))),
    "weights for all rows": lambda x: (x + WEIGHT[0]) * WEIGHT[1],
    "an input as wide as a row": lambda x: x * mx.sigmoid(x[..., :1]) + x,
    "compiled": lambda x: swiglu(x + 1, 2 * x),
    "a compiled operation of weights": lambda x: swiglu(x, WEIGHT[2]),
    "cast": lambda x: (x + 1).astype(mx.float16),
    "our norms": lambda x: ops.layer_norm(ops.rms_norm(x, WEIGHT[0], 1e-5), None, None, 1e-5),
    "product": lambda x: (x + 1) @ WEIGHT.T,
    "product with a bias": lambda x: mx.addmm(WEIGHT[0], x.reshape(ROWS, SIZE), WEIGHT),
    "our product": lambda x: ops.linear(ops.silu_mul(x, x + 1), WEIGHT),
    "quantized products": lambda x: ops.quantized_linear(
        mx.quantized_matmul(mx.concatenate([x] * 4, -1), *QUANTIZED, group_size=32, bits=4)
        @ mx.concatenate([WEIGHT] * 4, -1),
        *QUANTIZED,
        group_size=32,
        bits=4,
    ),
    "our residual": lambda x: (lambda h: h + ops.rms_norm(h, WEIGHT[0], 1e-5) @ WEIGHT)(x + 1),
    "heads": lambda x: mx.concatenate([x, x], -1).reshape(ROWS, 1, HEADS, DIM).transpose(0, 2, 1, 3)
    * 2,
    "our rotated heads": lambda x: ops.rope(
        mx.concatenate([x, x], -1).reshape(ROWS, HEADS, 1, DIM) * 2, ROTATIONS, traditional=False
    ),
    "halves": lambda x: mx.multiply(*mx.split(x + 1, 2, axis=-1)),
    "columns": lambda x: (x + 1)[:, :, 3:-1:2] * 2,
    "views": lambda x: mx.unflatten((x * 2).squeeze(1)[:, None, None].flatten(1), 1, (2, -1)) + 1,
    "rows that others are added to": lambda x: x + mx.cumsum(x * 2, axis=0),
    "rows side by side": lambda x: (x.reshape(ROWS // 2, 2, SIZE) * WEIGHT[:2]).reshape(x.shape),
    "rows as columns": lambda x: (x.transpose(2, 1, 0) * 2).transpose(2, 1, 0) + 1,
    "columns backwards": lambda x: (x + 1)[:, :, ::-1] * 2,
    "fewer rows": lambda x: mx.concatenate([x[1:] * 2, x[:1]]),
    "norms of MLX's": lambda x: mx.fast.rms_norm(x + 1, WEIGHT[0], 1e-5),
    "a product of rows with rows": lambda x: (x[:, 0] @ x[:, 0].T) @ x[:, 0],
    "one row for all": lambda x: mx.broadcast_to(x[:1] * 2, x.shape) + 1,
}  # fmt: skip


def made(name: str, x: mx.array) -> mx.array:
    with mx.stream(mx.cpu) if name.startswith("our ") else contextlib.nullcontext():
        return BY_ROWS[name](x)


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_are_those_of_the_whole(name: str) -> None:
    x = normal(ROWS, 1, SIZE)
    expected = made(name, x)[wanted()]
    actual = ops.select_rows(made(name, x), wanted())
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert mx.allclose(actual, expected, rtol=1e-5, atol=1e-5)


def marked(x: mx.array, count: int = len(WANTED)) -> tuple[mx.array, mx.array]:
    """All rows, and selected ones that are found again in all that is made of them."""
    return x, mx.full((count, *x.shape[1:]), float("nan"), dtype=x.dtype)


@pytest.mark.parametrize("name", list(BY_ROWS)[: list(BY_ROWS).index("views") + 1])
def test_nothing_is_computed_of_other_rows(name: str) -> None:
    x = normal(ROWS, 1, SIZE) + 0
    out = ops.select_rows(made(name, x), wanted(), known=[marked(x)])
    assert mx.isnan(out).all(), "they are made of rows of x"


def test_what_is_kept_is_not_made_again() -> None:
    x = normal(ROWS, 1, SIZE) + 0
    inner = x @ WEIGHT
    out = ops.select_rows(inner * 2 + x, wanted(), kept=[inner], known=[marked(inner)])
    assert not mx.isnan(out).any(), "it is computed of all rows anyway"
    assert mx.allclose(out, (inner * 2 + x)[wanted()], atol=1e-5)


def test_what_all_rows_are_needed_of_is_not_made_again() -> None:
    x = normal(ROWS, 1, SIZE) + 0
    inner = x @ WEIGHT
    mixed = inner + mx.cumsum(inner + 1, axis=0)
    out = ops.select_rows(mixed, wanted(), known=[marked(inner)])
    assert not mx.isnan(out).any()
    assert mx.allclose(out, mixed[wanted()], atol=1e-4)


def test_what_was_evaluated_is_taken() -> None:
    x = normal(ROWS, 1, SIZE) + 0
    inner = x @ WEIGHT
    mx.eval(inner)
    out = ops.select_rows(inner + 1, wanted(), known=[marked(x)])
    assert mx.allclose(out, (inner + 1)[wanted()])
    mx.eval(inner + 1)
    assert mx.allclose(ops.select_rows(inner, wanted()), inner[wanted()])


def test_the_way_back_ends() -> None:
    """However long a graph is that nothing has been evaluated of."""
    first = x = normal(ROWS, 1, SIZE) + 0
    for _ in range(5000):
        x = x + 1
    out = ops.select_rows(x, wanted(), known=[marked(first)])
    assert mx.allclose(out, (first + 5000)[wanted()])


def test_a_traced_graph_is_taken_from() -> None:
    x = normal(ROWS, 1, SIZE)
    traced = mx.compile(lambda x: ops.select_rows(x @ WEIGHT, wanted()))
    assert mx.allclose(traced(x), (x @ WEIGHT)[wanted()], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (mx.array(1.0), wanted(), []),
            r"a must be an array with at least one axis but got a scalar",
        ),
        ((WEIGHT, wanted()[None], []), r"rows must be .* but got \(1,2\)"),
        ((WEIGHT, wanted().astype(mx.int64), []), r"rows must be int32 but got int64"),
        ((WEIGHT, wanted(), [(WEIGHT, WEIGHT)]), r"known must be \(2,16\) but got \(16,16\)"),
        (
            (WEIGHT, wanted(), [(WEIGHT, mx.zeros((2, SIZE), mx.float16))]),
            r"the selected rows must be float32 like all of them but got float16",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, message: str) -> None:
    a, rows, known = arguments
    with pytest.raises(ValueError, match=message):
        ops.select_rows(a, rows, known=known)


# --- In a model -----------------------------------------------------------------------------------


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """For each step with selected rows: their number before and after, and whether attention
    computes the selected ones only."""
    found: list[tuple[int, int, bool]] = []
    select = caches.LastLayerPruning.of

    def spy(self: caches.LastLayerPruning, x: mx.array) -> mx.array:
        marking = copy.copy(self)
        marking._attention = [
            (queries, out, lambda rows, _, out=out: marked(out, len(rows))[1])
            for queries, out, _ in self._attention
        ]
        is_marked = bool(mx.isnan(select(marking, x)).all())
        out = select(self, x)
        found.append((len(x), len(out), is_marked))
        return out

    monkeypatch.setattr(caches.LastLayerPruning, "of", spy)
    return found


def test_a_prompt_s_last_layer_is_of_its_last_row(selections: list[tuple[int, int, bool]]) -> None:
    llm = LLM(str(model_path()), enable_prefix_caching=False, max_num_batched_tokens=256)
    prompts = [[7 * i % 1000 + 5 for i in range(n)] for n in (100, 60, 300)]
    selections.clear()  # (of a warm-up)
    greedy = SamplingParams(max_tokens=6, temperature=0)
    together = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy)
    assert selections, "no step selected its rows"
    assert all(of_attention for *_, of_attention in selections)
    assert all(wanted <= 3 < rows for rows, wanted, _ in selections)
    selections.clear()
    for prompt, others in zip(prompts, together):
        [alone] = llm.generate([{"prompt_token_ids": prompt}], greedy)
        assert alone.outputs[0].token_ids == others.outputs[0].token_ids


def test_decodes_take_all_rows(selections: list[tuple[int, int, bool]]) -> None:
    llm = LLM(str(model_path()))
    selections.clear()  # (of a warm-up)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=8, temperature=0))
    assert not selections, "neither decodes nor a short prompt are worth it"


def test_prompt_logprobs_are_of_all_rows(selections: list[tuple[int, int, bool]]) -> None:
    llm = LLM(str(model_path()))
    selections.clear()
    prompt = {"prompt_token_ids": list(range(5, 105))}
    [out] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    assert not selections
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == 100
