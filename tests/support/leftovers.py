"""Objects that an idle engine holds, which must not grow over a long time."""

from __future__ import annotations

import gc

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.memory import live_arrays


def leftovers_of(engine: Engine) -> dict[str, int]:
    """Counts them; call it on the engine's thread, with no request unfinished."""
    engine.synchronize()
    engine.reset_prefix_cache()
    engine.check_integrity()
    gc.collect()
    mx.clear_cache()
    return {
        "free": engine.stats().usage.num_free_blocks,
        "active": mx.get_active_memory(),
        # Made once per number of rows in a step.
        "arrays": live_arrays() - len(engine._runner.model._planner.first_rows),
        "requests": len(engine.request_states()),
        "copies": engine.stats().pool_copies,
    }
