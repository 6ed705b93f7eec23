"""pytest plugin: runs mlx-lm's tests with the embedded model in place of every hub model.

The tests run with and without ``import mlx_paged``: without it, ``MLX_PAGED_DISABLE=1`` leaves
mlx-lm unpatched (both use the same BLAS).
"""

from __future__ import annotations

import os

import mlx_paged  # noqa: F401

# isort: split
import mlx.core as mx
import mlx_lm.utils

MODEL = os.environ["MLX_LM_TESTS_MODEL"]


def _embedded_model(repo_id: str, **options: object) -> str:
    return MODEL


mlx_lm.utils.snapshot_download = _embedded_model
mx.set_default_device(mx.cpu)
