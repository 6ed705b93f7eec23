"""Bodies nobody should send: mutated by the thousand, and generated from the OpenAPI document."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.openapi_document import PATHS, check_path
from support.server_helpers import RunningServer, drained, running

from mlx_paged.server.config import ServerConfig

# 10,000 and 100 by `make hostile`.
NUM_BODIES = int(os.environ.get("MLX_PAGED_HOSTILE_BODIES", "300"))
NUM_EXAMPLES = int(os.environ.get("MLX_PAGED_HOSTILE_EXAMPLES", "2"))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(trust_request_chat_template=False, log_requests=False)
    with running(config, max_model_len=48, max_num_waiting=2000, max_num_seqs=256) as server:
        yield server


# Mutations.

VALID: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "mlx-paged-demo",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2,
            "stop": ["a"], "stop_token_ids": [5], "seed": 1, "logit_bias": {"5": 1.5},
            "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5, "stream": True,
            "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1},
            "repetition_penalty": 1.1, "metadata": {"k": "v"}, "cache_salt": "s",
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["def", "x"], "max_tokens": 2, "echo": True, "logprobs": 1, "best_of": 2,
            "min_tokens": 1, "ignore_eos": True, "bad_words": ["a"], "allowed_token_ids": [5, 6],
            "truncate_prompt_tokens": 4, "priority": 0, "frequency_penalty": 0.1,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [],
                 "content": [{"type": "reasoning_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "max_output_tokens": 2, "include": ["message.output_text.logprobs"], "store": True,
            "text": {"format": {"type": "text"}, "verbosity": "low"}, "instructions": "x",
            "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "auto",
            "metadata": {"k": "v"}, "top_logprobs": 1, "stream": True, "parallel_tool_calls": True,
        },
    ),
    ("/v1/responses/input_tokens", {"input": "hi", "instructions": "x"}),
    ("/tokenize", {"prompt": "abc", "add_special_tokens": True, "return_token_strs": True}),
    (
        "/v1/messages",
        {
            "model": "mlx-paged-demo", "max_tokens": 2, "stream": True, "temperature": 0.5,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "is_error": True,
                     "content": [{"type": "text", "text": "no"}]},
                ]},
                {"role": "system", "content": "x"},
            ],
            "stop_sequences": ["a"], "top_k": 5, "top_p": 0.9, "metadata": {"user_id": "u"},
            "thinking": {"type": "enabled", "budget_tokens": 2},
            "output_config": {"effort": "low", "format": {"type": "json_schema",
                              "schema": {"type": "object", "properties": {"a": {"enum": [1]}}}}},
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "hi"}], "system": "s", "tools": []},
    ),
    ("/detokenize", {"tokens": [1, 2, 3], "model": "mlx-paged-demo"}),
]  # fmt: skip
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, -1e308, "", " ",
    "\x00", "\ud800", "é" * 50, "a" * 300, "5", "null", [], [[]], [None], [[[[1]]]], {}, {"": ""},
    {"a": {"b": []}}, [1, "a"], ["a", None], [-1], [10**12], "{{ 7 * 7 }}", "../../etc/passwd",
    "🎉" * 40, "\u202e", [0] * 100, ["x"] * 100,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in a body."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from places(inner, (*path, key))
        else:
            yield (*path, key)


def mutate(rng: random.Random, body: dict[str, Any]) -> bytes:
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice(list(places(body)) or [("x",)])
        holder: Any = body
        for key in path[:-1]:
            holder = holder[key]
        kind = rng.random()
        if kind < 0.7:
            holder[path[-1]] = copy.deepcopy(rng.choice(STRANGE))
        elif kind < 0.85 and isinstance(holder, dict):
            holder.pop(path[-1], None)
        elif isinstance(holder, dict):
            holder[rng.choice(("", "new", "__proto__", "model", "stream"))] = rng.choice(STRANGE)
    raw = bytearray(json.dumps(body).encode())
    if rng.random() < 0.25:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            kind = rng.random()
            if kind < 0.4:
                raw[at] = rng.randrange(256)
            elif kind < 0.7:
                del raw[at : at + rng.randint(1, 20)]
            else:
                raw[at:at] = rng.choice(
                    (b"{", b"[", b'"', b"\x00", b"\xff", b"NaN", b"1e999", b",")
                )
            if not raw:
                break
    return bytes(raw)


def test_mutated_bodies_are_never_our_fault(server) -> None:
    rng = random.Random(0)
    statuses: dict[int, int] = {}
    headers = {"content-type": "application/json"}
    with server.client() as client:
        for number in range(NUM_BODIES):
            path, body = rng.choice(VALID)
            raw = mutate(rng, body)
            response = client.post(path, content=raw, headers=headers)
            status = response.status_code
            statuses[status] = statuses.get(status, 0) + 1
            # A valid mutation is answered; any other is a client error with its cause.
            assert status == 200 or 400 <= status < 500, (number, path, raw, response.text)
            if status == 200:
                assert "internal_error" not in response.text, (number, path, raw)
            else:
                assert response.json()["error"]["message"], (number, raw)
                assert status in (400, 404), (number, status, raw)
    assert statuses[400] > NUM_BODIES // 3
    server.wait_idle()


def test_bytes_that_are_no_http() -> None:
    rng = random.Random(1)
    with running(ServerConfig(read_timeout=2)) as server:
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
                sock.sendall(rng.randbytes(rng.randint(1, 2000)))
        for head in (
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
                try:
                    sock.sendall(head)
                    sock.recv(100)
                except OSError:
                    pass  # the server hung up: as good an answer as any
        assert httpx.get(f"{server.url}/health").status_code == 200


# Promises of the OpenAPI document.

# The pooling endpoints' bodies are sent to an engine that pools, in `test_server_pooling.py`; here
# one of them shows that an engine of the other kind answers in the documented form.
POOLING = re.compile("embed|pool|score|rerank|classify")


@pytest.fixture(scope="module")
def brief_server() -> Iterator[RunningServer]:
    """Thousands of bodies ask for no number of tokens; what is looked at is the form of answers."""
    config = ServerConfig(
        trust_request_chat_template=False,
        log_requests=False,
        override_generation_config={"max_new_tokens": 3},
    )
    with running(config, max_model_len=48, max_num_waiting=2000, max_num_seqs=256) as server:
        yield server


# (Bodies of /render are those of other paths.)
DOCUMENTED = [p for p in PATHS if not POOLING.search(p) and not p.endswith("/render")]
# A path with a small schema first: hundreds of bodies are made of others.
DOCUMENTED.sort(key=lambda path: path != "/tokenize")


@pytest.mark.one_in(23)
@pytest.mark.parametrize("path", [*DOCUMENTED, "/score"])
def test_the_document_is_kept(brief_server, path) -> None:
    check_path(brief_server.url, path, max_examples=NUM_EXAMPLES)


# Heads that do not end.


def test_heads_that_do_not_end_are_given_up() -> None:
    """However they dawdle: all are closed, those that began to ask are told why, others go on."""
    beginnings = {
        "silent": b"",
        "blank": b"\r\n",
        "half a line": b"POST /v1/comp",
        "half a head": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ",
        "second head": b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\nGET /li",
        "late body": b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    }
    answers: dict[str, bytes] = {}

    def dawdle(name: str) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
            sock.sendall(beginnings[name])
            done = threading.Event()

            def drip() -> None:  # a byte now and then does not buy time
                with contextlib.suppress(OSError):
                    while name != "silent" and not done.wait(0.1):
                        sock.sendall(b"\r\n" if name == "blank" else b"a")

            dripping = threading.Thread(target=drip)
            dripping.start()
            answers[name] = drained(sock)
            done.set()
            dripping.join()

    with running(ServerConfig(read_timeout=0.5)) as server, server.client() as client:
        threads = [threading.Thread(target=dawdle, args=(name,)) for name in beginnings]
        for thread in threads:
            thread.start()
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        streamed = client.post("/v1/completions", json=body)  # takes longer than a head may
        assert streamed.text.rstrip().endswith("[DONE]")
        for thread in threads:
            thread.join(300)
        assert answers.keys() == beginnings.keys()  # every one was closed
        assert httpx.get(f"{server.url}/live").status_code == 200
    told = {name: answer.count(b" 408 Request Timeout") for name, answer in answers.items()}
    assert told == {"silent": 0, "blank": 0, "half a line": 1, "half a head": 1, "second head": 1,
                    "late body": 0}  # fmt: skip
    assert answers["second head"].startswith(b"HTTP/1.1 200 ")
    assert answers["late body"].startswith(b"HTTP/1.1 404 ")
    error = json.loads(answers["half a line"].partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "read_timeout" and error["type"] == "timeout_error"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, 431),
        (b"what is this?\r\n\r\n", 400),
    ],
    ids=["line", "headers", "no HTTP"],
)
def test_errors_before_a_request_are_openais_too(server, head, status) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(head)
        answer = drained(sock)
    if answer:  # (a reset may overtake it where the server had not read everything)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    else:
        assert status == 431
