"""Full garbage collections wait until no request is unfinished."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from support.server_helpers import running

from mlx_paged.server import quiet_gc
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.quiet_gc import QuietGC
from mlx_paged.server.router.service import RouterService
from mlx_paged.server.router.spec import ModelSpec

OLD, FROZEN = 10, 1000


@pytest.fixture
def collections(monkeypatch) -> Iterator[list[int]]:
    """The explicit collections; the interpreter's count of those of the middle generation."""
    made: list[int] = []
    count = [0, 0, OLD + 1]
    after = [0, OLD + 1]  # the count after each collection; the first one is that at the entry

    def collect() -> int:
        made.append(count[2])
        count[2] = after.pop()
        return 0

    fake = SimpleNamespace(
        collect=collect,
        freeze=lambda: made.append(FROZEN),
        unfreeze=lambda: made.append(FROZEN),
        get_count=lambda: tuple(count),
        get_threshold=lambda: (700, 10, OLD),
        set_threshold=lambda *values: made.append(-values[2]),
    )
    monkeypatch.setattr(quiet_gc, "gc", fake)
    yield made


def test_it_collects_at_the_second_quiet_look_if_there_was_work(collections) -> None:
    quiet = [False]
    with QuietGC(lambda: quiet[0]) as collector:
        assert collections == [OLD + 1, FROZEN, -quiet_gc._PATIENCE], (
            "all that lives now is exempt, and under load, full collections are rare"
        )
        collections.clear()
        for is_quiet, total in ((False, 0), (True, 0), (False, 0), (True, 0), (True, 1), (True, 1)):
            quiet[0] = is_quiet
            collector.look()
            assert len(collections) == total
        collections.clear()
    assert collections == [-OLD, FROZEN]


def test_a_server_with_a_request_is_not_quiet() -> None:
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with running() as server, server.client() as client:
        assert server.context.is_quiet
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            assert not server.context.is_quiet
        server.until(lambda: server.context.is_quiet)
    assert gc.isenabled()


def test_a_router_exempts_its_modules_too(collections) -> None:
    async def run() -> None:
        service = RouterService([ModelSpec("m", None)], ServerConfig(), "", entry="", budget=1)
        watching = asyncio.create_task(service.watch(""))
        await asyncio.sleep(0)
        assert collections == [OLD + 1, FROZEN, -quiet_gc._PATIENCE]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await service.finish(0)

    asyncio.run(run())
