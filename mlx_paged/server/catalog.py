"""ModelCatalog: names, states and sizes of a server's models.

Endpoints about models (lists, details, loading) depend on it alone, so the one-model server and the
router (`server.router`) share them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from starlette.requests import Request

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.reader import is_gguf, parts_of
from mlx_paged.model.directory import (
    check_files,
    check_path,
    config_of,
    embedded_model,
    model_directory,
)
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError
from mlx_paged.server.registry import ModelRegistry


class ModelState(StrEnum):
    """Load state of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


class ModelFiles:
    """Finds the files of a model on this machine.

    Args:
        path: A directory, a GGUF file or a hub id; None: the embedded model.
    """

    def __init__(self, path: str | None) -> None:
        self._name = str(embedded_model()) if path is None else path
        self._weights: Sequence[Path] = ()  # once they are there

    @property
    def directory(self) -> Path | None:
        """The directory of config.json; None for a GGUF file or a model that is not downloaded."""
        return model_directory(self._name)

    def check(self) -> None:
        """Refuses a path from which no model can be loaded, as the load does, but at once.

        Raises:
            ModelLoadError: It gives the reason.
        """
        check_path(self._name)
        directory = Path(self._name)
        if directory.is_dir():
            config_of(self._name, directory)
            check_files(self._name, directory)

    def _find_weights(self) -> Sequence[Path]:
        if is_gguf(self._name):
            try:
                return parts_of(Path(self._name))
            except GGUFError:  # Loading will report why.
                return (Path(self._name),)
        directory = self.directory
        return () if directory is None else tuple(directory.glob("*.safetensors"))

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of its weights on disk; None if they are not there."""
        self._weights = self._weights or self._find_weights()
        sizes = [file.stat().st_size for file in self._weights if file.is_file()]
        return sum(sizes) if sizes else None


@dataclass(frozen=True)
class ModelStatus:
    """Snapshot of a model's state.

    Attributes:
        name: The name in answers.
        aliases: Other names that requests may use.
        path: Directory, GGUF file or hub id; None: the embedded model.
        files: Its files on this machine.
        memory: Bytes that the loaded model takes; None if unknown.
        pinned: True if it is never unloaded to make room or when idle.
        expires_at: Unix time at which it unloads unless a request comes; None: not planned.
        last_used: Unix time of the last request; None if there was none, or with a single model.
        failure: Why loading failed, or None.
        adapters: Names of its LoRA adapters.
        max_model_len: Maximum tokens of prompt and answer; None before the first load.
        input_modalities: Kinds of input; empty before the first load.
    """

    name: str
    state: ModelState
    aliases: tuple[str, ...] = ()
    path: str | None = None
    files: ModelFiles | None = None
    memory: int | None = None
    pinned: bool = False
    expires_at: float | None = None
    last_used: float | None = None
    failure: str | None = None
    adapters: tuple[str, ...] = ()
    max_model_len: int | None = None
    input_modalities: tuple[str, ...] = ()

    @property
    def size_on_disk(self) -> int | None:
        """Bytes of its weights on disk; None if they are not there."""
        return None if self.files is None else self.files.weight_bytes

    @property
    def directory(self) -> Path | None:
        """The directory of its config.json; None if it has none on this machine."""
        return None if self.files is None else self.files.directory


class ModelCatalog(Protocol):
    """The models of a server."""

    def statuses(self) -> list[ModelStatus]:
        """Returns all models, in the order of the command line."""

    def status(self, name: str | None) -> ModelStatus:
        """Returns a model by name, alias or adapter; None means the first.

        Raises:
            ApiError: 404.
        """

    async def load(self, name: str) -> None:
        """Loads a model if necessary, and waits for it.

        Raises:
            ApiError: 404; 503 if it cannot be loaded; 507 if it does not fit.
        """

    async def unload(self, name: str) -> None:
        """Waits for a model's requests to finish, and unloads it.

        Raises:
            ApiError: 404; 400 if it is the server's only model.
        """

    def unloaded(self, names: Collection[str]) -> AbstractAsyncContextManager[None]:
        """Unloads models, and keeps them unloaded until the context exits.

        Raises:
            ApiError: See `unload`.
        """

    def set_keep_alive(self, name: str, seconds: float | None) -> None:
        """Sets how long a model stays loaded after its last request.

        Args:
            seconds: None: forever.

        Raises:
            ApiError: 404.
        """


class OneModelCatalog:
    """The catalog of a server whose only model stays loaded."""

    def __init__(self, models: ModelRegistry, config: ServerConfig) -> None:
        self._models = models
        self._files = ModelFiles(config.model)
        self._path = config.model

    def statuses(self) -> list[ModelStatus]:
        """See `ModelCatalog`."""
        model = self._models.default
        state = ModelState.LOADING
        if model.is_dead:
            state = ModelState.FAILED
        elif model.is_loaded:
            state = ModelState.LOADED
        return [
            ModelStatus(
                model.name,
                state,
                model.names[1:],
                self._path,
                self._files,
                memory=self._files.weight_bytes if model.is_loaded else None,
                pinned=True,
                failure=None if model.failure is None else str(model.failure),
                adapters=model.lora_modules.names,
                max_model_len=model.renderer.max_model_len if model.is_loaded else None,
                input_modalities=model.input_modalities if model.is_loaded else (),
            )
        ]

    def status(self, name: str | None) -> ModelStatus:
        """See `ModelCatalog`."""
        self._models.find(name)
        return self.statuses()[0]

    async def load(self, name: str) -> None:
        """See `ModelCatalog`; waits for the start of the server."""
        model = self._models.of(name)
        await model.started_or_failed()
        if model.failure is not None:
            raise ApiError(503, str(model.failure), code="model_failed")

    async def unload(self, name: str) -> None:
        """See `ModelCatalog`."""
        self._models.of(name)
        raise ApiError(400, "this server has only one model, which stays loaded", code="only_model")

    @asynccontextmanager
    async def unloaded(self, names: Collection[str]) -> AsyncIterator[None]:
        """See `ModelCatalog`."""
        for name in names:
            await self.unload(name)
        yield

    def set_keep_alive(self, name: str, seconds: float | None) -> None:
        """See `ModelCatalog`; has no effect."""
        self._models.of(name)


def catalog_of(request: Request) -> ModelCatalog:
    """Returns the catalog of the server."""
    catalog: ModelCatalog = request.app.state.catalog
    return catalog
