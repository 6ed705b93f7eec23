"""One engine computes prompts, another one answers them: the same tokens, whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.embedded_llm import make
from support.grouped_models import HYBRIDS, WINDOWED, dense_answer, loaded
from support.models import embedded_twin
from support.offloading import GREEDY, NUM_TOKENS, answers, contents_of, random_prompts
from support.pressure import fake_source
from support.roles import (
    OPTIONS,
    SECRET,
    Pair,
    engine_with_role,
    pair_of,
    port_of,
    transfers_of,
)
from support.waiting import TIMEOUT
from test_kv_offloading import mla

from mlx_paged import LLM, AsyncEngine, SamplingParams
from mlx_paged.core import MissReason
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.offload import build
from mlx_paged.engine.offload.offloading import Offloading
from mlx_paged.engine.pressure_sources import PressureLevel
from mlx_paged.engine.roles.decode import RemoteLevel
from mlx_paged.engine.roles.stats import TransferStats
from mlx_paged.errors import InvalidParameterError, MemoryPressureError
from mlx_paged.model import staged_blocks
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.staged_blocks import StagedBlockBytes
from mlx_paged.offload.segments import Block, Record
from mlx_paged.transfer import local, receiver, server, wire

[PROMPT] = random_prompts(100)
NUM_CACHED = 96  # all full blocks before the last token


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The answer of one engine to `PROMPT`."""
    [tokens], _ = answers(make(embedded_twin(), **OPTIONS), [PROMPT])
    return tokens


@pytest.fixture(params=["shared", "tcp"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How blocks travel. Engines that cannot share memory are as if on two machines."""
    if request.param == "tcp":
        monkeypatch.setattr(local, "listen", mock.Mock(side_effect=OSError("no local sockets")))
    return str(request.param)


@pytest.fixture
def pair(path: str, tmp_path: Path) -> Iterator[Pair]:
    with pair_of(embedded_twin(), embedded_twin(), tmp_path, max_num_batched_tokens=24) as pair:
        yield pair
        for stats in (transfers_of(pair.decode), transfers_of(pair.prefill)):
            assert stats.num_shared_bytes == (stats.num_bytes if path == "shared" else 0)


def check_failed(pair: Pair, expected: list[int], reason: str) -> None:
    """The prompt is computed by the decode engine, which says why."""
    output = pair.answer(PROMPT, GREEDY)
    assert output.outputs[0].token_ids == expected
    assert output.num_cached_tokens == 0
    miss = output.cache_miss
    assert miss is not None and miss.reason is MissReason.TRANSFER
    assert reason in str(miss), miss


# --- The same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WINDOWED, *HYBRIDS])
def test_every_kind_of_cache_travels(name: str, tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": 24, "typical_context_len": 100, "max_num_seqs": 8}
    with pair_of(loaded(name), loaded(name), tmp_path, **options) as pair:
        output = pair.answer(PROMPT, GREEDY)
        assert output.outputs[0].token_ids == dense_answer(name, PROMPT, NUM_TOKENS)
        assert output.num_cached_tokens == NUM_CACHED and output.cache_miss is None
        assert pair.decode.stats().counters.num_restored_tokens == NUM_CACHED
        assert contents_of(pair.decode, PROMPT[:97]) == contents_of(pair.prefill, PROMPT[:97])


@pytest.mark.parametrize(("name", "bound"), [("gemma3", 1), ("qwen3_next", 1), ("gemma3", 1 << 29)])
def test_blocks_travel_through_the_streams_of_devices(
    name: str, bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with devices that have memory of their own: copies end later."""
    monkeypatch.setattr(build, "SharedBlockBytes", StagedBlockBytes)
    monkeypatch.setattr(server, "MAX_WAITING_BYTES", bound)
    monkeypatch.setattr(staged_blocks, "_MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(staged_blocks, "_COPY_THREADS", 2)
    options = {"max_num_batched_tokens": 24, "typical_context_len": 100, "max_num_seqs": 8}
    with pair_of(loaded(name), loaded(name), tmp_path, **options) as pair:
        output = pair.answer(PROMPT, GREEDY)
        assert output.outputs[0].token_ids == dense_answer(name, PROMPT, NUM_TOKENS)
        assert output.num_cached_tokens == NUM_CACHED
        assert contents_of(pair.decode, PROMPT[:97]) == contents_of(pair.prefill, PROMPT[:97])


@pytest.mark.parametrize("kv_cache_dtype", ["int8_k_int4_v", "fp8", "mla"])
def test_quantized_blocks_and_latents_travel(kv_cache_dtype: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 32}
    make_model: Callable[[], LoadedModel] = mla
    if kv_cache_dtype != "mla":
        make_model, options["kv_cache_dtype"] = embedded_twin, kv_cache_dtype
    one = LLM(make_model(), **{**OPTIONS, **options})
    [expected], _ = answers(one, [PROMPT])
    with pair_of(make_model(), make_model(), tmp_path, **options) as pair:
        output = pair.answer(PROMPT, GREEDY)
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == NUM_CACHED
        assert contents_of(pair.decode, PROMPT[:97]) == contents_of(pair.prefill, PROMPT[:97])


def test_blocks_travel_while_the_prompt_is_computed(pair: Pair, expected: list[int]) -> None:
    output = pair.decode.add_request("one", PROMPT, GREEDY)
    wait_until(lambda: pair.prefill.has_unfinished, "no prompt came")
    for _ in range(4):  # of 24 tokens; a step is committed by the next one
        pair.prefill.step()
    # Nothing computes from here on.
    wait_until(lambda: restored(pair) >= 6, "no block came")
    assert pair.prefill._scheduler.has_unfinished
    assert not transfers_of(pair.decode).num_blocks  # the transfer has not ended
    pair.run()
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens == NUM_CACHED


def restored(pair: Pair) -> int:
    """Steps the decode engine; returns how many blocks it has put in place."""
    pair.decode.step()
    return sum(restoration.num_done for restoration in pair.decode._kv.restorations.values())


def test_a_stream_goes_on_while_a_prompt_is_computed_elsewhere(
    pair: Pair, expected: list[int]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    running = pair.decode.add_request("running", [5, 6, 7], params)
    pair.decode.step()
    pair.decode.step()
    waiting, num_meanwhile = pair.decode.add_request("waiting", PROMPT, GREEDY), 0
    while pair.decode.has_unfinished:
        before = len(running.outputs[0].token_ids)
        pair.step()
        if pair.decode._kv.restorations and not running.finished:
            num_meanwhile += 1
            assert len(running.outputs[0].token_ids) == before + 1
    assert num_meanwhile
    assert waiting.outputs[0].token_ids == expected
    # The same again, from both engines' caches.
    assert pair.answer(PROMPT, GREEDY).outputs[0].token_ids == expected
    assert transfers_of(pair.prefill).num_prompts == 1


def test_many_prompts_with_equal_beginnings_and_aborts(tmp_path: Path) -> None:
    name, rng = "mistral", random.Random(5)
    prompts = [
        [*PROMPT[: 8 * (i % 4)], *prompt] for i, prompt in enumerate(random_prompts(*[60] * 8))
    ]
    options = {"max_num_batched_tokens": 24, "typical_context_len": 100, "max_num_seqs": 6}
    options["num_gpu_blocks_override"] = 60  # some sequences are preempted
    with pair_of(loaded(name), loaded(name), tmp_path, **options) as pair:
        outputs = {}
        for i, prompt in enumerate([*prompts, prompts[0], *prompts]):
            outputs[i] = pair.decode.add_request(str(i), prompt, GREEDY), prompt
            for _ in range(rng.randint(0, 3)):
                pair.step()
                pair.decode.check_integrity()
                pair.prefill.check_integrity()
            if i % 5 == 4:
                pair.decode.abort(str(i - 1))
        pair.run(pair.decode.check_integrity)
        for output, prompt in outputs.values():
            tokens = output.outputs[0].token_ids
            assert tokens == dense_answer(name, prompt, NUM_TOKENS)[: len(tokens)]
        received = transfers_of(pair.decode)
        assert received.num_prompts >= 8 and not received.num_failed_prompts
        wait_until(lambda: is_at_rest(pair), "a prompt is computed in vain")


def is_at_rest(pair: Pair) -> bool:
    """Steps both; returns True once neither has anything left of a transfer."""
    pair.step()
    assert pair.prefill._prefilling is not None
    return remote_of(pair).is_empty and not pair.prefill._prefilling._jobs


def test_short_prompts_and_what_the_other_engine_cannot_compute_stay_here(pair: Pair) -> None:
    pair.answer(PROMPT[:15], GREEDY)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    pair.answer(PROMPT, params)  # needs all logits
    assert transfers_of(pair.decode) == TransferStats()


def test_a_server_wakes_for_prompts_and_for_room(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_WAITING_BYTES", 1)  # most blocks leave it when it is idle
    made: list[Engine] = []

    def make_engine() -> Engine:
        made.append(engine_with_role("prefill", embedded_twin(), "127.0.0.1:0", tmp_path))
        return made[0]

    served = AsyncEngine(make_engine)
    asyncio.run(served.ready())
    try:
        address = f"127.0.0.1:{port_of(made[0])}"
        decode = engine_with_role("decode", embedded_twin(), address, tmp_path)
        output = decode.add_request("one", PROMPT, GREEDY)
        while decode.has_unfinished:
            decode.step()
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == NUM_CACHED
    finally:
        asyncio.run(served.shutdown())
    assert not is_listening(port_of(made[0]))


# --- Bounds ---------------------------------------------------------------------------------------


def test_no_end_holds_more_than_its_bound(
    pair: Pair, path: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    [size] = pair.decode._offloading._blocks.num_bytes  # type: ignore[union-attr]
    bound = 2 * size
    monkeypatch.setattr(receiver, "MAX_WAITING_BYTES", bound)
    monkeypatch.setattr(server, "MAX_WAITING_BYTES", bound)
    # So that little is on its way between the two.
    connect = socket.create_connection

    def narrow(*args: Any, **options: Any) -> socket.socket:
        sock = connect(*args, **options)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        return sock

    monkeypatch.setattr(socket, "create_connection", narrow)
    [prompt] = random_prompts(1000, seed=3)
    output = pair.decode.add_request("one", prompt, GREEDY)
    wait_until(lambda: pair.prefill.has_unfinished, "no prompt came")
    [transfer] = pair.decode._offloading._levels.remote._transfers.values()  # type: ignore[union-attr]
    most = [0, 0]

    def measure() -> None:
        jobs = pair.prefill._prefilling._jobs.values()  # type: ignore[union-attr]
        waiting = [job.outgoing.num_waiting_bytes + job.num_copying_bytes for job in jobs]
        most[0] = max(most[0], *waiting, 0)
        most[1] = max(most[1], transfer.incoming.num_waiting_bytes)

    while pair.prefill.has_unfinished:  # the decode engine takes nothing meanwhile
        pair.prefill.step()
        measure()
    wait_until(lambda: transfer.incoming.num_blocks == 2, "the receiver is not full")
    [job] = pair.prefill._prefilling._jobs.values()  # type: ignore[union-attr]
    assert len(job.pending) > 10  # most of the prompt has not left the device
    pair.run(measure)
    # Blocks in shared memory are only at the origin.
    assert most == [bound, bound if path == "tcp" else 0]
    assert output.num_cached_tokens == 992
    one = make(embedded_twin(), **OPTIONS)
    assert output.outputs[0].token_ids == answers(one, [prompt])[0][0]


def test_memory_of_blocks_that_travelled_is_given_back_under_pressure(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fake_source(monkeypatch)
    with pair_of(embedded_twin(), embedded_twin(), tmp_path) as pair:
        pair.answer(PROMPT, GREEDY)
        wait_until(lambda: is_at_rest(pair), "a transfer does not end")
        shared = pair.prefill._prefilling.server._memory  # type: ignore[union-attr]
        assert (shared is None) == (path == "tcp")
        engines = [pair.prefill] if path == "shared" else [pair.prefill, pair.decode]
        for engine in engines:
            offloading = engine._offloading
            assert offloading is not None
            wait_until(lambda: has_spare_memory(offloading), "nothing is left")  # noqa: B023
            before = engine.stats().pressure.num_bytes
            source.level = PressureLevel.WARNING
            engine.follow_pressure()
            assert not has_spare_memory(offloading)
            [size] = offloading._blocks.num_bytes
            assert engine.stats().pressure.num_bytes >= before + size
            source.level = PressureLevel.NORMAL
        assert pair.answer(PROMPT[10:], GREEDY).num_cached_tokens == 88


def has_spare_memory(offloading: Offloading) -> bool:
    """True if memory for blocks that travel is kept for later ones."""
    prefilling = offloading.prefilling
    shared = None if prefilling is None else prefilling.server._memory
    if shared is not None and any(shared._is_written):
        return True
    return offloading._buffers._num_bytes > 0


class EightBlocks:
    """A `Prefiller` whose prompts all have the same blocks."""

    max_tokens = 1

    def refusal(self, request: wire.PrefillRequest) -> str | None:
        return None

    def begin(self, outgoing: server.Outgoing) -> None:
        for number in range(8):
            outgoing.add(Block(bytes([number] * 16), 0, memoryview(bytes(1000))))
        outgoing.end()

    def wake(self) -> None:
        pass


def test_prompts_have_equal_shares_of_what_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "MAX_WAITING_BYTES", 4000)
    monkeypatch.setattr(server, "MAX_WAITING_BYTES", 4000)
    prefiller, listening = EightBlocks(), server.PrefillServer(("127.0.0.1", 0), SECRET)
    assert [listening.share_of(count) for count in (1, 2, 4)] == [4000, 2000, 1000]
    listening.start(prefiller)
    asks = receiver.Receiver(("127.0.0.1", listening.port), SECRET)
    request = wire.PrefillRequest(bytes(16), bytes(4))
    numbers = {bytes([number] * 16): number for number in range(8)}

    def start() -> receiver.Incoming:
        incoming = receiver.Incoming(
            *(request, numbers, [1000]),
            *(lambda size: memoryview(bytearray(size)), lambda data: None, lambda: None),
        )
        asks.start(incoming)
        return incoming

    alone = start()
    wait_until(lambda: alone.num_blocks == 4, "it does not get all that may wait")
    other = start()
    wait_until(lambda: other.num_blocks == 2, "it does not get half of what may wait")
    for number in range(3):
        assert alone.take(0, number) is not None
    wait_until(lambda: alone.num_blocks == 5, "the first one does not go on")
    for number in range(8):
        wait_until(lambda: other.take(0, number) is not None, "a block is lost")  # noqa: B023
        assert other.num_waiting_bytes <= 2000
    wait_until(lambda: other.is_over, "it does not end")
    alone.cancel()
    asks.close()
    listening.close()


def test_a_server_without_descriptors_accepts_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_RETRY", 0.0)
    prefiller, listening = EightBlocks(), server.PrefillServer(("127.0.0.1", 0), SECRET)
    sock = listening._socket
    full = OSError(errno.EMFILE, "Too many open files")
    accept = mock.Mock(side_effect=itertools.chain([full], iter(sock.accept, None)))
    monkeypatch.setattr(listening, "_socket", mock.Mock(wraps=sock, accept=accept))
    listening.start(prefiller)
    try:
        greeted(("127.0.0.1", listening.port)).close()
    finally:
        listening.close()


def test_silent_and_hostile_peers_delay_no_one(pair: Pair, expected: list[int]) -> None:
    address = ("127.0.0.1", port_of(pair.prefill))
    silent = socket.create_connection(address)
    garbage = socket.create_connection(address)
    garbage.sendall(bytes(64))
    assert not garbage.makefile("rb").read()[40:]  # a greeting, and no proof
    huge = greeted(address)
    head = struct.pack("<16sIIqBI", bytes(16), 1 << 31, 0, 0, 0, 0xFFFFFFFF)
    huge.send(head, 5.0)
    with pytest.raises(ConnectionError):
        huge.read_kind(30.0)
    assert pair.answer(PROMPT, GREEDY).outputs[0].token_ids == expected
    assert transfers_of(pair.decode).num_failed_prompts == 0
    for sock in (silent, garbage):
        sock.close()


def greeted(address: tuple[str, int]) -> wire.Connection:
    connection = wire.Connection(socket.create_connection(address))
    connection.greet_as_client(SECRET)
    connection.read_welcome(TIMEOUT)
    return connection


def test_a_decode_engine_that_leaves_ends_its_prompt(pair: Pair) -> None:
    pair.decode.add_request("one", PROMPT, GREEDY)
    wait_until(lambda: pair.prefill.has_unfinished, "no prompt came")
    pair.prefill.step()
    pair.decode.abort("one")
    pair.decode.on_idle()
    wait_until(lambda: not stepped(pair.prefill), "the prompt is computed to its end")
    assert pair.prefill.stats().counters.num_admissions == 1
    sent = transfers_of(pair.prefill)
    assert sent.num_failed_prompts == 1 and sent.num_blocks < 12


def stepped(engine: Engine) -> bool:
    if engine._prefilling.has_new:  # type: ignore[union-attr]
        engine.step()
    return bool(engine._scheduler.has_unfinished)


def two_prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Two prompts, and one engine's answers."""
    prompts = random_prompts(100, 100, seed=6)
    expected, _ = answers(make(embedded_twin(), **OPTIONS), prompts)
    return prompts, expected


def test_a_prompt_that_overtakes_others_does_not_wait_for_their_transfers(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer of the one that cannot be admitted is full, and holds the only thread; that of
    the admitted one waited for a thread, and its sequence for that transfer."""
    monkeypatch.setattr(receiver, "MAX_TRANSFERS", 1)
    for end in (receiver, server):
        monkeypatch.setattr(end, "MAX_WAITING_BYTES", 1)
    options = {"max_num_seqs": 1, "policy": "priority"}
    with pair_of(embedded_twin(), embedded_twin(), tmp_path, **options) as pair:
        [first, second], expected = two_prompts()
        long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        running = pair.decode.add_request("running", [5, 6, 7], long)
        pair.step()
        low = pair.decode.add_request("low", first, GREEDY, priority=1)
        remote = pair.decode._offloading._levels.remote  # type: ignore[union-attr]
        [transfer] = remote._transfers.values()  # type: ignore[union-attr]

        def is_full() -> bool:
            pair.step_prefill()
            return transfer.incoming.num_blocks > 0

        wait_until(is_full, "no block came")
        high = pair.decode.add_request("high", second, GREEDY, priority=-1)
        pair.decode.abort("running")
        pair.run(pair.decode.check_integrity)
        assert running.finished
        assert [output.outputs[0].token_ids for output in (low, high)] == expected
        assert [output.num_cached_tokens for output in (low, high)] == [NUM_CACHED] * 2
        assert high.metrics.finished_time < low.metrics.first_token_time  # type: ignore[operator]
        wait_until(lambda: is_at_rest(pair), "a transfer does not end")


def test_an_urged_transfer_ends_with_its_restoration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would keep its thread from others until its sequence is admitted again."""
    monkeypatch.setattr(receiver, "MAX_TRANSFERS", 0)  # All transfers have to be urged.
    monkeypatch.setattr(receiver, "MAX_URGED_TRANSFERS", 1)
    options = {"max_num_seqs": 1, "policy": "priority"}
    with pair_of(embedded_twin(), embedded_twin(), tmp_path, **options) as pair:
        [first, second], expected = two_prompts()
        low = pair.decode.add_request("low", first, GREEDY, priority=1)
        while not pair.decode._kv.restorations:
            pair.decode.step()
        pair.decode.step()
        wait_until(lambda: pair.prefill.has_unfinished, "the transfer is not urged")
        [seq] = pair.decode._scheduler.running.items
        pair.decode._scheduler._preempt(seq)
        high = pair.decode.add_request("high", second, GREEDY, priority=-1)
        pair.run(pair.decode.check_integrity)
        assert [output.outputs[0].token_ids for output in (low, high)] == expected
        assert high.num_cached_tokens == NUM_CACHED


# --- A full queue, which is no failure ------------------------------------------------------------


def check_refused(pair: Pair, expected: list[int], reason: str) -> None:
    """One prompt is computed by the decode engine, and the next one is sent."""
    check_failed(pair, expected, reason)
    assert not remote_of(pair)._receiver.is_paused


def check_next(pair: Pair) -> None:
    """The next prompt is computed by the prefill engine."""
    [prompt] = random_prompts(60, seed=9)
    output = pair.answer(prompt, GREEDY, "next")
    assert output.num_cached_tokens == 56 and output.cache_miss is None


def remote_of(pair: Pair) -> RemoteLevel:
    remote = pair.decode._offloading._levels.remote  # type: ignore[union-attr]
    assert remote is not None
    return remote


def test_a_prompt_whose_turn_does_not_come(
    pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "_PROGRESS", -1.0)
        check_refused(pair, expected, "too many prompts wait")
    check_next(pair)


def test_a_prompt_that_waits_for_others_at_the_prefill_engine(
    pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It beats, so it is not dead. Its time counts as that of a slow engine does."""
    with monkeypatch.context() as patch:
        patch.setattr(server, "HEARTBEAT", 0.0)
        output = pair.decode.add_request("one", PROMPT, GREEDY)
        wait_until(lambda: pair.prefill.has_unfinished, "no prompt came")
        patch.setattr(receiver, "_PROGRESS", -1.0)
        while pair.decode.has_unfinished:  # the prefill engine computes nothing
            pair.decode.step()
    assert output.outputs[0].token_ids == expected
    assert "no block came within" in str(output.cache_miss)
    assert not remote_of(pair)._receiver.is_paused
    assert remote_of(pair)._rates._remote._amount == NUM_CACHED
    check_next(pair)


def test_a_prefill_engine_with_too_many_prompts(
    pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server, "MAX_PROMPTS", 0)
        check_refused(pair, expected, "the prefill engine has too many prompts")
    check_next(pair)


def test_a_prompt_that_is_too_long_for_the_prefill_engine(pair: Pair, expected: list[int]) -> None:
    pair.prefill._prefilling.max_tokens = 80  # type: ignore[union-attr]
    check_refused(pair, expected, "takes prompts of at most 80 tokens")
    check_next(pair)


def test_a_prefill_engine_that_is_short_of_memory(
    pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse = mock.Mock(side_effect=MemoryPressureError(10.0))
        patch.setattr(pair.prefill._relief, "check_admission", refuse)
        check_refused(pair, expected, "short of memory")
    check_next(pair)


def test_silent_peers_without_the_secret_keep_no_one_out(
    pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_GREETINGS", 2)
    monkeypatch.setattr(wire, "GREETING_TIMEOUT", 10 * TIMEOUT)
    address = ("127.0.0.1", port_of(pair.prefill))
    silent = [socket.create_connection(address) for _ in range(3)]
    silent[0].settimeout(TIMEOUT)
    assert not silent[0].makefile("rb").read()[40:]  # the oldest one is closed
    assert pair.answer(PROMPT, GREEDY).outputs[0].token_ids == expected
    assert transfers_of(pair.decode).num_failed_prompts == 0
    for sock in silent:
        sock.close()


# --- Failures -------------------------------------------------------------------------------------


def test_a_prefill_engine_that_dies_costs_only_time(pair: Pair, expected: list[int]) -> None:
    output = pair.decode.add_request("one", PROMPT, GREEDY)
    wait_until(lambda: pair.prefill.has_unfinished, "no prompt came")
    for _ in range(4):
        pair.prefill.step()
    wait_until(lambda: restored(pair) >= 6, "no block came")
    pair.prefill._prefilling.server.close()  # type: ignore[union-attr]
    while pair.decode.has_unfinished:
        pair.decode.step()
        pair.decode.check_integrity()
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 0
    assert output.cache_miss is not None and output.cache_miss.reason is MissReason.TRANSFER
    assert transfers_of(pair.decode).num_failed_prompts == 1
    # The next prompts meet a closed port, and then nobody asks for a while.
    [*others] = random_prompts(60, 60, seed=9)
    for prompt, reason in zip(others, ("refused", "failed a moment ago")):
        later = pair.answer(prompt, GREEDY, "later")
        assert reason in str(later.cache_miss)


def test_a_server_that_is_killed_in_the_middle(tmp_path: Path, expected: list[int]) -> None:
    secret, port = tmp_path / "secret", free_port()
    secret.write_bytes(SECRET)
    address = f"127.0.0.1:{port}"
    options = ["--role", "prefill", "--prefill-address", address, "--dtype", "float32"]
    options += ["--prefill-secret-file", str(secret), "--port", str(free_port())]
    options += ["--block-size", "8", "--max-num-batched-tokens", "8", "--max-num-seqs", "4"]
    command = [sys.executable, "-m", "mlx_paged", "serve", *options]
    [prompt] = random_prompts(400, seed=4)
    [tokens], _ = answers(make(embedded_twin(), **OPTIONS), [prompt])
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_listening(port), "the server did not start")
        decode = engine_with_role("decode", embedded_twin(), address, tmp_path)
        output = decode.add_request("one", prompt, GREEDY)
        restorations = decode._kv.restorations
        while sum(restoration.num_done for restoration in restorations.values()) < 3:
            assert decode.has_unfinished
            decode.step()
        process.send_signal(signal.SIGSTOP)  # between two blocks, or within one
        decode.step()
        assert restorations
        process.kill()
        while decode.has_unfinished:
            decode.step()
            decode.check_integrity()
    finally:
        process.kill()
        process.wait()
    assert output.outputs[0].token_ids == tokens
    assert output.cache_miss is not None and output.cache_miss.reason is MissReason.TRANSFER


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_listening(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT),
    ):
        return True
    return False


def fail_a_step(engine: Engine) -> None:
    def fail(num_tokens: int) -> None:
        engine.on_launch = None
        raise MemoryError

    engine.on_launch = fail
    with pytest.raises(MemoryError):
        engine.step()


def test_a_prefill_engine_that_repairs_itself(pair: Pair, expected: list[int]) -> None:
    output = pair.decode.add_request("one", PROMPT, GREEDY)
    wait_until(lambda: pair.prefill.has_unfinished, "no prompt came")
    pair.prefill.step()

    fail_a_step(pair.prefill)
    pair.run()
    assert output.outputs[0].token_ids == expected
    assert "was repaired" in str(output.cache_miss)


def test_a_decode_engine_that_repairs_itself(pair: Pair, expected: list[int]) -> None:
    waiting = pair.decode.add_request("one", PROMPT, GREEDY)
    pair.decode.add_request("two", [5, 6, 7], GREEDY)

    fail_a_step(pair.decode)
    pair.run()
    assert waiting.outputs[0].token_ids == expected
    wait_until(lambda: is_at_rest(pair), "a prompt is computed in vain")


def test_another_secret(tmp_path: Path, expected: list[int]) -> None:
    with pair_of(embedded_twin(), embedded_twin(), tmp_path) as pair:
        pair.prefill._prefilling.server._secret = b"another secret!!"  # type: ignore[union-attr]
        check_failed(pair, expected, "it has another secret")


def test_another_model(tmp_path: Path) -> None:
    with pair_of(loaded("gpt-oss"), loaded("mistral"), tmp_path) as pair:
        check_failed(pair, dense_answer("mistral", PROMPT, NUM_TOKENS), "it has another model")
        assert remote_of(pair)._receiver.is_paused  # no prompt of this one will be computed


def test_another_format(tmp_path: Path, expected: list[int]) -> None:
    options = {"kv_cache_dtype": "int8"}
    with pair_of(embedded_twin(), embedded_twin(), tmp_path, prefill_options=options) as pair:
        check_failed(pair, expected, "another format of the cache")


class Changing:
    """Changes the fifth block's record before it is sent, on either path."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, change: Callable[[Record], Record | None]
    ) -> None:
        send, frame, count = wire.Connection.send_record, server.shared_frame, itertools.count(1)

        def changed(record: Record) -> Record | None:
            return change(record) if next(count) == 5 else record

        def send_changed(self: Any, record: Record, data: memoryview, timeout: float) -> None:
            if (found := changed(record)) is not None:
                send(self, found, data, timeout)

        def changed_frame(record: Record) -> bytes:
            return b"" if (found := changed(record)) is None else frame(found)

        monkeypatch.setattr(wire.Connection, "send_record", send_changed)
        monkeypatch.setattr(server, "shared_frame", changed_frame)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"digest": bytes(16)}, "a block of another prompt arrived"),
        ({"group": 1}, "a block of another prompt arrived"),
        ({"length": 1 << 31}, "bytes but has 2147483648"),
    ],
)
def test_records_that_are_wrong(
    pair: Pair,
    expected: list[int],
    change: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Changing(monkeypatch, lambda record: record._replace(**change))
    check_failed(pair, expected, reason)


def test_damaged_bytes(
    pair: Pair, path: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that cross a wire have a checksum; others have a place, which must exist."""
    if path == "tcp":
        Changing(monkeypatch, lambda record: record._replace(crc=record.crc ^ 1))
        check_failed(pair, expected, "a block is damaged")
    else:
        Changing(monkeypatch, lambda record: record._replace(offset=1 << 40))
        check_failed(pair, expected, "exceed the memory")


def test_blocks_that_are_left_out(
    pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Changing(monkeypatch, lambda record: None)
    check_failed(pair, expected, "did not send all blocks")


def test_an_error_that_was_not_foreseen_costs_no_thread(
    pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "MAX_TRANSFERS", 1)
        patch.setattr(local.Linker, "connect", mock.Mock(side_effect=MemoryError("no memory")))
        check_refused(pair, expected, "no memory")
    check_next(pair)


def test_a_salt_that_is_no_text(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    connection = greeted(("127.0.0.1", port_of(pair.prefill)))
    head = struct.pack("<16sIIqBI", bytes(16), 9, 0, 0, 0, 4)
    connection.send(head + b"\xff\xfe\x80\x80" + bytes(36), 5.0)
    with pytest.raises(ConnectionError):
        connection.read_kind(TIMEOUT)
    wait_until(lambda: "a connection was refused: a salt is not UTF-8" in caplog.text, "no word")
    connection.close()


def test_a_server_without_threads_serves_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    prefiller, listening = EightBlocks(), server.PrefillServer(("127.0.0.1", 0), SECRET)
    listening.start(prefiller)
    address, serve = ("127.0.0.1", listening.port), mock.Mock()
    serve.return_value.start.side_effect = RuntimeError("can't start new thread")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(server.threading, "Thread", serve)
            with socket.create_connection(address, TIMEOUT) as refused:
                assert not refused.recv(1)
        wait_until(lambda: not listening._greeting, "it is kept")
        greeted(address).close()
    finally:
        listening.close()


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"role": "both"}, "role must be None, 'prefill' or 'decode' but"),
        ({"role": "decode"}, "prefill_address must be HOST:PORT, for a role"),
        ({"prefill_address": "a:1"}, "prefill_address must be None without a role"),
        (
            {"role": "decode", "prefill_address": "a:1"},
            "prefill_secret_file must be a file that both engines have, for a role",
        ),
        (
            {"role": "decode", "prefill_address": "a", "prefill_secret_file": "s"},
            "prefill_address must be HOST:PORT but",
        ),
        *(
            (
                {"role": "decode", "prefill_address": address, "prefill_secret_file": "s"},
                "prefill_address must be HOST:PORT but",
            )
            for address in (
                "a..b:1",
                f"{'a' * 64}:1",
                "a\0:1",
                "\udcff:1",
                "a:0",
                f"a:{'9' * 5000}",
            )
        ),
        (
            {
                "role": "prefill",
                "prefill_address": "a:1",
                "prefill_secret_file": "s",
                "tensor_parallel_size": 2,
            },
            "role must be None where tensor_parallel_size is above 1",
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        EngineConfig(**options)
    assert text in str(error.value)


def test_the_secret_and_the_address_are_checked(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    options = {"role": "decode", "prefill_address": "a:1", "prefill_secret_file": "\0"}
    with pytest.raises(InvalidParameterError, match="null byte"):
        LLM(embedded_twin(), **OPTIONS, **options)
    for content in (None, b"short\n"):
        if content is not None:
            secret.write_bytes(content)
        options = {"role": "decode", "prefill_address": "a:1", "prefill_secret_file": secret}
        with pytest.raises(InvalidParameterError, match="prefill_secret_file"):
            LLM(embedded_twin(), **OPTIONS, **options)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidParameterError, match="prefill_address"):
            (tmp_path / "secret").write_bytes(SECRET)
            engine_with_role("prefill", embedded_twin(), address, tmp_path)
    with pytest.raises(InvalidParameterError, match="only a server's engine"):
        LLM(role="prefill", prefill_address="a:1", prefill_secret_file=secret)
