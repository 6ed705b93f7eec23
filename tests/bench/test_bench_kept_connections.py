"""`bench serve`'s client where a server closes connections that it was expected to keep."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from mlx_paged.bench.client import Result, Target, run
from mlx_paged.bench.datasets import Prompt

CHUNK = json.dumps({"choices": [{"text": "x", "finish_reason": "length"}]})
STREAM = f"data: {CHUNK}\n\ndata: [DONE]\n\n"
ANSWER = f"HTTP/1.1 200 OK\r\ncontent-length: {len(STREAM)}\r\n\r\n{STREAM}".encode()

# (number of the request on its connection from 0, writer): answers, or closes.
Answer = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


async def measured(
    answer: Answer, num_prompts: int, concurrency: int = 1
) -> tuple[list[Result], int, int]:
    """Returns the results, and the numbers of requests and of connections that the server saw."""
    num_requests = num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests, num_connections
        num_connections += 1
        number = 0
        while not writer.is_closing():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            length = next(
                int(line.partition(b":")[2])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            )
            await reader.readexactly(length)
            num_requests += 1
            await answer(number, writer)
            number += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = Target(f"http://127.0.0.1:{port}/v1/completions", "m", False, {})
    prompts = [Prompt((1,), 1, f"prompt {i}") for i in range(num_prompts)]
    results, _ = await run(target, prompts, concurrency=concurrency)
    server.close()
    return results, num_requests, num_connections


async def _reply(writer: asyncio.StreamWriter) -> None:
    writer.write(ANSWER)
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with RST instead of FIN."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_request_is_repeated_when_its_kept_connection_is_closed(
    with_reset: bool, concurrency: int
) -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 0:
            await _reply(writer)
        elif with_reset:
            _reset(writer)
        else:
            writer.close()

    results, num_requests, num_connections = asyncio.run(measured(answer, 12, concurrency))
    assert [result.error for result in results] == [""] * 12
    assert all(result.success for result in results)
    assert num_connections == 12 < num_requests


def test_a_request_on_a_new_connection_is_not_repeated() -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        writer.close()

    results, num_requests, _ = asyncio.run(measured(answer, 3))
    assert num_requests == 3
    assert all(result.error.startswith("ServerDisconnectedError") for result in results)


@pytest.mark.parametrize("sent", [ANSWER[:20], ANSWER[:-5]], ids=["headers", "body"])
def test_a_request_with_a_part_of_an_answer_is_not_repeated(sent: bytes) -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 0:
            await _reply(writer)
        else:
            writer.write(sent)
            await writer.drain()
            writer.close()

    results, num_requests, _ = asyncio.run(measured(answer, 2))
    assert num_requests == 2
    assert results[0].success and not results[1].success and results[1].error
