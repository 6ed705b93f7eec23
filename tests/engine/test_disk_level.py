"""DiskLevel: what a step that computed a NaN leaves of the copies on their way to the disk."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_paged.engine.offload.buffers import Buffers
from mlx_paged.engine.offload.disk_level import DiskLevel

SIZE = 16


class Node:
    """A node of the prefix tree."""

    is_indexed, digest = True, b"digest"


NODE: Any = Node()


def test_a_distrusted_copy_is_not_written_in_the_place_of_a_later_one() -> None:
    written: list[bytes] = []
    copies: list[tuple[np.ndarray, Callable[[], None]]] = []

    def write(digest: bytes, group: int, data: memoryview, give: Callable[[], None]) -> None:
        written.append(bytes(data))
        give()

    def copy_out(node: Any, group: int, out: np.ndarray, on_read: Callable[[], None]) -> bool:
        copies.append((out, on_read))
        return True

    store: Any = SimpleNamespace(room=1 << 20, write=write, distrust=lambda: None)
    names, owner = Any, SimpleNamespace(groups=[])
    buffers = Buffers()
    level = DiskLevel(store, names, [], 8, owner, copy_out, buffers)  # type: ignore[arg-type]
    level._block_bytes = [SIZE]
    for _ in range(2):
        level._pending[NODE, 0] = None
        assert level.write(1) == SIZE
        if len(copies) == 1:
            level.distrust()
    for i, (out, on_read) in enumerate(copies):
        out[:] = i
        on_read()
    assert written == [bytes([1]) * SIZE]
    assert buffers.give_back() == 2 * SIZE
    assert not level._copying
