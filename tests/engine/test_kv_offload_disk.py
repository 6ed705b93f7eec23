"""Engines with a disk for their blocks: a restart costs little, and never a wrong token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedded_llm import make
from support.grouped_models import HYBRIDS, WINDOWED, dense_answer, engine_of
from support.hash_model import hash_model
from support.models import embedded_twin

# isort: split
import mlx.core as mx
from support.offloading import (
    GREEDY,
    NUM_TOKENS,
    answers,
    contents_of,
    flush,
    random_prompts,
    run_beside,
    run_load,
)
from support.waiting import TIMEOUT

from mlx_paged import LLM, AsyncEngine, SamplingParams, ops
from mlx_paged.core import MissReason
from mlx_paged.core.kv import write_policy
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.offload import offloading, restorer
from mlx_paged.engine.offload.identity import identity_of
from mlx_paged.errors import InvalidParameterError
from mlx_paged.offload import index


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests take few tokens."""
    monkeypatch.setattr(write_policy, "LONG_TOKENS", 128)
    monkeypatch.setattr(write_policy, "MIN_TOKENS", 32)
    monkeypatch.setattr(index, "_LOOK_SECONDS", 0.0)


def embedded(folder: Path, **options: Any) -> LLM:
    options = {"block_size": 8, "num_gpu_blocks_override": 200, **options}
    return make(embedded_twin(), kv_offload_dir=folder, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*WINDOWED, *HYBRIDS])
def test_every_kind_of_cache_survives_a_restart(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_offload_dir": tmp_path, "num_gpu_blocks_override": 200}
    copies = ops.pool_copies()  # other tests make some on purpose
    first, chats = engine_of(name, **options), random_prompts(200, 328)
    expected = [dense_answer(name, chat, NUM_TOKENS) for chat in chats]
    assert answers(first, chats) == (expected, [0, 0])
    before = [contents_of(first.engine, chat) for chat in chats]
    flush(first)
    second = engine_of(name, **options)
    tokens, cached = answers(second, chats)
    assert tokens == expected
    assert cached == [192, 320]  # all full blocks before the last token
    assert [contents_of(second.engine, chat) for chat in chats] == before
    stats = second.stats()
    assert stats.counters.num_restored_tokens == 512 and stats.pool_copies == copies
    assert stats.offloading is not None and not stats.offloading.disk_warnings


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_k_int4_v", "fp8"])
def test_quantized_blocks_survive_as_they_are(kv_cache_dtype: str, tmp_path: Path) -> None:
    chats = random_prompts(200)
    first = embedded(tmp_path, kv_cache_dtype=kv_cache_dtype)
    expected, _ = answers(first, chats)
    before = contents_of(first.engine, chats[0])[:24]  # the next one is computed in another chunk
    flush(first)
    second = embedded(tmp_path, kv_cache_dtype=kv_cache_dtype)
    assert answers(second, chats) == (expected, [192])
    assert contents_of(second.engine, chats[0])[:24] == before
    # Other formats have other blocks.
    other = embedded(tmp_path, kv_cache_dtype="int8")
    assert answers(other, chats)[1] == [0]


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    [chat] = random_prompts(140)
    for turn in range(3):
        llm = embedded(tmp_path)
        [tokens], [cached] = answers(llm, [chat])
        assert cached == 0 if turn == 0 else cached >= len(chat) - 80
        cold = make(embedded_twin(), block_size=8)
        assert answers(cold, [chat])[0] == [tokens]
        flush(llm)
        chat = chat + tokens + random_prompts(50, seed=turn + 5)[0]


def test_only_what_is_worth_it_is_written(tmp_path: Path) -> None:
    llm = embedded(tmp_path)
    short, short_again, long = random_prompts(60, 60, 200)
    answers(llm, [short])
    flush(llm)
    assert llm.stats().offloading.num_written_bytes == 0
    answers(llm, [short_again] * 2)
    flush(llm)
    per_token = llm.engine._offloading._blocks.num_bytes[0] / 8
    written = llm.stats().offloading.disk_bytes / per_token
    assert 32 <= written <= 60
    answers(llm, [long])
    flush(llm)
    # The prompt once; the answer is too short to be written by itself.
    assert llm.stats().offloading.disk_bytes / per_token == written + 192
    answers(llm, [long])
    flush(llm)
    assert llm.stats().offloading.disk_bytes / per_token <= written + 192 + 32


def test_salts_have_blocks_of_their_own(tmp_path: Path) -> None:
    [chat] = random_prompts(200)

    def cached(llm: LLM, salt: str | None) -> int:
        engine = llm.engine
        output = engine.add_request("x", chat, GREEDY, cache_salt=salt)
        while engine.has_unfinished:
            engine.step()
        flush(llm)
        return output.num_cached_tokens or 0

    assert cached(embedded(tmp_path), "a") == 0
    assert cached(embedded(tmp_path), None) == 0
    assert cached(embedded(tmp_path), "b") == 0
    assert cached(embedded(tmp_path), "a") == cached(embedded(tmp_path), None) == 192


def test_a_prompt_with_log_probabilities_is_computed(tmp_path: Path) -> None:
    [chat] = random_prompts(200)
    llm = embedded(tmp_path, kv_offloading_size=0.1)
    answers(llm, [chat])
    llm.engine._kv.evict_idle()
    flush(llm)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    for each in (llm, embedded(tmp_path)):
        [output] = each.generate([chat], params)
        assert output.num_cached_tokens == 0 and output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 200 and output.prompt_logprobs[199] is not None
    assert answers(embedded(tmp_path), [chat])[1] == [192]


def test_changed_weights_are_another_model(tmp_path: Path) -> None:
    [chat] = random_prompts(200)
    llm = embedded(tmp_path)
    answers(llm, [chat])
    flush(llm)
    loaded = embedded_twin()
    layer = loaded.model.layers[2].input_layernorm
    changed = np.array(layer.weight)
    changed[5] += 1e-3
    layer.weight = mx.array(changed)
    other = make(loaded, kv_offload_dir=tmp_path, block_size=8)
    assert answers(other, [chat])[1] == [0]
    assert answers(embedded(tmp_path), [chat])[1] == [192]


def test_the_same_model_has_one_identity() -> None:
    one, other = (make(embedded_twin(), block_size=size) for size in (8, 8))
    names = [
        identity_of(llm.engine._runner.model, embedded_twin(), llm.engine.config, None)
        for llm in (one, other)
    ]
    assert names[0] == names[1]
    config = EngineConfig(cpu_activations="bfloat16")
    assert identity_of(one.engine._runner.model, embedded_twin(), config, None)[0] != names[0][0]


def test_memory_and_disk_together(tmp_path: Path) -> None:
    """A pool of a few blocks, a memory of a few more, and everything else on disk."""
    options: dict[str, Any] = {"num_gpu_blocks_override": 60, "kv_offloading_size": 5e-4}
    chats = random_prompts(200, 201, 202, 203)
    llm = embedded(tmp_path, **options)
    expected, _ = answers(llm, chats)
    for _ in range(2):
        flush(llm)
        tokens, cached = answers(llm, chats)
        assert tokens == expected and min(cached) >= 192
    assert llm.stats().offloading.num_lost_blocks > 0
    assert llm.stats().offloading.num_read_bytes > 0
    flush(llm)
    assert answers(embedded(tmp_path), chats) == (expected, [192, 200, 200, 200])


@pytest.mark.parametrize("allowance", [None, 0])
def test_evictions_copy_for_the_disk_within_what_a_step_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowance: int | None
) -> None:
    monkeypatch.setattr(offloading, "_COPY_STEP_BYTES", 0)
    monkeypatch.setattr(offloading, "_COPY_BYTES_PER_SECOND", 0)
    llm = embedded(tmp_path)
    llm.engine.add_request("chat", random_prompts(200)[0], GREEDY)
    while llm.engine.has_unfinished:
        llm.engine.step()
    llm.engine._offloading._levels.memory.allowance = allowance
    assert llm.engine._kv.evict_idle()
    flush(llm)
    stats = llm.stats().offloading
    assert bool(stats.num_written_bytes) == (not stats.num_skipped_blocks) == (allowance is None)


def test_while_others_run_memory_takes_nothing_that_is_on_disk(tmp_path: Path) -> None:
    llm = embedded(tmp_path, kv_offloading_size=1e-3)
    answers(llm, random_prompts(200))
    flush(llm)
    memory = llm.engine._offloading._levels.memory
    memory.allowance = 1 << 30
    assert llm.engine._kv.evict_idle() >= 26
    assert memory.num_stored == 5 + 2, "copies made ahead, and two blocks that are not on disk"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_under_load(name: str, tmp_path: Path) -> None:
    """Requests share prefixes, are aborted or preempted; few blocks in the pool and in memory."""
    rng, stems = random.Random(3), random_prompts(150, 180)
    chats = [stems[i % 2][: rng.choice([100, 150])] + [i] * rng.randint(1, 30) for i in range(10)]
    for start in range(2):
        llm = engine_of(
            name, num_gpu_blocks_override=50, typical_context_len=300, kv_offloading_size=1e-4,
            kv_offload_dir=tmp_path,
        )  # fmt: skip
        run_load(name, llm.engine, chats, rng)
        flush(llm)
        assert start == 0 or llm.stats().offloading.num_read_bytes > 0


def test_other_requests_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(offloading, "_STEP_BYTES", 1)  # a block a step
    options: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 60}
    first = LLM(hash_model(), kv_offload_dir=tmp_path, **options)
    first.generate([[0] * 150], GREEDY)
    flush(first)
    engine = LLM(hash_model(), kv_offload_dir=tmp_path, **options).engine
    [block_bytes] = engine._offloading._blocks.num_bytes
    monkeypatch.setattr(restorer, "_BUSY_AHEAD_BYTES", 3 * block_bytes)
    num_ahead: list[int] = []

    def on_step(count: int) -> None:
        ahead = engine._offloading._restorer._ahead.values()
        num_ahead.append(sum(each.num_bytes for each in ahead))

    num_meanwhile, num_cached = run_beside(engine, [0] * 150, on_step)
    assert num_meanwhile >= 17 and num_cached == 144
    # Checksums take the cores of the steps, so little is read ahead.
    assert 0 < max(num_ahead) <= 3 * block_bytes


# --- Faults ---------------------------------------------------------------------------------------


def test_damaged_files_cost_time_and_nothing_else(tmp_path: Path, caplog) -> None:
    chats = random_prompts(200, 201)
    llm = embedded(tmp_path)
    expected, _ = answers(llm, chats)
    flush(llm)
    for path in tmp_path.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    second = embedded(tmp_path)
    tokens, cached = answers(second, chats)
    assert tokens == expected and min(cached) == 0
    assert second.stats().offloading.num_damaged_blocks == 1
    assert len([r for r in caplog.records if "[kv offload]" in r.getMessage()]) == 1
    flush(second)  # what was computed again is written again
    tokens, cached = answers(embedded(tmp_path), chats)
    assert tokens == expected and max(cached) >= 192


def test_a_read_only_folder_serves_and_takes_nothing(tmp_path: Path, monkeypatch, caplog) -> None:
    chats = random_prompts(200, 210)
    llm = embedded(tmp_path)
    expected, _ = answers(llm, chats[:1])
    flush(llm)
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_RDWR) and str(path).endswith(".tmp"):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", read_only)
    second = embedded(tmp_path)
    tokens, cached = answers(second, chats)
    assert tokens[:1] == expected and cached == [192, 0]
    flush(second)
    assert second.stats().offloading.disk_warnings == {"write": 1}


def test_a_step_that_computes_a_nan_takes_its_files_along(tmp_path: Path) -> None:
    chats = random_prompts(200)
    llm = embedded(tmp_path)
    answers(llm, chats)
    flush(llm)
    assert list(tmp_path.rglob("*.kv"))
    llm.engine._offloading.distrust()
    assert not list(tmp_path.rglob("*.kv"))
    assert answers(embedded(tmp_path), chats)[1] == [0]


KILLED = """
import os, sys, threading
sys.path[:0] = ["tests", "."]
from support.embedded_llm import make
from support.models import embedded_twin, random_tokens
import numpy as np
from mlx_paged import SamplingParams
from mlx_paged.core import MissReason
from mlx_paged.core.kv import write_policy
from mlx_paged.offload import writer
write_policy.LONG_TOKENS, write_policy.MIN_TOKENS = 128, 32
writer.FULL_BYTES = 60_000
llm = make(embedded_twin(), kv_offload_dir=sys.argv[1], block_size=8, num_gpu_blocks_override=400)
rng = np.random.default_rng(1)
real = os.write
def slow(fd, data):
    if len(data) > 4096 * 3:  # a block: dies in the middle of the third segment
        slow.count += 1
        if slow.count == int(sys.argv[2]):
            real(fd, data[:1000])
            os.kill(os.getpid(), 9)
    return real(fd, data)
slow.count = 0
os.write = slow
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
llm.generate([random_tokens(rng, 200), random_tokens(rng, 328)], params)
llm.engine._offloading.flush()
"""


def test_a_killed_process_leaves_nothing_wrong(tmp_path: Path) -> None:
    size = make(embedded_twin(), block_size=8, kv_offloading_size=0.1)
    assert size.engine._offloading._blocks.num_bytes[0] > 3 * 4096
    chats = random_prompts(200, 328)
    cold = make(embedded_twin(), block_size=8, num_gpu_blocks_override=400)
    expected, _ = answers(cold, chats)
    run = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, "40"], check=False, timeout=TIMEOUT
    )
    assert run.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("*.tmp")) and list(tmp_path.rglob("*.kv"))
    llm = embedded(tmp_path, num_gpu_blocks_override=400)
    assert not list(tmp_path.rglob("*.tmp"))
    tokens, cached = answers(llm, chats)
    assert tokens == expected and sum(cached) > 0 and not llm.stats().offloading.disk_warnings


def test_a_process_writes_what_is_left_when_it_ends(tmp_path: Path) -> None:
    code = KILLED.replace("llm.engine._offloading.flush()\n", "")
    subprocess.run([sys.executable, "-c", code, tmp_path, "0"], check=True, timeout=TIMEOUT)
    assert answers(embedded(tmp_path), random_prompts(200, 328))[1] == [192, 320]


def test_a_server_writes_when_it_is_idle(tmp_path: Path) -> None:
    async def serve() -> None:
        config = EngineConfig(block_size=8, num_gpu_blocks_override=200, kv_offload_dir=tmp_path)
        engine = AsyncEngine(lambda: Engine(embedded_twin(), config))
        await engine.ready()
        await engine.generate(random_prompts(200)[0], GREEDY)
        deadline = time.monotonic() + TIMEOUT
        while not list(tmp_path.rglob("*.kv")):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await engine.shutdown()

    asyncio.run(serve())
    assert answers(embedded(tmp_path), random_prompts(200))[1] == [192]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_offload_gib": 0}, "kv_offload_gib"),
        ({"kv_offload_gib": "1"}, "kv_offload_gib"),
        ({"kv_offload_dir": 5}, "kv_offload_dir"),
        ({"kv_offload_dir": ""}, "kv_offload_dir"),
        ({"kv_offload_dir": "x", "enable_prefix_caching": False}, "kv_offload_dir"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError, match=field):
        EngineConfig(**options)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameterError, match=r"kv_offload_dir.*Not a directory"):
        embedded(tmp_path / "file" / "kv")


def test_a_repaired_engine_keeps_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_STEP_BYTES", 1)
    monkeypatch.setattr(offloading, "_IDLE_BYTES", 1)
    chats = random_prompts(200)
    llm = embedded(tmp_path)
    expected, _ = answers(llm, chats)
    flush(llm)
    second = embedded(tmp_path)
    engine = second.engine
    output = engine.add_request("x", chats[0], GREEDY)
    engine.step()
    assert engine._kv.restorations  # interrupted with blocks on their way
    store = engine._offloading._store
    segments = list(store._index._segments.values())
    engine._recovery.is_whole = False
    assert engine.recover() and not store._pins
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    assert output.outputs[0].token_ids == expected[0]
    assert engine.stats().counters.num_restored_tokens == 192
    store._reader.close()
    assert not any(segment._num_users for segment in segments)


# --- Why a prompt was not cached ------------------------------------------------------------------


def test_a_miss_is_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "mlx_paged.engine.output_processor")
    chat, other = random_prompts(200, 160)
    llm = embedded(tmp_path)
    [first] = llm.generate([chat], GREEDY)
    assert first.cache_miss is not None and first.cache_miss.reason is MissReason.NEVER_SEEN
    [same] = llm.generate([chat], GREEDY)
    assert same.cache_miss is None
    [changed] = llm.generate([[*chat[:100], *other]], GREEDY)
    miss = changed.cache_miss
    assert miss is not None and (miss.num_shared_tokens, miss.num_cached_tokens) == (100, 100)
    assert miss.given == tuple(other[:8]) and miss.earlier == tuple(chat[100:108])
    lines = [r.getMessage() for r in caplog.records if "cache miss" in r.getMessage()]
    assert len(lines) == 2 and "shares the first 100 of 260 tokens" in lines[1]
    assert llm.stats().cache_misses == {MissReason.NEVER_SEEN: 2}
    flush(llm)
    # Another format of the same model has nothing of this one.
    [again] = embedded(tmp_path, kv_cache_dtype="int8").generate([chat], GREEDY)
    assert again.cache_miss is not None and again.cache_miss.reason is MissReason.FORMAT


def test_an_evicted_prompt_says_so() -> None:
    llm = make(embedded_twin(), block_size=8, num_gpu_blocks_override=40)
    chats = random_prompts(200, 201)
    llm.generate([chats[0]], GREEDY)
    llm.generate([chats[1]], GREEDY)
    [again] = llm.generate([chats[0]], GREEDY)
    assert again.cache_miss is not None and again.cache_miss.reason is MissReason.EVICTED
