"""Gemma 4's assistant: answers do not change, and drafts are those of transformers in float64."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.draft_oracle import chooser, recorded
from support.gemma4_assistant import AssistantReference
from support.mixed_requests import assert_same
from support.models import embedded, random_tokens, tiny_config, tiny_model
from support.oracle_torch import MISSING
from support.reference import ON_GPU

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.loading import load
from mlx_paged.engine.speculation.assistant_drafter import AssistantDrafter
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU"),
]


def llm_of(path: Path, *, drafts: bool, model: LoadedModel | None = None) -> LLM:
    config = {
        "method": "mtp",
        "model": str(path / "assistant"),
        "num_speculative_tokens": 3,
        "adaptive": False,
    }
    return LLM(
        model or load(path / "model", dtype="float32"),
        block_size=8,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=60,
        speculative_config=config if drafts else None,
    )


@pytest.mark.parametrize("is_ordered", [False, True], ids=["all tokens", "groups"])
def test_drafts_are_those_of_the_reference(
    is_ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts are longer than the windows; drafts are accepted and rejected; requests are greedy,
    sampled and penalized."""
    oracle = recorded(monkeypatch, 0.8, AssistantDrafter)
    reference = AssistantReference(tmp_path, is_ordered=is_ordered)
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, int(count)) for count in rng.integers(3, 60, 7)]
    more: list[dict[str, Any]] = [{}] * 6 + [{"repetition_penalty": 1.3}]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, **more[i])
        for i in range(len(prompts))
    ]
    expected = llm_of(tmp_path, drafts=False).generate(prompts, params)
    oracle.tell(expected)
    llm = llm_of(tmp_path, drafts=True)
    assert_same(llm.generate(prompts, params), expected)
    stats = llm.stats().spec_decoding
    assert stats is not None and stats.num_accepted_tokens > 40
    llm.engine.check_integrity()
    penalized = prompts[-1]
    plain = [each for each in oracle.made if each[0][: len(penalized)] != penalized]
    for tokens, row, draft in random.Random(2).sample(plain, 16):
        found = reference.drafts(tokens, chooser(row), len(draft.tokens))
        assert tuple(found) == draft.tokens


def test_a_request_limits_all_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assistant itself would hardly ever draft one of three tokens."""
    oracle = recorded(monkeypatch, 0.8, AssistantDrafter)
    AssistantReference(tmp_path)
    allowed = [40, 70, 80]
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True, allowed_token_ids=allowed)
    prompts = [random_tokens(np.random.default_rng(3), count) for count in (5, 9)]
    llm_of(tmp_path, drafts=True).generate(prompts, params)
    drafted = {token for _, _, draft in oracle.made for token in draft.tokens}
    assert len(oracle.made) > 5 and drafted <= set(allowed)


def test_an_assistant_of_another_family_is_refused(tmp_path: Path) -> None:
    AssistantReference(tmp_path)
    config = tiny_config("llama")
    llama = LoadedModel(tiny_model(config), embedded().tokenizer, config, "tiny")
    with pytest.raises(InvalidParameterError, match="for a Gemma 4 model"):
        llm_of(tmp_path, drafts=True, model=llama)
