"""Steps that verify drafts on the simulated GPU: programs whose rows are padded, so they repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.guesses import guess
from support.mixed_requests import assert_same
from support.models import embedded, random_tokens, tiny_config, tiny_model
from support.platforms import CUDA_PROGRAMS, run_as_on
from support.simulated import needs_simulator, simulated

from mlx_paged import LLM, SamplingParams, ops
from mlx_paged.engine.speculation.model_drafter import ModelDrafter
from mlx_paged.model.graph_runner import Refusals
from mlx_paged.model.loader import LoadedModel

pytestmark = needs_simulator

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", head_dim=32, num_hidden_layers=2),
    "windows": tiny_config(
        "llama",
        head_dim=32,
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
    ),
}


def engine_of(config: dict[str, Any], speculation: dict[str, Any] | None = None) -> LLM:
    tokenizer = embedded().tokenizer
    model = LoadedModel(tiny_model(config), tokenizer, config, "tiny")
    llm = LLM(
        model,
        max_model_len=128,
        block_size=8,
        num_gpu_blocks_override=64,
        speculative_config=speculation,
    )
    run_as_on(llm.engine._runner.model, **CUDA_PROGRAMS)
    return llm


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.one_in(2)
def test_any_numbers_of_drafts_share_few_programs(name: str) -> None:
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, count) for count in (5, 9)]
    params = [
        SamplingParams(temperature=0.9 * (i == 1), seed=i, max_tokens=14, ignore_eos=True)
        for i in range(2)
    ]
    plain, llm = engine_of(CONFIGS[name]), engine_of(CONFIGS[name])
    with simulated():
        expected = plain.generate(prompts, params)
        drafter = guess(llm, 0.7, splits=True)
        for output in expected:
            drafter.answers[tuple(output.prompt_token_ids), 0] = output.outputs[0].token_ids
        steps = llm.engine._runner.model._graph_runner
        sizes, run = [], steps.run

        def watched(tokens: Any, *args: Any) -> Any:
            sizes.append(tokens.shape[0])
            return run(tokens, *args)

        steps.run = watched
        assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None and found.num_accepted_tokens > 10
    assert found.num_draft_tokens > found.num_accepted_tokens
    assert steps.refusals == Refusals()
    assert len(sizes) > 5 and set(sizes) <= {1, 2, 4, 8, 16}


def test_a_draft_models_rounds_are_programs_too() -> None:
    """A model that drafts for itself is accepted always, whatever its steps are padded to."""
    rng = np.random.default_rng(2)
    prompts = [random_tokens(rng, count) for count in (5, 9)]
    params = [
        SamplingParams(temperature=0.9 * i, seed=i, max_tokens=9, ignore_eos=True) for i in range(2)
    ]
    config = CONFIGS["llama"]
    draft = LoadedModel(tiny_model(config), embedded().tokenizer, config, "draft")
    options = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    plain, llm = engine_of(config), engine_of(config, {**options, "adaptive": False})
    drafter = llm.engine._speculator._drafter  # type: ignore[union-attr]
    assert isinstance(drafter, ModelDrafter)
    llm.engine._runner.splits_drafts = drafter.runner.splits_drafts = True
    run_as_on(drafter.runner.model, **CUDA_PROGRAMS)
    with simulated():
        expected = plain.generate(prompts, params)
        assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None and found.num_accepted_tokens == found.num_draft_tokens > 8
    assert drafter.runner.model._graph_runner.refusals == Refusals()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.one_in(2)
def test_drafts_share_a_pass_over_their_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NVIDIA's kernels, which give each row the bits that it has alone."""
    rng = np.random.default_rng(4)
    prompts = [random_tokens(rng, count) for count in (5, 14, 37)]
    params = [
        SamplingParams(temperature=0.9 * (i == 1), seed=i, max_tokens=20, ignore_eos=True)
        for i in range(3)
    ]
    plain, llm = engine_of(CONFIGS[name]), engine_of(CONFIGS[name])
    monkeypatch.setattr(ops, "max_shared_rows", lambda *_, **__: 3)
    most: list[int] = []
    plan_attention = ops.plan_attention

    def watched(*args: Any, **options: Any) -> Any:
        plan = plan_attention(*args, **options)
        items = np.array(plan.work_items)
        most.append((items[:, 2] - items[:, 1]).max() if options["shared_rows"] > 1 else 0)
        return plan

    monkeypatch.setattr(ops, "plan_attention", watched)
    with simulated():
        expected = plain.generate(prompts, params)
        drafter = guess(llm, 0.8, splits=True)
        for output in expected:
            drafter.answers[tuple(output.prompt_token_ids), 0] = output.outputs[0].token_ids
        assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None and found.num_accepted_tokens > 10
    assert max(most) == 3
