"""`bench/models.py` measures the gaps of a stream that begin during some work, and no others."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import TIMEOUT

BENCH = Path(__file__).resolve().parents[2] / "bench"


class Stream:
    """An engine whose tokens come when the test says so, by a clock of its own."""

    def __init__(self) -> None:
        self.clock = 0.0
        self._tokens: asyncio.Queue[int] = asyncio.Queue()

    def perf_counter(self) -> float:
        return self.clock

    async def submit(self, _: object) -> AsyncIterator[int]:
        return self._read()

    async def _read(self) -> AsyncIterator[int]:
        while True:
            yield await self._tokens.get()

    async def token_at(self, seconds: float) -> None:
        """Gives the reader a token, and lets it read."""
        self.clock = seconds
        self._tokens.put_nowait(0)
        for _ in range(10):
            await asyncio.sleep(0)


def test_gaps_belong_to_the_work_during_which_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    models: Any = importlib.import_module("models")
    monkeypatch.delitem(sys.modules, "models")

    async def measure() -> float:
        stream, worked = Stream(), asyncio.Event()
        monkeypatch.setattr(models, "time", stream)
        gaps = models.Gaps(stream)

        async def work() -> None:
            await stream.token_at(101.0)
            await stream.token_at(103.0)
            worked.set()

        await stream.token_at(0.0)
        measuring = asyncio.create_task(gaps.during(work()))
        await asyncio.sleep(0)
        await stream.token_at(100.0)  # ends what began before the work
        await worked.wait()
        await stream.token_at(108.0)
        largest: float = await asyncio.wait_for(measuring, TIMEOUT)
        await gaps.close()
        return largest

    assert asyncio.run(measure()) == 5000
