"""Measures replicas of one model against one engine: throughput, and tokens found in the cache.

    python bench/replicas.py [--replicas 2] [--conversations 16] [--turns 4]

Conversations with one system message take their turns, some of them at a time, while each server
may hold `--blocks` blocks for every engine:

- **one**: one engine, without a router.
- **routed**: replicas, each request where its prefix is cached.
- **by_load**: replicas, each request on the one with the fewest, which ignores the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from typing import Any

import aiohttp
from harness import free_port, print_table, save, server_process
from prometheus_client.parser import text_string_to_metric_families

_MAIN = "from mlx_paged.cli.main import main; main()"
# Replicas' processes do not import it, so only the router changes.
_BY_LOAD = "from mlx_paged.server.router import routing; routing._match = lambda *_: 0; " + _MAIN
_WORDS = ("list", "index", "value", "result", "count", "total", "items", "string", "return", "def")
_COUNTERS = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:generation_tokens")


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


async def converse(session: aiohttp.ClientSession, number: int, given: argparse.Namespace) -> None:
    """Takes the turns of one conversation."""
    rng = random.Random(number)
    messages = [{"role": "system", "content": words(random.Random(-1), given.system_words)}]
    for _ in range(given.turns):
        messages.append({"role": "user", "content": words(rng, given.question_words)})
        # Different lengths, without which conversations take their turns in one order.
        num_tokens = rng.randint(1, 2 * given.answer_tokens)
        body = {"messages": messages, "max_tokens": num_tokens, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        async with session.post("/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            messages.append((await answer.json())["choices"][0]["message"])


async def counters(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    return {f.name: sum(s.value for s in f.samples) for f in families if f.name in _COUNTERS}


async def measure(url: str, given: argparse.Namespace) -> dict[str, float]:
    """Returns figures of all conversations."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(None)) as session:
        warm_up = range(-given.replicas, 0)
        await asyncio.gather(*(converse(session, number, given) for number in warm_up))
        async with session.post("/reset_prefix_cache") as answer:
            answer.raise_for_status()
        places = asyncio.Semaphore(given.concurrency)

        async def take_place(number: int) -> None:
            async with places:
                await converse(session, number, given)

        before, began = await counters(session), time.perf_counter()
        await asyncio.gather(*(take_place(number) for number in range(given.conversations)))
        seconds = time.perf_counter() - began
        after = await counters(session)
        queries, hits, tokens = (after[name] - before[name] for name in _COUNTERS)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "cached_share": hits / queries,
    }


def command(code: str, port: int, given: argparse.Namespace, replicas: int) -> list[str]:
    return [sys.executable, "-c", code, "serve", "--port", str(port), "--log-level", "warning",
            "--num-gpu-blocks-override", str(given.blocks), "--block-size", "16",
            "--data-parallel-size", str(replicas)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system-words", type=int, default=200)
    parser.add_argument("--question-words", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=24, help="mean")
    parser.add_argument("--blocks", type=int, default=220, help="of 16 tokens, for each engine")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    result: dict[str, Any] = {"options": vars(given), "load_before": os.getloadavg(), "rounds": []}
    ways = {
        "one": (_MAIN, 1),
        "routed": (_MAIN, given.replicas),
        "by_load": (_BY_LOAD, given.replicas),
    }
    for _ in range(given.rounds):
        found = {}
        for name, (code, replicas) in ways.items():
            port = free_port()
            with server_process(name, command(code, port, given, replicas), port) as url:
                found[name] = asyncio.run(measure(url, given))
        result["rounds"].append(found)
        rows = [[name, *(f"{v:.2f}" for v in values.values())] for name, values in found.items()]
        print_table(["server", "seconds", "tokens/s", "cached"], rows)
    print(save("replicas-cpu", result))


if __name__ == "__main__":
    main()
