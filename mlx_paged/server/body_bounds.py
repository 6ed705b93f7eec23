"""Bounds of a JSON body, checked while its bytes arrive and before anything parses them.

Parsing, validating and freeing a body are calls into C that hold Python's lock: a body of a million
small values would stop every other stream for seconds, on whatever thread it is parsed. So a body
has a limited number of values; a long text is one value.
"""

from __future__ import annotations

import re

from mlx_paged.server.errors import ApiError, bad_request, context_exceeded, shorten

#: Maximum keys and values of a body, without token ids: about 9,000 messages.
MAX_VALUES = 1 << 16
#: Maximum token ids of a body, or as many as the model's context has.
MAX_TOKEN_IDS = 1 << 18
#: Maximum top-level keys of a body.
MAX_FIELDS = 256
MAX_DEPTH = 100

_ID_FIELDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids", "context"})
# The inside of a string, and bytes without structure. Possessive, so it never backtracks.
_IN_STRING = re.compile(rb"(?:[^\"\\]++|\\.)*+", re.DOTALL)
_PLAIN = re.compile(rb"[^\"\[\]{}]*+")
_LONGEST_KEY = 64


class BodyBounds:
    """Counts the values of one body, whose bytes may arrive in any pieces.

    It costs some hundred nanoseconds for each string, list or object, and almost nothing for
    numbers, long texts and media in base64. It does not check that the bytes are JSON.

    Args:
        max_token_ids: Maximum for all lists of token ids together.
        max_model_len: For the message about a prompt with too many; None if there is no limit.
        is_in_line: True if the body is the value of a field, as in a line of a batch.
    """

    def __init__(
        self,
        max_token_ids: int = MAX_TOKEN_IDS,
        max_model_len: int | None = None,
        *,
        is_in_line: bool = False,
    ) -> None:
        self._max_token_ids = max_token_ids
        self._max_model_len = max_model_len
        self._depth = -1 if is_in_line else 0
        self._in_string = False
        self._is_escaped = False  # the first byte of the next piece
        self._expects_key = False  # of the body itself
        self._key: bytearray | None = None  # of the body itself, while it is read
        self.field: str | None = None  # that the next bytes belong to
        self.num_values = 0
        self.num_token_ids = 0
        self.num_fields = 0

    def feed(self, data: bytes) -> None:
        """Reads the next bytes.

        Raises:
            ApiError: 400 that names the field in which a limit was exceeded.
        """
        position, end = 0, len(data)
        while position < end:
            if self._in_string:
                position = self._string(data, position)
                continue
            stop = _PLAIN.match(data, position).end()  # type: ignore[union-attr]
            commas = data.count(b",", position, stop)
            if commas:
                self._count_entries(commas)
            if stop == end:
                return
            self._structure(data[stop])
            position = stop + 1

    def _string(self, data: bytes, position: int) -> int:
        """Continues in a string; returns the position after it."""
        if self._is_escaped:
            self._is_escaped = False
            position += 1
        stop = data.find(b'"', position)
        stop = len(data) if stop < 0 else stop
        if data.find(b"\\", position, stop) >= 0:  # The quote may be escaped.
            stop = _IN_STRING.match(data, position).end()  # type: ignore[union-attr]
        if self._key is not None:
            self._key += data[position : min(stop, position + _LONGEST_KEY)]
        if stop == len(data):
            return stop
        if data[stop] == 0x5C:  # a backslash, as the last byte
            self._is_escaped = True
            return stop + 1
        self._in_string = False
        if self._key is not None:
            self.field = shorten(self._key.decode("utf-8", "replace"), _LONGEST_KEY)
            self._key = None
        return stop + 1

    def _structure(self, byte: int) -> None:
        if byte == 0x22:  # "
            self._in_string = True
            if self._expects_key:
                self._expects_key = False
                self._count_field()
                self._key = bytearray()
            else:
                self._count(1)
        elif byte in b"[{":
            self._depth += 1
            self._expects_key = self._depth == 1 and byte == 0x7B
            if self._depth > MAX_DEPTH:
                raise self._refusal(f"is nested more than {MAX_DEPTH} levels deep")
            self._count(1)
        else:
            self._depth -= 1

    def _count_entries(self, commas: int) -> None:
        if self._depth > 1:
            if self.field in _ID_FIELDS:
                self.num_token_ids += commas
                if self.num_token_ids > self._max_token_ids:
                    raise self._too_many_token_ids()
            else:
                self._count(commas)
            return
        self._expects_key = True

    def _count_field(self) -> None:
        self.num_fields += 1
        if self.num_fields > MAX_FIELDS:
            raise ApiError(
                400, f"the body must have at most {MAX_FIELDS} fields but has more",
                param=self.field, code="too_many_fields",
            )  # fmt: skip

    def _count(self, number: int) -> None:
        self.num_values += number
        if self.num_values > MAX_VALUES:
            raise self._refusal(
                f"is too much: a body must have at most {MAX_VALUES} keys and values", "too_large"
            )

    def _refusal(self, what: str, code: str = "invalid_value") -> ApiError:
        if self.field is None:
            return ApiError(400, f"the body {what}", code=code)
        return bad_request(self.field, f"{self.field} {what}", code)

    def _too_many_token_ids(self) -> ApiError:
        assert self.field is not None
        reason = f"a body must have at most {self._max_token_ids} token ids but has more"
        if self.field in ("prompt", "input") and self._max_model_len is not None:
            return context_exceeded(self._max_model_len, reason, self.field)
        return bad_request(self.field, reason, "too_large")
