"""LoraModules: the adapters that requests can name as their model."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterable
from typing import NamedTuple

from mlx_paged.engine.client import EngineClient
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.errors import AdapterError, InvalidParameterError, MlxPagedError
from mlx_paged.server.errors import ApiError, bad_request

logger = logging.getLogger(__name__)


class LoraModule(NamedTuple):
    """An adapter and the name under which requests select it."""

    name: str
    path: str


def lora_modules_of(given: Iterable[str]) -> tuple[LoraModule, ...]:
    """Parses the values of ``--lora-modules``: ``name=path``, or a JSON object with both.

    Raises:
        InvalidParameterError: Anything else, or a name that occurs twice.
    """
    modules: dict[str, LoraModule] = {}
    for text in given:
        name, path = _from_json(text) if text.startswith("{") else text.partition("=")[::2]
        if not name or not path:
            expected = 'name=path, or {"name": ..., "path": ...},'
            raise InvalidParameterError("lora_modules", expected, text)
        if name in modules:
            raise InvalidParameterError("lora_modules", "unique names", text)
        modules[name] = LoraModule(name, path)
    return tuple(modules.values())


def _from_json(text: str) -> tuple[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    # vLLM's third field names the base model, of which there is one here.
    if not isinstance(found, dict) or found.keys() - {"name", "path", "base_model_name"}:
        return "", ""
    name, path = found.get("name"), found.get("path")
    return (name, path) if isinstance(name, str) and isinstance(path, str) else ("", "")


class LoraModules:
    """The adapters of one served model, by name.

    Args:
        reserved: Names of the model itself.
    """

    def __init__(self, engine: EngineClient, reserved: Iterable[str]) -> None:
        self._engine = engine
        self._reserved = frozenset(reserved)
        self._requests: dict[str, LoRARequest] = {}
        self._ids = itertools.count(1)
        self._changing = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which requests select adapters."""
        return tuple(self._requests)

    def get(self, name: str) -> LoRARequest | None:
        """Returns the adapter of a name."""
        return self._requests.get(name)

    async def load(self, module: LoraModule, *, in_place: bool = False) -> None:
        """Loads an adapter and serves it from now on.

        Args:
            in_place: Replace an adapter of the same name. Running requests keep the old one.

        Raises:
            ApiError: 400, the name is taken or the adapter is unusable; 404, no such directory.
        """
        async with self._changing:
            name = module.name
            if name in self._reserved:
                raise bad_request("lora_name", f"lora_name {name!r} is a name of the model itself")
            if name in self._requests and not in_place:
                raise bad_request(
                    "lora_name",
                    f"The lora adapter {name!r} has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                )
            request = LoRARequest(name, next(self._ids), module.path)
            try:
                await self._engine.add_lora(request)
            except AdapterError as error:
                status = 404 if error.is_missing else 400
                raise ApiError(status, str(error), param="lora_path") from error
            except InvalidParameterError as error:
                raise bad_request("lora_path", str(error)) from error
            self._requests[name] = request
            logger.info("adapter %r is served from %s", name, module.path)

    async def unload(self, name: str) -> None:
        """Stops serving an adapter. Running requests keep it.

        Raises:
            ApiError: 404, there is no adapter of that name.
        """
        async with self._changing:
            request = self._requests.pop(name, None)
            if request is None:
                raise ApiError(
                    404, f"The lora adapter {name!r} cannot be found.",
                    param="lora_name", code="model_not_found",
                )  # fmt: skip
            others = {other.lora_path for other in self._requests.values()}
            if request.lora_path not in others:
                await self._engine.remove_lora(request)
            logger.info("adapter %r is no longer served", name)

    async def load_all(self, modules: Iterable[LoraModule]) -> None:
        """Loads the adapters of the command line.

        Raises:
            MlxPagedError: One cannot be served.
        """
        for module in modules:
            try:
                await self.load(module)
            except ApiError as error:
                cause = error.__cause__
                if isinstance(cause, MlxPagedError):
                    raise cause from None
                raise InvalidParameterError(
                    "lora_modules", "names that the model itself does not have", module.name
                ) from None
