"""Journal: the append-only output file of a batch, which can be continued after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from mlx_paged.errors import MlxPagedError
from mlx_paged.server.batches.lines import Line, read_lines
from mlx_paged.server.batches.runner import Output

_BEGIN = b'{"id": "batch_req_'
_ID = re.compile(re.escape(_BEGIN) + rb'([0-9]{1,9})_([0-9a-f]{16})", ')
_REMEDY = "give another --output, or --overwrite"


class Done:
    """The input lines that have an output line; takes 8 bytes per line."""

    def __init__(self) -> None:
        self._digests = array("Q")  # by line number; 0: no output yet
        self.count = 0

    def add(self, number: int, digest: int) -> None:
        """Marks a line as done."""
        missing = number + 1 - len(self._digests)
        if missing > 0:
            self._digests.frombytes(bytes(missing * self._digests.itemsize))
        self.count += not self._digests[number]
        self._digests[number] = digest

    def digest(self, number: int) -> int:
        """Returns the digest that a line had when it was done; 0 if it is not done."""
        return self._digests[number] if number < len(self._digests) else 0

    @property
    def last(self) -> int:
        """The highest line number that is done; -1 if none is."""
        return len(self._digests) - 1


class Journal:
    """The output file, or stdout, which cannot be resumed.

    Args:
        path: None means stdout.
        overwrite: Empty the file first.
        mode: Permissions of a new file.

    Attributes:
        done: The lines that the file already has.
        num_torn_bytes: Bytes of a half-written last line, which was cut off.

    Raises:
        MlxPagedError: The file cannot be written, is not the output of a batch, or is in use by
            another process.
    """

    def __init__(self, path: Path | None, *, overwrite: bool = False, mode: int = 0o644) -> None:
        self.path = path
        self.done = Done()
        self.num_torn_bytes = 0
        if path is None:
            self._fd = os.dup(sys.stdout.fileno())
        else:
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
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
        try:  # Makes the name of a new file durable, too.
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self, path: Path, file: BinaryIO) -> int:
        """Records the lines that are done; returns the end of the last complete line."""
        end = 0
        for number, line in enumerate(file, 1):
            found = _ID.match(line)
            if found is None or not line.endswith(b"}\n"):
                torn = not line.endswith(b"\n")
                if torn and (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                    return end
                raise MlxPagedError(f"{path} is not batch output (line {number}): {_REMEDY}")
            self.done.add(int(found[1]), int(found[2], 16))
            end += len(line)
        return end

    def check(self, file: BinaryIO) -> int:
        """Checks that lines that are done have not changed; returns the number of input lines.

        Raises:
            MlxPagedError: The input was changed since its output was begun.
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
        """Returns True if the file already has the output of a line."""
        return self.done.digest(line.number) != 0

    def write(self, outputs: Sequence[Output]) -> None:
        """Writes the output of lines; see `append`."""
        self.append([output.content for output in outputs])

    def append(self, lines: Iterable[bytes]) -> None:
        """Writes output lines durably.

        Raises:
            MlxPagedError: The lines could not be written.
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
