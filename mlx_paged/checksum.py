"""crc32: the checksum of blocks on disk and between engines."""

from __future__ import annotations

import zlib


def crc32(data: bytes | memoryview) -> int:
    """CRC-32 of contiguous bytes: the number of `zlib.crc32`, without the interpreter's lock.

    Linux compiles zlib for any x86-64 processor. Ours uses carry-less products, which nearly all
    of them have, and takes less than a third of the time.
    """
    # Here, so that commands that only list what is on disk need not load MLX.
    from mlx_paged.extension import ext

    found: int | None = ext.crc32(data)
    return zlib.crc32(data) if found is None else found
