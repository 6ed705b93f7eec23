"""pytest plugin: mlx-lm's tests with the embedded model in place of every model of the hub.

``import mlx_paged`` is the import that the tests are run with and without: without it,
``MLX_PAGED_DISABLE=1`` leaves mlx-lm unpatched (and both have the same BLAS).
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
