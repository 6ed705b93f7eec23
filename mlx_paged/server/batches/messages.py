"""`/v1/messages/batches`: Anthropic's batch API."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, overload

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged.server.batches.endpoints import (
    found_batch,
    index_of,
    limit_of,
    manager_of,
    no_batch,
    query_of,
)
from mlx_paged.server.batches.folder import open_new
from mlx_paged.server.batches.manager import TURN, BatchManager, Results, new_batch_id
from mlx_paged.server.batches.records import BatchRecord
from mlx_paged.server.batches.splitter import RequestSplitter
from mlx_paged.server.batches.uploads import read_large, receiving, storing
from mlx_paged.server.bodies import Body, Label
from mlx_paged.server.body_bounds import BodyBounds
from mlx_paged.server.context import request_log_of, server_context_of
from mlx_paged.server.errors import ApiError, bad_request, message_error
from mlx_paged.server.requests import check_content, validated

_ENDPOINT = "/v1/messages"
_KIND: Literal["anthropic"] = "anthropic"
_HOURS = 24
#: Maximum requests of a batch, as in Anthropic's API.
MAX_REQUESTS = 100_000
_DEFAULT_PAGE, _MAX_PAGE = 20, 1000  # batches
_PIECE_SIZE = 1 << 16  # bytes
_NO_EFFECT = "Accepted; has no effect here."


class MessageBatchRequest(Body):
    """One request of a batch."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any] = Field(description="A body of /v1/messages; stream must be false.")


class MessageBatchBody(Body):
    """`POST /v1/messages/batches`."""

    requests: Annotated[list[MessageBatchRequest], Field(fail_fast=True)] = Field(
        description="1 to 100,000 requests."
    )
    user_profile_id: Label | None = Field(None, description=_NO_EFFECT)
    workspace_id: Label | None = Field(None, description=_NO_EFFECT)


class MessageBatchCounts(TypedDict):
    """Numbers of requests by result. All count as processing until the batch has ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    """A batch. Times are in the format of RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    cancel_initiated_at: str | None
    ended_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchList(TypedDict):
    """`GET /v1/messages/batches`."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(TypedDict):
    """`DELETE /v1/messages/batches/{id}`."""

    id: str
    type: Literal["message_batch_deleted"]


async def create(request: Request) -> Response:
    """Creates a batch."""
    manager, context = manager_of(request), server_context_of(request)
    context.check_takes_requests()
    check_content(request)
    manager.check_room()
    batch_id = new_batch_id("msgbatch")
    async with receiving(manager.folder, context.config, "the body") as to:
        await read_large(request, to.take, to.write, context.config.max_file_size)
        await asyncio.to_thread(to.upload.sync)
        path = manager.folder.batch_path(batch_id, "input")
        try:
            total = await asyncio.to_thread(_write_lines, request, manager, to.upload.path, path)
            now = int(time.time())
            record = await manager.create(
                BatchRecord(
                    batch_id,
                    _KIND,
                    _ENDPOINT,
                    now,
                    now + 3600 * _HOURS,
                    f"{_HOURS}h",
                    status="in_progress",
                    in_progress_at=now,
                    total=total,
                )
            )
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    request_log_of(request).fields["batch"] = record.id
    return JSONResponse(_batch(record, request))


def _write_lines(request: Request, manager: BatchManager, body: Path, to: Path) -> int:
    """Converts the requests of a body to lines; returns their number. Runs on a thread.

    Args:
        body: File with the body.
        to: File for the lines.

    Raises:
        ApiError: 400 that names a field; 503, the server is shutting down.
    """
    splitter, custom_ids = RequestSplitter(manager.max_line), set[str]()
    context = server_context_of(request)
    began = time.monotonic()
    with body.open("rb") as source, open_new(to) as lines:
        while piece := source.read(_PIECE_SIZE):
            context.check_takes_requests()  # The server's shutdown waits for this thread.
            for entry in splitter.feed(piece):
                lines.write(_line(entry, len(custom_ids), custom_ids, manager.bounds()))
                if time.monotonic() - began > TURN:
                    time.sleep(TURN)
                    began = time.monotonic()
        lines.flush()
        os.fsync(lines.fileno())
    rest = validated(request, splitter.rest, MessageBatchBody)
    # The splitter has taken all entries, unless it did not recognize the field.
    if rest.requests or not custom_ids:
        raise bad_request("requests", "requests must be a list that is not empty")
    return len(custom_ids)


def _line(entry: bytes, index: int, custom_ids: set[str], bounds: BodyBounds) -> bytes:
    """Converts a request to a line, and adds its `custom_id` to the earlier ones."""
    if index == MAX_REQUESTS:
        raise bad_request("requests", f"requests must have at most {MAX_REQUESTS} entries")
    name = f"requests.{index}"
    try:
        bounds.feed(entry)  # An entry that takes long to parse would stall the server.
        found = MessageBatchRequest.model_validate_json(entry)
    except ApiError as error:
        raise bad_request(name, f"{name}: {error.message}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join([name, *map(str, first["loc"])])
        raise bad_request(path, f"{path}: {first['msg'].lower()}") from None
    if found.custom_id in custom_ids:
        path = f"{name}.custom_id"
        raise bad_request(path, f"{path} {found.custom_id!r} must be given once")
    custom_ids.add(found.custom_id)
    if found.params.get("stream"):
        path = f"{name}.params.stream"
        raise bad_request(path, f"{path} must be false: results are written whole")
    line = {
        "custom_id": found.custom_id, "method": "POST", "url": _ENDPOINT, "body": found.params,
    }  # fmt: skip
    return json.dumps(line).encode() + b"\n"


async def retrieve(request: Request) -> Response:
    """Returns the current state of a batch."""
    return JSONResponse(_batch(found_batch(request, _KIND), request))


async def list_batches(request: Request) -> Response:
    """Lists batches, newest first, in pages."""
    query = query_of(request, "limit", "after_id", "before_id", "workspace_id")
    records, limit = manager_of(request).batches(_KIND), limit_of(query, _DEFAULT_PAGE, _MAX_PAGE)
    if "before_id" in query and "after_id" in query:
        raise bad_request("before_id", "before_id must not be given with after_id")
    if "before_id" in query:
        end = index_of("before_id", query["before_id"], records)
        begin = max(0, end - limit)
        has_more = begin > 0
    else:
        begin = 0
        if "after_id" in query:
            begin = 1 + index_of("after_id", query["after_id"], records)
        end = begin + limit
        has_more = end < len(records)
    page = records[begin:end]
    answer: MessageBatchList = {
        "data": [_batch(record, request) for record in page],
        "has_more": has_more,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }
    return JSONResponse(answer)


async def cancel(request: Request) -> Response:
    """Cancels a batch; keeps its finished results."""
    record = found_batch(request, _KIND)
    if record.has_ended:
        raise bad_request("message_batch_id", f"{record.id} has ended and cannot be canceled")
    with storing():
        await manager_of(request).cancel(record.id)
    return JSONResponse(_batch(found_batch(request, _KIND), request))


async def delete(request: Request) -> Response:
    """Deletes a batch that has ended, with its results."""
    record = found_batch(request, _KIND)
    if not record.has_ended:
        message = f"{record.id} has not ended: cancel it before deleting it"
        raise bad_request("message_batch_id", message)
    with storing():
        await manager_of(request).delete(record.id)
    answer: MessageBatchDeleted = {"id": record.id, "type": "message_batch_deleted"}
    return JSONResponse(answer)


async def results(request: Request) -> Response:
    """Returns the results of a batch that has ended, as one line per request."""
    record = found_batch(request, _KIND)
    if not record.has_ended:
        raise bad_request("message_batch_id", f"{record.id} has not ended: there are no results")
    opened = await manager_of(request).open_results(record.id)
    if opened is None:
        raise no_batch(record.id)
    return _ResultsResponse(opened)


class _ResultsResponse(StreamingResponse):
    """Sends the results in open files, which may be deleted meanwhile.

    Args:
        opened: The files; closed at the end.
    """

    def __init__(self, opened: Results) -> None:
        self._opened = opened
        super().__init__(_results(opened), media_type="application/x-jsonl")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._opened):
            await super().__call__(scope, receive, send)


def _results(opened: Results) -> Iterator[bytes]:
    """Yields one line per request."""
    custom_ids = set[str]()
    for content in itertools.chain.from_iterable(opened.outputs):
        try:
            line = json.loads(content)
            made = {"custom_id": line["custom_id"], "result": _result(line)}
        except (ValueError, KeyError, TypeError):  # damaged
            continue
        if opened.input is not None:
            custom_ids.add(line["custom_id"])
        yield json.dumps(made).encode() + b"\n"
    error = message_error(ApiError(500, "the batch failed before this was answered"), None)
    for content in opened.input or ():
        custom_id = json.loads(content)["custom_id"]
        if custom_id not in custom_ids:
            made = {"custom_id": custom_id, "result": {"type": "errored", "error": error}}
            yield json.dumps(made).encode() + b"\n"


def _result(line: dict[str, Any]) -> dict[str, Any]:
    """Converts an output line to the result of a request."""
    response, error = line["response"], line["error"]
    if response is None and error["code"] == "batch_cancelled":
        return {"type": "canceled"}
    if response is None and error["code"] == "batch_expired":
        return {"type": "expired"}
    if response is None:
        return {"type": "errored", "error": message_error(ApiError(500, error["message"]), None)}
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


def _batch(record: BatchRecord, request: Request) -> MessageBatch:
    ended = record.has_ended
    rest = record.total - record.completed - record.failed
    counts: MessageBatchCounts = {
        "processing": 0 if ended else record.total,
        "succeeded": record.completed if ended else 0,
        "errored": record.failed if ended else 0,
        "canceled": rest if record.status == "cancelled" else 0,
        "expired": rest if record.status == "expired" else 0,
    }
    if record.status == "failed":  # such as for a full disk
        counts["errored"] += rest
    status: Literal["in_progress", "canceling", "ended"] = "ended" if ended else "in_progress"
    if record.status == "cancelling":
        status = "canceling"
    ended_at = record.completed_at or record.cancelled_at or record.expired_at or record.failed_at
    base = str(request.base_url).rstrip("/")
    return {
        "id": record.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": _moment(record.created_at),
        "expires_at": _moment(record.expires_at),
        "cancel_initiated_at": _moment(record.cancelling_at),
        "ended_at": _moment(ended_at),
        "archived_at": None,
        "results_url": f"{base}/v1/messages/batches/{record.id}/results" if ended else None,
    }


@overload
def _moment(seconds: int) -> str: ...
@overload
def _moment(seconds: None) -> None: ...
@overload
def _moment(seconds: int | None) -> str | None: ...
def _moment(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
