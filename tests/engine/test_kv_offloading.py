"""Engines that keep evicted blocks: the same tokens and the same bits, with less computation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.embedded_llm import make, tokens_of
from support.grouped_models import HYBRIDS, WINDOWED, dense_answer, engine_of
from support.hash_model import follows, hash_model
from support.models import embedded_twin, tiny_config
from support.offloading import (
    GREEDY,
    NUM_TOKENS,
    answers,
    contents_of,
    random_prompts,
    run_beside,
    run_load,
)
from support.parity import family_model
from support.pressure import fake_source

from mlx_paged import LLM, RequestOutput, SamplingParams, ops
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.offload import offloading
from mlx_paged.engine.offload.stats import OffloadStats
from mlx_paged.engine.pressure_sources import PressureLevel
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.loader import LoadedModel

#: Room for about two of the prompts on the device, and for all of them in memory.
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 40, "typical_context_len": 300}


def chats(count: int = 5, length: int = 100) -> list[list[int]]:
    return random_prompts(*[length] * count)


@pytest.mark.one_in(17)
@pytest.mark.parametrize("name", [*WINDOWED, *HYBRIDS])
def test_every_kind_of_cache_comes_back(name: str) -> None:
    copies = ops.pool_copies()  # other tests make some on purpose
    llm = engine_of(name, **SMALL, kv_offloading_size=0.1)
    prompts = chats()
    expected = [dense_answer(name, prompt, NUM_TOKENS) for prompt in prompts]
    assert answers(llm, prompts) == (expected, [0] * 5)
    before = contents_of(llm.engine, prompts[-1])
    assert any(map(any, before))
    for _ in range(2):
        tokens, cached = answers(llm, prompts)
        assert tokens == expected
        assert cached == [96] * 5  # all full blocks before the last token
        assert contents_of(llm.engine, prompts[-1]) == before
    stats = llm.stats()
    assert stats.counters.num_restored_tokens > 5 * 96 and stats.pool_copies == copies
    assert stats.offloading is not None and stats.offloading.num_lost_blocks == 0


def mla() -> LoadedModel:
    config = tiny_config(
        "deepseek_v3",
        kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        n_routed_experts=None, n_shared_experts=None, moe_intermediate_size=32,
        first_k_dense_replace=100, rope_scaling=None,
    )  # fmt: skip
    return LoadedModel(family_model(config), embedded_twin().tokenizer, config, "mla")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int8_k_int4_v", "int4", "fp8", "mla"])
def test_quantized_blocks_and_latents_come_back_as_they_are(kv_cache_dtype: str) -> None:
    # A device with memory of its own takes blocks of some formats only if they have 32 tokens.
    options: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 10}
    model = mla() if kv_cache_dtype == "mla" else embedded_twin()
    if kv_cache_dtype != "mla":
        options["kv_cache_dtype"] = kv_cache_dtype
    llm = LLM(model, **options, kv_offloading_size=0.1)
    prompts = chats()
    expected, _ = answers(llm, prompts)
    before = contents_of(llm.engine, prompts[-1])
    tokens, cached = answers(llm, prompts)
    assert tokens == expected and cached == [96] * 5
    assert contents_of(llm.engine, prompts[-1]) == before


def test_the_memory_is_a_limit() -> None:
    llm = make(embedded_twin(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=1e-3)
    tier, memory = llm.engine._offloading._levels.memory, llm.engine._offloading._memory
    prompts = chats()
    for _ in range(2):
        answers(llm, prompts)
        assert 0 < tier.num_bytes <= tier.capacity == int(1e-3 * (1 << 30))
        assert memory._num_kept_bytes + memory._num_free_bytes <= tier.capacity
    assert llm.stats().offloading.num_lost_blocks > 0


def test_other_requests_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_STEP_BYTES", 1)  # a block a step
    engine = LLM(
        hash_model(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=0.1
    ).engine
    for first in range(4):
        engine.add_request(f"old {first}", [first] * 90, GREEDY)
        while engine.has_unfinished:
            engine.step()
    aborted: list[RequestOutput] = []

    def on_step(count: int) -> None:
        if count == 0:
            aborted.append(engine.add_request("aborted", [1] * 90, GREEDY))
        elif count == 5:
            engine.abort("aborted")

    num_meanwhile, num_cached = run_beside(engine, [0] * 90, on_step)
    assert num_meanwhile > 8  # 11 blocks
    assert num_cached == 88 and not aborted[0].outputs[0].token_ids


def test_evictions_copy_little_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content copied ahead is restored; the step that evicts it copies nothing."""
    monkeypatch.setattr(offloading, "_EVICT_STEP_BYTES", 0)
    engine = LLM(
        hash_model(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=0.1
    ).engine
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    running = engine.add_request("running", [9] * 10, params)
    outputs = []
    for first in (0, 1, 2, 0):  # each evicts the one before the last
        outputs.append(engine.add_request(f"chat {first}", [first] * 90, GREEDY))
        while not outputs[-1].finished:
            engine.step()
            engine.check_integrity()
    assert not running.finished
    stats = engine.stats()
    assert outputs[-1].num_cached_tokens == 88 and stats.counters.num_restored_tokens >= 40
    assert stats.offloading.num_stored_blocks >= 10 and not stats.offloading.num_skipped_blocks
    assert outputs[-1].outputs[0].token_ids == follows([0] * 90, NUM_TOKENS)


@pytest.fixture
def no_copies_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is copied before it is evicted, unless the engine is idle."""
    monkeypatch.setattr(offloading, "_COPY_STEP_BYTES", 0)
    monkeypatch.setattr(offloading, "_COPY_BYTES_PER_SECOND", 0)


def test_evictions_are_bounded_only_while_others_run(
    monkeypatch: pytest.MonkeyPatch, no_copies_ahead: None
) -> None:
    monkeypatch.setattr(offloading, "_EVICT_STEP_BYTES", 0)
    engine = LLM(
        hash_model(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=0.1
    ).engine

    def chat(first: int) -> OffloadStats:
        output = engine.add_request(f"chat {first}", [first] * 90, GREEDY)
        while not output.finished:
            engine.step()
        return engine.stats().offloading

    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    running = engine.add_request("running", [9] * 10, params)
    beside = [chat(first) for first in range(4)][-1]
    assert not running.finished
    assert beside.num_skipped_blocks and not beside.num_stored_blocks
    while engine.has_unfinished:
        engine.step()
    before, alone = engine.stats().offloading, chat(4)
    assert alone.num_stored_blocks and alone.num_skipped_blocks == before.num_skipped_blocks


def test_no_copy_begins_while_pools_are_replaced(no_copies_ahead: None) -> None:
    """It would read the new pools, which may lack the block."""
    engine = make(
        embedded_twin(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=0.1
    ).engine
    engine.add_request("chat", chats(1)[0], GREEDY)
    while engine.has_unfinished:
        engine.step()
    engine._offloading.prepare_resize()
    assert engine._kv.evict_idle()
    stats = engine.stats().offloading
    assert stats.num_skipped_blocks and not stats.num_stored_blocks


@pytest.mark.parametrize("copy", [Engine.on_idle, Engine.synchronize])
def test_an_idle_engine_copies_what_it_may_evict(
    no_copies_ahead: None, copy: Callable[[Engine], None]
) -> None:
    engine = make(
        embedded_twin(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=0.1
    ).engine
    engine.add_request("chat", chats(1)[0], GREEDY)
    while engine.has_unfinished:
        engine.step()
    memory = engine._offloading._levels.memory
    assert not memory.num_bytes and engine.idle_interval == 0
    copy(engine)
    assert memory.num_bytes and memory.is_empty and not engine._offloading.has_idle_work


def test_equal_prompts_come_back_once() -> None:
    llm = make(embedded_twin(), block_size=8, num_gpu_blocks_override=60, kv_offloading_size=0.1)
    prompts = chats(8)
    expected, _ = answers(llm, prompts)
    outputs = llm.generate([prompts[0]] * 3, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [expected[0]] * 3
    assert llm.stats().counters.num_restored_tokens == 96


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_in_a_small_pool_under_load(name: str) -> None:
    """Few blocks in memory, preemption, and requests that share prefixes or are aborted."""
    llm = engine_of(
        name, num_gpu_blocks_override=30, typical_context_len=300, kv_offloading_size=1e-4
    )
    rng = random.Random(3)
    stems = chats(3, 60)
    prompts = [stems[i % 3][: rng.choice([30, 60])] + [i] * rng.randint(1, 20) for i in range(12)]
    run_load(name, llm.engine, prompts, rng)
    assert llm.stats().counters.num_restored_tokens > 0


def test_a_repaired_engine_begins_with_empty_memory() -> None:
    llm = make(embedded_twin(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=0.1)
    prompts = chats()
    expected, _ = answers(llm, prompts)
    llm.engine._recovery.is_whole = False
    assert llm.engine.recover()
    assert answers(llm, prompts) == (expected, [0] * 5)
    assert answers(llm, prompts) == (expected, [96] * 5)
    assert llm.stats().offloading.num_stored_blocks > 5 * 12


def test_memory_pressure_takes_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake_source(monkeypatch)
    llm = make(embedded_twin(), block_size=8, num_gpu_blocks_override=40, kv_offloading_size=0.1)
    prompts = chats()
    expected, _ = answers(llm, prompts)
    assert llm.stats().offloading.memory_bytes > 0
    source.level = PressureLevel.WARNING
    llm.engine.follow_pressure()
    llm.engine.check_integrity()
    assert llm.stats().offloading.memory_bytes == 0
    assert answers(llm, prompts) == (expected, [0] * 5)
    assert llm.stats().offloading.memory_bytes == 0


def test_a_text_by_its_name() -> None:
    """The embedded model's own words, so that a failure can be read."""
    llm = make(block_size=8, num_gpu_blocks_override=20, kv_offloading_size=0.1)
    text = tokens_of('"""A module that sorts words.\n\nIt reads a text and counts them.\n"""\n')
    [first], _ = answers(llm, [text])
    answers(llm, chats(2))
    [again], [cached] = answers(llm, [text])
    assert again == first and cached == (len(text) - 1) // 8 * 8


@pytest.mark.parametrize("size", [0, -1, True, "1", float("nan"), float("inf")])
def test_a_wrong_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidParameterError, match="kv_offloading_size"):
        EngineConfig(kv_offloading_size=size)


def test_without_a_prefix_cache_there_is_nothing_to_keep() -> None:
    with pytest.raises(InvalidParameterError, match="enable_prefix_caching"):
        EngineConfig(kv_offloading_size=1, enable_prefix_caching=False)
