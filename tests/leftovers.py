"""What an engine holds when nobody wants anything: the same before and after any load."""

from __future__ import annotations

import gc

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.memory import live_arrays

# isort: split
import mlx.core as mx


async def leftovers(engine: AsyncEngine) -> dict[str, int]:
    """Blocks, bytes, arrays and books of an idle engine, its cached prefixes forgotten."""

    def look(inner: Engine) -> dict[str, int]:
        inner.settle()
        inner.reset_prefix_cache()
        inner.check_integrity()
        gc.collect()
        mx.clear_cache()
        stats = inner.stats()
        return {
            "free": stats.usage.num_free_blocks,
            "active": mx.get_active_memory(),
            "arrays": live_arrays(),
            "generations": len(inner._generations),
            "readers": len(engine._thread._requests),
            "copies": stats.pool_copies,
        }

    return await engine._call(look)
