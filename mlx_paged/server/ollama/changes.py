"""`POST /api/pull` and `DELETE /api/delete`: models in the Hugging Face hub's cache.

A model is named by its hub id or by its name on this server. All other operations that change
models are refused (`refuse`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlx_paged import hub
from mlx_paged.server import lazy_json
from mlx_paged.server.catalog import ModelStatus, catalog_of
from mlx_paged.server.config import DEFAULT_TAG
from mlx_paged.server.context import ServerContext, request_log_of, server_context_of
from mlx_paged.server.disconnect import ClientDisconnectedError, while_connected
from mlx_paged.server.downloads import Downloads, hub_id_of
from mlx_paged.server.errors import ApiError, bad_request, shorten, unavailable
from mlx_paged.server.ollama.answers import PullStatus
from mlx_paged.server.ollama.bodies import DeleteBody, PullBody
from mlx_paged.server.requests import read_small_body

#: (path, method) of operations that are refused, with the reasons.
REFUSED = {
    ("/api/create", "POST"): "this server does not create models: it serves directories of "
    "safetensors, GGUF files and hub ids (`mlx-paged serve MODEL`)",
    (
        "/api/copy",
        "POST",
    ): "this server does not copy models: --served-model-name gives one several names",
    ("/api/push", "POST"): "this server does not publish models",
}
# Prefixes of hub ids in Ollama's model names.
_HOSTS = ("hf.co/", "huggingface.co/")


async def refuse(request: Request) -> Response:
    """Refuses to create, copy or publish models, and names the alternative."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    raise ApiError(400, REFUSED[path, request.method], code="unsupported")


async def pull(request: Request) -> Response:
    """Downloads a model. Streams the progress unless `stream` is false."""
    body = await read_small_body(request, PullBody)
    name = body.model or body.name
    downloads = _downloads(request, f"mlx-paged pull {shorten(name or 'NAME', 96)}")
    hub_id, served = _found(request, name)
    if hub_id is None:
        assert served is not None
        return _PullResponse(request, _present(), streams=body.stream is not False)
    downloads.check_room()
    wanted = await downloads.plan(hub_id)
    request_log_of(request).fields |= {"model": hub_id, "bytes": wanted.missing}
    statuses = _statuses(server_context_of(request), downloads, hub_id, wanted)
    return _PullResponse(request, statuses, streams=body.stream is not False)


async def delete(request: Request) -> Response:
    """Removes a model from the cache, and unloads it first if necessary."""
    body = await read_small_body(request, DeleteBody)
    name = body.model or body.name
    downloads = _downloads(request, f"mlx-paged rm {shorten(name or 'NAME', 96)}")
    hub_id, served = _found(request, name)
    if hub_id is None:
        assert served is not None
        raise bad_request(
            "model",
            f"model {served.name!r} is outside the hub's cache ({served.path or 'embedded'}), and "
            "this server removes nothing else",
        )
    found = await asyncio.to_thread(hub.models, hub_id)
    if not found:
        message = f"there is no model {shorten(hub_id, 64)!r} in {hub.cache_dir()}"
        raise ApiError(404, message, param="model", code="model_not_found")
    if downloads.is_running(hub_id):
        raise bad_request("model", f"model {hub_id!r} is being fetched", "model_in_use")
    root = hub.repository(found[0])
    catalog = catalog_of(request)
    users = [status.name for status in catalog.statuses() if _lies_in(status, hub_id, root)]
    async with catalog.unloaded(users):
        freed = await asyncio.to_thread(hub.remove, found)
    request_log_of(request).fields |= {"model": hub_id, "bytes": freed}
    return Response()


def _downloads(request: Request, command: str) -> Downloads:
    """Returns the server's downloads if clients may change models.

    Raises:
        ApiError: 403, clients may not; 503, the server is shutting down.
    """
    context = server_context_of(request)
    if context.downloads is None:
        raise ApiError(
            403,
            f"clients may not change models: run `{command}`, or start the server with "
            "--model-changes",
            code="model_changes_disabled",
        )
    if context.draining:
        raise unavailable("the server is shutting down", "shutting_down")
    return context.downloads


def _found(request: Request, given: str | None) -> tuple[str | None, ModelStatus | None]:
    """Finds the model that a name refers to.

    Returns:
        Its hub id, None for a served model outside the hub's cache; and the served model of that
        name, None if it is not served.

    Raises:
        ApiError: 400, the name is neither a served name nor a hub id.
    """
    if not given:
        raise ApiError(400, "model is missing", param="model", code="missing_field")
    name = given.removesuffix(DEFAULT_TAG)
    for status in catalog_of(request).statuses():
        if name in (status.name, *status.aliases):
            return hub_id_of(status.path), status
    for host in _HOSTS:
        name = name.removeprefix(host)
    owner, _, rest = name.partition("/")
    if not owner or not rest or "/" in rest or ":" in rest or owner.startswith("."):
        raise bad_request(
            "model",
            f"model must be a hub id without a tag ('owner/model'), or a name of this server, but "
            f"is {shorten(given, 64)!r}",
        )
    return name, None


def _lies_in(status: ModelStatus, hub_id: str, root: Path) -> bool:
    """Returns True if a served model uses the files of a repository."""
    if status.path == hub_id:
        return True
    return status.path is not None and Path(status.path).resolve().is_relative_to(root.resolve())


async def _present() -> AsyncIterator[PullStatus]:
    """Yields the progress for a model that needs no download."""
    yield {"status": "success"}


async def _statuses(
    context: ServerContext, downloads: Downloads, name: str, wanted: hub.Download
) -> AsyncIterator[PullStatus]:
    """Downloads a model; yields the progress in Ollama's format.

    Raises:
        ApiError: See `Downloads.fetch`; 503 when the server shuts down.
    """
    yield {"status": "pulling manifest"}

    def progress(completed: int) -> PullStatus:
        status = f"pulling {wanted.revision[:12]}"
        digest = f"sha1:{wanted.revision}"
        return {"status": status, "digest": digest, "total": wanted.size, "completed": completed}

    yield progress(wanted.size - wanted.missing)
    if wanted.missing:
        async with contextlib.aclosing(downloads.fetch(name, wanted)) as fetching:  # type: ignore[type-var]
            async for completed in fetching:
                yield progress(completed)
                if context.draining:
                    raise unavailable("the server is shutting down", "shutting_down")
    yield {"status": "verifying digest"}
    yield {"status": "writing manifest"}
    yield {"status": "success"}


class _PullResponse(Response):
    """Sends the progress of a download, and cancels it if the client disconnects.

    Args:
        streams: False sends only the last status.
    """

    def __init__(
        self, request: Request, statuses: AsyncIterator[PullStatus], *, streams: bool
    ) -> None:
        self.background = None
        self._request, self._statuses, self._streams = request, statuses, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream if self._streams else self._whole
        try:
            await while_connected(receive, answer(scope, receive, send))
        except ClientDisconnectedError:
            request_log_of(self._request).fields["error"] = "the client disconnected"

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with contextlib.aclosing(self._statuses) as statuses:  # type: ignore[type-var]
                async for status in statuses:
                    await send(_line(status))
        except ApiError as error:
            request_log_of(self._request).fields["error"] = error.message
            await send(_line({"error": error.message}))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._statuses) as statuses:  # type: ignore[type-var]
                async for status in statuses:
                    last = status
            response: Response = JSONResponse(last)
        except ApiError as error:
            request_log_of(self._request).fields["error"] = error.message
            response = error.response(scope)
        await response(scope, receive, send)


def _line(content: object) -> dict[str, object]:
    body = lazy_json.json_bytes(content) + b"\n"
    return {"type": "http.response.body", "body": body, "more_body": True}
