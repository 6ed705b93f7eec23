"""Structured outputs and forced calls of many requests at once, and of real tools.

MLX_PAGED_STRUCTURED_ROUNDS raises how often all of them are sent (1).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import jsonschema
import pytest
from support.agent_tools import AGENT_TOOLS
from support.server_helpers import ENGINE, RunningServer, running
from support.structured_schemas import SCHEMAS

from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.grammar.compiler import GrammarCompiler
from mlx_paged.server.config import ServerConfig

ASK: list[Any] = [{"role": "user", "content": "Describe something."}]
CHATS = "/v1/chat/completions"
ROUNDS = int(os.environ.get("MLX_PAGED_STRUCTURED_ROUNDS", "1"))
AT_ONCE = 32
# Schemas with every kind of keyword; the demo model ends answers within a few hundred tokens.
SIXTEEN = [
    "a map of one to three", "names by a pattern", "an enum", "a large enum", "a const",
    "several types", "one of, told apart", "all of, bounds", "a tree", "a chain", "a pattern",
    "a pattern and lengths", "formats", "bounds of integers", "lengths of arrays", "a tuple",
]  # fmt: skip
# (Dates are left out: patterns take 0000-01-01, and the 29th of February of any year.)
CHECKER = jsonschema.FormatChecker(("email", "uuid"))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(tool_template=True)
    with running(config, **{**ENGINE, "max_model_len": 4096}) as server:
        yield server


def check(text: str, schema: Any) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))


def together(server: RunningServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of requests that are sent at once; None of one that was cut."""

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            return await asyncio.gather(*(client.post(CHATS, json=b) for b in bodies))

    answers = asyncio.run(ask())
    for body, answer in zip(bodies, answers):
        assert answer.status_code == 200, (body, answer.text)
    return [answer.json()["choices"][0] for answer in answers]


def test_sixteen_schemas_in_each_batch(server) -> None:
    """Every answer that ended is valid, whatever else is in its batch."""
    num_ended = dict.fromkeys(SIXTEEN, 0)
    seeds = itertools.count()
    for _ in range(ROUNDS):
        names = [SIXTEEN[i % len(SIXTEEN)] for i in range(AT_ONCE)]
        bodies = [
            {
                "messages": ASK, "seed": next(seeds), "max_tokens": 200, "temperature": 1.0,
                "response_format": {"type": "json_schema", "json_schema": {
                    "name": "n", "schema": SCHEMAS[name], "strict": True,
                }},
            }
            for name in names
        ]  # fmt: skip
        for name, choice in zip(names, together(server, bodies)):
            if choice["finish_reason"] == "length":
                continue
            assert choice["finish_reason"] == "stop"
            check(choice["message"]["content"], SCHEMAS[name])
            num_ended[name] += 1
    print(f"{sum(num_ended.values())} of {ROUNDS * AT_ONCE} answers ended: {num_ended}")
    assert sum(num_ended.values()) > 0.6 * ROUNDS * AT_ONCE


def test_tools_of_agents(server) -> None:
    """All are offered, a call is forced, and the schemas are strict: none is relaxed or refused."""
    parameters = {t["function"]["name"]: t["function"]["parameters"] for t in AGENT_TOOLS}
    strict = [
        {"type": "function", "function": {**t["function"], "strict": True}} for t in AGENT_TOOLS
    ]
    base = {"messages": ASK, "tools": strict, "max_tokens": 100, "parallel_tool_calls": False}
    num_called = 0
    for seed in range(ROUNDS):
        bodies = [
            {**base, "seed": seed, "tool_choice": {"type": "function", "function": {"name": name}}}
            for name in parameters
        ]
        bodies += [{**base, "seed": seed + i, "tool_choice": "required"} for i in range(4)]
        # (The others find the prompt, which is long, in the cache.)
        choices = together(server, bodies[:1]) + together(server, bodies[1:])
        for body, choice in zip(bodies, choices):
            if choice["finish_reason"] == "length":
                continue
            assert choice["finish_reason"] == "tool_calls"
            [call] = choice["message"]["tool_calls"]
            name = call["function"]["name"]
            if body["tool_choice"] != "required":
                assert name == body["tool_choice"]["function"]["name"]
            check(call["function"]["arguments"], parameters[name])
            num_called += 1
    print(f"{num_called} of {ROUNDS * len(bodies)} answers ended")
    assert num_called > 0.4 * ROUNDS * len(bodies)


def test_a_schema_that_takes_for_ever_is_refused_and_others_are_answered(server) -> None:
    """(LM Studio #824: a compile at 100% CPU for ever.)"""
    compiler = server.engine.engine.intake.grammar_compiler
    compile_grammar = GrammarCompiler._compile
    finish, begun = threading.Event(), threading.Event()
    compiler.compile(StructuredOutputs(choice=["yes", "no"]))  # (that is within any limit then)

    def slow(self: GrammarCompiler, wanted: Any) -> Any:
        if wanted.regex == "(hostile){3}":
            begun.set()
            while not finish.is_set():  # (of CPU time there is a limit)
                sum(range(1000))
        return compile_grammar(self, wanted)

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            hostile = {"messages": ASK, "structured_outputs": {"regex": "(hostile){3}"}}
            slow = asyncio.ensure_future(client.post(CHATS, json=hostile))
            await asyncio.to_thread(begun.wait, 300)
            # The engine and the server go on.
            other = {"messages": ASK, "structured_outputs": {"choice": ["yes", "no"]}}
            return await client.post(CHATS, json=other), await slow

    with (
        mock.patch.object(GrammarCompiler, "_compile", slow),
        mock.patch.object(compiler, "_timeout", 0.2),
    ):
        try:
            other, refused = asyncio.run(ask())
        finally:
            finish.set()
    assert other.status_code == 200
    assert other.json()["choices"][0]["message"]["content"] in ("yes", "no")
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "structured_outputs.regex"
    assert "compiles within" in error["message"]
