"""Folder: files and batches that survive a restart. Changes are on disk before they are reported.

    lock                  held by the one server that uses the folder
    files/ID.json         a file of the API: name, purpose, size, times
    files/ID.data         its content; or an output that is still being written
    files/*.part          unfinished uploads; removed at the next start
    batches/ID.json       a batch
    batches/ID.input      the requests of a batch without an input file of the API
    batches/ID.answers, ID.failures    its output

Names are made here, never taken from a client, and only the user can read the files. Files with
other names are neither read nor removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlx_paged.errors import InvalidParameterError

_FILES, _BATCHES = "files", "batches"
# Bytes of an upload that are written at once.
_PIECE_SIZE = 1 << 20
_PART, _DATA, _META = ".part", ".data", ".json"
# Names that this server makes.
_OWN = re.compile(
    r"(?:(?:file-|batch_|msgbatch_)?[0-9a-f]{32})\.(?:json|data|part|input|answers|failures)"
)


@dataclass(frozen=True)
class StoredFile:
    """A file of the API.

    Attributes:
        filename: The client's name, only for display.
        purpose: "batch" or "batch_output".
        bytes: Size of the content.
        created_at, expires_at: Unix times; None keeps the file until it is deleted.
    """

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class Upload:
    """A file that is being received.

    Attributes:
        size: Bytes so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._unwritten: list[bytes] = []
        self._num_unwritten = 0
        self._file: BinaryIO | None = open_new(path)

    def add(self, data: bytes) -> None:
        """Appends data, in memory."""
        self._unwritten.append(data)
        self._num_unwritten += len(data)
        self.size += len(data)

    @property
    def should_write(self) -> bool:
        """True if enough data is buffered to be worth a write."""
        return self._num_unwritten >= _PIECE_SIZE

    def write(self) -> None:
        """Writes buffered data. This may wait for the disk."""
        assert self._file is not None
        pieces, self._unwritten, self._num_unwritten = self._unwritten, [], 0
        self._file.write(b"".join(pieces))

    def sync(self) -> None:
        """Makes the content durable, and closes the file."""
        assert self._file is not None
        self.write()
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class Folder:
    """The stored files and batches of a server. Only one server at a time may use a folder.

    Methods that access the disk block, so the server calls them on threads.

    Args:
        path: Created if it does not exist.

    Attributes:
        files: Files of the API by id, oldest first.
        num_receiving: Bytes of uploads in progress.
        num_uploaded: Bytes of all uploads that were completed since the folder was opened.

    Raises:
        InvalidParameterError: The folder is unusable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Replaced, never modified, because other threads may be reading it.
        self.files: Mapping[str, StoredFile] = {}
        self.num_receiving = self.num_uploaded = 0
        self._changing = threading.Lock()
        try:
            for each in (path, path / _FILES, path / _BATCHES):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            expected = f"a folder that can be written ({error.strerror})"
            raise InvalidParameterError("files_dir", expected, str(path)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            expected = "a folder that no other server uses"
            raise InvalidParameterError("files_dir", expected, str(path)) from error
        try:
            records = [self._stored_file(found) for found in self._read_all(_FILES)]
        except BaseException:
            self.close()
            raise
        records.sort(key=lambda file: (file.created_at, file.id))
        self.files = {file.id: file for file in records}

    def close(self) -> None:
        """Unlocks the folder for other servers."""
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def num_bytes(self) -> int:
        """Returns the bytes of everything stored, without unfinished uploads."""
        total = 0
        for kind in (_FILES, _BATCHES):
            with os.scandir(self.path / kind) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if not entry.name.endswith(_PART):
                            total += entry.stat().st_size
        return total

    # Files of the API.

    def begin_upload(self) -> Upload:
        """Creates the file of an upload."""
        return Upload(self.path / _FILES / f"{uuid.uuid4().hex}{_PART}")

    def discard(self, upload: Upload) -> None:
        """Discards the received data."""
        with contextlib.suppress(OSError):  # Unwritten data may not fit on a full disk.
            upload.close()
        upload.path.unlink(missing_ok=True)

    def keep(
        self, upload: Upload, filename: str, purpose: str, expires_after: int | None
    ) -> StoredFile:
        """Turns a completed upload into a file of the API.

        If it fails, it leaves neither the file's record nor, under its name, its content.

        Args:
            expires_after: Lifetime in seconds; None: no limit.
        """
        now = int(time.time())
        expires_at = None if expires_after is None else now + expires_after
        file = StoredFile(new_file_id(), filename, purpose, upload.size, now, expires_at)
        upload.sync()
        path = self.data_path(file.id)
        upload.path.rename(path)
        record = path.with_suffix(_META)
        # The record first: a start removes content without a record, but trusts a record.
        with _removed_unless_done(record, path):
            self.publish(file)
        return file

    def publish(self, file: StoredFile) -> None:
        """Adds a file of the API whose content is on disk."""
        self._write(_FILES, file.id, asdict(file))
        with self._changing:
            self.files = {**self.files, file.id: file}

    def delete(self, file_id: str) -> None:
        """Deletes a file."""
        self._unlink(
            _FILES, file_id + _META
        )  # First, because a start removes data without a record.
        self._unlink(_FILES, file_id + _DATA)
        with self._changing:
            self.files = {name: file for name, file in self.files.items() if name != file_id}

    def data_path(self, file_id: str) -> Path:
        """Returns the path of a file's content."""
        return self.path / _FILES / f"{file_id}{_DATA}"

    def remove_leftovers(self, in_use: set[Path]) -> None:
        """Removes content that belongs to no file or batch.

        Args:
            in_use: Outputs that are being written.
        """
        known = {self.data_path(file_id) for file_id in self.files} | in_use
        for path in self._files_of_kind(_FILES):
            if path.suffix != _META and path not in known:
                path.unlink(missing_ok=True)
        batches = self.path / _BATCHES
        for path in self._files_of_kind(_BATCHES):
            if path.suffix == _PART or not (batches / f"{path.stem}{_META}").exists():
                path.unlink(missing_ok=True)

    # Batches.

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yields the stored records of all batches.

        Raises:
            InvalidParameterError: A record is damaged.
        """
        return self._read_all(_BATCHES)

    def write_batch(self, batch_id: str, record: dict[str, Any]) -> None:
        """Writes the record of a batch."""
        self._write(_BATCHES, batch_id, record)

    def batch_path(self, batch_id: str, part: str) -> Path:
        """Returns the path of a part of a batch: its input, answers or failures."""
        return self.path / _BATCHES / f"{batch_id}.{part}"

    def delete_batch(self, batch_id: str) -> None:
        """Deletes a batch, except its files of the API."""
        for part in ("json", "input", "answers", "failures"):
            self._unlink(_BATCHES, f"{batch_id}.{part}")

    # Records.

    def _read_all(self, kind: str) -> Iterator[dict[str, Any]]:
        for path in self._files_of_kind(kind):
            if path.suffix != _META:
                continue
            try:
                record = json.loads(path.read_bytes())
                if not isinstance(record, dict) or record.get("id") != path.stem:
                    raise ValueError(f"it must be an object with the id {path.stem}")
            except (OSError, ValueError) as error:
                expected = f"a folder of whole records ({path.name}: {error})"
                raise InvalidParameterError("files_dir", expected, str(self.path)) from error
            yield record

    def _files_of_kind(self, kind: str) -> list[Path]:
        """Returns the files with names made by this server."""
        found = (self.path / kind).iterdir()
        return [path for path in found if _OWN.fullmatch(path.name) and path.is_file()]

    def _stored_file(self, record: dict[str, Any]) -> StoredFile:
        try:
            return StoredFile(**record)
        except TypeError as error:
            expected = f"a folder of records of files ({record['id']}: {error})"
            raise InvalidParameterError("files_dir", expected, str(self.path)) from None

    def _write(self, kind: str, name: str, record: dict[str, Any]) -> None:
        folder = self.path / kind
        part = folder / f"{name}{_PART}"
        part.unlink(missing_ok=True)
        with _removed_unless_done(part):
            with open_new(part) as file:
                file.write(json.dumps(record).encode())
                file.flush()
                os.fsync(file.fileno())
            part.rename(folder / f"{name}{_META}")
        _sync_folder(folder)

    def _unlink(self, kind: str, name: str) -> None:
        folder = self.path / kind
        (folder / name).unlink(missing_ok=True)
        _sync_folder(folder)


def new_file_id() -> str:
    """Returns an unguessable id."""
    return f"file-{uuid.uuid4().hex}"


def open_new(path: Path) -> BinaryIO:
    """Creates a file that only the user may access."""
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
    )


@contextlib.contextmanager
def _removed_unless_done(*paths: Path) -> Iterator[None]:
    """Removes files, in order, if the body fails, which may be because the disk is full."""
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
