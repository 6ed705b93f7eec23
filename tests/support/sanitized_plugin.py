"""A pytest plugin (``-p support.sanitized_plugin``): `mlx_paged` runs on mlx_paged._asan."""

from __future__ import annotations

import sys

from mlx_paged import blas

blas.preload()  # before mlx.core, or it has no effect

from mlx_paged import _asan  # type: ignore[attr-defined]  # noqa: E402

sys.modules["mlx_paged._ext"] = _asan
