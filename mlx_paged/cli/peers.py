"""mlx-lm doing the same work on the same weights in the same process, to compare with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import batch_generate, generate_step

from mlx_paged.model.loader import LoadedModel


@dataclass(frozen=True)
class PeerRun:
    """Greedy answers and what they took.

    Attributes:
        name: Who did it.
        token_ids: For each prompt its tokens, without the end token.
        seconds: Wall time of all prompts.
    """

    name: str
    token_ids: list[list[int]]
    seconds: float


def one_by_one(model: LoadedModel, prompts: list[list[int]], max_tokens: int) -> PeerRun:
    """mlx-lm's `generate_step`, a prompt at a time: its dense path."""
    answers = []
    start = time.perf_counter()
    for prompt in prompts:
        answer: list[int] = []
        for token, _ in generate_step(mx.array(prompt), model.model, max_tokens=max_tokens):
            if token in model.tokenizer.eos_token_ids:
                break
            answer.append(int(token))
        answers.append(answer)
    return PeerRun("mlx-lm, one by one", answers, time.perf_counter() - start)


def batched(model: LoadedModel, prompts: list[list[int]], max_tokens: int) -> PeerRun:
    """mlx-lm's `BatchGenerator`, all prompts at once."""
    start = time.perf_counter()
    response = batch_generate(
        model.model, model.tokenizer, prompts, max_tokens=max_tokens, return_token_ids=True
    )
    seconds = time.perf_counter() - start
    return PeerRun("mlx-lm, BatchGenerator", response.token_ids, seconds)
