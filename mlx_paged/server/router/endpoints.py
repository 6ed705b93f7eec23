"""Endpoints that the router answers itself: model lists, loading, merged metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, cast

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from mlx_paged import __version__, extension
from mlx_paged.server import responses
from mlx_paged.server.abort import AbortBody, Aborted
from mlx_paged.server.bodies import Body
from mlx_paged.server.catalog import ModelState, ModelStatus
from mlx_paged.server.context import Phase
from mlx_paged.server.endpoints import model_info
from mlx_paged.server.errors import speaks_anthropic
from mlx_paged.server.messages.answers import ModelInfo, ModelPage
from mlx_paged.server.requests import read_body
from mlx_paged.server.router.context import RouterContext, router_of
from mlx_paged.server.router.forward import forward
from mlx_paged.server.router.metrics import merged
from mlx_paged.server.router.pool import PooledModel
from mlx_paged.server.router.routing import Replica
from mlx_paged.server.router.transport import Upstream, UpstreamError

# Seconds to wait for a process to answer.
_TIMEOUT = 2.0


class ModelBody(Body):
    """`POST /models/load` and `POST /models/unload`."""

    model: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="A name of the model."
    )


class Done(TypedDict):
    """Acknowledges a load or unload request. The model's state changes later."""

    success: bool


class StateInfo(TypedDict):
    """A model's state in llama.cpp's format, where a failed model counts as unloaded."""

    value: Literal["unloaded", "loading", "loaded"]
    failed: NotRequired[bool]
    reason: NotRequired[str]


class Architecture(TypedDict):
    """A model's input and output modalities, in llama.cpp's format."""

    input_modalities: list[str]
    output_modalities: list[str]


class RoutedModel(responses.Model):
    """One name of a model, with the model's state."""

    status: StateInfo
    path: str | None
    aliases: list[str]
    pinned: bool
    size: int | None
    memory: int | None
    expires_at: float | None
    architecture: Architecture


class RoutedModelList(TypedDict):
    """`GET /v1/models` and `GET /models`."""

    object: Literal["list"]
    data: list[RoutedModel]


# Models.


async def models(request: Request) -> Response:
    """Lists every name of every model and adapter, with its state."""
    context = router_of(request)
    named = [
        (name, status)
        for status in context.pool.statuses()
        for name in (status.name, *status.aliases, *status.adapters)
    ]
    if speaks_anthropic(request.scope):
        data = [_info(context, name, status) for name, status in named]
        names = [name for name, _ in named]
        page = ModelPage(data=data, has_more=False, first_id=names[0], last_id=names[-1])
        return JSONResponse(page)
    entries = [_model(context, name, status) for name, status in named]
    return JSONResponse(RoutedModelList(object="list", data=entries))


async def model(request: Request) -> Response:
    """Describes one model or adapter by name."""
    context, name = router_of(request), request.path_params["model"]
    status = context.pool.status(name)
    if name not in (*status.aliases, *status.adapters):
        name = status.name
    if speaks_anthropic(request.scope):
        return JSONResponse(_info(context, name, status))
    return JSONResponse(_model(context, name, status))


def _info(context: RouterContext, name: str, status: ModelStatus) -> ModelInfo:
    found = model_info(name, context.started)
    if status.input_modalities:  # It has been loaded.
        found["max_input_tokens"] = found["max_tokens"] = status.max_model_len
    return found


def _model(context: RouterContext, name: str, status: ModelStatus) -> RoutedModel:
    is_adapter = name in status.adapters
    if status.state is ModelState.FAILED:
        state = StateInfo(value="unloaded", failed=True, reason=status.failure or "")
    else:
        state = StateInfo(value=cast(Any, status.state.value))
    found: RoutedModel = {
        "id": name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "mlx-paged",
        "root": status.name,
        "parent": status.name if is_adapter else None,
        "status": state,
        "path": status.path,
        "aliases": list(status.aliases),
        "pinned": status.pinned,
        "size": status.size_on_disk,
        "memory": status.memory,
        "expires_at": status.expires_at,
        "architecture": {
            "input_modalities": list(status.input_modalities) or ["text"],
            "output_modalities": ["text"],
        },
    }
    if status.input_modalities:  # It has been loaded.
        found["max_model_len"] = status.max_model_len
        found["input_modalities"] = list(status.input_modalities)
    return found


async def load_model(request: Request) -> Response:
    """Starts loading a model. `GET /models` shows when it is loaded or why it failed."""
    body = await read_body(request, ModelBody)
    pool = router_of(request).pool
    pool.begin_loading(pool.find(body.model))
    return JSONResponse(Done(success=True))


async def unload_model(request: Request) -> Response:
    """Unloads a model once its requests have finished."""
    body = await read_body(request, ModelBody)
    pool = router_of(request).pool
    pool.begin_unloading(pool.find(body.model))
    return JSONResponse(Done(success=True))


# The server.


async def ready(request: Request) -> Response:
    """Returns 200 once the preloaded models are ready, while the server accepts requests.

    A model whose replicas are all down counts as loading.
    """
    context = router_of(request)
    phase = context.phase
    is_down = any(model.is_loaded and not model.replicas for model in context.pool.models)
    if phase is Phase.READY and (context.is_preloading or is_down):
        phase = Phase.LOADING
    return JSONResponse(responses.Status(status=phase.value), 200 if phase is Phase.READY else 503)


async def server_info(request: Request) -> Response:
    """Returns the router's options, or with `?model=` a loaded model's options and statistics."""
    context = router_of(request)
    asked = request.query_params.get("model")
    if asked is not None:
        # No lease: reading statistics must not keep the model loaded.
        found = context.pool.find(asked)
        answers = await _ask_model(found, "GET", "/server_info")
        infos = {
            each.replica.number: json.loads(each.body) for each in answers if each.status == 200
        }
        if infos and found.spec.num_replicas > 1:
            return JSONResponse(_joined_info(infos))
        if infos:
            return JSONResponse(*infos.values())
    info: dict[str, Any] = {
        "version": __version__,
        "status": context.phase.value,
        "uptime_seconds": round(time.time() - context.started, 1),
        "config": {**asdict(context.config), "api_keys": len(context.config.api_keys)},
        "build": extension.build_info(),
        "memory_budget": context.pool.budget,
        "models": [_model(context, s.name, s) for s in context.pool.statuses()],
    }
    return JSONResponse(info)


def _joined_info(infos: Mapping[int, responses.ServerInfo]) -> responses.ServerInfo:
    """Merges the infos of a model's replicas, by number: options of one, statistics of all."""
    joined = next(iter(infos.values())).copy()
    joined["replicas"] = [
        responses.ReplicaInfo(
            replica=number,
            status=info["status"],
            uptime_seconds=info["uptime_seconds"],
            stats=info.get("stats"),
        )
        for number, info in infos.items()
    ]
    stats = [info["stats"] for info in infos.values() if "stats" in info]
    if stats:
        joined["stats"] = _merged(stats)
    return joined


# Statistics of replicas that are no counts: levels, limits, and what one step has.
_MAXIMA = frozenset({"level", "seconds", "max_loras", "foreign"})


def _merged(values: Iterable[Any], add: Callable[[list[Any]], Any] = sum) -> Any:
    """Merges JSON values of the same structure; None counts as missing.

    Numbers are added, or for the names of `_MAXIMA`, the largest is taken. Lists of texts are
    joined, without repetitions.
    """
    present = [value for value in values if value is not None]
    match present:
        case [dict(), *_]:
            names = dict.fromkeys(name for value in present for name in value)
            return {
                name: _merged(
                    (value.get(name) for value in present), max if name in _MAXIMA else add
                )
                for name in names
            }
        case [list(), *_]:
            items = [item for value in present for item in value]
            if items and all(isinstance(item, str) for item in items):
                return list(dict.fromkeys(items))
            return [_merged(each, add) for each in zip(*present, strict=False)]
        case [int() | float(), *_] if not isinstance(present[0], bool):
            return add(present)
    return present[0] if present else None


async def metrics(request: Request) -> Response:
    """Returns the metrics of the router and of all loaded models, in Prometheus's text format."""
    context = router_of(request)
    texts: dict[PooledModel, dict[Replica, str]] = {}
    for answer in await _ask_all(context, "GET", "/metrics"):
        if answer.status == 200:
            texts.setdefault(answer.model, {})[answer.replica] = answer.body.decode()
    families = (
        (model.name, model.process.metrics(texts.get(model, {})))
        for model in context.pool.models
        if model.process is not None
    )
    own = context.metrics.render(None).decode()
    return Response(await merged(own, families), media_type=CONTENT_TYPE_LATEST)


async def abort_requests(request: Request) -> Response:
    """Aborts requests on any model; their clients get 499."""
    body = await read_body(request, AbortBody)
    context = router_of(request)
    answers = await _ask_all(
        context, "POST", "/abort_requests", json.dumps({"request_ids": body.request_ids}).encode()
    )
    ids = [
        each
        for answer in answers
        if answer.status == 200
        for each in json.loads(answer.body)["aborted"]
    ]
    return JSONResponse(Aborted(aborted=list(dict.fromkeys(ids))))


async def reset_prefix_cache(request: Request) -> Response:
    """Drops the cached prefixes of all loaded models."""
    context = router_of(request)
    context.check_takes_requests()
    answers = await _ask_all(context, "POST", "/reset_prefix_cache")
    for answer in answers:
        answer.replica.prefixes.clear()
    counts = [json.loads(each.body)["num_blocks"] for each in answers if each.status == 200]
    return JSONResponse(responses.Reset(num_blocks=sum(counts)))


class _Answer(NamedTuple):
    """A process's answer to this router."""

    model: PooledModel
    replica: Replica
    status: int
    body: bytes


async def _ask_all(
    context: RouterContext, method: str, path: str, body: bytes = b""
) -> list[_Answer]:
    """Queries all processes of loaded models; returns the answers within the timeout."""
    asked = [_ask_model(model, method, path, body) for model in context.pool.models]
    return [answer for answers in await asyncio.gather(*asked) for answer in answers]


async def _ask_model(
    model: PooledModel, method: str, path: str, body: bytes = b""
) -> list[_Answer]:
    """Queries the processes of one model."""
    asked = [_ask(model, replica, method, path, body) for replica in model.replicas]
    return [answer for answer in await asyncio.gather(*asked) if answer is not None]


async def _ask(
    model: PooledModel, replica: Replica, method: str, path: str, body: bytes = b""
) -> _Answer | None:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    upstream = None
    try:
        async with asyncio.timeout(_TIMEOUT):
            upstream = await Upstream.send(replica.socket, method, path, headers, body)
            return _Answer(model, replica, upstream.status, await upstream.read())
    except (TimeoutError, UpstreamError):
        return None
    finally:
        if upstream is not None:
            upstream.close()


async def change_adapters(request: Request) -> Response:
    """Loads or unloads an adapter of the model that the field `model` names.

    The change lasts until the model is unloaded.
    """
    return await forward(request, before_answer=_refresh_adapters)


async def _refresh_adapters(model: PooledModel) -> None:
    """Updates the list of a model's adapters from its process."""
    answer = await _ask(model, model.replicas[0], "GET", "/v1/models") if model.replicas else None
    if answer is not None and answer.status == 200 and model.loaded is not None:
        entries = json.loads(answer.body)["data"]
        names = tuple(entry["id"] for entry in entries if entry["parent"] is not None)
        model.loaded = replace(model.loaded, adapters=names)
