"""Checksums are zlib's, for every length and address."""

from __future__ import annotations

import random
import zlib

import pytest

from mlx_paged import checksum
from mlx_paged.extension import ext

DATA = random.Random(1).randbytes(1 << 20)


@pytest.mark.parametrize("begin", [0, 1, 15])
def test_the_number_is_zlibs(begin: int) -> None:
    """Lengths around those of vectors and of strides."""
    for size in [*range(300), 4096, 65537, (1 << 20) - 16]:
        data = memoryview(DATA)[begin : begin + size]
        assert checksum.crc32(data) == zlib.crc32(data), size


def test_other_processors_use_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ext, "crc32", lambda data: None)
    assert checksum.crc32(DATA) == zlib.crc32(DATA)
