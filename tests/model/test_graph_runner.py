"""Decode steps as compiled graphs, and steps with prompts in parts: the same tokens.

They are for CUDA; what they compute does not depend on that, so here they run anywhere.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.family_configs import config_of
from support.models import StepDriver, tiny_config, tiny_model
from support.parity import Driver, family_model
from support.platforms import CUDA, platform_with

from mlx_paged import executables, ops
from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model import graph_runner, layerwise
from mlx_paged.model.caches import Step
from mlx_paged.model.graph_runner import GraphRunner, Repeat
from mlx_paged.model.media import MediaRows
from mlx_paged.model.plan import build_plan
from mlx_paged.model.wrap import build_paged_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 40, 65, 17)]


def run(**options: Any) -> tuple[list[list[int]], Engine]:
    """Requests that come and go while others decode."""
    engine = Engine(load(model_path()), EngineConfig(kv_cache_memory=64 << 20, **options))
    outputs = []
    waiting = list(enumerate(PROMPTS * 2))
    steps = 0
    while waiting or engine.has_unfinished:
        if waiting and steps % 9 == 0:
            i, prompt = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=30 + 7 * i, ignore_eos=True)
            outputs.append(engine.add_request(str(i), prompt, params))
        engine.step()
        steps += 1
    return [output.outputs[0].token_ids for output in outputs], engine


def test_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = ops.pool_copies()  # other tests make some on purpose
    expected, engine = run()
    assert engine._runner.model._graph_runner._graphs, "as programs on a CPU"
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    actual, engine = run()
    assert engine._runner.model._graph_runner._graphs
    assert not engine._runner.model._graph_runner.refusals.steps
    assert actual == expected
    assert engine.stats().num_faults == 0
    assert ops.pool_copies() == copies


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    monkeypatch.setattr(graph_runner, "_MAX_GRAPHS", 2)
    expected, engine = run()
    assert 0 < len(engine._runner.model._graph_runner._graphs) <= 2
    assert [len(tokens) for tokens in expected] == [30 + 7 * i for i in range(len(PROMPTS) * 2)]


def test_model_that_looks_at_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    calls = []

    def forward(
        tokens: mx.array, step: Step, pools: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        calls.append(tokens.sum().item())
        return tokens + 1, pools

    steps = graph_runner.GraphRunner(forward)
    for i in range(5):
        plan = build_plan([[1]], [3], [1], block_size=16)
        out = run_step(steps, mx.array([i]), Step(plan, mx.array([0]))).logits
        assert out.item() == i + 1
    assert steps.refusals.steps
    assert calls == [0, 1, 2, 3, 4]


def test_only_steps_with_prompts_start_before_they_are_built(monkeypatch) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    config = tiny_config("llama", num_hidden_layers=6, head_dim=64)  # (16 is gathered on a GPU)
    driver = StepDriver(tiny_model(config), "llama", block_size=8)
    started: list[int] = []
    async_eval = mx.async_eval

    def counted(*arrays: mx.array) -> None:
        pools = [id(cache.key_pool) for cache in driver.caches]
        if len(arrays) == 1 and id(arrays[0]) in pools:  # (at the end all go at once)
            started.append(pools.index(id(arrays[0])))
        async_eval(*arrays)

    monkeypatch.setattr(mx, "async_eval", counted)
    driver.step({"a": [1, 2, 3]})
    assert started == [0, 4]  # of six layers
    driver.step({"a": [4]})
    assert started == [0, 4]


@pytest.mark.parametrize("ahead", [1, 3])
def test_layers_of_a_large_step_start_one_by_one_and_few_ahead(monkeypatch, ahead: int) -> None:
    config = tiny_config("llama", num_hidden_layers=6, head_dim=64)
    expected = StepDriver(tiny_model(config), "llama", block_size=8).step({"a": [1, 2, 3]})
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    monkeypatch.setattr(layerwise, "LARGE_STEP", 3)
    driver = StepDriver(tiny_model(config), "llama", block_size=8)
    driver.runner.model.parts_ahead = ahead
    events: list[str] = []
    async_eval, evaluate = mx.async_eval, mx.eval

    def started(*arrays: mx.array) -> None:
        if any(arrays[0] is cache.key_pool for cache in driver.caches):
            events.append("start")
        async_eval(*arrays)

    def waited(*arrays: mx.array) -> None:
        if isinstance(arrays[0], mx.array) and arrays[0].shape[1:] == (2, 64):  # keys
            events.append("wait")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "async_eval", started)
    monkeypatch.setattr(mx, "eval", waited)
    copies = ops.pool_copies()
    actual = driver.step({"a": [1, 2, 3]})
    first = ["start"] * (ahead + 1)
    assert events == first + ["wait", "start"] * (6 - len(first)) + ["wait"]
    for rows in (expected, actual):
        assert list(rows) == ["a"]
    np.testing.assert_array_equal(np.array(actual["a"]), np.array(expected["a"]))
    num_events = len(events)
    driver.step({"a": [4]})
    assert len(events) == num_events and ops.pool_copies() == copies


def run_step(
    steps: graph_runner.GraphRunner, tokens: mx.array, step: Step
) -> graph_runner.StepOutput:
    """Decides how a step of arrays repeats, and runs it."""
    num_sequences = step.plan.context_lens.shape[0]
    repeat = steps.repeat_of(
        tokens.shape[0], num_sequences, step.logit_rows.shape[0], is_of_arrays=True
    )
    return steps.run(tokens, step, [], repeat)


def decode_step(num_seqs: int, **fields: Any) -> tuple[mx.array, Step]:
    ones = [1] * num_seqs
    plan = build_plan([[i + 1] for i in range(num_seqs)], ones, ones, block_size=16)
    return mx.zeros((num_seqs,), dtype=mx.int32), Step(plan, mx.array([0]), **fields)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> graph_runner.GraphRunner:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    monkeypatch.setattr(graph_runner, "_MAX_GRAPHS", 2)
    return graph_runner.GraphRunner(lambda tokens, step, pools: (tokens + 1, pools))


def stand_in(self: GraphRunner, forward: Any, *_: Any) -> Any:
    """In place of `GraphRunner._gpu_executable`."""
    return lambda *args: graph_runner.StepOutput(*forward(*args))


def test_mlx_repeats_a_graph_when_its_shape_occurs_for_the_third_time(steps) -> None:
    for i in range(4):
        run_step(steps, *decode_step(1))
        assert len(steps._graphs) == (1 if i >= 2 else 0)


def test_an_executable_is_made_when_its_shape_first_occurs(steps, monkeypatch) -> None:
    """Otherwise tokens would depend on it: MLX's products sum in another order than ours."""
    monkeypatch.setattr(GraphRunner, "_gpu_executable", stand_in)
    steps.platform = platform_with(**{**CUDA, "max_gpu_step_rows": 2})
    for num_seqs in (1, 2):
        run_step(steps, *decode_step(num_seqs))
        assert len(steps._graphs) == num_seqs
    run_step(steps, *decode_step(3))  # more rows than an executable has
    assert len(steps._graphs) == 2


def test_a_step_without_samples_is_never_compiled(steps) -> None:
    """(It has no logits, so an attempt would refuse all that follow.)"""
    steps.platform = platform_with(**{**CUDA, "max_gpu_step_rows": 64})
    assert steps.repeat_of(1, 1, 0, is_of_arrays=True) is Repeat.NOT


def test_the_graph_that_was_not_used_for_longest_is_dropped(steps) -> None:
    def kept() -> set[int]:
        return {shape[1] for shape in steps._graphs}

    for num_seqs in (1, 2):
        for _ in range(3):
            run_step(steps, *decode_step(num_seqs))
    run_step(steps, *decode_step(1))
    assert kept() == {1, 2}
    for _ in range(3):
        run_step(steps, *decode_step(3))
    assert kept() == {1, 3}


def test_shapes_that_do_not_repeat_are_forgotten(steps) -> None:
    for num_seqs in range(1, 30):
        run_step(steps, *decode_step(num_seqs))
    assert len(steps._times) == 4 * 2 and not steps._graphs


def test_only_decodes_of_arrays_repeat(steps) -> None:
    assert steps.repeat_of(2, 2, 2, is_of_arrays=True) is Repeat.AS_GRAPH
    assert steps.repeat_of(2, 2, 2, is_of_arrays=False) is Repeat.NOT
    assert steps.repeat_of(3, 2, 2, is_of_arrays=True) is Repeat.NOT, "a row more than sequences"


def test_steps_with_recurrent_states_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    config = {**config_of("qwen3_next"), "head_dim": 64}  # (GPU kernels have no 16)
    driver = Driver(build_paged_model(family_model(config), config, block_size=8))
    for token in range(5):
        driver.step({"a": [token]})
    compiled = driver.paged._graph_runner
    assert not compiled._graphs and not compiled._times


def test_new_pools_have_no_graphs_of_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    driver = StepDriver(tiny_model(tiny_config("llama", head_dim=64)), "llama", block_size=8)
    paged = driver.runner.model
    for token in range(5):
        driver.step({"a": [token]})
    assert paged._graph_runner._graphs
    paged.allocate(8)
    assert not paged._graph_runner._graphs


def test_positions_of_rope_are_those_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that a step had when it was compiled."""
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    steps = graph_runner.GraphRunner(
        lambda tokens, step, pools: (step.media.rope_positions + tokens[0], pools)
    )
    for i in range(6):
        positions = mx.full((3, 2, 1), i, dtype=mx.int32)
        found = run_step(steps, *decode_step(2, media=MediaRows(None, None, positions)))
        assert found.logits.tolist() == positions.tolist()
    assert len(steps._graphs) == 1
    # Another graph than that of a step without.
    with pytest.raises(AttributeError):
        run_step(steps, *decode_step(2))


def test_a_refusal_of_many_rows_leaves_executables_of_few(steps, monkeypatch) -> None:
    """Products of few rows have more formats than those of many."""
    tried: list[int] = []

    def gpu_executable(self: GraphRunner, forward: Any, tokens: mx.array, *_: Any) -> Any:
        tried.append(tokens.shape[0])
        if tokens.shape[0] > refused_from:
            raise ValueError("a product with quantized weights")
        return lambda *args: graph_runner.StepOutput(*forward(*args))

    steps.platform = platform_with(**{**CUDA, "max_gpu_step_rows": 512})
    monkeypatch.setattr(GraphRunner, "_gpu_executable", gpu_executable)
    refused_from = 64
    for num_seqs in (100, 65, 110, 64):
        assert steps.reads_once(num_seqs) == (num_seqs != 110)
        for _ in range(3):
            run_step(steps, *decode_step(num_seqs))
    assert tried == [100, 65, 64]
    assert steps.reads_once(64) and not steps.reads_once(65)
    refused_from = 0
    for _ in range(3):
        run_step(steps, *decode_step(1))
    assert tried == [100, 65, 64, 1] and not steps.reads_once(1)


def test_the_arrays_that_an_executable_reads_stay_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, logit rows and plan, of decodes and of few rows with prompts."""
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    monkeypatch.setattr(executables, "max_gpu_step_rows", lambda: 64)
    monkeypatch.setattr(GraphRunner, "_gpu_executable", stand_in)
    driver = StepDriver(tiny_model(tiny_config("llama", head_dim=64)), "llama", block_size=8)
    stayed: list[bool] = []

    def recorded(function: Any) -> Any:
        def call(*args: Any, stays: bool = False, **options: Any) -> Any:
            stayed.append(stays)
            return function(*args, stays=stays, **options)

        return call

    for name in ("upload", "plan_attention"):
        monkeypatch.setattr(ops, name, recorded(getattr(ops, name)))

    def step(**tokens: list[int]) -> list[bool]:
        stayed.clear()
        driver.step(tokens)
        return stayed

    assert step(a=[1] * 40) == [True] * 3
    assert step(b=[1] * 65) == [False] * 4  # (which is no program, and has a plan of its last row)
    assert step(a=[1], b=[2]) == [True, True, False]  # (logit rows that are kept)
    assert step(a=[1], b=[2]) == [True, True]
    assert step(a=[1], c=[2] * 3) == [True] * 3
