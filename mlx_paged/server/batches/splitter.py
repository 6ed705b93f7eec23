"""RequestSplitter: extracts the entries of `requests` from a streamed body, one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mlx_paged.server.errors import ApiError, bad_request

#: Maximum bytes of a body without the entries.
MAX_REST = 1 << 16
_FIELD = b"requests"
# Bytes without structure, outside and inside a string. Possessive quantifiers do not backtrack.
_PLAIN = re.compile(rb"[^\"\[\]{}]*+")
_IN_STRING = re.compile(rb"(?:[^\"\\]++|\\.)*+", re.DOTALL)
_SHOWN = 64


class RequestSplitter:
    """Splits a JSON object whose field `requests` is a list of objects.

    Finds the beginning and end of each entry, without validating its content.

    Args:
        max_entry: Maximum bytes of an entry.

    Attributes:
        rest: The body without the entries; valid JSON if the body is.
    """

    def __init__(self, max_entry: int) -> None:
        self.rest = bytearray()
        self._max_entry = max_entry
        self._entry: bytearray | None = None
        self._depth = 0
        self._num_entries = 0
        self._in_string = False
        self._is_escaped = False  # whether the next byte is escaped
        self._string = bytearray()  # beginning of the last string at depth 1
        self._in_list = self._had_list = False
        self._between = b""  # bytes between two entries

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Reads the next bytes; yields the entries that end in them.

        Raises:
            ApiError: 400, `requests` is not a list of objects, or the body is too large.
        """
        position = 0
        while position < len(data):
            if self._in_string:
                position = self._read_string(data, position)
                continue
            stop = _PLAIN.match(data, position).end()  # type: ignore[union-attr]
            self._keep(data[position:stop])
            if stop < len(data):
                entry = self._structure(data[stop : stop + 1])
                if entry is not None:
                    yield entry
            position = stop + 1

    def _read_string(self, data: bytes, position: int) -> int:
        start = position
        if self._is_escaped:
            self._is_escaped = False
            position += 1
        stop = _IN_STRING.match(data, position).end()  # type: ignore[union-attr]
        if stop < len(data):
            self._is_escaped = data[stop : stop + 1] == b"\\"
            self._in_string = self._is_escaped
            stop += 1
        piece = data[start:stop]
        if self._depth == 1:
            self._string += (
                piece[: _SHOWN - len(self._string)] if len(self._string) < _SHOWN else b""
            )
        self._keep(piece)
        return stop

    def _structure(self, byte: bytes) -> bytes | None:
        """Handles a quote or bracket; returns the entry that ends with it, if one does."""
        at_list = self._in_list and self._depth == 2
        if byte == b'"':
            self._in_string = True
            if self._depth == 1:
                self._string.clear()
        elif byte in (b"[", b"{"):
            self._depth += 1
        else:
            self._depth -= 1
        if at_list and byte == b"{":
            self._check_between(b"," if self._num_entries else b"")
            self._entry = bytearray()
        elif at_list and byte == b"]":
            self._check_between(b"")
            self._in_list = False
        elif at_list:
            raise self._not_an_object()
        self._keep(byte)
        if self._entry is not None and self._depth == 2:
            entry, self._entry = bytes(self._entry), None
            self._num_entries += 1
            return entry
        if byte == b"[" and self._depth == 2 and self._string == _FIELD + b'"':
            if self._had_list:
                raise bad_request("requests", "requests must be given once")
            self._in_list = self._had_list = True
        return None

    def _keep(self, piece: bytes) -> None:
        if self._entry is not None:
            self._entry += piece
            if len(self._entry) > self._max_entry:
                name = f"requests.{self._num_entries}"
                raise bad_request(name, f"{name} must be at most {self._max_entry} bytes")
        elif self._in_list and self._depth == 2:
            self._between += piece.strip()
            if len(self._between) > 1:
                raise self._not_an_object()
        else:
            self.rest += piece
            if len(self.rest) > MAX_REST:
                message = f"the body must be at most {MAX_REST} bytes without its requests"
                raise ApiError(400, message, code="too_large")

    def _check_between(self, expected: bytes) -> None:
        if self._between != expected:
            raise self._not_an_object()
        self._between = b""

    def _not_an_object(self) -> ApiError:
        name = f"requests.{self._num_entries}"
        return bad_request(name, f"{name} must be an object, after a single comma")
