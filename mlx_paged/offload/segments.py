"""Segments: files that hold blocks of many prefixes.

::

    0   magic         8 bytes
    8   header_bytes  uint32
    12  header_crc    uint32, CRC-32 of the header
    16  header        model digest (16), about_bytes (uint32), about (JSON), then one record for
                      each block: digest (16), group (uint16), 2 zeros, length (uint32),
                      CRC-32 (uint32), offset (uint64)
    ..  zeros up to a multiple of 4096
    ..  the bytes of the blocks, as they are in the pools

All numbers are little-endian. The file's size is the end of its last block, so a truncated file is
recognized before any block is read.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlx_paged.checksum import crc32

MAGIC = b"mlxpkv1\n"
SUFFIX = ".kv"
PAGE = 4096
#: Bytes of blocks at which a segment is full; the block that fills it may exceed them.
FULL_BYTES = 32 << 20

_PREAMBLE = struct.Struct("<8sII")
_MODEL = struct.Struct("<16sI")
_RECORD = struct.Struct("<16sHxxIIQ")
#: Bytes of a packed record.
RECORD_BYTES = _RECORD.size
_MAX_HEADER_BYTES = 16 << 20


class SegmentError(ValueError):
    """A file is not a segment, or a damaged one; the message says why."""


class Record(NamedTuple):
    """The place of a block in a segment, or in a stream of blocks."""

    digest: bytes
    group: int
    length: int  # bytes
    crc: int
    offset: int

    def pack(self) -> bytes:
        """Returns its bytes, see the module."""
        return _RECORD.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        """Reads `RECORD_BYTES` bytes."""
        return cls(*_RECORD.unpack(data))


@dataclass(frozen=True)
class Header:
    """The contents of a segment.

    Attributes:
        model: Digest of the model and its cache.
        about: The model in words, for people.
    """

    model: bytes
    about: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return max((r.offset + r.length for r in self.records), default=0)


class Block(NamedTuple):
    """A block to be written.

    Attributes:
        on_released: Called once nothing reads `data` any more, written or not, on any thread.
    """

    digest: bytes
    group: int
    data: memoryview
    on_released: Callable[[], None] = lambda: None


def layout(model: bytes, about: Mapping[str, Any], blocks: Sequence[Block]) -> tuple[bytes, Header]:
    """Returns the beginning of a segment, up to its first block, and its header."""
    text = json.dumps(about).encode()
    header_bytes = _MODEL.size + len(text) + _RECORD.size * len(blocks)
    offset = -(-(_PREAMBLE.size + header_bytes) // PAGE) * PAGE
    records = []
    for block in blocks:
        data = block.data
        records.append(Record(block.digest, block.group, data.nbytes, crc32(data), offset))
        offset += data.nbytes
    header = _MODEL.pack(model, len(text)) + text + b"".join(record.pack() for record in records)
    begin = _PREAMBLE.pack(MAGIC, len(header), zlib.crc32(header)) + header
    return begin + bytes(-len(begin) % PAGE), Header(model, about, records)


def read_header(path: Path) -> Header:
    """Reads and checks the header of a segment, and the size of the file.

    Raises:
        SegmentError: It is damaged, or no segment.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        preamble = file.read(_PREAMBLE.size)
        if len(preamble) < _PREAMBLE.size:
            raise SegmentError("it is too short")
        magic, header_bytes, crc = _PREAMBLE.unpack(preamble)
        if magic != MAGIC:
            raise SegmentError("it is no segment of this version")
        if not _MODEL.size <= header_bytes <= min(size, _MAX_HEADER_BYTES):
            raise SegmentError(f"a header of {header_bytes} bytes cannot be")
        data = file.read(header_bytes)
    if len(data) < header_bytes or zlib.crc32(data) != crc:
        raise SegmentError("its header is damaged")
    return _parsed(data, size)


def _parsed(data: bytes, size: int) -> Header:
    model, about_bytes = _MODEL.unpack_from(data)
    end = _MODEL.size + about_bytes
    if end > len(data) or (len(data) - end) % _RECORD.size:
        raise SegmentError("its header is damaged")
    try:
        about = json.loads(data[_MODEL.size : end])
    except ValueError as error:
        raise SegmentError("its header is damaged") from error
    records = [Record(*fields) for fields in _RECORD.iter_unpack(data[end:])]
    header = Header(model, about if isinstance(about, dict) else {}, records)
    if header.num_bytes != size:
        raise SegmentError(f"it has {size} bytes instead of {header.num_bytes}")
    return header


def read_block(fd: int, record: Record, out: memoryview) -> bool:
    """Reads a block; returns False if it is incomplete or damaged.

    Args:
        out: Of the block's length.
    """
    done = 0
    while done < record.length:
        count = os.preadv(fd, [out[done:]], record.offset + done)
        if count <= 0:
            return False
        done += count
    return crc32(out) == record.crc
