"""ModelRegistry: the models of a server, by the names that requests use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mlx_paged.server.config import DEFAULT_TAG, ServerConfig
from mlx_paged.server.errors import model_not_found
from mlx_paged.server.served_model import ServedModel


class FoundModel(NamedTuple):
    """A model, possibly with an adapter, and its name for the response."""

    model: ServedModel
    name: str


class ModelRegistry:
    """The models of a server. It holds exactly one today.

    Args:
        model: The model for requests that name none.
        config: The server's options, including other names of the model.
    """

    def __init__(self, model: ServedModel, config: ServerConfig) -> None:
        self.default = model
        self._config = config

    def __iter__(self) -> Iterator[ServedModel]:
        yield self.default

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models and adapters."""
        return tuple(name for model in self for name in (*model.names, *model.lora_modules.names))

    def find(self, name: str | None) -> FoundModel:
        """Finds the model or adapter of a request.

        Args:
            name: The request's `model`; None: it gives none.

        Raises:
            ApiError: 404, no model or adapter has this name.
        """
        if name is None:
            return FoundModel(self.default, self.default.name)
        found = self._config.served_name(name)
        if found is None and name.endswith(DEFAULT_TAG):
            return self.find(name.removesuffix(DEFAULT_TAG))
        if found is None:
            adapter = self.default.lora_modules.get(name)
            if adapter is not None:
                return FoundModel(self.default.with_adapter(adapter), name)
            raise model_not_found(name, self.names)
        return FoundModel(self.default, found)

    def of(self, name: str | None) -> ServedModel:
        """Returns the model of a request; see `find`."""
        return self.find(name).model

    # Limits of request bodies, which must be read before their model is known.

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of prompt and answer of any model; None means no limit."""
        limits = [model.renderer.max_model_len for model in self]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def max_body_size(self) -> int:
        """Maximum bytes of a body for any model."""
        return max(model.max_body_size for model in self)
