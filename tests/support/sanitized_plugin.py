"""A pytest plugin (``-p support.sanitized_plugin``): `mlx_paged` runs on mlx_paged._asan."""

from __future__ import annotations

import sys

from hypothesis import HealthCheck, settings

from mlx_paged import blas

blas.preload()  # before mlx.core, otherwise it has no effect

from mlx_paged import _asan  # type: ignore[attr-defined]  # noqa: E402

sys.modules["mlx_paged._ext"] = _asan

settings.register_profile(
    "sanitized",
    max_examples=6,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
