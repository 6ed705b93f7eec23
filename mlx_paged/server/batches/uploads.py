"""Receives files and other large bodies piece by piece, into the folder of the server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from mlx_paged.server.batches.folder import Folder, Upload
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import context_of
from mlx_paged.server.errors import ApiError, bad_request, shorten
from mlx_paged.server.requests import too_large, unsupported_content

# A refused form is in the log of requests.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

_TYPE = "multipart/form-data"
# Maximum bytes of a form without the file, of a field, and of the headers of a part.
_MAX_REST, _MAX_FIELD = 1 << 16, 1 << 12
_MAX_PARTS = 16
# Bytes a second that a body must have, after the time that any has.
_MIN_RATE = 1 << 14
_DISK_PROBLEMS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "read-only"}


class FormReader:
    """Splits a form into one file, whose content goes to a function, and short fields.

    Args:
        boundary: Boundary of its parts.
        take: Receives the content of the part named `file`, in pieces.

    Attributes:
        fields: Received fields by name.
        filename: The client's name of the file; None until it has arrived.
        is_whole: True once the end of the form has arrived.
    """

    def __init__(self, boundary: bytes, take: Callable[[bytes], None]) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_whole = False
        self._take = take
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_header_field": lambda data, start, end: self._add(
                    self._header, data, start, end
                ),
                "on_header_value": lambda data, start, end: self._add(
                    self._value, data, start, end
                ),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_end": self._finish,
            },
        )
        self._num_parts = 0
        self._header, self._value, self._text = bytearray(), bytearray(), bytearray()
        self._disposition = b""
        self._name = ""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes.

        Raises:
            ApiError: 400, they are no form.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            message = f"the body is not {_TYPE} as its Content-Type says: {error}"
            raise ApiError(400, shorten(message), code="invalid_form") from None

    @staticmethod
    def _add(to: bytearray, data: bytes, start: int, end: int) -> None:
        to += data[start:end]
        if len(to) > _MAX_FIELD:
            message = f"a header of a part must be at most {_MAX_FIELD} bytes"
            raise ApiError(400, message, code="invalid_form")

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ApiError(400, f"a form must have at most {_MAX_PARTS} parts", code="invalid_form")
        self._disposition, self._name = b"", ""
        self._text.clear()

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.fields or (self._name == "file" and self.filename is not None):
            raise bad_request(self._name, f"{self._name} must be given once")
        if self._name == "file":
            if b"filename" not in options:
                raise bad_request("file", "file must be a file: a part that has a filename")
            self.filename = options[b"filename"].decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._take(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > _MAX_FIELD:
            name = shorten(self._name, 64)
            raise bad_request(name, f"{name} must be at most {_MAX_FIELD} bytes")

    def _end(self) -> None:
        if self._name != "file":
            self.fields[shorten(self._name, 64)] = self._text.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.is_whole = True


class Receiving:
    """A file that is being received, within the limits of the server.

    Args:
        upload: The destination.
        folder: Its folder.
        limit: Maximum bytes of the file.
        what: Its name in errors.
        max_total: Maximum bytes of all files.
        room: Remaining bytes of all files when `Folder.num_uploaded` was 0.
    """

    def __init__(
        self, upload: Upload, folder: Folder, limit: int, what: str, max_total: int, room: int
    ) -> None:
        self.upload = upload
        self._folder = folder
        self._limit, self._what, self._max_total, self._room = limit, what, max_total, room

    def take(self, data: bytes) -> None:
        """Appends to it.

        Raises:
            ApiError: 413.
        """
        if self.upload.size + len(data) > self._limit:
            raise too_large(self._limit, self._what)
        if self._folder.num_receiving + self._folder.num_uploaded + len(data) > self._room:
            raise files_too_large(self._max_total)
        self.upload.add(data)
        self._folder.num_receiving += len(data)

    async def write(self) -> None:
        """Writes it, if much of it is in memory."""
        if self.upload.should_write:
            await asyncio.to_thread(self.upload.write)


@contextlib.asynccontextmanager
async def receiving(folder: Folder, config: ServerConfig, what: str) -> AsyncIterator[Receiving]:
    """Receives a file; unless it is kept, it is deleted at the end.

    Args:
        what: Its name in errors.

    Raises:
        ApiError: 507, the disk is full or read-only.
    """
    room = config.max_files_size + folder.num_uploaded
    room -= await asyncio.to_thread(folder.num_bytes)
    with storing():
        upload = folder.begin_upload()
        try:
            yield Receiving(upload, folder, config.max_file_size, what, config.max_files_size, room)
            folder.num_uploaded += upload.size
        finally:
            folder.num_receiving -= upload.size
            folder.discard(upload)  # A no-op if it was kept.


def files_too_large(limit: int) -> ApiError:
    """Returns 413 for a file that would exceed the limit of all files."""
    message = f"all files together must be at most {limit} bytes: delete some"
    return ApiError(413, message, code="files_too_large")


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Errors of the disk, as answers.

    Raises:
        ApiError: 507, the disk is full or read-only.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_PROBLEMS:
            raise
        problem = _DISK_PROBLEMS[error.errno]
        raise ApiError(507, f"the disk of this server is {problem}", code="storage_full") from error


async def read_form(request: Request, to: Receiving, limit: int) -> tuple[str, Mapping[str, str]]:
    """Receives a form with one file.

    Args:
        to: Receives its content.
        limit: Maximum bytes of the file.

    Returns:
        The client's name of the file, and the fields.

    Raises:
        ApiError: 400, 408, 413, 415 or 503.
    """
    reader = FormReader(_boundary(request), to.take)
    await read_large(request, reader.feed, to.write, limit, "the file", _MAX_REST)
    if not reader.is_whole:
        raise ApiError(400, "the body ends before its last boundary", code="invalid_form")
    if reader.filename is None:
        raise ApiError(400, "file is missing", param="file", code="missing_field")
    return reader.filename, reader.fields


async def read_large(
    request: Request,
    take: Callable[[bytes], None],
    after_piece: Callable[[], Awaitable[None]],
    limit: int,
    what: str = "the body",
    rest: int = 0,
) -> None:
    """Reads a body that is not held in memory.

    Args:
        take: Receives it, in pieces.
        after_piece: Called after each piece; no more is read until it returns.
        limit, rest: Maximum bytes of `what`, and of the rest of the body.

    Raises:
        ApiError: 408, 413 or 503; or whatever `take` raises.
    """
    context = context_of(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit + rest:
        raise too_large(limit, what)
    timeout, size, began = context.config.read_timeout, 0, time.monotonic()
    pieces = request.stream().__aiter__()
    try:
        async with context.reading_body():
            while True:
                try:
                    # (A large body may take its time, but not stand still.)
                    left = began + timeout + size / _MIN_RATE - time.monotonic()
                    piece = await asyncio.wait_for(anext(pieces), max(0.0, min(timeout, left)))
                except StopAsyncIteration:
                    break
                except TimeoutError:  # (here: outside it means that the server shuts down)
                    seconds = time.monotonic() - began
                    raise ApiError(
                        408,
                        f"the body comes too slowly: {size} bytes in {seconds:.0f} s",
                        code="read_timeout",
                    ) from None
                size += len(piece)
                if size > limit + rest:
                    raise too_large(limit, what)
                take(piece)
                await after_piece()
    except ClientDisconnect:
        raise ApiError(499, "the client disconnected", code="client_closed") from None
    except ApiError as error:
        error.headers.setdefault("Connection", "close")  # the rest of the body is not read
        raise


def _boundary(request: Request) -> bytes:
    given = request.headers.get("content-type")
    kind, options = parse_options_header(given)
    boundary = options.get(b"boundary", b"")
    if kind.lower() != _TYPE.encode() or not 0 < len(boundary) <= 256:
        shown = "missing" if given is None else repr(shorten(given, 64))
        raise unsupported_content(f"Content-Type must be {_TYPE} with a boundary but is {shown}")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise unsupported_content("Content-Encoding must be identity: send the form uncompressed")
    return boundary
