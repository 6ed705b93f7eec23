"""Gemma 3 with pictures whose tokens see each other, against dense attention by an explicit mask.

The rule is Hugging Face's: a token sees what is before it (in sliding layers what its window
reaches), and all of its own picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text
from support.parity import Driver
from support.platforms import CUDA, run_as_on
from support.reference import ON_GPU

from mlx_paged import ops
from mlx_paged.model import dense_prefill, step_planner
from mlx_paged.model.caches import LatentLayerCache, Scores, Step, StepContext
from mlx_paged.model.graph_runner import Repeat, Repetition
from mlx_paged.model.layout import LayerSpec
from mlx_paged.model.media import StepMedia
from mlx_paged.model.plan import StepInputs, build_plan
from mlx_paged.model.wrap import build_paged_model

VOCAB_SIZE, WINDOW = 64, 8
CONFIG = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "query_pre_attn_scalar": 32,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
}
Spans = Sequence[tuple[int, int]]  # first and last position of each picture


@pytest.fixture(scope="module")
def model() -> nn.Module:
    mx.random.seed(0)
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(CONFIG))
    # (Norms multiply by one more than their weights, and mlx-lm begins with ones.)
    norms = [(k, 0.1 * mx.random.normal(w.shape)) for k, w in tree_flatten(model) if "norm" in k]
    return model.load_weights(norms, strict=False)


def dense_logits(model: nn.Module, tokens: list[int], spans: Spans, monkeypatch) -> np.ndarray:
    """``[num_tokens, vocab_size]``, with masks written out."""
    row, key = np.arange(len(tokens))[:, None], np.arange(len(tokens))
    in_span = np.zeros((len(tokens), len(tokens)), bool)
    for first, last in spans:
        in_span |= (row >= first) & (row <= last) & (key >= first) & (key <= last)
    masks = {None: (key <= row) | in_span, WINDOW: (key <= row) & (key > row - WINDOW) | in_span}

    def mask(_h: mx.array, _cache: object, window_size: int | None = None) -> mx.array:
        return mx.array(masks[window_size])

    with monkeypatch.context() as patch:
        patch.setattr(gemma3_text, "create_attention_mask", mask)
        return np.array(model(mx.array([tokens]))[0])


def difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """RMS, of log-probabilities."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max()
        return x - np.log(np.exp(x).sum())

    return float(np.sqrt(np.mean((log_softmax(logits) - log_softmax(expected)) ** 2)))


class BoundedDriver:
    """Runs steps of a paged model whose plans get the bounds of these spans."""

    def __init__(self, paged: Any, spans: Mapping[str, Spans], monkeypatch) -> None:
        self.driver = Driver(paged)
        self.spans = spans
        self.bounds: np.ndarray | None = None
        self.bounded_plans = 0
        self._decide = paged.repetition_of
        monkeypatch.setattr(step_planner, "build_plan", self._build_plan)
        monkeypatch.setattr(paged, "repetition_of", self._repetition_of)

    def _repetition_of(self, inputs: StepInputs, num_rows: int | None = None) -> Repetition:
        assert self.bounds is not None
        has_bounds = (self.bounds[1] > self.bounds[0]).any()  # (the model itself takes text only)
        found = self._decide(inputs, num_rows)
        return found._replace(repeat=Repeat.NOT) if has_bounds else found

    def _build_plan(self, *args: Any, **options: Any) -> ops.AttentionPlan:
        plan = build_plan(*args, **{**options, "bounds": self.bounds})
        self.bounded_plans += plan.bounds is not None
        return plan

    def step(self, work: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
        bounds = []
        for name, tokens in work.items():
            before = self.driver.sequences.get(name)
            start = len(before.tokens) if before else 0
            rows = np.stack([np.arange(start, start + len(tokens))] * 2)
            for first, last in self.spans.get(name, ()):
                inside = (rows[0] >= first) & (rows[1] <= last)
                rows[:, inside] = [[first], [last]]
            bounds.append(rows)
        self.bounds = np.concatenate(bounds, axis=1)
        return self.driver.step(work)


def test_gemma3_sees_whole_pictures(model, monkeypatch) -> None:
    rng = np.random.default_rng(3)
    tokens = {name: rng.integers(0, VOCAB_SIZE, 70).tolist() for name in ("one", "two", "text")}
    spans = {"one": [(11, 42)], "two": [(3, 18), (19, 40)]}
    expected = {n: dense_logits(model, t, spans.get(n, ()), monkeypatch) for n, t in tokens.items()}
    causal = dense_logits(model, tokens["one"], (), monkeypatch)
    assert difference(causal[42], expected["one"][42]) > 0.05, "the pictures matter"

    run = BoundedDriver(build_paged_model(model, CONFIG, block_size=8), spans, monkeypatch)
    # (sequence, up to which token) of each step: cuts are beside pictures, not in them.
    steps = [
        [("text", 21)],
        [("text", 22), ("one", 11), ("two", 19)],
        [("text", 23), ("one", 45), ("two", 41)],
        [("text", 60), ("one", 46), ("two", 69)],
        [("two", 70), ("one", 70), ("text", 61)],
    ]
    done = dict.fromkeys(tokens, 0)
    for step in steps:
        got = run.step({name: tokens[name][done[name] : end] for name, end in step})
        for name, end in step:
            error = difference(got[name], expected[name][end - 1])
            assert error < (1e-5 if ON_GPU else 1e-6), f"{name} at {end}: {error}"
            done[name] = end
    assert run.bounded_plans > 0
    before = run.bounded_plans
    run.step({"text": [1], "one": [2]})
    assert run.bounded_plans == before, "decodes run as they always do"


# --- Who does not see bounds ----------------------------------------------------------------------


@pytest.mark.parametrize("decode_rows", [0, 2])
def test_mlx_attention_leaves_chunks_with_pictures_alone(monkeypatch, decode_rows) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    rows = np.array([1] * decode_rows + [600, 700, 20])
    lens = rows + 50
    tables, first = [], 1
    for n in lens:
        tables.append(list(range(first, first + -(-int(n) // 16))))
        first = tables[-1][-1] + 1
    positions = np.concatenate([np.arange(n - r, n) for n, r in zip(lens, rows)])
    bounds = np.stack([positions] * 2)
    picture = decode_rows + 600 + np.arange(100, 300)  # in the second chunk
    bounds[:, picture] = positions[picture[[0, -1]]][:, None]
    rng = np.random.default_rng(0)
    pools = [mx.array(rng.standard_normal((first, 16, 2, 64))).astype(mx.float16) for _ in "kv"]
    queries = mx.array(rng.standard_normal((rows.sum(), 4, 64))).astype(mx.float16)
    prefill = dense_prefill.plan_dense_prefill(tables, lens, rows, block_size=16, bounds=bounds)
    assert [chunk.num_rows for chunk in prefill.chunks] == [600]
    plan = build_plan(tables, lens, rows, block_size=16, bounds=bounds)
    expected = ops.paged_attention(queries, *pools, plan, scale=0.125)
    difference = prefill.attend(queries, tuple(pools), None, 0.125).astype(mx.float32) - expected
    assert mx.abs(difference).max().item() < 4e-3

    bounds[:, :] = positions  # a step of text
    prefill = dense_prefill.plan_dense_prefill(tables, lens, rows, block_size=16, bounds=bounds)
    assert [chunk.num_rows for chunk in prefill.chunks] == [600, 700]
    only = dense_prefill.plan_dense_prefill(
        [tables[-2]], lens[-2:-1], rows[-2:-1], block_size=16,
        bounds=np.stack([np.zeros(700, np.int64), np.full(700, lens[-2] - 1)]),
    )  # fmt: skip
    assert only is None


@pytest.mark.parametrize("of_second", [None, (100, 299)])
def test_text_beside_a_picture_is_left_to_mlx_attention(model, of_second) -> None:
    paged = build_paged_model(model, CONFIG, block_size=16)
    run_as_on(paged, **CUDA)
    rows, tables = np.array([600, 700]), [list(range(1, 39)), list(range(40, 84))]
    bounds = np.stack([np.concatenate([np.arange(n) for n in rows])] * 2)
    if of_second is not None:
        bounds[:, 600 + np.arange(of_second[0], of_second[1] + 1)] = np.array([of_second]).T
    media = StepMedia(np.zeros(0, np.int32), None, None, bounds)
    inputs = StepInputs(rows, rows, tables, np.cumsum(rows) - 1, media=media)
    chunks = paged._planner.plan(inputs, Repetition(Repeat.NOT, 1300, 2, False)).prefill.chunks
    assert [c.num_rows for c in chunks] == ([600, 700] if of_second is None else [600])


def bounded_plan() -> ops.AttentionPlan:
    return build_plan([[1]], [8], [1], block_size=8, window=2, bounds=np.array([[3], [7]]))


@pytest.mark.parametrize("fields", [CUDA, {"has_cuda": False, "max_cpu_step_rows": 16}])
def test_a_step_with_bounds_does_not_repeat(model, fields) -> None:
    paged = build_paged_model(model, CONFIG, block_size=8)
    run_as_on(paged, **fields)
    one, rows = np.array([8]), np.zeros(0, np.int32)
    text = StepInputs(one, one // 8, [[1]], one * 0)
    seen = replace(text, media=StepMedia(rows, None, None, np.array([[3], [7]])))
    unseen = replace(text, media=StepMedia(rows, None, None))
    found = [paged.repetition_of(step).repeat for step in (text, unseen, seen)]
    assert found == [Repeat.AS_GRAPH] * 2 + [Repeat.NOT]


def test_latent_attention_refuses_bounds() -> None:
    context = StepContext()
    spec = LayerSpec(num_kv_heads=1, key_dim=576, value_dim=512, dtype=mx.float16, latent=True)
    cache = LatentLayerCache(context, spec, num_blocks=2, block_size=8)
    context.enter(Step(bounded_plan(), mx.zeros(1, mx.int32)))
    queries = mx.zeros((1, 4, 1, 512), mx.float16)
    scores = Scores(cache.keys, mx.zeros((1, 4, 1, 64), mx.float16))
    with pytest.raises(ValueError, match="bounds must be None for latent attention"):
        cache.attend(queries, scale=1.0, sinks=None, scores=scores)
    context.leave()
