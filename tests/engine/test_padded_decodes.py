"""On NVIDIA GPUs, plain decodes and short prompts beside them are padded to a small set of shapes,
and the warm-up compiles all of them.

The programs are the model's own code here, one for each shape, so the CPU runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.family_config_parts import EXPERTS
from support.models import embedded, random_tokens, tiny_config, tiny_model
from support.platforms import CUDA_PROGRAMS, run_as_on

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.outputs import PositionReport
from mlx_paged.engine.warm_up import warm_up
from mlx_paged.model.graph_runner import GraphRunner, padded_decodes
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.plan import PaddedTables, StepInputs

MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", head_dim=32, num_hidden_layers=1),
    "windows": tiny_config(
        "llama",
        head_dim=32,
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
    ),
    "experts": tiny_config(
        "qwen3_moe",
        **EXPERTS,
        head_dim=32,
        num_hidden_layers=1,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
}


def engine_of(name: str, max_num_seqs: int) -> LLM:
    config = MODELS[name]
    model = LoadedModel(tiny_model(config), embedded().tokenizer, config, "tiny")
    options = {"max_model_len": 128, "block_size": 8, "num_gpu_blocks_override": 1100}
    return LLM(model, max_num_seqs=max_num_seqs, enable_prefix_caching=False, **options)


class Programs:
    """Makes an engine run as on an NVIDIA GPU, with model code in place of programs.

    Attributes:
        made: Rows of each program, in the order in which they were compiled.
        rows: Rows of each step.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.rows: list[int] = []
        runner = llm.engine._runner
        run_as_on(runner.model, **CUDA_PROGRAMS)
        monkeypatch.setattr(GraphRunner, "_ways", lambda *_: [self._program])
        steps, run = runner.model._graph_runner, runner.model._graph_runner.run

        def watched(tokens: mx.array, *args: Any) -> Any:
            self.rows.append(tokens.shape[0])
            return run(tokens, *args)

        steps.run = watched
        warm_up(runner, llm.engine.config, 128)

    def _program(self, forward: Any, tokens: mx.array, *_: Any) -> Any:
        self.made.append(tokens.shape[0])
        return forward


def load_of(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests that end one after another, one in each step; some are sampled."""
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, 3) for _ in range(count)]
    params = [
        SamplingParams(temperature=0.9 * (i % 3 == 0), seed=i, max_tokens=2 + i, ignore_eos=True)
        for i in range(count)
    ]
    return prompts, params


def tokens_of(llm: LLM, count: int) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(*load_of(count))]


def test_few_numbers_of_rows() -> None:
    sizes = sorted({padded_decodes(count) for count in range(1, 65)})
    assert sizes == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert all(count <= padded_decodes(count) < 2 * count for count in range(1, 1000))


@pytest.mark.parametrize("name", ["llama", "windows"])
@pytest.mark.one_in(2)
def test_a_load_of_any_number_of_sequences_compiles_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 64 if name == "llama" else 20
    expected = tokens_of(engine_of(name, count), count)
    llm = engine_of(name, count)
    programs = Programs(llm, monkeypatch)
    prepared = {padded_decodes(size) for size in range(1, count + 1)}
    assert prepared <= set(programs.made)
    programs.made.clear()
    programs.rows.clear()
    assert tokens_of(llm, count) == expected
    decodes = programs.rows[1:]  # after the prompts
    assert len(decodes) >= count and set(decodes) == prepared
    assert not [rows for rows in programs.made if rows in prepared]


def tokens_in(reports: Sequence[PositionReport | None] | None) -> list[list[int]]:
    """The reported tokens of each position."""
    return [list(report or ()) for report in reports or ()]


def answers_of_joining(llm: LLM, count: int, longest: int = 30) -> list[tuple[Any, ...]]:
    """The answers to prompts that come one after another, each beside one more decode."""
    rng, outputs = np.random.default_rng(5), []
    for i in range(count):
        params = SamplingParams(
            temperature=0.9 * (i % 3 == 1), seed=i, max_tokens=2 * count, ignore_eos=True,
            logprobs=2 if i % 4 == 2 else None, prompt_logprobs=1 if i % 4 == 3 else None,
        )  # fmt: skip
        prompt = random_tokens(rng, int(rng.integers(longest // 10, longest)))
        outputs.append(llm.engine.add_request(str(i), prompt, params))
        llm.engine.step()
    while llm.engine.has_unfinished:
        llm.engine.step()
    return [
        (each.token_ids, tokens_in(each.logprobs), tokens_in(output.prompt_logprobs))
        for output in outputs
        for each in output.outputs
    ]


@pytest.mark.parametrize("name", ["llama", "windows"])
@pytest.mark.one_in(2)
def test_short_prompts_beside_any_number_of_decodes_compile_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers_of_joining(engine_of(name, 16), 16)
    llm = engine_of(name, 16)
    programs = Programs(llm, monkeypatch)
    programs.made.clear()
    programs.rows.clear()
    assert answers_of_joining(llm, 16) == expected
    assert {16, 32, 48} <= set(programs.rows) and not programs.made


@pytest.mark.parametrize("name", ["llama", "windows", "experts"])
@pytest.mark.one_in(3)
def test_long_prompts_beside_any_number_of_decodes_have_few_numbers_of_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of products would load kernels for each other number."""
    expected = answers_of_joining(engine_of(name, 16), 12, longest=90)
    llm = engine_of(name, 16)
    model = llm.engine._runner.model
    run_as_on(model, **CUDA_PROGRAMS)
    monkeypatch.setattr(GraphRunner, "_ways", lambda *_: [])
    run, counts = model.run, []

    def watched(tokens: mx.array, *args: Any) -> Any:
        output = run(tokens, *args)
        if tokens.shape[0] > 64:
            counts.append(output.logits.shape[0])
        return output

    model.run = watched  # type: ignore[method-assign]
    assert answers_of_joining(llm, 12, longest=90) == expected
    few = {padded_decodes(count) for count in range(1, 200)}
    assert {8, 16} <= set(counts) <= few


def test_padding_reads_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(engine_of("experts", 5), 5)
    llm = engine_of("experts", 5)
    programs = Programs(llm, monkeypatch)
    programs.rows.clear()
    assert tokens_of(llm, 5) == expected
    assert {3, 5} <= set(programs.rows)
    # Many rows together read nearly all experts anyway.
    model = llm.engine._runner.model
    run_as_on(model, max_gpu_step_rows=512)
    padded = [model.repetition_of(decodes(count)).num_rows for count in (63, 64, 65, 200)]
    assert padded == [63, 64, 96, 224]


def decodes(count: int) -> StepInputs:
    ones = np.ones(count, np.int64)
    tables = PaddedTables(np.ones((count, 1), np.int32), ones)
    return StepInputs(ones, ones, tables, np.arange(count), None, may_pad=True)
