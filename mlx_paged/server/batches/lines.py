"""Reads the requests of a batch: lines of a JSONL file in OpenAI's format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

#: Maximum bytes of a line, as of a body for a model that takes media.
MAX_LINE = 48 << 20
#: Paths that a line may name.
URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/score",
    "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
_FIELDS = ("custom_id", "method", "url", "body")
_CHUNK = 1 << 16
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input that is not blank.

    Attributes:
        number: Line number in the file, from 1.
        digest: 64 bits of the SHA-256 of the line, never 0; detects changed lines.
        content: The line without its line break; None if it is too long.
    """

    number: int
    digest: int
    content: bytes | None

    @property
    def id(self) -> str:
        """Id of the output line, the same in every run over the same input."""
        return f"batch_req_{self.number}_{self.digest:016x}"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The request of a line.

    Attributes:
        body: JSON.
    """

    custom_id: str
    url: str
    body: bytes


class LineError(Exception):
    """A line without a valid request; it becomes an error line of the output.

    Attributes:
        code: Machine-readable reason.
        custom_id: The custom_id of the line, if that is valid.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def read_lines(file: BinaryIO, max_line: int = MAX_LINE) -> Iterator[Line]:
    """Yields the lines of a file from its beginning that are not blank.

    Keeps only one line in memory, and nothing of a line over `max_line` bytes.
    """
    file.seek(0)
    number = 0
    while piece := file.readline(_CHUNK):
        number += 1
        digest, pieces, size = hashlib.sha256(), list[bytes](), 0
        while piece:
            size += len(piece)
            digest.update(piece.rstrip(b"\r\n"))
            if size <= max_line:
                pieces.append(piece)
            else:
                pieces.clear()
            if piece.endswith(b"\n"):
                break
            piece = file.readline(_CHUNK)
        content = b"".join(pieces).strip() if size <= max_line else None
        if number == 1 and content is not None:
            content = content.removeprefix(_BOM)
        if content != b"":
            yield Line(number, int.from_bytes(digest.digest()[:8]) or 1, content)


def parse(line: Line, urls: Sequence[str] = URLS) -> BatchRequest:
    """Parses the request of a line. The endpoint validates its body.

    Args:
        urls: Paths that the line may name.

    Raises:
        LineError: The line has no valid request.
    """
    if line.content is None:
        raise LineError("line_too_long", f"the line must be at most {MAX_LINE} bytes")
    try:
        given = json.loads(line.content)
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json_line", f"the line is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise LineError("invalid_json_line", "the line must be a JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        shown = "is missing" if "custom_id" not in given else f"but got {_short(custom_id)}"
        raise LineError("invalid_custom_id", f"custom_id must be a string, not empty, {shown}")
    problem = _problem(given, urls)
    if problem is not None:
        raise LineError("invalid_request", problem, custom_id)
    body = given["body"]
    if given["url"] == "/v1/responses":
        body.setdefault(
            "store", False
        )  # Otherwise they would evict responses that clients continue.
    return BatchRequest(custom_id, given["url"], json.dumps(body).encode())


def _problem(given: dict[str, Any], urls: Sequence[str]) -> str | None:
    for name in _FIELDS:
        if name not in given:
            return f"{name} is missing"
    if unknown := [name for name in given if name not in _FIELDS]:
        return f"unknown field {_short(unknown[0])}: a line has {', '.join(_FIELDS)}"
    if given["method"] != "POST":
        return f"method must be 'POST' but got {_short(given['method'])}"
    if given["url"] not in urls:
        return f"url must be {' or '.join(urls)} but got {_short(given['url'])}"
    if not isinstance(given["body"], dict):
        return f"body must be an object but got {_short(given['body'])}"
    if given["body"].get("stream"):
        return "body.stream must be false: a batch is written whole"
    if given["body"].get("background"):
        return "body.background must be false: a batch waits for its answers"
    return None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."
