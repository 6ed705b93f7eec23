"""What the server tells about itself: models, health, version, metrics, and a reset."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged import __version__, extension
from mlx_paged.engine.engine import EngineStats
from mlx_paged.errors import EngineDeadError
from mlx_paged.server.context import Context, Phase
from mlx_paged.server.routing import context_of

# A step may be long; who asks for numbers gets the last ones then.
_STATS_TIMEOUT = 2.0


async def models(request: Request) -> Response:
    """All names of the model."""
    context = context_of(request)
    names = context.config.served_model_names
    return JSONResponse({"object": "list", "data": [_model(context, name) for name in names]})


async def model(request: Request) -> Response:
    """One name of the model."""
    context = context_of(request)
    name = request.path_params["model"]
    context.check_model(name)
    return JSONResponse(_model(context, name))


def _model(context: Context, name: str) -> dict[str, Any]:
    loaded = context.phase is not Phase.LOADING and context.has_text
    return {
        "id": name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "mlx-paged",
        "root": context.config.model_name,
        "parent": None,
        "max_model_len": context.text.max_model_len if loaded else None,
    }


async def health(request: Request) -> Response:
    """200 while requests are answered; 503 while the model loads and when the engine is dead."""
    phase = context_of(request).phase
    ok = phase in (Phase.READY, Phase.DRAINING)
    return JSONResponse({"status": phase.value}, 200 if ok else 503)


async def live(request: Request) -> Response:
    """200 unless the engine is dead: a process that should be replaced."""
    phase = context_of(request).phase
    return JSONResponse({"status": phase.value}, 503 if phase is Phase.DEAD else 200)


async def ready(request: Request) -> Response:
    """200 while new requests are taken."""
    phase = context_of(request).phase
    return JSONResponse({"status": phase.value}, 200 if phase is Phase.READY else 503)


async def version(_: Request) -> Response:
    """Versions of this package and of what it stands on."""
    build = extension.build_info()
    names = ("mlx_version", "mlx_lm_version", "backends")
    return JSONResponse({"version": __version__, **{name: build[name] for name in names}})


async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    context = context_of(request)
    stats = await _stats(context)
    return Response(context.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


async def server_info(request: Request) -> Response:
    """Options in force, and where the engine stands."""
    context = context_of(request)
    config = asdict(context.config)
    config["api_keys"] = len(context.config.api_keys)  # how many, never which
    told: dict[str, Any] = {
        "version": __version__,
        "status": context.phase.value,
        "uptime_seconds": round(time.time() - context.started, 1),
        "config": config,
        "build": extension.build_info(),
    }
    stats = await _stats(context)
    if stats is not None:
        told["generation_defaults"] = asdict(context.defaults)
        told["engine_config"] = asdict(context.engine.engine.config)
        told["stats"] = asdict(stats)
    return JSONResponse(told)


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets every cached prefix."""
    context = context_of(request)
    context.check_takes_requests()
    try:
        return JSONResponse({"num_blocks": await context.engine.reset_prefix_cache()})
    except EngineDeadError:
        context.check_takes_requests()
        raise


async def _stats(context: Context) -> EngineStats | None:
    if context.phase is not Phase.READY:
        return None
    try:
        async with asyncio.timeout(_STATS_TIMEOUT):
            return await context.engine.stats()
    except (TimeoutError, EngineDeadError):
        return None
