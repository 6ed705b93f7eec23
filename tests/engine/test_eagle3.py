"""EAGLE-3: answers do not change, and drafts are those of a dense reference in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.draft_oracle import Oracle, chooser, recorded
from support.eagle3 import Reference, make_eagle3, states_of
from support.mixed_requests import assert_same
from support.models import embedded, random_tokens, tiny_config, tiny_model
from support.reference import ON_GPU

from mlx_paged import LLM, SamplingParams
from mlx_paged.errors import InvalidParameterError, ModelLoadError
from mlx_paged.model.loader import LoadedModel

pytestmark = pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")

CONFIG = tiny_config("llama", num_hidden_layers=8)
PLACES = (2, 4, 5)  # the defaults for eight layers
NUM_DRAFTS = 3


def target() -> LoadedModel:
    return LoadedModel(tiny_model(CONFIG), embedded().tokenizer, CONFIG, "tiny")


def llm_of(path: Path | None, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
        "num_gpu_blocks_override": 26,
    }
    if path is not None:
        defaults["speculative_config"] = {
            "method": "eagle3",
            "model": str(path),
            "num_speculative_tokens": NUM_DRAFTS,
            "adaptive": False,
        }
    return LLM(target(), **{**defaults, **options})


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, int(count)) for count in rng.integers(3, 50, 8)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Oracle]:
    yield recorded(monkeypatch, 0.8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_drafts_are_those_of_the_reference(
    tmp_path: Path, oracle: Oracle, norm_before_residual: bool
) -> None:
    """Prompts go in chunks; drafts are accepted and rejected; sequences are preempted. Speculation
    is switched off and on: meanwhile, the head still computes what the model computes."""
    weights = make_eagle3(tmp_path, norm_before_residual=norm_before_residual)
    prompts, params = work()
    expected = llm_of(None).generate(prompts, params)
    oracle.tell(expected)
    llm, rng = llm_of(tmp_path), random.Random(2)
    speculator = llm.engine._speculator
    assert speculator is not None

    def switch(num_rows: int) -> None:
        speculator.is_active = rng.random() < 0.8

    llm.engine.on_launch = switch
    assert_same(llm.generate(prompts, params), expected)
    stats = llm.stats()
    assert stats.spec_decoding is not None and stats.spec_decoding.num_accepted_tokens > 40
    assert stats.num_preemptions > 0
    llm.engine.check_integrity()

    model = target().model
    embeddings = np.array(model.model.embed_tokens.weight)
    reference = Reference(weights, embeddings, norm_before_residual=norm_before_residual)
    assert len(oracle.made) > 40
    for tokens, row, draft in rng.sample(oracle.made, 40):
        states = states_of(model, tokens[:-1], PLACES)

        found = reference.drafts(tokens, states, chooser(row), len(draft.tokens))
        assert tuple(found) == draft.tokens


def test_cached_prefixes_are_cached_for_the_head(tmp_path: Path, oracle: Oracle) -> None:
    """The second time, prompts are not computed, and drafts are the same."""
    make_eagle3(tmp_path)
    prompts, params = work()
    llm = llm_of(tmp_path, num_gpu_blocks_override=200)
    first = llm.generate(prompts, params)
    made = {(tuple(tokens), draft.tokens) for tokens, _, draft in oracle.made}
    oracle.made.clear()
    assert_same(llm.generate(prompts, params), first)
    again = {(tuple(tokens), draft.tokens) for tokens, _, draft in oracle.made}
    assert llm.stats().counters.num_cached_tokens > 100
    assert len(again) > 60 and len(again & made) >= 0.95 * len(again)


def test_evicted_blocks_come_back_for_the_head(tmp_path: Path, oracle: Oracle) -> None:
    make_eagle3(tmp_path)
    rng = np.random.default_rng(4)
    prompts = [random_tokens(rng, 70) for _ in range(4)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = llm_of(tmp_path, num_gpu_blocks_override=26, kv_offloading_size=0.1)
    made: list[set[tuple[tuple[int, ...], tuple[int, ...]]]] = []
    for _ in range(2):
        oracle.made.clear()
        for prompt in prompts:  # Each evicts the ones before.
            llm.generate([prompt], params)
        made.append({(tuple(tokens), draft.tokens) for tokens, _, draft in oracle.made})
    assert llm.stats().counters.num_restored_tokens >= 4 * 64
    assert len(made[0]) > 30 and made[0] == made[1]


def test_penalties_and_grammars(tmp_path: Path) -> None:
    prompts, _ = work()
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=16,
            repetition_penalty=1.3,
            structured_outputs={"regex": "[a-z]{1,9}"} if i % 3 == 0 else None,
        )
        for i in range(len(prompts))
    ]
    expected = llm_of(None).generate(prompts, params)
    llm = llm_of(tmp_path if make_eagle3(tmp_path) else None)
    assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None and found.num_draft_tokens > 40


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for name, fields, message in (
        ("vocab", {"vocab_size": 97}, "vocab_size is 96 and not 97"),
        ("size", {"target_hidden_size": 32}, "target_hidden_size is 64 and not 32"),
    ):
        make_eagle3(tmp_path / name, **fields)
        with pytest.raises((InvalidParameterError, ModelLoadError), match=message):
            llm_of(tmp_path / name)
    with pytest.raises(ModelLoadError, match=r"config.json does not describe an EAGLE-3 head"):
        (tmp_path / "empty").mkdir()
        llm_of(tmp_path / "empty")
