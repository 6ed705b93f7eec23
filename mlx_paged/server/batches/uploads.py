"""Receives files and other large bodies in pieces, without holding them in memory."""

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

# Refused forms are in the access log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

_TYPE = "multipart/form-data"
# Maximum bytes of a form without the file, and of a field or header.
_MAX_REST, _MAX_FIELD = 1 << 16, 1 << 12
_MAX_PARTS = 16
# Minimum bytes per second of a body, once its initial timeout has passed.
_MIN_RATE = 1 << 14
_DISK_PROBLEMS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "read-only"}


class FormReader:
    """Splits a multipart form into one file, whose content is passed on, and short fields.

    Args:
        boundary: The boundary between parts.
        take: Called with the content of the part named `file`, in pieces.

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
        """Parses the next bytes.

        Raises:
            ApiError: 400, the form is invalid or has too many parts.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            message = f"the body is not valid {_TYPE}: {error}"
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
    """An upload within the limits of the server.

    Args:
        upload: The destination.
        folder: The folder that contains it.
        limit: Maximum bytes of the upload.
        what: Name of the upload in errors.
        max_total: Maximum bytes of all files.
        room: Bytes that were left for files when `Folder.num_uploaded` was 0.
    """

    def __init__(
        self, upload: Upload, folder: Folder, limit: int, what: str, max_total: int, room: int
    ) -> None:
        self.upload = upload
        self._folder = folder
        self._limit, self._what, self._max_total, self._room = limit, what, max_total, room

    def take(self, data: bytes) -> None:
        """Appends data.

        Raises:
            ApiError: 413, a limit would be exceeded.
        """
        if self.upload.size + len(data) > self._limit:
            raise too_large(self._limit, self._what)
        if self._folder.num_receiving + self._folder.num_uploaded + len(data) > self._room:
            raise files_too_large(self._max_total)
        self.upload.add(data)
        self._folder.num_receiving += len(data)

    async def write(self) -> None:
        """Writes buffered data to disk if there is enough of it."""
        if self.upload.should_write:
            await asyncio.to_thread(self.upload.write)


@contextlib.asynccontextmanager
async def receiving(folder: Folder, config: ServerConfig, what: str) -> AsyncIterator[Receiving]:
    """Receives a file, which is deleted at the end unless `Folder.keep` was called.

    Args:
        what: Name of the file in errors.

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
    """Returns 413 for a file that would exceed the limit for all files."""
    message = f"all files together must be at most {limit} bytes: delete some"
    return ApiError(413, message, code="files_too_large")


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Converts disk errors to API errors.

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
        to: Receives the content of the file.
        limit: Maximum bytes of the file.

    Returns:
        The client's name of the file, and the fields.

    Raises:
        ApiError: 400 or 415, the form is invalid; see also `read_large`.
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
    """Reads a body in pieces, without holding it in memory.

    Args:
        take: Called with each piece.
        after_piece: Awaited after each piece, before more is read.
        limit, rest: Maximum bytes of `what`, and of the rest of the body.

    Raises:
        ApiError: 408, the body arrives too slowly; 413, it is too large; 499, the client left; 503,
            the server is shutting down; or an error of `take`.
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
                    # A large body may take long, but must keep arriving.
                    left = began + timeout + size / _MIN_RATE - time.monotonic()
                    piece = await asyncio.wait_for(anext(pieces), max(0.0, min(timeout, left)))
                except StopAsyncIteration:
                    break
                except TimeoutError:  # A TimeoutError outside this loop means a shutdown.
                    seconds = time.monotonic() - began
                    raise ApiError(
                        408,
                        f"the body arrives too slowly: {size} bytes in {seconds:.0f} s",
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
