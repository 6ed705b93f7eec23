"""Packages that only benchmarks need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mlx_paged.errors import MlxPagedError


@contextlib.contextmanager
def bench_packages() -> Iterator[None]:
    """Around their imports: says how to get what is missing."""
    try:
        yield
    except ImportError as error:
        raise MlxPagedError(
            f"this needs a package that is not installed ({error.name}): "
            "pip install 'mlx-paged[bench]'"
        ) from error
