"""Engines whose blocks go through the device's stream, as on a device with memory of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.embedded_llm import make
from support.grouped_models import dense_answer, engine_of
from support.hash_model import follows, hash_model
from support.models import embedded_twin
from support.offloading import (
    GREEDY,
    NUM_TOKENS,
    answers,
    contents_of,
    flush,
    random_prompts,
    run_load,
)

from mlx_paged import LLM, SamplingParams, ops
from mlx_paged.core.kv import write_policy
from mlx_paged.engine.offload import build
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.staged_blocks import StagedBlockBytes


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SharedBlockBytes", StagedBlockBytes)
    monkeypatch.setattr(write_policy, "LONG_TOKENS", 128)
    monkeypatch.setattr(write_policy, "MIN_TOKENS", 32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "lfm2", "mamba2"])
def test_memory_and_disk(name: str, tmp_path: Path) -> None:
    copies = ops.pool_copies()
    options: dict[str, Any] = {"num_gpu_blocks_override": 40, "typical_context_len": 300}
    options["kv_offload_dir"] = tmp_path
    llm = engine_of(name, **options, kv_offloading_size=0.1)
    chats = random_prompts(200, 201, 202)
    expected = [dense_answer(name, chat, NUM_TOKENS) for chat in chats]
    assert answers(llm, chats) == (expected, [0] * 3)
    before = contents_of(llm.engine, chats[-1])
    tokens, cached = answers(llm, chats)
    assert tokens == expected and min(cached) >= 192
    flush(llm)
    again = engine_of(name, **options)
    tokens, cached = answers(again, chats)
    assert tokens == expected and min(cached) >= 192
    assert contents_of(again.engine, chats[-1]) == before
    stats = again.stats()
    assert stats.offloading is not None and not stats.offloading.disk_warnings
    assert stats.offloading.num_read_bytes > 0 and stats.pool_copies == copies


def test_other_requests_go_on_meanwhile() -> None:
    """Chats evict each other beside a stream; steps are launched ahead."""
    engine = LLM(
        hash_model(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=0.1
    ).engine
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    running = engine.add_request("running", [9] * 10, params)
    for turn in range(9):
        chat = [turn % 4] * 90
        output = engine.add_request(f"chat {turn}", chat, GREEDY)
        while not output.finished:
            engine.step()
            engine.check_integrity()
        assert output.outputs[0].token_ids == follows(chat, NUM_TOKENS)
    while engine.has_unfinished:
        engine.step()
    assert running.outputs[0].token_ids == follows([9] * 10, 90)
    assert engine.stats().counters.num_restored_tokens > 200


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_under_load(name: str, tmp_path: Path) -> None:
    """Requests share prefixes, are aborted or preempted, and an engine is repaired."""
    rng, stems = random.Random(5), random_prompts(150, 180)
    chats = [stems[i % 2][: rng.choice([100, 150])] + [i] * rng.randint(1, 30) for i in range(8)]
    llm = engine_of(
        name, num_gpu_blocks_override=40, typical_context_len=300, kv_offloading_size=1e-3,
        kv_offload_dir=tmp_path,
    )  # fmt: skip

    def repair(index: int) -> None:
        if index == 3:
            llm.engine._recovery.is_whole = False
            assert llm.engine.recover()

    run_load(name, llm.engine, chats, rng, repair)
    flush(llm)
    assert llm.stats().counters.num_restored_tokens > 0


def test_a_model_whose_blocks_cannot_be_written_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"kv_offloading_size.*None.*1056 bytes"):
        make(embedded_twin(), block_size=8, kv_cache_dtype="int8", kv_offloading_size=0.1)
