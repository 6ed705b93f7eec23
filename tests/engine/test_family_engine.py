"""Families of every mode through the engine: batched, chunked, shared; the dense path's tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import numpy as np
import pytest
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.models import dense_logits, embedded
from support.parity import family_model

from mlx_paged import LLM, LoadedModel, SamplingParams, ops
from mlx_paged.model.families import PROVEN
from mlx_paged.model.layout import Mode

FAMILIES = ["gemma2", "gemma3n", "gpt_oss", "deepseek_v3", "llama4", "afm7", "deepseek_v32",
            "minimax_m3_vl"]  # fmt: skip
NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Blocks of 16, as llama4's chunks are; chunks of prompts that end anywhere.
OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "kv_cache_memory": 1 << 24,
    "max_num_batched_tokens": 48,
}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    head = rng.integers(0, VOCAB_SIZE, 40).tolist()
    alone = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (1, 7, 33, 60)]
    return [*alone, *(head + rng.integers(0, VOCAB_SIZE, n).tolist() for n in (1, 9, 25))]


def loaded(family: str) -> LoadedModel:
    config = config_of(family) | {"max_position_embeddings": 128}
    return LoadedModel(family_model(config_of(family)), embedded().tokenizer, config, family)


@cache
def expected(family: str) -> list[list[int]]:
    model = family_model(config_of(family))
    answers = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(dense_logits(model, [tokens]).argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_answers_as_the_dense_path(family: str) -> None:
    copies = ops.pool_copies()  # other tests make some on purpose
    llm = LLM(loaded(family), **OPTIONS)
    for _ in range(2):
        outputs = llm.generate(prompts(), GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected(family)
    # At the second turn all was there; the last token is always computed.
    for prompt, output in zip(prompts(), outputs):
        assert output.num_cached_tokens == len(prompt) - 1
    llm.engine.check_integrity()
    assert llm.stats().pool_copies == copies


def test_every_mode_without_states_is_tried() -> None:
    assert {PROVEN[family] for family in FAMILIES} == set(Mode) - {Mode.REGROUPED}


def test_a_pool_too_small_for_all_preempts_a_gathered_model() -> None:
    llm = LLM(loaded("deepseek_v32"), **OPTIONS, num_gpu_blocks_override=8)
    outputs = llm.generate(prompts(), GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected("deepseek_v32")
    assert llm.stats().num_preemptions > 0
