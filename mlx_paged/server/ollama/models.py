"""`/api/version`, `/api/tags`, `/api/ps` and `/api/show`: read-only endpoints about models."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.server.catalog import ModelState, ModelStatus, catalog_of
from mlx_paged.server.errors import ApiError
from mlx_paged.server.model_details import ModelDetails, details_of
from mlx_paged.server.ollama.answers import (
    Details,
    ListedModel,
    LoadedModel,
    LoadedModels,
    ModelTags,
    OllamaVersion,
    ShownModel,
)
from mlx_paged.server.ollama.bodies import ShowBody
from mlx_paged.server.ollama.endpoints import time_of
from mlx_paged.server.requests import read_small_body

#: The version of Ollama's API. Clients refuse versions that are too old.
VERSION = "0.33.0"
# Ollama's expiry time of models that are never unloaded. Also shown for later times: a client may
# give any number of seconds, and years end at 9999.
_FOREVER = "2318-01-01T00:00:00Z"
_FOREVER_SECONDS = datetime.fromisoformat(_FOREVER).timestamp()
_MODALITIES = {"image": "vision", "video": "vision", "audio": "audio"}


async def version(_: Request) -> Response:
    """Returns the version of Ollama's API."""
    return JSONResponse(OllamaVersion(version=VERSION))


async def tags(request: Request) -> Response:
    """Lists all models and adapters, loaded or not."""
    found: list[ListedModel] = []
    for status in catalog_of(request).statuses():
        details = await asyncio.to_thread(details_of, status)
        for name in (status.name, *status.aliases, *status.adapters):
            found.append(
                {
                    "name": name,
                    "model": name,
                    "modified_at": time_of(details.modified),
                    "size": status.size_on_disk or 0,
                    "digest": details.digest,
                    "details": _details(details, status.name if name != status.name else ""),
                    "capabilities": capabilities(status, details),
                }
            )
    return JSONResponse(ModelTags(models=found))


async def ps(request: Request) -> Response:
    """Lists the loaded models."""
    found: list[LoadedModel] = []
    for status in catalog_of(request).statuses():
        if status.state is not ModelState.LOADED:
            continue
        details = await asyncio.to_thread(details_of, status)
        size = status.memory or status.size_on_disk or 0
        found.append(
            {
                "name": status.name,
                "model": status.name,
                "size": size,
                "digest": details.digest,
                "details": _details(details),
                "expires_at": _expiry_of(status),
                "size_vram": size,
                "context_length": status.max_model_len or details.context_len,
            }
        )
    return JSONResponse(LoadedModels(models=found))


def _expiry_of(status: ModelStatus) -> str:
    if status.expires_at is None or status.expires_at >= _FOREVER_SECONDS:
        return _FOREVER
    return time_of(status.expires_at)


async def show(request: Request) -> Response:
    """Describes a model and its capabilities."""
    body = await read_small_body(request, ShowBody)
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model is missing", param="model", code="missing_field")
    status = catalog_of(request).status(name)
    details = await asyncio.to_thread(details_of, status)
    shown: ShownModel = {
        "modelfile": f"# mlx-paged serves this model; it has no Modelfile.\nFROM {status.name}\n",
        "parameters": "",
        "template": details.template,
        "details": _details(details),
        "model_info": model_info(status, details),
        "capabilities": capabilities(status, details),
        "modified_at": time_of(details.modified),
    }
    return JSONResponse(shown)


def model_info(status: ModelStatus, details: ModelDetails) -> dict[str, Any]:
    """Returns a model's sizes under GGUF's names."""
    family = details.family or "unknown"
    found: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": status.name,
        "general.parameter_count": details.num_parameters,
    }
    length = status.max_model_len or details.context_len
    if length:
        found[f"{family}.context_length"] = length
    return found | {f"{family}.{name}": size for name, size in details.sizes.items()}


def capabilities(status: ModelStatus, details: ModelDetails) -> list[str]:
    """Returns a model's capabilities under Ollama's names."""
    if details.embeds:
        return ["embedding"]
    media = [_MODALITIES[kind] for kind in status.input_modalities if kind in _MODALITIES]
    if status.state is not ModelState.LOADED:
        media = list(details.modalities)
    return [
        "completion",
        *(["tools"] if details.takes_tools else []),
        *(["thinking"] if details.thinks else []),
        *dict.fromkeys(media),
    ]


def _details(details: ModelDetails, parent: str = "") -> Details:
    return {
        "parent_model": parent,
        "format": details.format,
        "family": details.family,
        "families": [details.family] if details.family else [],
        "parameter_size": _human(details.num_parameters),
        "quantization_level": details.quantization,
    }


def _human(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number) if number else ""
