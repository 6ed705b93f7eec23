"""The steps that run when an engine starts on a GPU: which they are, and that they leave no trace.

On the CPU there are none; here they are switched on, as what they compute does not depend on it.
"""

from __future__ import annotations

import io
import logging
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.adapters import random_layers, write_mlx
from support.grouped_models import engine_of
from support.models import embedded_twin
from support.platforms import platform_with
from support.reference import ON_GPU

from mlx_paged import LLM, LoRARequest, SamplingParams, ops
from mlx_paged.engine import runner, warm_up
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.input_tokens import KnownTokens, input_tokens
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.sampling import logits_processors, sampler
from mlx_paged.engine.sampling.logits_processors import InFlight
from mlx_paged.engine.sampling.logprobs import PromptTargets
from mlx_paged.engine.sampling.sampler import SamplingMetadata
from mlx_paged.engine.sampling.sequence_sampler import SamplingRow
from mlx_paged.engine.warm_up import Kind, batch_sizes, kinds
from mlx_paged.model.graph_runner import padded_decodes
from mlx_paged.model.lora import AdapterLayers
from mlx_paged.model.paged_model import PagedModel

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# Few tokens in a step leave few steps to prepare.
SMALL = {"num_gpu_blocks_override": 40, "block_size": 8, "max_num_batched_tokens": 64}
PROMPTS = [[3, 4, 5, 6], [7, 8], list(range(10, 60))]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "is_needed", lambda config, platform: not config.enforce_eager)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    assert llm.engine.stats().num_faults == 0
    return [output.outputs[0].token_ids for output in outputs]


def test_powers_of_two_and_the_largest_number_of_sequences_are_prepared() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(256) == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_every_padded_number_of_sequences_is_prepared() -> None:
    sizes = set(batch_sizes(256, padded_from=1))
    assert {padded_decodes(size) for size in range(1, 257)} <= sizes
    assert len(sizes) < 20, "each takes some time and one of the kept graphs"
    assert max(batch_sizes(100, padded_from=1)) == 100
    assert set(batch_sizes(256, padded_from=65)) - set(batch_sizes(256)) == {96, 160, 192, 224}


def test_what_is_prepared_with_cuda() -> None:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=1024)
    further = [Kind(2, settings=name) for name in warm_up._SETTINGS]
    loads = warm_up._loads(1024, 2, None)
    assert kinds(config, None, with_cuda=True) == [
        Kind(1, 64, 4096),
        Kind(1, 1024, 1024, at_once=2),
        *(Kind(1, n, n) for n in (512, 64, 48, 32, 16)),
        *loads,
        Kind(2),
        Kind(2, context_len=4096, temperature=1.0),
        Kind(1),
        Kind(1, context_len=4096, temperature=1.0),
        *further,
    ]
    # No more than the model takes, however many steps follow.
    assert kinds(config, 100, with_cuda=True) == [
        Kind(1, 64, 97),
        *(Kind(1, n, n) for n in (64, 48, 32, 16)),
        *(kind for kind in loads if kind.num_tokens <= 100),
        Kind(2),
        Kind(2, context_len=97, temperature=1.0),
        Kind(1),
        Kind(1, context_len=97, temperature=1.0),
        *further,
    ]
    assert {kind.num_sequences for kind in kinds(config, 100, with_cuda=False)} == {1}


def test_steps_with_drafts_are_prepared_beyond_the_number_of_sequences() -> None:
    config = EngineConfig(max_num_seqs=2, speculative_config={"method": "suffix"})
    sizes = {kind.num_sequences for kind in kinds(config, None, with_cuda=True)}
    assert {padded_decodes(rows) for rows in range(1, 65)} <= sizes and max(sizes) == 64


def test_prompts_beside_decodes_are_prepared_if_such_a_step_can_be() -> None:
    def mixed(max_context_len: int | None = None, **options: int) -> list[tuple[int, int]]:
        made = kinds(EngineConfig(**options), max_context_len, with_cuda=True)
        return [
            (kind.num_tokens, kind.num_decodes)
            for kind in made
            if kind.num_decodes and kind.temperature  # else of a load, see below
        ]

    assert mixed(max_num_batched_tokens=2048) == [(2016, 32), (512, 8)]
    assert mixed(max_num_batched_tokens=512) == [(480, 32)]
    assert mixed(max_num_batched_tokens=2048, max_num_seqs=32) == [(512, 8)]
    assert mixed(1000, max_num_batched_tokens=2048) == [(512, 8)]
    assert mixed(max_num_batched_tokens=64) == []


@pytest.mark.parametrize(
    ("step_tokens", "most"), [(8192, 256), (2048, 16), (300, 8), (8192, 1), (128, 64)]
)
def test_steps_of_a_load_have_many_numbers_of_rows(step_tokens: int, most: int) -> None:
    loads = warm_up._loads(step_tokens, most, None)
    rows = [kind.num_sequences * kind.num_tokens + kind.num_decodes for kind in loads]
    assert rows == sorted(rows) and max(rows) <= step_tokens
    grid = [64, *rows]
    assert all(after <= 1.13 * before for before, after in pairwise(grid)), "kernels are skipped"
    assert max(grid) >= step_tokens * 0.88 and len(loads) < 70
    counts = {kind.num_sequences + kind.num_decodes for kind in loads}
    few = {count for count in batch_sizes(most, padded_from=1) if count <= step_tokens // 4}
    assert few <= counts, "as many rows have logits"
    short = warm_up._loads(step_tokens, most, 80)
    assert all(kind.num_tokens <= 80 for kind in short)


def test_a_large_model_starts_without_the_rest_of_a_load(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None
) -> None:
    ran: list[Kind] = []
    monkeypatch.setattr(warm_up, "_run", lambda runner, kind, adapter: ran.append(kind))
    monkeypatch.setattr(warm_up, "_SECONDS_OF_OPTIONAL", 0.0)
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    LLM(embedded_twin(), num_gpu_blocks_override=40, block_size=8, max_num_seqs=2)
    assert ran and not any(kind.is_load for kind in ran)
    assert ran[-1].settings, "all others run"
    ran.clear()
    monkeypatch.setattr(warm_up, "_SECONDS_OF_OPTIONAL", 60.0)
    LLM(embedded_twin(), num_gpu_blocks_override=40, block_size=8, max_num_seqs=2)
    assert any(kind.is_load for kind in ran)


@pytest.mark.parametrize("is_program", [True, False])
def test_decodes_of_many_rows_that_are_no_program_are_optional(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, is_program: bool
) -> None:
    """MLX would compile a graph of each number of rows."""
    ran: list[Kind] = []
    monkeypatch.setattr(warm_up, "_run", lambda runner, kind, adapter: ran.append(kind))
    monkeypatch.setattr(warm_up, "_SECONDS_OF_OPTIONAL", 0.0)
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    monkeypatch.setattr(PagedModel, "runs_program", lambda self, num_rows: is_program)
    LLM(embedded_twin(), num_gpu_blocks_override=40, block_size=8, max_num_seqs=130)
    sizes = {kind.num_sequences for kind in ran if kind.num_tokens == 1 and not kind.settings}
    assert sizes == {1, 2, 4, 8, 16, 24, 32, 48, 64} | ({96, 128, 130} if is_program else set())


def test_chunks_of_long_prompts_are_prepared() -> None:
    def chunks(step_tokens: int, most: int | None = None) -> list[tuple[int, int]]:
        return warm_up._prepared_chunks(step_tokens, most)

    assert chunks(8192) == [(4096, 4096), (4096, 8192), (8192, 16384)]
    assert chunks(8192, 8192) == [(4096, 4096), (4096, 8192)]
    assert chunks(4096) == [(4096, 8192)] and chunks(2048) == []


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3_next"])
def test_a_prompt_beside_decodes_leaves_no_trace(name: str) -> None:
    llm = engine_of(name, max_num_seqs=4)
    expected = answers(llm)
    launched = []
    launch = llm.engine._runner.launch
    llm.engine._runner.launch = lambda batch, before: (  # type: ignore[method-assign]
        launched.append((list(batch.query_lens), list(batch.starts))) or launch(batch, before)
    )
    llm.engine.reset_prefix_cache()
    warm_up._run(llm.engine._runner, Kind(1, 20, 24, 1.0, num_decodes=3), None)
    assert launched == [([1, 1, 1, 20], [23, 23, 23, 4])] * len(launched) and launched
    llm.engine._runner.reset()
    assert answers(llm) == expected


def test_two_large_steps_are_in_flight() -> None:
    """Their buffers then exist when a load needs them."""
    runner = engine_of("gpt-oss", max_num_seqs=4).engine._runner
    launch, read = runner.launch, runner.read
    events: list[str] = []
    runner.launch = lambda *args: (  # type: ignore[method-assign]
        events.append("launch") or launch(*args)
    )
    runner.read = lambda step: events.append("read") or read(step)  # type: ignore[assignment]
    warm_up._run(runner, Kind(1, 65, 65, at_once=2), None)
    assert events == ["launch", "launch", "read", "read"]


@pytest.mark.skipif(ON_GPU, reason="tests on a GPU start engines without a warm-up")
def test_on_the_cpu_nothing_is_prepared() -> None:
    cpu, gpu = platform_with(on_cpu=True), platform_with(on_cpu=False)
    assert not warm_up.is_needed(EngineConfig(runner="generate"), cpu)
    assert warm_up.is_needed(EngineConfig(runner="generate"), gpu)
    assert not warm_up.is_needed(EngineConfig(runner="generate", enforce_eager=True), gpu)


@pytest.mark.parametrize("with_cuda", [True, False])
def test_the_steps_come_before_the_first_request_and_change_no_answer(
    monkeypatch: pytest.MonkeyPatch, with_cuda: bool
) -> None:
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 40, "block_size": 8, "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
    }  # fmt: skip
    expected = answers(LLM(embedded_twin(), **options))
    monkeypatch.setattr(warm_up, "is_needed", lambda config, platform: True)
    monkeypatch.setattr(ops, "has_cuda", lambda: with_cuda)
    launched: list[tuple[int, int]] = []
    launch = ModelRunner.launch

    def note(self: ModelRunner, output: Any, previous: Any) -> Any:
        launched.append((output.num_seqs, output.num_tokens))
        return launch(self, output, previous)

    monkeypatch.setattr(ModelRunner, "launch", note)
    progress: list[tuple[int, int]] = []
    llm = LLM(embedded_twin(), **options, on_kernel=lambda *at: progress.append(at))
    total = len(progress) - 1
    assert progress == [(i, total) for i in range(total + 1)]
    if with_cuda:
        prompts = [(1, n) for n in (64, 48, 32, 16) for _ in range(4)]
        wanted = [*prompts, *[(3, 3)] * 8, *[(2, 2)] * 8, *[(1, 1)] * 8, *[(2, 2)] * 12]
        # The shape of the next decode has been compiled.
        assert llm.engine._runner.model._graph_runner._graphs
    else:
        wanted = [(1, 1)] * 8
    assert launched == wanted
    assert llm.engine.stats().num_steps == 0
    assert answers(llm) == expected


def test_the_sampler_is_prepared_for_all_settings(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is the first for which MLX compiles an operation of the sampler."""
    called: set[str] = set()
    for module, name in (
        *((sampler, name) for name in ("_draw", "filters_of")),
        *((logits_processors, name) for name in ("_change", "_apply_masks")),
        (runner, "logprobs_of"),
    ):
        function = getattr(module, name)

        def note(*args: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            called.add(name)
            return function(*args, **options)

        monkeypatch.setattr(module, name, note)
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    with caplog.at_level(logging.WARNING):
        LLM(embedded_twin(), **SMALL, max_num_seqs=2)
    assert "could not be prepared" not in caplog.text
    assert len(called) == 5, called


def compiled_when_first_run(arrays: Sequence[mx.array]) -> set[str]:
    """Primitives in the arrays' graphs that MLX's CUDA back end compiles when they first run."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    names = set(re.findall(r'label ="(\w+)', dot.getvalue()))
    assert names, "no graph"
    return {name for name in names if re.match("Gather|Scatter|MaskedScatter|Compiled", name)}


def test_gathers_and_scatters_are_found() -> None:
    a, at = mx.zeros((3, 4)), mx.array([[0], [1], [2]])
    mx.eval(a, at)
    made = [a[at], mx.take_along_axis(a, at, axis=1), a.at[at].add(1), mx.compile(mx.sigmoid)(a)]
    made.append(mx.put_along_axis(a, at, mx.zeros((3, 1)), axis=1))
    assert all(compiled_when_first_run([array + 1]) for array in made[:3] + made[4:])
    assert not compiled_when_first_run([mx.argpartition(a, 2, axis=-1), a[1:] * 2])


@pytest.mark.parametrize("source", [[0, 1], [1, -1], [-1, -1]])
@pytest.mark.parametrize("name", warm_up._SETTINGS)
def test_choosing_tokens_runs_nothing_that_mlx_compiles_at_run_time(
    name: str, source: list[int]
) -> None:
    """Each would take some seconds of the first start of a server, or of a request."""
    model_runner = LLM(embedded_twin(), **SMALL, max_num_seqs=2).engine._runner
    step = warm_up._step(model_runner, Kind(2, settings=name), 1, None)
    [row, *_] = warm_up._SETTINGS["edits and log-probabilities"]
    rows = [
        row._replace(position=9, logprobs=2, logprob_token_ids=(3, 4)),
        SamplingRow(0.5, seed=1, position=4),
    ]
    tokens = mx.array([5, 6], mx.int32)
    logits = mx.random.normal((2, 640)).astype(mx.float16)
    mx.eval(tokens, logits)
    newest = InFlight(tokens, np.array(source, np.int32), tokens)
    for batch in (step, replace(step, sampling=SamplingMetadata.of(rows))):
        chosen = model_runner._choose(logits, batch, newest, None)
        results = [chosen.tokens, *chosen.results]
        assert not compiled_when_first_run(results)
        mx.eval(results)
    prompt = runner._report_prompts(logits, [(0, PromptTargets([3, 4], likeliest=True))])
    assert not compiled_when_first_run(prompt.arrays.arrays)
    step = replace(step, input_from=array("i", source))
    inputs = input_tokens(step, np.arange(2), KnownTokens(tokens[:1], tokens[:1]), 0)
    if max(source) >= 0:
        assert not compiled_when_first_run([inputs + 1])


def test_the_adapter_of_all_requests_is_in_the_steps(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps with adapters are programs of their own: the first request makes no other ones."""
    path = write_mlx(tmp_path, random_layers(embedded_twin().model, 3))
    options: dict[str, Any] = {
        **SMALL, "max_num_seqs": 3, "adapter_path": path,
    }  # fmt: skip
    expected = answers(LLM(embedded_twin(), **options, enforce_eager=True))
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    launched: list[set[int]] = []
    loads: list[int] = []
    launch, load = ModelRunner.launch, PagedModel.load_adapter
    monkeypatch.setattr(
        ModelRunner,
        "launch",
        lambda self, batch, previous: (
            launched.append(set(batch.adapter_ids)) or launch(self, batch, previous)
        ),
    )
    monkeypatch.setattr(
        PagedModel,
        "load_adapter",
        lambda self, slot, layers: loads.append(slot) or load(self, slot, layers),
    )
    with caplog.at_level(logging.WARNING):
        llm = LLM(embedded_twin(), **options)
    assert "could not be prepared" not in caplog.text
    assert launched and all(slots == {1} for slots in launched) and loads == [1]
    assert answers(llm) == expected
    assert loads == [1], "requests find the adapter in its slot"


def test_named_adapters_are_prepared_beside_steps_without_one(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Adapters of different layers, more than slots: no request makes a program any more."""
    paths = []
    for i, name in enumerate(("q_proj", "down_proj")):
        layers = random_layers(embedded_twin().model, i, names=[name])
        paths.append(write_mlx(tmp_path / name, layers))
    options: dict[str, Any] = {
        **SMALL, "max_num_seqs": 1, "enable_lora": True, "max_loras": 1,
    }  # fmt: skip
    requests = [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)]

    def told(llm: LLM) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=6)
        each = [llm.generate(["def f("], params, lora_request=r)[0] for r in (None, *requests)]
        return [answer.outputs[0].token_ids for answer in each]

    expected = told(LLM(embedded_twin(), **options, enforce_eager=True))
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    outdated: list[bool] = []
    load = AdapterLayers.load
    monkeypatch.setattr(
        AdapterLayers,
        "load",
        lambda self, slot, layers: outdated.append(load(self, slot, layers)) or outdated[-1],
    )
    with caplog.at_level(logging.WARNING):
        llm = LLM(embedded_twin(), **options, warm_up_loras=[str(path) for path in paths])
    assert "could not be prepared" not in caplog.text and outdated == [True, True]
    graphs = llm.engine._runner.model._graph_runner._graphs
    prepared = set(graphs)
    assert prepared
    assert told(llm) == expected and len({tuple(tokens) for tokens in expected}) == 3
    assert not any(outdated[2:]) and set(graphs) == prepared


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3_next"])
def test_models_with_windows_and_states(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    expected = answers(engine_of(name, enforce_eager=True, max_num_seqs=2))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(ops, "has_cuda", lambda: True)
        llm = engine_of(name, max_num_seqs=2, max_num_batched_tokens=64)
    assert "could not be prepared" not in caplog.text
    assert answers(llm) == expected


def test_a_step_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    run = warm_up._run

    def fail(runner: ModelRunner, kind: Kind, *rest: Any) -> None:
        if kind.context_len > 1:
            raise RuntimeError("[malloc] no memory for that")
        run(runner, kind, *rest)

    monkeypatch.setattr(warm_up, "_run", fail)
    with caplog.at_level(logging.WARNING):
        llm = LLM(embedded_twin(), num_gpu_blocks_override=40, block_size=8)
    assert "no memory for that" in caplog.text
    assert answers(llm)


def test_without_repeated_steps_none_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    options = {"num_gpu_blocks_override": 40, "block_size": 8}
    llm = LLM(embedded_twin(), **options, enforce_eager=True)
    assert answers(llm)
    assert not llm.engine._runner.model._graph_runner._graphs
