"""Unpatched mlx-lm, the oracle of many tests, which otherwise run with mlx-lm paged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import mlx_paged  # before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.nn as nn
from mlx_lm.models import cache

from mlx_paged import drop_in


def plain_caches(model: nn.Module) -> list[Any]:
    """mlx-lm's own prompt caches.

    With these, the model, `generate_step` and `BatchGenerator` compute the same as without the
    drop-in, so an oracle needs nothing else, even while paged models run.
    """
    caches: list[Any] = unwrap(cache.make_prompt_cache)(model)
    return caches


@contextmanager
def plain_mlx_lm() -> Iterator[None]:
    """mlx-lm without the drop-in, for code that makes its own prompt caches.

    It affects the whole process, and all models lose their stores: do not use it while another
    thread runs a model.
    """
    was_patched = drop_in.is_patched()
    mlx_paged.unpatch()
    try:
        yield
    finally:
        if was_patched:
            assert mlx_paged.patch()
