"""The files of a batch in OpenAI's format: a JSONL file of requests, and one of answers."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlx_paged.errors import MlxPagedError

#: Most bytes of a line, as of a request's body on a server whose model takes media.
MAX_LINE = 48 << 20
URLS = ("/v1/chat/completions", "/v1/completions")
_FIELDS = ("custom_id", "method", "url", "body")
_CHUNK = 1 << 16
_BOM = b"\xef\xbb\xbf"
_BEGIN = b'{"id": "batch_req_'
_ID = re.compile(re.escape(_BEGIN) + rb'([0-9]{1,9})_([0-9a-f]{16})", ')
_REMEDY = "give another --output, or --overwrite"


# --- Requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input that is not blank.

    Attributes:
        number: Its place in the file; the first line is 1.
        digest: 64 bits of its SHA-256, never 0: whether it is the same line as before.
        content: Without the line break; None where it is longer than `MAX_LINE`.
    """

    number: int
    digest: int
    content: bytes | None

    @property
    def id(self) -> str:
        """Id of the output line: the same in every run over the same input."""
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
    """A line that holds no request; it becomes an error line of the output.

    Attributes:
        code: A word for programs.
        custom_id: If the line has a usable one.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def read_lines(file: BinaryIO, max_line: int = MAX_LINE) -> Iterator[Line]:
    """The lines of a file from its beginning. At most one is in memory, and no long one."""
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


def parse(line: Line) -> BatchRequest:
    """The request of a line.

    Raises:
        LineError: it is not a request. The body is validated by the endpoint.
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
    problem = _problem(given)
    if problem is not None:
        raise LineError("invalid_request", problem, custom_id)
    return BatchRequest(custom_id, given["url"], json.dumps(given["body"]).encode())


def _problem(given: dict[str, Any]) -> str | None:
    for name in _FIELDS:
        if name not in given:
            return f"{name} is missing"
    if unknown := [name for name in given if name not in _FIELDS]:
        return f"unknown field {_short(unknown[0])}: a line has {', '.join(_FIELDS)}"
    if given["method"] != "POST":
        return f"method must be 'POST' but got {_short(given['method'])}"
    if given["url"] not in URLS:
        return f"url must be {' or '.join(URLS)} but got {_short(given['url'])}"
    if not isinstance(given["body"], dict):
        return f"body must be an object but got {_short(given['body'])}"
    if given["body"].get("stream"):
        return "body.stream must be false: a batch is written whole"
    return None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."


# --- Answers --------------------------------------------------------------------------------------


class Done:
    """Which lines of the input have their output line: 8 bytes for each line."""

    def __init__(self) -> None:
        self._digests = array("Q")  # by line number; 0: not done
        self.count = 0

    def add(self, number: int, digest: int) -> None:
        """Marks a line."""
        missing = number + 1 - len(self._digests)
        if missing > 0:
            self._digests.frombytes(bytes(missing * self._digests.itemsize))
        self.count += not self._digests[number]
        self._digests[number] = digest

    def digest(self, number: int) -> int:
        """Of the line as it was when it was done; 0 where it is not."""
        return self._digests[number] if number < len(self._digests) else 0

    @property
    def last(self) -> int:
        """The highest line number that was ever marked."""
        return len(self._digests) - 1


class Journal:
    """The output file, or stdout (then nothing can be resumed).

    Args:
        path: None: stdout.
        overwrite: empty the file first.

    Attributes:
        done: The lines that were found in it.
        num_torn_bytes: Length of a half-written last line that was cut off.

    Raises:
        MlxPagedError: the file cannot be written, or is no output of a batch, or another process
            writes to it.
    """

    def __init__(self, path: Path | None, *, overwrite: bool = False) -> None:
        self.path = path
        self.done = Done()
        self.num_torn_bytes = 0
        if path is None:
            self._fd = os.dup(sys.stdout.fileno())
        else:
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise MlxPagedError(f"cannot write {path}: {error.strerror}") from error
        self._syncs = stat.S_ISREG(os.fstat(self._fd).st_mode)
        if path is not None and self._syncs:
            try:
                self._take(path, overwrite)
            except BaseException:
                self.close()
                raise

    def _take(self, path: Path, overwrite: bool) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MlxPagedError(f"another process writes {path}: give another --output") from error
        if overwrite:
            os.ftruncate(self._fd, 0)
        with open(self._fd, "rb", closefd=False) as file:
            end = self._read(path, file)
        self.num_torn_bytes = os.fstat(self._fd).st_size - end
        if self.num_torn_bytes:
            os.ftruncate(self._fd, end)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._sync()
        folder = os.open(path.resolve().parent, os.O_RDONLY)
        try:  # the file's name must be durable, too
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self, path: Path, file: BinaryIO) -> int:
        """Records the lines that are done; returns where the last whole line ends."""
        end = 0
        for number, line in enumerate(file, 1):
            found = _ID.match(line)
            if found is None or not line.endswith(b"}\n"):
                torn = not line.endswith(b"\n")
                if torn and (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                    return end
                raise MlxPagedError(f"{path} is no output of a batch (line {number}): {_REMEDY}")
            self.done.add(int(found[1]), int(found[2], 16))
            end += len(line)
        return end

    def check(self, file: BinaryIO) -> int:
        """Compares the lines of the input with those that were done; returns how many there are.

        Raises:
            MlxPagedError: the input is another one.
        """
        count = last = 0
        for line in read_lines(file):
            count, last = count + 1, line.number
            if self.done.digest(line.number) not in (0, line.digest):
                raise MlxPagedError(
                    f"line {line.number} of the input is not the one that {self.path} has an "
                    f"answer to: the input was changed; {_REMEDY}"
                )
        if self.done.last > last:
            raise MlxPagedError(
                f"{self.path} has an answer to line {self.done.last}, but the input ends at line "
                f"{last}: it was changed; {_REMEDY}"
            )
        return count

    def is_done(self, line: Line) -> bool:
        """Whether the line has its output line already."""
        return self.done.digest(line.number) != 0

    def append(self, lines: Iterable[bytes]) -> None:
        """Writes output lines; they survive a crash of the machine once it has returned.

        Raises:
            MlxPagedError: they could not be written.
        """
        rest = memoryview(b"".join(line + b"\n" for line in lines))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._sync()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise MlxPagedError(f"cannot write {self.path}: {error.strerror}") from error

    def _sync(self) -> None:
        if self._syncs:
            os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
