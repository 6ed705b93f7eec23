"""ModelCatalog: the models of a server by name, with their states and sizes.

Endpoints about models (lists, details, loading) use it and nothing else, so they work the same in a
server of one model and in one of several (`server.router`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Protocol

from starlette.requests import Request

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.reader import is_gguf, parts_of
from mlx_paged.model.loader import embedded_model, model_directory
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError
from mlx_paged.server.registry import ModelRegistry


class ModelState(StrEnum):
    """Where a model is between its files and its engine."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


class ModelFiles:
    """The files of a model, as far as they are on this machine.

    Args:
        path: A directory, a GGUF file or a hub id; None: the embedded model.
    """

    def __init__(self, path: str | None) -> None:
        self._name = str(embedded_model()) if path is None else path

    @property
    def directory(self) -> Path | None:
        """The directory with its config.json; None for a GGUF file or a model not downloaded."""
        return model_directory(self._name)

    @cached_property
    def _weights(self) -> Sequence[Path]:
        if is_gguf(self._name):
            try:
                return parts_of(Path(self._name))
            except GGUFError:  # Loading it will say why.
                return (Path(self._name),)
        directory = self.directory
        return () if directory is None else tuple(directory.glob("*.safetensors"))

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of its weights on disk; None if they are not there."""
        sizes = [file.stat().st_size for file in self._weights if file.is_file()]
        return sum(sizes) if sizes else None


@dataclass(frozen=True)
class ModelStatus:
    """A model of the server, as it is now.

    Attributes:
        name: The name in answers.
        aliases: Other names that requests may use.
        path: Directory, GGUF file or hub id; None: the embedded model.
        files: Its files on this machine.
        memory: Bytes that it takes while it is loaded, by the server's own count; None: unknown.
        pinned: True if it is never unloaded to make room or for idleness.
        expires_at: Unix time at which it is unloaded if no request comes; None: not planned.
        last_used: Unix time of the last request; None: there was none, or it is the only model.
        failure: Why it could not be loaded; None unless it failed.
        adapters: Names of its LoRA adapters.
        max_model_len: Maximum tokens of prompt and answer; None: not known before it was loaded.
        input_modalities: What it reads; empty before it was loaded.
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
        """All models, in the order of the command line."""

    def status(self, name: str | None) -> ModelStatus:
        """Returns the model that a name means: its own, an alias or an adapter; None: the first.

        Raises:
            ApiError: 404.
        """

    async def load(self, name: str) -> None:
        """Loads a model, unless it is loaded, and waits for it.

        Raises:
            ApiError: 404; 503 if it cannot be loaded; 507 if it does not fit.
        """

    async def unload(self, name: str) -> None:
        """Unloads a model when its requests have ended, and waits for it.

        Raises:
            ApiError: 404; 400 if the server cannot be without it.
        """

    def unloaded(self, names: Collection[str]) -> AbstractAsyncContextManager[None]:
        """Unloads models, and keeps them unloaded until the context is left.

        Raises:
            ApiError: See `unload`.
        """

    def set_keep_alive(self, name: str, seconds: float | None) -> None:
        """Sets how long a model stays loaded without requests, from its last one on.

        Args:
            seconds: None: forever.

        Raises:
            ApiError: 404.
        """


class OneModelCatalog:
    """The catalog of a server that serves one model from its start to its end."""

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
        raise ApiError(400, "this server has one model, and keeps it", code="only_model")

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
