"""MLX's and NumPy's random states are those of a new seed when a test begins."""

from __future__ import annotations

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest


def draws() -> tuple[float, float]:
    return float(np.random.random()), mx.random.uniform().item()


@pytest.fixture(scope="module")
def drawn_by_the_module() -> tuple[float, float]:
    return draws()


def test_fixtures_of_a_module_draw_from_a_seed(
    drawn_by_the_module: tuple[float, float],
) -> None:
    np.random.seed(0)
    mx.random.seed(0)
    assert draws() == drawn_by_the_module
