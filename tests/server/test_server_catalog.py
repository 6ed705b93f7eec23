"""The catalog of models, in a server of one model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server_helpers import RunningServer, running

from mlx_paged.demo import model_path
from mlx_paged.server.catalog import ModelCatalog, ModelFiles, ModelState
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(ServerConfig(served_model_names=("demo", "second")), max_model_len=512) as server:
        yield server


@pytest.fixture
def catalog(server: RunningServer) -> ModelCatalog:
    return server.catalog


def test_the_only_model(catalog: ModelCatalog) -> None:
    [status] = catalog.statuses()
    assert status == catalog.status(None)
    assert (status.name, status.aliases, status.state) == ("demo", ("second",), ModelState.LOADED)
    assert status.max_model_len == 512 and status.input_modalities == ("text",)
    assert status.directory == model_path() and status.pinned and status.expires_at is None
    assert status.size_on_disk == (model_path() / "model.safetensors").stat().st_size


def test_other_names_are_not_found(catalog: ModelCatalog) -> None:
    with pytest.raises(ApiError) as caught:
        catalog.status("third")
    assert caught.value.status == 404 and caught.value.code == "model_not_found"


def test_it_stays_loaded(catalog: ModelCatalog) -> None:
    asyncio.run(catalog.load("second"))
    with pytest.raises(ApiError, match="one model"):
        asyncio.run(catalog.unload("demo"))
    catalog.set_keep_alive("demo", 0)
    assert catalog.status("demo").state is ModelState.LOADED


def test_sizes_of_files(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / f"m-{i:05}-of-00002.gguf").write_bytes(b"GGUF" + bytes(i))
    assert ModelFiles(str(tmp_path / "m-00001-of-00002.gguf")).weight_bytes == 11
    assert ModelFiles("nobody/has-this").weight_bytes is None
    assert ModelFiles(str(tmp_path)).weight_bytes is None
