"""Measures how much code a reader passes on the path of a decode step, or of a one-token chat.

The limits go down as the code gets simpler. A change that raises one needs a reason.
"""

from __future__ import annotations

import asyncio
import gc
import json
import operator
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from support.models import embedded_twin
from support.passage import ROOT, Passage, passage

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.server.app import create_app
from mlx_paged.server.config import ServerConfig

#: Limits of (files, changes of file, calls) on the path.
STEP = (26, 67, 117)
CHAT = (86, 745, 1270)


PAGE = Path(__file__).resolve().parent.parent / "docs/architecture.md"


def check_passage(found: Passage, most: tuple[int, int, int]) -> None:
    counted = len(found.files), found.num_changes, found.num_calls
    assert all(map(operator.le, counted, most)), (counted, sorted(found.files))


def test_what_a_reader_of_a_decode_step_passes() -> None:
    """`Engine.step` with sampling, new blocks, and blocks that are added to the index."""
    engine = LLM(embedded_twin(), num_gpu_blocks_override=64, block_size=8).engine
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=100, ignore_eos=True)
    for i in range(4):
        engine.add_request(str(i), list(range(3 + i, 40)), params)
    for _ in range(4):
        engine.step()
    gc.collect()  # finalizers of other tests' objects are not part of a step
    gc.disable()
    try:
        for _ in range(16):
            with passage() as found:
                engine.step()
            check_passage(found, STEP)
            assert {"core/scheduler.py", "engine/runner.py", "ops.py"} <= found.files
    finally:
        gc.enable()


async def chat(app: Starlette, found: Passage) -> None:
    """Streams a one-token chat; counts until its end is sent."""
    asked = {
        "messages": [{"role": "user", "content": "Write a function."}],
        "stream": True, "max_tokens": 1, "temperature": 0.7, "seed": 1, "ignore_eos": True,
    }  # fmt: skip
    body = json.dumps(asked).encode()
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"",
        "root_path": "", "headers": headers, "client": ("127.0.0.1", 1), "state": {},
        "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    sent = b""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        nonlocal sent
        sent += message.get("body", b"")
        if b'"finish_reason":"length"' in sent:
            found.is_counting = False

    found.is_counting = True
    await app(scope, receive, send)
    assert b'"finish_reason":"length"' in sent, sent


def test_what_a_reader_of_a_chat_passes() -> None:
    async def main(found: Passage) -> Passage:
        """Returns the chat with the fewest calls: threads that wait for each other make more."""
        engine = AsyncEngine.from_model(num_gpu_blocks_override=64)
        app = create_app(engine, ServerConfig())
        async with app.router.lifespan_context(app):
            await app.state.context.models.default.started_or_failed()
            await chat(app, found)  # warm-up: imports and one-time setup
            chats = []
            for _ in range(5):
                found.files.clear()
                found.num_calls = found.num_changes = 0
                await chat(app, found)
                chats.append(replace(found, files=set(found.files)))
        await engine.shutdown()
        return min(chats, key=lambda each: each.num_calls)

    with passage(of_new_threads=True) as found:
        found.is_counting = False
        fewest = asyncio.run(main(found))
    assert {"server/chat.py", "core/scheduler.py", "engine/runner.py"} <= fewest.files
    check_passage(fewest, CHAT)


class FirstCalls(Passage):
    """Records each function when it is first called, as (thread, file, name)."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[tuple[str, str], int] = {}  # (file, name) -> thread, in order

    def note(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            key = code.co_filename.removeprefix(ROOT), code.co_name
            self.functions.setdefault(key, threading.get_ident())


def test_the_architecture_page_follows_a_chat() -> None:
    """Its ten lines name functions of a chat, and each thread calls its own in that order."""
    lines = re.findall(r"^\d+\. .*(?:\n   +.*)*", PAGE.read_text(), re.MULTILINE)
    assert len(lines) == 10
    pairs = re.findall(r"`([\w/]+\.py)`:\s+`([\w.]+)`", "\n".join(lines))
    named = [(file, name.rpartition(".")[2]) for file, name in pairs]
    assert len(named) > 20

    async def main(found: FirstCalls) -> None:
        engine = AsyncEngine.from_model(num_gpu_blocks_override=64)
        app = create_app(engine, ServerConfig())
        async with app.router.lifespan_context(app):
            await app.state.context.models.default.started_or_failed()
            found.functions.clear()
            await chat(app, found)
        await engine.shutdown()

    found = FirstCalls()
    threading.setprofile(found.note)
    sys.setprofile(found.note)
    try:
        asyncio.run(main(found))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert not set(named) - found.functions.keys()
    for thread in set(found.functions.values()):
        called = [key for key, by in found.functions.items() if by == thread and key in named]
        assert called == sorted(called, key=named.index)
