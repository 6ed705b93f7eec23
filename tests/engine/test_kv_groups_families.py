"""Every family with windows or states through the engine, in pools too small to keep everything."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from support.family_config_parts import VOCAB_SIZE
from support.family_configs import config_of
from support.models import embedded
from support.parity import family_model
from support.plain import plain_caches

from mlx_paged import LLM, LoadedModel, SamplingParams, ops
from mlx_paged.model.families import PROVEN
from mlx_paged.model.layout import Mode

_WINDOWED = """
    afmoe cohere2 exaone4 exaone_moe gemma3 gemma3_text gemma3n gemma4 gemma4_text gpt_oss
    iquestloopcoder laguna llama llama4 mellum mimo_v2_flash ministral3 muse_glimmer olmo3 spark2_5
    step3p5
"""
RECURRENT = [family for family, mode in PROVEN.items() if mode is Mode.REGROUPED]
NUM_TOKENS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    found = [rng.integers(0, VOCAB_SIZE, count).tolist() for count in (5, 33, 70)]
    return [*found, found[2][:50] + found[0]]


def dense_answers(config: dict[str, Any]) -> list[list[int]]:
    model, answers = family_model(config), []
    for prompt in prompts():
        cache, tokens, answer = plain_caches(model), prompt, []
        for _ in range(NUM_TOKENS):
            tokens = [int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]).item())]
            answer += tokens
        answers.append(answer)
    return answers


@pytest.mark.one_in(15)
@pytest.mark.parametrize("family", [*_WINDOWED.split(), *RECURRENT])
def test_tokens_are_the_dense_ones_and_the_second_turn_finds_the_first(family: str) -> None:
    config = config_of(family)
    block_size = 16 if family == "llama4" else 8  # chunks are whole blocks
    model = LoadedModel(
        family_model(config),
        embedded().tokenizer,
        config | {"max_position_embeddings": 128},
        family,
    )
    llm = LLM(
        model,
        block_size=block_size,
        num_gpu_blocks_override=2 + 128 // block_size,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        typical_context_len=200,
    )
    assert len(llm.engine._kv.attention) > 1 or family in RECURRENT
    assert (llm.engine._kv.states is not None) == (family in RECURRENT)
    expected = dense_answers(config)
    copies = ops.pool_copies()  # of other tests of this process
    for _ in range(2):
        outputs = llm.generate(prompts(), GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.engine.check_integrity()
    llm.generate([prompts()[2]], GREEDY)
    turn = prompts()[2] + expected[2] + prompts()[0]
    assert llm.generate([turn], GREEDY)[0].num_cached_tokens >= 64
    assert llm.stats().pool_copies == copies
