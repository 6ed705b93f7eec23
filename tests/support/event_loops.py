"""Other tasks of an event loop while something runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def turns_during(work: Callable[[], Any]) -> tuple[int, Any]:
    """How often another task had a turn while a coroutine ran, and its result."""

    async def main() -> tuple[int, Any]:
        num_turns = 0

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        before = num_turns
        result = await work()
        found = num_turns - before
        task.cancel()
        return found, result

    return asyncio.run(main())
