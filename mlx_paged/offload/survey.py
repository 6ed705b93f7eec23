"""Survey: what a folder of segments holds, whether it is intact, and its removal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_paged.offload.digests import DIGEST_BYTES
from mlx_paged.offload.segments import SUFFIX, SegmentError, read_block, read_header


@dataclass
class ModelFiles:
    """The segments of one model.

    Attributes:
        name: Name of the folder: the digest of the model and its cache.
        about: The model in words; empty if no segment can be read.
        num_segments: Readable ones.
        num_tokens: Tokens whose blocks of the first group are there.
        num_bytes: Bytes of all files.
        used_at: Time of the last use, in seconds since 1970.
        damaged: (path, why) of files that cannot be used.
    """

    name: str
    about: Mapping[str, Any] = field(default_factory=dict)
    num_segments: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    used_at: float = 0.0
    damaged: list[tuple[Path, str]] = field(default_factory=list)


def model_folders(folder: Path) -> Iterator[Path]:
    """The folders of models, which other files of the folder are not."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_digest = len(path.name) == 2 * DIGEST_BYTES and not set(path.name) - set(
            "0123456789abcdef"
        )
        if is_digest and path.is_dir() and not path.is_symlink():
            yield path


def survey(folder: Path, *, verifies: bool = False) -> list[ModelFiles]:
    """Reads the headers of all segments. A model without files is left out.

    Args:
        verifies: Also read all blocks, and check their sums.
    """
    found = (_survey(path, verifies) for path in model_folders(folder))
    return [each for each in found if each.num_bytes]


def _survey(folder: Path, verifies: bool) -> ModelFiles:
    found = ModelFiles(folder.name)
    for path in sorted(folder.iterdir()):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue  # another process has deleted it
        found.num_bytes += stat.st_size
        if path.suffix != SUFFIX:
            continue
        found.used_at = max(found.used_at, stat.st_mtime)
        try:
            header = read_header(path)
            if header.model.hex() != folder.name:
                raise SegmentError("it belongs to another model")
            if verifies:
                _verify(path, header.records)
        except FileNotFoundError:
            continue
        except (SegmentError, OSError) as error:
            found.damaged.append((path, str(error)))
            continue
        found.about = header.about
        found.num_segments += 1
        size = header.about.get("block_size")
        num_blocks = sum(record.group == 0 for record in header.records)
        found.num_tokens += num_blocks * size if isinstance(size, int) else 0
    return found


def _verify(path: Path, records: Any) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for record in records:
            if not read_block(fd, record, memoryview(bytearray(record.length))):
                raise SegmentError(f"the block at byte {record.offset} is damaged")
    finally:
        os.close(fd)


def clear(folder: Path, name: str = "") -> int:
    """Deletes the segments of models whose folder begins with `name`; returns their bytes.

    Processes that use the folder keep running, without the blocks.
    """
    freed = 0
    for model in model_folders(folder):
        if not model.name.startswith(name):
            continue
        for path in model.iterdir():
            with contextlib.suppress(FileNotFoundError):
                freed += path.lstat().st_size
                path.unlink()
        with contextlib.suppress(OSError):  # a process has begun a segment
            model.rmdir()
    return freed
