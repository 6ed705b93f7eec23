"""The host work of a prompt in a full pool does not grow with the pool or with earlier prompts."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from support.passage import passage

from mlx_paged.core import KVManager, PromptHistory
from mlx_paged.core.kv import misses

SIZE = 8
PROMPT = 16 * SIZE  # tokens of a prompt, a whole number of blocks


def prompt(i: int) -> array[int]:
    """A prompt that shares its first token with all others."""
    return array("I", [7, *range(1000 * i, 1000 * i + PROMPT - 1)])


def full_pool(num_prompts: int) -> KVManager:
    """A KV store whose pool is full of the cached blocks of ended sequences."""
    kv = KVManager(1 + num_prompts * PROMPT // SIZE, SIZE)
    for i in range(num_prompts):
        tables = kv.admit(prompt(i))
        assert tables is not None
        kv.commit(tables, PROMPT)
        kv.free(tables)
    assert not kv.pool.num_free
    return kv


def calls_of_admission(kv: KVManager) -> int:
    """Calls of the package's functions while a prompt takes a full pool's oldest blocks."""
    before = kv.counters.num_evictions
    with passage() as found:
        tables = kv.admit(prompt(999))
    assert tables is not None and kv.counters.num_evictions - before == PROMPT // SIZE
    return found.num_calls


def test_an_eviction_takes_the_same_few_calls_in_any_pool() -> None:
    few, many = full_pool(2), full_pool(64)
    empty = KVManager(1 + PROMPT // SIZE, SIZE)
    with passage() as found:
        empty.admit(prompt(999))
    calls = calls_of_admission(few)
    assert calls == calls_of_admission(many)
    assert (calls - found.num_calls) / (PROMPT // SIZE) < 11
    few.check_integrity()


def test_a_new_prompt_is_compared_with_few_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []

    def note(a: bytes, b: memoryview, original: Any = misses.common_prefix_len) -> int:
        compared.append(b)
        return original(a, b)

    monkeypatch.setattr(misses, "common_prefix_len", note)
    history = PromptHistory()
    for i in range(64):
        history.note(prompt(i), None, None, num_cached=0, block_size=SIZE)
    compared.clear()
    # All 64 share one token with it, and the one in the middle shares half of it.
    given = prompt(32)[: PROMPT // 2] + prompt(999)[: PROMPT // 2]
    miss = history.note(given, None, None, num_cached=0, block_size=SIZE)
    assert miss is not None and miss.num_shared_tokens == PROMPT // 2
    assert len(compared) == 2
