"""DFlash and DSpark: answers do not change, and blocks are those of a dense float64 reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.dflash import DSPARK, SECOND, WINDOW, Reference, make_dflash
from support.draft_oracle import Oracle, chooser, recorded
from support.eagle3 import states_of
from support.mixed_requests import assert_same
from support.models import embedded, random_tokens, tiny_config, tiny_model
from support.reference import ON_GPU

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.speculation.block_drafter import BlockDrafter
from mlx_paged.errors import InvalidParameterError, ModelLoadError
from mlx_paged.model.loader import LoadedModel

pytestmark = pytest.mark.skipif(ON_GPU, reason="heads of 16 dims have no kernel on a GPU")

CONFIG = tiny_config("llama", num_hidden_layers=8, tied=False)
PLACES = (2, 4, 6)  # the inputs of the layers after 1, 3 and 5
NUM_DRAFTS = 4


def llm_of(path: Path | None, **more: Any) -> LLM:
    config = {
        "method": "dflash",
        "model": str(path),
        "num_speculative_tokens": NUM_DRAFTS,
        "adaptive": False,
        **more,
    }
    return LLM(
        LoadedModel(tiny_model(CONFIG), embedded().tokenizer, CONFIG, "tiny"),
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=26,
        speculative_config=None if path is None else config,
    )


def work(**fields: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, int(count)) for count in rng.integers(3, 50, 8)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, **fields)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Oracle]:
    yield recorded(monkeypatch, 0.8)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [({}, (None, None)), (SECOND, (WINDOW, None)), (DSPARK, (None, None))],
    ids=["DFlash", "DFlash 2", "DSpark"],
)
def test_blocks_are_those_of_the_reference(
    fields: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path, oracle: Oracle
) -> None:
    """Prompts go in chunks; drafts are accepted and rejected; sequences are preempted; steps
    without drafts are computed, too."""
    weights = make_dflash(tmp_path, **fields)
    prompts, params = work()
    expected = llm_of(None).generate(prompts, params)
    oracle.tell(expected)
    llm, rng = llm_of(tmp_path), random.Random(2)
    speculator = llm.engine._speculator
    assert speculator is not None and isinstance(speculator._drafter, BlockDrafter)

    def switch(num_rows: int) -> None:
        speculator.is_active = rng.random() < 0.8

    llm.engine.on_launch = switch
    assert_same(llm.generate(prompts, params), expected)
    stats = llm.stats()
    assert stats.spec_decoding is not None and stats.spec_decoding.num_accepted_tokens > 40
    assert stats.num_preemptions > 0
    llm.engine.check_integrity()

    model = tiny_model(CONFIG)
    embeddings, output = (
        np.array(module.weight) for module in (model.model.embed_tokens, model.lm_head)
    )
    reference = Reference(weights, embeddings, output, windows)
    for tokens, row, draft in rng.sample(oracle.made, 30):
        states = states_of(model, tokens[:-1], PLACES)

        found = reference.drafts(tokens, states, chooser(row), len(draft.tokens))
        assert tuple(found) == draft.tokens


@pytest.mark.parametrize("fields", [{}, DSPARK], ids=["DFlash", "DSpark"])
def test_penalties_and_grammars(fields: dict[str, Any], tmp_path: Path) -> None:
    make_dflash(tmp_path, **fields)
    prompts, params = work(repetition_penalty=1.3)
    _, limited = work(structured_outputs={"regex": "[a-z]{1,9}"})
    prompts, params = prompts * 2, [*params, *limited]
    expected = llm_of(None).generate(prompts, params)
    llm = llm_of(tmp_path)
    assert_same(llm.generate(prompts, params), expected)
    found = llm.stats().spec_decoding
    assert found is not None and found.num_draft_tokens > 100


@pytest.mark.parametrize("fields", [{}, DSPARK], ids=["DFlash", "DSpark"])
def test_a_request_limits_the_first_draft(
    fields: dict[str, Any], tmp_path: Path, oracle: Oracle
) -> None:
    """The head itself would hardly ever draft one of three tokens."""
    make_dflash(tmp_path, **fields)
    allowed = [40, 70, 80]
    llm_of(tmp_path).generate(*work(allowed_token_ids=allowed))
    first = {draft.tokens[0] for _, _, draft in oracle.made}
    assert len(oracle.made) > 20 and first <= set(allowed)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"num_speculative_tokens": 5}, "num_speculative_tokens.*at most 4"),
        ({"hidden_size": 32}, {}, "hidden_size is 64 and not 32"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "sliding_window is missing"),
        ({**SECOND, "is_causal": True}, {}, "is_causal must be False but is True"),
        ({**DSPARK, "markov_head_type": "rnn"}, {}, "markov_head_type must be vanilla but is rnn"),
        ({**DSPARK, "dspark_bonus_anchor": True}, {}, "num_speculative_tokens.*at most 3"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    make_dflash(tmp_path, **fields)
    with pytest.raises((InvalidParameterError, ModelLoadError), match=message):
        llm_of(tmp_path, **options)
