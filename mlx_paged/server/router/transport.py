"""Upstream: an HTTP/1.1 client for one request to a model's process over its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httptools

Header = tuple[bytes, bytes]

_READ_SIZE = 1 << 16


class UpstreamError(Exception):
    """The process has ended, or does not speak HTTP."""


class Upstream:
    """A response whose headers have arrived. `chunks` yields the body.

    Attributes:
        status: Its status.
        headers: Its headers, with names in lower case.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._has_head = self._is_complete = False

    @classmethod
    async def send(
        cls, socket: Path, method: str, target: str, headers: Iterable[Header], body: bytes
    ) -> Upstream:
        """Sends a request, and waits for the response headers.

        Args:
            target: Path and query, encoded.
            headers: Without those about the body and the connection.

        Raises:
            UpstreamError: There is no response.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(str(socket))
        except OSError as error:
            raise UpstreamError("the process of the model does not answer") from error
        made = cls(reader, writer)
        try:
            head = [f"{method} {target} HTTP/1.1\r\n".encode()]
            head += [b"%b: %b\r\n" % header for header in headers]
            head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
            writer.write(b"".join(head) + body)
            while not made._has_head:
                await made._receive()
        except BaseException:
            made.close()
            raise
        return made

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the body as it arrives.

        Raises:
            UpstreamError: The connection closes early.
        """
        while True:
            if self._body:
                body = b"".join(self._body)
                self._body.clear()
                yield body
            if self._is_complete:
                return
            await self._receive()

    async def read(self) -> bytes:
        """Returns the whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        """Closes the connection. The process aborts an unfinished request."""
        self._writer.transport.abort()

    async def _receive(self) -> None:
        try:
            data = await self._reader.read(_READ_SIZE)
            if not data:
                raise UpstreamError("the process of the model has ended")
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise UpstreamError(f"the process of the model does not answer: {error}") from error

    # The parser's callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Notes the end of the headers; a 1xx status announces another response."""
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        """Stores a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Notes the end of a response."""
        if self._has_head:
            self._is_complete = True
        else:
            self.headers.clear()
