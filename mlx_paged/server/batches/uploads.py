"""Reads a file and the fields beside it from a form, piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from mlx_paged.server.context import context_of
from mlx_paged.server.errors import ApiError, bad_request, shorten
from mlx_paged.server.requests import too_large, unsupported_content

_TYPE = "multipart/form-data"
# Most bytes of a form besides the file, of a field, and of the headers of a part.
_MAX_REST, _MAX_FIELD = 1 << 16, 1 << 12
_MAX_PARTS = 16
# Bytes a second that a body must have, after the time that any has.
_MIN_RATE = 1 << 14


class FormReader:
    """Splits a form into one file, whose content goes to a function, and short fields.

    Args:
        boundary: of its parts.
        take: gets the content of the part named `file`, in pieces.

    Attributes:
        fields: Those that came, by name.
        filename: The name that the client gives to the file; None: no file has come.
        is_whole: True once the end of the form has come.
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


async def read_form(
    request: Request,
    limit: int,
    take: Callable[[bytes], None],
    after_piece: Callable[[], Awaitable[None]],
) -> tuple[str, Mapping[str, str]]:
    """Receives a form of one file.

    Args:
        limit: most bytes of the file.
        take: gets its content, in pieces.
        after_piece: called after each piece of the body; no more is read before it is done.

    Returns:
        Its name as the client calls it, and the fields.

    Raises:
        ApiError: 400, 408, 413, 415 or 503; or whatever `take` raises.
    """
    context = context_of(request)
    reader = FormReader(_boundary(request), take)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit + _MAX_REST:
        raise too_large(limit, "the file")
    timeout, size, began = context.config.read_timeout, 0, time.monotonic()
    pieces = request.stream().__aiter__()
    try:
        async with context.reading_body():
            while True:
                try:
                    # (A large file may take its time, but not stand still.)
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
                if size > limit + _MAX_REST:
                    raise too_large(limit, "the file")
                reader.feed(piece)
                await after_piece()
    except ClientDisconnect:
        raise ApiError(499, "the client has gone", code="client_closed") from None
    except ApiError as error:
        error.headers.setdefault("Connection", "close")  # the rest of the body is not read
        raise
    if not reader.is_whole:
        raise ApiError(400, "the body ends before its last boundary", code="invalid_form")
    if reader.filename is None:
        raise ApiError(400, "file is missing", param="file", code="missing_field")
    return reader.filename, reader.fields


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
