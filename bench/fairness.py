"""Measures how one client's requests delay others: the largest gaps of a stream and of /health.

    python bench/fairness.py --baseline /path/to/another/environment/bin/python

A server process with the embedded model serves one normal stream and a client that polls /health
every 20 ms. A separate process then sends named requests, costly or hostile, one after another. For
each, the result is the longest time between two chunks of the stream, and the longest /health, next
to the same figures without the request (`quiet`) and with batches that keep the model busy but not
the server (`plain_*`). `--baseline` measures a server with other code in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from harness import free_port, print_table, save, server_process

POLL_INTERVAL = 0.02
PATIENCE = 60.0  # request timeout in seconds
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "def add(a, b):\n    return a + b\n\n"

Attack = tuple[str, bytes, int]  # path, body, number of concurrent requests


def _attack(path: str, body: Any, count: int = 1) -> Callable[[], Attack]:
    return lambda: (path, json.dumps(body() if callable(body) else body).encode(), count)


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Return the n-th number"}], **fields}


def _many(**fields: Any) -> dict[str, Any]:
    return _chat(temperature=1, ignore_eos=True, max_tokens=24, **fields)


def _top(n: int, **fields: Any) -> Callable[[], Attack]:
    return _attack(CHAT, _many(n=n, logprobs=True, top_logprobs=20, **fields))


#: Functions that make path and body, by name.
ATTACKS: dict[str, Callable[[], Attack]] = {
    "plain_n64": _attack(CHAT, _many(n=64)),
    "plain_n256": _attack(CHAT, _many(n=256)),
    "plain_n256_stream": _attack(CHAT, _many(n=256, stream=True)),
    "plain_prompt_4000": _attack(COMPLETIONS, {"prompt": [300] * 4000, "max_tokens": 1}),
    "messages_500k": _attack(
        CHAT, lambda: {"messages": [{"role": "a", "content": ""}] * 500_000, "max_tokens": 1}
    ),
    "messages_1_500k": _attack(CHAT, lambda: {"messages": [1] * 1_500_000, "max_tokens": 1}),
    "messages_4000": _attack(
        CHAT, lambda: {"messages": [{"role": "user", "content": "x"}] * 4000, "max_tokens": 1}
    ),
    "parts_500k": _attack(
        CHAT,
        lambda: {"messages": [{"role": "a", "content": [{"type": "text", "text": ""}] * 450_000}]},
    ),
    "unknown_keys_900k": _attack(COMPLETIONS, lambda: {
        "prompt": "x", "max_tokens": 1, **{f"k{i}": 0 for i in range(900_000)}}),
    "unknown_keys_nested": _attack(CHAT, lambda: _chat(max_tokens=1, chat_template_kwargs={
        f"k{i}": [] for i in range(900_000)})),
    "prompt_3m_ids": _attack(COMPLETIONS, lambda: {"prompt": [300] * 3_000_000, "max_tokens": 1}),
    "prompt_3m_negative_ids": _attack(
        COMPLETIONS, lambda: {"prompt": [-1] * 3_000_000, "max_tokens": 1}
    ),
    "prompts_1m": _attack(COMPLETIONS, lambda: {"prompt": [[3]] * 1_000_000, "max_tokens": 1}),
    "prompts_256": _attack(COMPLETIONS, lambda: {
        "prompt": [f"{i}: {TEXT}" for i in range(256)], "max_tokens": 4}),
    "nested_8m": lambda: (CHAT, b'{"messages":' + b"[" * 8_000_000, 1),
    "nested_lists_3m": lambda: (
        CHAT, b'{"messages":[{"role":"a"}],"x":[' + b"[],[[]]," * 1_500_000 + b"0]}", 1),
    "text_16mb": _attack(COMPLETIONS, lambda: {"prompt": TEXT * 460_000, "max_tokens": 1}),
    "text_60kb": _attack(COMPLETIONS, lambda: {"prompt": TEXT * 1800, "max_tokens": 1}),
    "text_no_spaces_60kb": _attack(COMPLETIONS, lambda: {"prompt": "a1" * 30_000, "max_tokens": 1}),
    "text_escapes_16mb": lambda: (
        COMPLETIONS, b'{"prompt":"' + b"\\ud83d\\ude00" * 1_300_000 + b'"}', 1),
    "number_field_is_text_16mb": _attack(
        COMPLETIONS, lambda: {"prompt": "x", "temperature": "a" * 16_000_000}
    ),
    "messages_texts_16mb": _attack(CHAT, lambda: {
        "messages": [{"role": "user", "content": TEXT * 900}] * 500, "max_tokens": 1}),
    "kwargs_16mb": _attack(CHAT, lambda: _chat(max_tokens=1, documents=[
        {"title": "t", "text": TEXT * 2000}] * 200)),
    "tokenize_60kb": _attack(
        "/tokenize", lambda: {"prompt": TEXT * 1800, "return_token_strs": True}),
    "tokenize_16mb": _attack("/tokenize", lambda: {"prompt": TEXT * 460_000}),
    "detokenize_3m": _attack("/detokenize", lambda: {"tokens": [300] * 3_000_000}),
    "stop_strings": _attack(CHAT, _many(n=64, stop=[f"{i:04}" * 256 for i in range(64)])),
    "logit_bias_4096": _attack(CHAT, _many(n=64, logit_bias={f"{i}": -1 for i in range(4096)})),
    "logit_bias_900k": _attack(
        CHAT, lambda: _many(logit_bias={f"{i}": -1 for i in range(900_000)})),
    "allowed_ids_1m": _attack(CHAT, lambda: _many(n=64, allowed_token_ids=[300, 301] * 500_000)),
    "bad_words": _attack(CHAT, _many(n=64, bad_words=[f"{i:04}" * 256 for i in range(256)])),
    "echo_logprobs_4000": _attack(COMPLETIONS, lambda: {
        "prompt": [300 + i % 3000 for i in range(4000)], "max_tokens": 1, "echo": True,
        "logprobs": 20}),
    "prompt_logprobs_4000": _attack(COMPLETIONS, lambda: {
        "prompt": [300 + i % 2999 for i in range(4000)], "max_tokens": 1, "prompt_logprobs": 20}),
    "top20_n128": _top(128),
    "top20_n256": _top(256),
    "top20_n256_stream": _top(256, stream=True),
    "top20_n256_long": _attack(
        CHAT, {**_many(n=256, logprobs=True, top_logprobs=20), "max_tokens": 80}
    ),
    "token_ids_n256": _attack(CHAT, _many(n=256, return_token_ids=True)),
    "messages_500k_by_8": _attack(
        CHAT, lambda: {"messages": [{"role": "a", "content": ""}] * 500_000, "max_tokens": 1}, 8
    ),
}  # fmt: skip


# The attacker, in its own process.


def _send(port: int, attack: Attack) -> dict[str, Any]:
    path, body, _ = attack
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    started, size, status = time.monotonic(), 0, None
    error = ""
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A rejection may arrive before the whole body is sent.
            connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        status = answer.status
        while chunk := answer.read(1 << 16):
            if time.monotonic() - started > PATIENCE:
                raise TimeoutError(f"not answered within {PATIENCE:g} s")
            if status != 200:
                error += chunk.decode(errors="replace")[: 300 - len(error)]
            size += len(chunk)
    except (OSError, http.client.HTTPException) as problem:
        error = error or repr(problem)
    finally:
        connection.close()
    return {"status": status, "seconds": time.monotonic() - started, "answer_bytes": size,
            "error": error}  # fmt: skip


def _attacker(port: int, pipe: Any) -> None:
    """Makes the bodies whose names it receives; sends each on command."""
    from concurrent.futures import ThreadPoolExecutor

    while (name := pipe.recv()) is not None:
        attack = ATTACKS[name]()
        pipe.send(len(attack[1]))
        pipe.recv()
        with ThreadPoolExecutor(attack[2]) as threads:
            answers = list(threads.map(_send, [port] * attack[2], [attack] * attack[2]))
        pipe.send({**answers[0], "seconds": max(a["seconds"] for a in answers)})


# The other clients.


class Bystanders:
    """One stream and one poller of /health, which record the time of every chunk and answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._chunks: list[float] = []  # arrival times; NaN between two streams
        self._polls: list[tuple[float, float]] = []  # (begin, end)

    async def stream(self, session: aiohttp.ClientSession) -> None:
        """Reads one stream after another, forever."""
        body = {"prompt": TEXT, "max_tokens": 3500, "ignore_eos": True, "stream": True, "seed": 1}
        while True:
            async with session.post(self._url + COMPLETIONS, json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content.iter_any():
                    self._chunks.append(time.monotonic())
            self._chunks.append(float("nan"))

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Polls /health."""
        while True:
            begin = time.monotonic()
            async with session.get(self._url + "/health") as answer:
                await answer.read()
            self._polls.append((begin, time.monotonic()))
            await asyncio.sleep(POLL_INTERVAL)

    def gaps(self, begin: float) -> dict[str, float]:
        """Milliseconds since a given time: the largest gap, and the longest /health."""
        now = time.monotonic()
        first = next((i for i, t in enumerate(self._chunks) if t >= begin), len(self._chunks))
        moments = [*self._chunks[max(0, first - 1) :], now]
        gaps = [b - a for a, b in itertools.pairwise(moments) if a == a and b == b]
        polls = [end - start for start, end in self._polls if end >= begin]
        return {
            "stream_gap_ms": 1e3 * max(gaps, default=now - begin),
            "median_gap_ms": 1e3 * statistics.median(gaps) if gaps else 0.0,
            "health_ms": 1e3 * max(polls, default=now - begin),
        }


async def measure(port: int, pipe: Any, names: list[str], quiet_seconds: float) -> dict[str, Any]:
    """Runs one round: every attack once."""
    loop = asyncio.get_running_loop()
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session:
        bystanders = Bystanders(f"http://127.0.0.1:{port}")
        tasks = [
            asyncio.create_task(bystanders.stream(session)),
            asyncio.create_task(bystanders.poll(session)),
        ]
        await asyncio.sleep(1.0)
        begin = time.monotonic()
        await asyncio.sleep(quiet_seconds)
        found["quiet"] = bystanders.gaps(begin)
        for name in names:
            pipe.send(name)
            size = await loop.run_in_executor(None, pipe.recv)
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            pipe.send("go")
            answer = await loop.run_in_executor(None, pipe.recv)
            await asyncio.sleep(0.5)  # so that late cleanup counts too
            found[name] = {**bystanders.gaps(begin), "body_bytes": size, **answer}
            made = {key: round(v, 1) for key, v in found[name].items() if isinstance(v, float)}
            print(name, answer["status"], made, answer["error"][:160], flush=True)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise SystemExit(f"a bystander failed: {result!r}")
    return found


@contextlib.contextmanager
def started(python: str) -> Iterator[int]:
    """A running server's port."""
    port = free_port()
    command = [python, "-m", "mlx_paged.cli.main", "serve", "--port", str(port),
               "--disable-log-requests", "--log-level", "error"]  # fmt: skip
    with server_process(python, command, port, cwd=Path(python).parents[2]):
        yield port


def one_round(python: str, names: list[str], quiet_seconds: float) -> dict[str, Any]:
    """Starts a server and measures every attack."""
    with started(python) as port:
        spawn = multiprocessing.get_context("spawn")
        pipe, other = spawn.Pipe()
        attacker = spawn.Process(target=_attacker, args=(port, other), daemon=True)
        attacker.start()
        try:
            return asyncio.run(measure(port, pipe, names, quiet_seconds))
        finally:
            pipe.send(None)
            attacker.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quiet-seconds", type=float, default=5.0)
    parser.add_argument("--only", nargs="*", help="names of requests")
    parser.add_argument("--baseline", help="a Python whose mlx_paged is compared")
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args()
    names = options.only or list(ATTACKS)
    servers = {"now": sys.executable}
    if options.baseline:
        servers = {"baseline": str(Path(options.baseline).absolute()), **servers}
    load_before = os.getloadavg()
    rounds: dict[str, list[dict[str, Any]]] = {label: [] for label in servers}
    for number in range(options.rounds):
        for label, python in servers.items():
            rounds[label].append(one_round(python, names, options.quiet_seconds))
            print(f"round {number + 1}, {label}: load {os.getloadavg()[0]:.1f}", flush=True)
    report(rounds, names, options, load_before)


def report(
    rounds: dict[str, list[dict[str, Any]]],
    names: list[str],
    options: argparse.Namespace,
    load_before: tuple[float, float, float],
) -> None:
    results: dict[str, Any] = {}
    for name in ["quiet", *names]:
        results[name] = {}
        for label, found in rounds.items():
            of_rounds = [r[name] for r in found]
            entry = {
                key: round(statistics.median(r[key] for r in of_rounds), 1)
                for key in ("stream_gap_ms", "median_gap_ms", "health_ms")
            }
            entry["stream_gaps_ms"] = [round(r["stream_gap_ms"], 1) for r in of_rounds]
            entry["healths_ms"] = [round(r["health_ms"], 1) for r in of_rounds]
            if name != "quiet":
                last = of_rounds[-1]
                entry |= {
                    "seconds": round(statistics.median(r["seconds"] for r in of_rounds), 3),
                    **{key: last[key] for key in ("status", "body_bytes", "answer_bytes", "error")},
                }
            results[name][label] = entry
    header = ["request", "status"]
    for label in rounds:
        header += [f"{label}: gap ms", "health ms", "seconds"]
    rows = []
    for name, by_label in results.items():
        row = [name, "/".join(str(e.get("status", "-")) for e in by_label.values())]
        for entry in by_label.values():
            row += [f"{entry['stream_gap_ms']:.0f}", f"{entry['health_ms']:.0f}",
                    f"{entry.get('seconds', 0):.2f}"]  # fmt: skip
        rows.append(row)
    print_table(header, rows)
    if options.save:
        body = {"rounds": options.rounds, "load_before": load_before, "load": os.getloadavg(),
                "results": results}  # fmt: skip
        print(save("fairness-cpu", body))


if __name__ == "__main__":
    main()
