"""BlockReader: reads blocks ahead of their use, with a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mlx_paged.offload.segments import Record, read_block

#: Threads that read and sum. Half of the cores are left to the steps of other sequences.
#: bench/kv_offload.py measures them.
NUM_THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))


class BlockReader:
    """Reads and checks blocks. Reads and checksums release the interpreter's lock."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="mlx-paged-kv-reader")

    def read(
        self, fd: int, record: Record, out: memoryview, done: Callable[[], None]
    ) -> Future[bool]:
        """Reads a block to `out`. The result is False if it is incomplete or damaged.

        Args:
            fd: Must stay open until the result is there.
            done: Called on the reader's thread afterwards.
        """

        def task() -> bool:
            try:
                return read_block(fd, record, out)
            except OSError:
                return False
            finally:
                done()

        return self._pool.submit(task)

    def close(self) -> None:
        """Drops reads that have not begun, and ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
