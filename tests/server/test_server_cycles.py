"""Ended requests leave nothing to the garbage collector, whose pauses stop every stream."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from support.server_helpers import RunningServer, running
from support.waiting import TIMEOUT

CHAT = [{"role": "user", "content": "x"}]
SHORT = {"max_tokens": 4, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x", "stream": True, **SHORT}),
    "several": ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "stream": True, **SHORT}),
    "stop": ("/v1/completions", {"prompt": "x", "stop": ["never"], "logprobs": 1, **SHORT}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "stream": True, **SHORT}),
    "whole chat": ("/v1/chat/completions", {"messages": CHAT, **SHORT}),
    "message": ("/v1/messages", {"messages": CHAT, "max_tokens": 4, "stream": True}),
    "response": ("/v1/responses", {"input": "x", "max_output_tokens": 16, "stream": True}),
    "lines": ("/api/generate", {"prompt": "x", "options": {"num_predict": 4}}),
}
# Modules of the server, because the client runs in this process, too.
OURS = ("mlx_paged.", "uvicorn.", "starlette.")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as started:
        yield started


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Counts the server's objects that only a collection frees."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        names = (f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage)
        found.update(name for name in names if name.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", REQUESTS)
def test_an_ended_request_is_in_no_reference_cycle(server, name) -> None:
    path, body = REQUESTS[name]

    def ask() -> None:
        headers = {"Connection": "close"}
        answer = httpx.post(server.url + path, json=body, headers=headers, timeout=TIMEOUT)
        assert answer.status_code == 200, answer.text
        server.until(lambda: not server._server.server_state.connections)

    ask()  # Some objects are made once.
    with garbage() as found:
        for _ in range(3):
            ask()
        server.wait_idle()
    assert not found


def test_a_client_that_leaves_leaves_no_reference_cycle(server) -> None:
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}

    def leave() -> None:
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        server.wait_idle()
        server.until(lambda: not server._server.server_state.connections)

    leave()
    with garbage() as found:
        for _ in range(3):
            leave()
    assert not found
