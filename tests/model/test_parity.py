"""Forty prompts of mixed lengths: the engine's tokens are the dense path's, however it runs.

Half of the answers are greedy, half are seeded, side by side; the batch, the chunks, the cache and
the pool's size change.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.models import dense_greedy, embedded, embedded_twin

from mlx_paged import LLM, SamplingParams, ops
from mlx_paged.demo.prompts import CHATS, REQUESTS, SYSTEM_PROMPT

# The kinds of prompts repeat after 60.
NUM_PROMPTS = int(os.environ.get("MLX_PAGED_PARITY_PROMPTS", "40"))
NUM_TOKENS = 6


def greedy(i: int) -> bool:
    """One of two prompts of each kind."""
    return i // 2 % 2 == 0


PARAMS = [
    SamplingParams(
        temperature=0 if greedy(i) else 0.8, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    for i in range(NUM_PROMPTS)
]

# Name -> options of the engine, and how many prompts are given to it at once.
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "one at a time": ({}, 1),
    "7 at once": ({}, 7),
    "32 at once": ({}, 32),
    "32 at once, no cache": ({"enable_prefix_caching": False}, 32),
    "all at once, chunks of 16": ({"max_num_batched_tokens": 16}, NUM_PROMPTS),
    "all at once, chunks of 100": (
        {"max_num_batched_tokens": 100, "max_num_seqs": 30},
        NUM_PROMPTS,
    ),
    "all at once, no overlap": ({"async_scheduling": False}, NUM_PROMPTS),
    # 30 blocks hold the longest prompt and little else.
    "all at once, preempted": ({"num_gpu_blocks_override": 31, "block_size": 32}, NUM_PROMPTS),
    "blocks of 8": ({"block_size": 8}, NUM_PROMPTS),
}


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """From 2 to some 850 tokens: beginnings of texts, chats with and without a system prompt."""
    tokenizer = embedded().tokenizer
    requests = [*CHATS, *REQUESTS]
    rng = np.random.default_rng(0)
    found: list[tuple[int, ...]] = []
    for i in range(NUM_PROMPTS):
        system = [{"role": "system", "content": SYSTEM_PROMPT[: int(rng.integers(20, 400))]}]
        if i % 20 == 0:
            system = [{"role": "system", "content": SYSTEM_PROMPT}]
        chat = [
            *(system if i % 2 else []),
            {"role": "user", "content": requests[i % len(requests)]},
        ]
        if i % 20 == 0:
            chat = [*system, chat[-1]]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        found.append(tuple(tokens[: int(rng.integers(2, len(tokens)))] if i % 3 == 0 else tokens))
    return tuple(found)


def run(name: str) -> list[list[int]]:
    options, at_once = RUNS[name]
    copies = ops.pool_copies()  # other tests make some on purpose
    llm = LLM(embedded_twin(), **{"kv_cache_memory": 1 << 26, **options})
    answers: list[list[int]] = []
    for start in range(0, NUM_PROMPTS, at_once):
        some = slice(start, start + at_once)
        outputs = llm.generate([list(p) for p in prompts()[some]], PARAMS[some])
        answers += [output.outputs[0].token_ids for output in outputs]
    llm.engine.check_integrity()
    stats = llm.stats()
    assert stats.pool_copies == copies
    assert stats.usage.num_used_blocks == 0
    if "preempted" in name:
        assert stats.num_preemptions > 0
    return answers


def test_the_prompts_are_of_many_lengths() -> None:
    lengths = sorted(len(p) for p in prompts())
    assert lengths[0] < 10 and lengths[-1] > 800 and len(set(lengths)) > 0.4 * NUM_PROMPTS


@cache
def one_at_a_time() -> list[list[int]]:
    return run("one at a time")


def test_greedy_tokens_of_each_prompt_alone_are_those_of_the_dense_path() -> None:
    for i in filter(greedy, range(NUM_PROMPTS)):
        assert one_at_a_time()[i] == dense_greedy(prompts()[i], NUM_TOKENS), i


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in RUNS if name != "one at a time"])
def test_tokens_are_those_of_each_prompt_alone(name: str) -> None:
    assert run(name) == one_at_a_time()
