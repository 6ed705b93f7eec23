"""Load: many streams at once, aborts, slow readers and half-open sockets on a tiny pool.

Every request that was accepted ends with its full, right text or a clean error, and afterwards all
that was taken is back. `make load` runs the full size.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from support.hash_model import VOCAB_SIZE, follows, hash_model
from support.leftovers import leftovers_of
from support.server_helpers import RunningServer, process, running
from support.waiting import TIMEOUT

from mlx_paged import ops
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.server.config import ServerConfig

NUM_CLIENTS = int(os.environ.get("MLX_PAGED_LOAD_CLIENTS", "64"))
SECONDS = float(os.environ.get("MLX_PAGED_LOAD_SECONDS", "3"))


def head(body: bytes, *, connection: str = "keep-alive") -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: {connection}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


async def dechunked(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a chunked body; empty at its end."""
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size)
    await reader.readexactly(2)
    return data


async def one_request(port: int, rng: random.Random, seen: Counter[str]) -> None:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
    wanted = rng.randint(1, 80)
    stream = rng.random() < 0.8
    body = json.dumps(
        {"prompt": prompt, "max_tokens": wanted, "temperature": 0, "ignore_eos": True,
         "stream": stream, "return_token_ids": True}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        manner = rng.random()
        if manner < 0.05:  # half a body, then silence
            writer.write(head(body) + body[: len(body) // 2])
            await asyncio.sleep(rng.random() * 0.3)
            seen["half a body"] += 1
            return
        writer.write(head(body) + body)
        if manner < 0.10:  # gone before the answer
            seen["left at once"] += 1
            return
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        if status != 200:
            error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
            assert status in (429, 503), (status, error)
            assert headers["retry-after"] and error["code"]
            seen[f"{status} {error['code']}"] += 1
            return
        leaves_after = rng.randrange(1, 20) if rng.random() < 0.2 else None
        pause = rng.choice((0, 0, 0, 0.01, 0.1))
        tokens: list[int] = []
        if stream:
            text, num_chunks = b"", 0
            while chunk := await dechunked(reader):
                text += chunk
                num_chunks += 1
                if num_chunks == leaves_after:
                    seen["left in between"] += 1
                    return
                if pause:
                    await asyncio.sleep(pause)
            events = [e.removeprefix("data: ") for e in text.decode().split("\n\n") if e]
            events = [e for e in events if not e.startswith(":")]
            assert events[-1] == "[DONE]"
            for event in map(json.loads, events[:-1]):
                assert "error" not in event, event
                tokens += event["choices"][0]["token_ids"]
        else:
            answer = json.loads(await reader.readexactly(int(headers["content-length"])))
            tokens = answer["choices"][0]["token_ids"]
        assert tokens == follows(prompt, wanted)
        seen["right"] += 1
    finally:
        if rng.random() < 0.3:
            writer.transport.abort()  # a reset instead of a farewell
        writer.close()


async def storm(port: int, seed: int, seconds: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    end = asyncio.get_running_loop().time() + seconds

    async def client(number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        while asyncio.get_running_loop().time() < end:
            await asyncio.wait_for(one_request(port, rng, seen), TIMEOUT)

    # Half-open: connections that say nothing, or stop in the middle of a word.
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    for i, (_, writer) in enumerate(silent):
        writer.write(b"POST /v1/comp"[: i % 14])
    await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    for _, writer in silent:
        writer.close()
    return seen


def leftovers(server: RunningServer) -> dict[str, int]:
    server.wait_idle()

    def look(inner: Engine) -> dict[str, int]:
        return {**leftovers_of(inner), "readers": len(server.engine._thread._sleepers)}

    return server.call(server.engine._call(look))


def test_a_storm_leaves_nothing_behind() -> None:
    config = EngineConfig(
        block_size=8, num_gpu_blocks_override=160, max_num_seqs=48, max_num_waiting=60,
        max_num_batched_tokens=256, max_model_len=200,
    )  # fmt: skip
    copies = ops.pool_copies()
    options = ServerConfig(read_timeout=3, log_requests=False)
    with running(options, lambda: AsyncEngine(lambda: Engine(hash_model(), config))) as server:
        asyncio.run(storm(server.port, 0, SECONDS / 4))  # whatever is made once is there now
        before = leftovers(server)
        seen = asyncio.run(storm(server.port, 1, SECONDS))
        after = leftovers(server)
        print(f"\n{NUM_CLIENTS} clients, {SECONDS:g} s: {dict(seen)}, {after}")
        assert seen["right"] > NUM_CLIENTS and seen["left in between"] and seen["half a body"]
        assert before["free"] == after["free"] == 159
        assert after["requests"] == after["readers"] == 0
        assert abs(after["arrays"] - before["arrays"]) <= 4
        assert abs(after["active"] - before["active"]) <= 65536
        assert ops.pool_copies() == copies


CLIENT = """
import sys, httpx
body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 2}
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=300) as response:
    for line in response.iter_lines():
        print("reading", flush=True)
"""


def test_clients_that_are_killed_free_what_they_held() -> None:
    with running() as server:
        clients = [
            subprocess.Popen([sys.executable, "-c", CLIENT, server.url], stdout=subprocess.PIPE)
            for _ in range(3)
        ]
        try:
            for client in clients:
                assert client.stdout is not None and client.stdout.readline()
            assert server.stats().num_running == 6
        finally:
            for client in clients:
                client.kill()
                client.communicate()
        server.until(lambda: server.num_ended("abort") == 3)
        server.wait_idle()
        assert server.num_ended("length") == 0


def test_sigterm_under_load() -> None:
    """Everybody gets an answer or a clean error, and the process ends with status 0."""

    async def load(port: int, stop: Any) -> Counter[str]:
        seen: Counter[str] = Counter()

        async def client(number: int) -> None:
            body = json.dumps({"prompt": f"x{number}", "max_tokens": 60, "ignore_eos": True,
                               "stream": True}).encode()  # fmt: skip
            while True:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    seen["refused"] += 1
                    return
                try:
                    writer.write(head(body, connection="close") + body)
                    answer = await asyncio.wait_for(reader.read(), 300)
                except ConnectionResetError:
                    seen["refused"] += 1
                    return
                finally:
                    writer.close()
                if not answer:
                    seen["refused"] += 1
                    return
                status = int(answer.split(maxsplit=2)[1])
                if status == 200:
                    assert answer.rstrip().endswith(b"0"), answer[-100:]  # the last chunk came
                    ended = b'"finish_reason":"length"' in answer or b"shutting_down" in answer
                    assert ended and b"[DONE]" in answer
                    seen["finished"] += 1
                else:
                    assert status == 503, answer
                    seen["503"] += 1

        clients = [asyncio.create_task(client(i)) for i in range(24)]
        while seen["finished"] < len(clients) / 2:
            await asyncio.sleep(0.01)
        stop()
        await asyncio.gather(*clients)
        return seen

    with process("--shutdown-timeout", "20", "--disable-log-requests") as (server, url):
        port = int(url.rpartition(":")[2])
        seen = asyncio.run(load(port, lambda: server.send_signal(signal.SIGTERM)))
        assert server.wait(300) == 0
        assert seen["finished"] >= 24 and seen["refused"] + seen["503"] >= 24, seen


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory: Linux only")
def test_memory_is_flat() -> None:
    """A thousand requests later the process is as large as before."""

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    config = EngineConfig(block_size=8, num_gpu_blocks_override=200, max_num_seqs=32)
    options = ServerConfig(log_requests=False)
    with (
        running(options, lambda: AsyncEngine(lambda: Engine(hash_model(), config))) as server,
        server.client() as client,
    ):

        def ask(count: int) -> None:
            for i in range(count):
                body = {"prompt": [i % 60, 5], "max_tokens": 4, "stream": i % 2 == 0}
                assert client.post("/v1/completions", json=body).status_code == 200

        ask(300)
        before = resident()
        ask(1000)
        assert resident() - before < 8 << 20
