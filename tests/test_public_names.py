"""The names of the package itself."""

from __future__ import annotations

import mlx_paged
from mlx_paged.engine.async_engine import AsyncEngine


def test_every_public_name_is_there() -> None:
    assert {name for name in mlx_paged.__all__ if getattr(mlx_paged, name) is None} == set()
    assert set(mlx_paged.__all__) <= set(dir(mlx_paged))
    assert mlx_paged.AsyncEngine is AsyncEngine
