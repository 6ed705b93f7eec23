"""The endpoints of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Protocol, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlx_paged.server.batches import bodies
from mlx_paged.server.batches.folder import StoredFile
from mlx_paged.server.batches.lines import URLS
from mlx_paged.server.batches.manager import BatchManager, new_batch_id
from mlx_paged.server.batches.records import BatchRecord
from mlx_paged.server.batches.uploads import read_form, receiving, storing
from mlx_paged.server.context import request_log_of, server_context_of
from mlx_paged.server.errors import ApiError, bad_request, shorten
from mlx_paged.server.requests import read_body
from mlx_paged.server.streaming import json_response

# Paths of lines that need a model that generates; the others need one that pools.
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_MAX_FILES, _MAX_BATCHES, _BATCHES = 10_000, 100, 20
# Folders and control characters, which are removed from file names.
_UNSHOWN = re.compile(r".*[/\\]|[\x00-\x1f\x7f-\x9f]", re.DOTALL)
_MAX_NAME = 255


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=_HasId)


def manager_of(request: Request) -> BatchManager:
    """Returns the batch manager of the server.

    Raises:
        ApiError: 404, the server has no folder for files.
    """
    manager = server_context_of(request).batches
    if manager is None:
        message = "this server stores no files and batches: start it with --files-dir"
        raise ApiError(404, message, code="files_disabled")
    return manager


# Files.


async def upload(request: Request) -> Response:
    """Receives a file."""
    manager, config = manager_of(request), server_context_of(request).config
    await manager.sweep()
    async with receiving(manager.folder, config, "the file") as to:
        filename, fields = await read_form(request, to, config.max_file_size)
        form = _form(fields)
        expires_after = form.expires_after_seconds
        if (form.expires_after_anchor is None) != (expires_after is None):
            name = "expires_after"
            raise bad_request(name, f"{name} must have an anchor (created_at) and seconds")
        name = _UNSHOWN.sub("", filename)[-_MAX_NAME:] or "file"
        keep = manager.folder.keep
        file = await asyncio.to_thread(keep, to.upload, name, form.purpose, expires_after)
    return JSONResponse(_file(file))


def _form(fields: Mapping[str, str]) -> bodies.FileForm:
    """Validates the fields beside the file of a form.

    Raises:
        ApiError: 400 that names a field.
    """
    known = {field.alias or name for name, field in bodies.FileForm.model_fields.items()}
    for name in fields:
        if name not in known:
            raise bad_request(name, f"{name} is not supported here", "unsupported_parameter")
    try:
        return bodies.FileForm.model_validate({**fields, "file": ""}, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise ApiError(400, f"{name} is missing", param=name, code="missing_field") from None
        given = shorten(fields[name], 64)
        raise bad_request(name, f"{name}: {first['msg']} but got {given!r}") from None


async def list_files(request: Request) -> Response:
    """Lists files, in pages."""
    manager = manager_of(request)
    query = query_of(request, "purpose", "limit", "order", "after")
    await manager.sweep()
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order", f"order must be 'asc' or 'desc' but got {shorten(order)!r}")
    files = list(manager.folder.files.values())
    if "purpose" in query:
        files = [file for file in files if file.purpose == query["purpose"]]
    if order == "desc":
        files.reverse()
    page, has_more = _page(files, query, _MAX_FILES, _MAX_FILES)
    answer: bodies.FileList = {
        "object": "list", "data": [_file(file) for file in page], "has_more": has_more,
        "first_id": _first(page), "last_id": _first(page[::-1]),
    }  # fmt: skip
    return await json_response(answer)


async def retrieve_file(request: Request) -> Response:
    """Returns the name, size and times of a file."""
    return JSONResponse(_file(await _found_file(request)))


async def file_content(request: Request) -> Response:
    """Returns the content of a file."""
    file = await _found_file(request)
    content = await manager_of(request).open_file(file.id)
    if content is None:
        raise _no_file(file.id)
    return _ContentResponse(content, file.filename)


async def delete_file(request: Request) -> Response:
    """Deletes a file."""
    file = await _found_file(request)
    with storing():
        is_deleted = await manager_of(request).delete_file(file.id)
    if not is_deleted:
        raise ApiError(400, f"a batch still reads {file.id}: cancel it first", code="file_in_use")
    answer: bodies.FileDeleted = {"id": file.id, "object": "file", "deleted": True}
    return JSONResponse(answer)


async def _found_file(request: Request) -> StoredFile:
    manager = manager_of(request)
    await manager.sweep()
    file_id: str = request.path_params["file_id"]
    file = manager.folder.files.get(file_id)
    if file is None:
        raise _no_file(file_id)
    return file


def _no_file(file_id: str) -> ApiError:
    return ApiError(404, f"there is no file {shorten(file_id, 64)!r} here", code="not_found")


class _ContentResponse(FileResponse):
    """Sends the content of an open file, which may be deleted meanwhile.

    Args:
        content: The file; closed at the end.
        filename: The client's name of the file.
    """

    def __init__(self, content: BinaryIO, filename: str) -> None:
        self._content = content
        number = content.fileno()
        super().__init__(
            f"/dev/fd/{number}",
            media_type="application/octet-stream",
            filename=filename,
            stat_result=os.fstat(number),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._content:
            await super().__call__(scope, receive, send)


def _file(file: StoredFile) -> bodies.FileAnswer:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": "batch" if file.purpose == "batch" else "batch_output",
        "status": "processed",
    }


# Batches.


async def create_batch(request: Request) -> Response:
    """Creates a batch."""
    manager = manager_of(request)
    body = await read_body(request, bodies.BatchBody)
    await manager.sweep()
    if body.endpoint not in URLS:
        expected = ", ".join(URLS)
        raise bad_request(
            "endpoint", f"endpoint must be one of {expected} but got {shorten(body.endpoint, 64)!r}"
        )
    runner = "generate" if body.endpoint in _GENERATING else "pooling"
    server_context_of(request).check_runner(runner, body.endpoint)
    file = manager.folder.files.get(body.input_file_id)
    unknown = bad_request(
        "input_file_id",
        f"input_file_id {shorten(body.input_file_id, 64)!r} is not a file here",
    )
    if file is None:
        raise unknown
    if file.purpose != "batch":
        message = f"input_file_id must be a file with purpose 'batch' but has {file.purpose!r}"
        raise bad_request("input_file_id", message)
    now, kept = int(time.time()), body.output_expires_after
    record = BatchRecord(
        new_batch_id("batch"), "openai", body.endpoint, now,
        now + 3600 * int(body.completion_window.removesuffix("h")), body.completion_window,
        input_file_id=file.id,
        metadata=body.metadata,
        output_expires_after=None if kept is None else kept.seconds,
    )  # fmt: skip
    try:
        with storing():
            record = await manager.create(record)
    except KeyError:
        raise unknown from None
    request_log_of(request).fields["batch"] = record.id
    return JSONResponse(_batch(record))


async def list_batches(request: Request) -> Response:
    """Lists batches, newest first, in pages."""
    query = query_of(request, "limit", "after")
    page, has_more = _page(manager_of(request).batches("openai"), query, _BATCHES, _MAX_BATCHES)
    answer: bodies.BatchList = {
        "object": "list", "data": [_batch(record) for record in page], "has_more": has_more,
        "first_id": _first(page), "last_id": _first(page[::-1]),
    }  # fmt: skip
    return await json_response(answer)


async def retrieve_batch(request: Request) -> Response:
    """Returns the current state of a batch."""
    return JSONResponse(_batch(found_batch(request, "openai")))


async def cancel_batch(request: Request) -> Response:
    """Cancels a batch."""
    record = found_batch(request, "openai")
    if not record.has_ended:
        with storing():
            record = await manager_of(request).cancel(record.id)
    if record.status not in ("cancelling", "cancelled"):
        message = f"a batch with status {record.status!r} cannot be cancelled"
        raise ApiError(400, message, code="invalid_batch_status")
    return JSONResponse(_batch(found_batch(request, "openai")))


def found_batch(request: Request, kind: str) -> BatchRecord:
    """Returns the batch that a path names.

    Raises:
        ApiError: 404.
    """
    batch_id: str = request.path_params["batch_id"]
    record = manager_of(request).get(batch_id)
    if record is None or record.kind != kind:
        raise no_batch(batch_id)
    return record


def no_batch(batch_id: str) -> ApiError:
    """Returns 404 for an unknown batch."""
    return ApiError(404, f"there is no batch {shorten(batch_id, 64)!r} here", code="not_found")


def _batch(record: BatchRecord) -> bodies.BatchAnswer:
    assert record.input_file_id is not None
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": record.errors} if record.errors else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "output_file_id": record.output_file_id if record.has_ended else None,
        "error_file_id": record.error_file_id if record.has_ended else None,
        "created_at": record.created_at,
        "in_progress_at": record.in_progress_at,
        "expires_at": record.expires_at,
        "finalizing_at": record.finalizing_at,
        "completed_at": record.completed_at,
        "failed_at": record.failed_at,
        "expired_at": record.expired_at,
        "cancelling_at": record.cancelling_at,
        "cancelled_at": record.cancelled_at,
        "request_counts": {
            "total": record.total, "completed": record.completed, "failed": record.failed,
        },
        "metadata": record.metadata,
    }  # fmt: skip


# Pages.


def query_of(request: Request, *known: str) -> dict[str, str]:
    """Returns the query parameters.

    Raises:
        ApiError: 400 for an unknown parameter.
    """
    for name in request.query_params:
        if name not in known:
            name = shorten(name, 64)
            raise bad_request(name, f"{name} is not supported here", "unsupported_parameter")
    return dict(request.query_params)


def _page(
    entries: Sequence[R], query: Mapping[str, str], default: int, maximum: int
) -> tuple[Sequence[R], bool]:
    """Returns a page of entries, and True if there are more after it."""
    limit = limit_of(query, default, maximum)
    begin = 0
    if "after" in query:
        begin = 1 + index_of("after", query["after"], entries)
    return entries[begin : begin + limit], begin + limit < len(entries)


def limit_of(query: Mapping[str, str], default: int, maximum: int) -> int:
    """Returns the query's `limit`, the maximum entries of a page.

    Raises:
        ApiError: 400, it is not a number from 1 to `maximum`.
    """
    given = query.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 6 and 1 <= int(given) <= maximum):
        raise bad_request(
            "limit", f"limit must be a number from 1 to {maximum} but got {shorten(given)!r}"
        )
    return int(given)


def index_of(name: str, given: str, entries: Sequence[_HasId]) -> int:
    """Returns the index of the entry with an id.

    Args:
        name: The query parameter that holds the id, for errors.

    Raises:
        ApiError: 400, there is no such entry.
    """
    for index, entry in enumerate(entries):
        if entry.id == given:
            return index
    raise bad_request(name, f"{name} must be the id of an entry but got {shorten(given, 64)!r}")


def _first(page: Sequence[_HasId]) -> str | None:
    return page[0].id if page else None
