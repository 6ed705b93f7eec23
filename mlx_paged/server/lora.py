"""Endpoints that load and unload adapters, with vLLM's bodies and answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlx_paged.server.bodies import Body
from mlx_paged.server.context import context_of
from mlx_paged.server.errors import ApiError
from mlx_paged.server.lora_modules import LoraModule, LoraModules
from mlx_paged.server.requests import read_body

LoraName = Annotated[str, Field(min_length=1, max_length=512)]


class LoadLoraBody(Body):
    """`POST /v1/load_lora_adapter`."""

    lora_name: LoraName = Field(description="The name that requests give as their model.")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Directory of the adapter on the server."
    )
    load_inplace: bool = Field(False, description="Replace an adapter of the same name.")
    model: str | None = Field(None, description="Its model, in a server of several.")


class UnloadLoraBody(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: LoraName
    lora_int_id: int | None = Field(None, description="No effect: the name decides.")
    model: str | None = Field(None, description="Its model, in a server of several.")


async def load_adapter(request: Request) -> Response:
    """Loads an adapter and serves it under a name."""
    body = await read_body(request, LoadLoraBody)
    module = LoraModule(body.lora_name, body.lora_path)
    await _modules(request).load(module, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Stops serving an adapter."""
    body = await read_body(request, UnloadLoraBody)
    await _modules(request).unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def _modules(request: Request) -> LoraModules:
    """Returns the server's adapters if requests may change them.

    Raises:
        ApiError: 400 or 403 if the server was started without the options.
    """
    context = context_of(request)
    if not context.models.default.info.config.enable_lora:
        message = "adapters need a server started with --enable-lora"
        raise ApiError(400, message, code="lora_disabled")
    if not context.config.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "loading adapters by request needs a server started with "
            "--allow-runtime-lora-updating, because requests name directories of its machine",
            code="runtime_lora_updating_disabled",
        )
    return context.models.default.lora_modules
