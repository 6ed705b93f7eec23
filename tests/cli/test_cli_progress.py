"""The bar of an engine's kernels ends however the engine's start does."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from rich.live import _RefreshThread
from rich.logging import RichHandler

from mlx_paged.cli.progress import kernel_bar
from mlx_paged.engine import async_engine

_HIDE, _SHOW = b"\x1b[?25l", b"\x1b[?25h"  # a terminal's cursor


def is_open() -> bool:
    """True while a bar prints the log or draws itself."""
    prints = any(isinstance(h, RichHandler) for h in logging.getLogger("mlx_paged").handlers)
    drawing = [t for t in threading.enumerate() if isinstance(t, _RefreshThread)]
    return prints or any(not thread.done.is_set() for thread in drawing)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("done", [0, 2])
def test_a_failure_between_kernels_ends_the_bar(done: int, error: type[BaseException]) -> None:
    with pytest.raises(error), kernel_bar(shown=True) as on_kernel:
        for i in range(done + 1):
            on_kernel(i, 3)
        assert is_open()
        raise error
    assert not is_open()


def test_each_row_of_kernels_has_a_bar() -> None:
    with kernel_bar(shown=True) as on_kernel:
        for total in (2, 3, 0):
            for i in range(total):
                on_kernel(i, total)
                assert is_open()
            on_kernel(total, total)
            assert not is_open()


def test_an_engine_that_cannot_be_made_ends_it(monkeypatch) -> None:
    def make_engine(*_: Any, on_kernel: Any, **__: Any) -> Any:
        on_kernel(0, 3)
        assert is_open()
        raise ValueError("no second kernel")

    monkeypatch.setattr(async_engine, "make_engine", make_engine)

    async def scenario() -> None:
        engine = async_engine.AsyncEngine.from_model(make_on_kernel=lambda: kernel_bar(shown=True))
        with pytest.raises(ValueError, match="no second kernel"):
            await engine.ready()

    asyncio.run(scenario())
    assert not is_open()


@pytest.mark.parametrize(
    "leave",
    [
        "from mlx_paged.server.run import _leave",
        "from mlx_paged.engine.process.child import _end_process as _leave",
    ],
)
def test_a_process_that_ends_while_a_kernel_compiles_gives_the_cursor_back(leave: str) -> None:
    """The server's process at Ctrl-C, and the engine's when the server is gone."""
    code = (
        f"{leave}\n"
        "from mlx_paged.cli.progress import kernel_bar\n"
        "bar = kernel_bar()\n"
        "bar.__enter__()(0, 3)\n"
        "_leave(*[0][:_leave.__code__.co_argcount])\n"
    )
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, timeout=300
    )
    assert done.stderr.count(_HIDE) == 1
    assert done.stderr.rpartition(_HIDE)[2].count(_SHOW) == 1
