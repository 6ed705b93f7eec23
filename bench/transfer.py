"""Blocks from a prefill engine to a decode engine of the same machine, without the engines.

python bench/transfer.py

Each end is a process, as in production, with a connection for each prompt: through shared memory,
and over loopback TCP. First the blocks lie where they are sent from, and are dropped where they
arrive, which measures the path alone. Then, as in engines, the sender copies each block there, as
from a device, and the receiver copies it away. Checksums are included where blocks have any.

Wall time needs two free cores; the CPU seconds that each end takes for a gigabyte do not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx_paged.extension  # noqa: F401  (before mlx.core)

# isort: split
import numpy as np
from harness import environment, print_table, save

from mlx_paged.engine.offload.buffers import ROLE_SPARE_BYTES, Buffers
from mlx_paged.model.block_bytes import Bytes
from mlx_paged.offload.segments import Block
from mlx_paged.transfer import local
from mlx_paged.transfer.memory import Slot
from mlx_paged.transfer.receiver import Incoming, Receiver
from mlx_paged.transfer.server import Outgoing, PrefillServer
from mlx_paged.transfer.wire import PrefillRequest

SECRET = bytes(16)
# (bytes of a block, prompts at once). A block of 16 tokens of a 3B model has 1.8 MB.
CASES = [(1 << 17, 1), (2 << 20, 1), (2 << 20, 4)]
# Blocks of a prompt that wait to be sent.
_AHEAD = 16
# Bytes that each end copies blocks from or to, as an engine's pool or its pinned memory.
POOL_BYTES = 64 << 20
PATHS = ("shared", "tcp")
_pools: dict[int, Bytes] = {}


class Blocks:
    """A `Prefiller` that copies blocks of a pool, until the prompt's last one.

    A prompt's tokens are the number of its blocks, their bytes, and 1 if they are copied.
    """

    def __init__(self) -> None:
        self.max_tokens = 3
        self.spare = Buffers(ROLE_SPARE_BYTES)

    def refusal(self, request: PrefillRequest) -> str | None:
        return None

    def begin(self, outgoing: Outgoing) -> None:
        threading.Thread(target=self._add, args=(outgoing,), daemon=True).start()

    def _add(self, outgoing: Outgoing) -> None:
        count, size, copies = np.frombuffer(outgoing.request.tokens, dtype=np.int32).tolist()
        pool, room = pool_of(size), threading.Semaphore(_AHEAD)
        for number in range(count):
            room.acquire()
            slot = outgoing.take_slot(size)
            data = self.spare.take(size) if slot is None else np.frombuffer(slot.data, np.uint8)
            if copies:
                data[:] = pool[number % len(pool)]

            def released(slot: Slot | None = slot, data: Bytes = data) -> None:
                if slot is None:
                    self.spare.give(data)
                else:
                    slot.free()
                room.release()

            outgoing.add(Block(digest_of(number), 0, data.data, released), slot)
        outgoing.end()

    def wake(self) -> None:
        pass


def pool_of(size: int) -> Bytes:
    """``[num_blocks, size]`` uint8, which no cache holds."""
    if size not in _pools:
        row = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        _pools[size] = np.repeat(row[None], max(1, POOL_BYTES // size), axis=0)
    return _pools[size]


def copy_seconds(size: int, gigabytes: float) -> float:
    """CPU seconds to copy a gigabyte from one pool's blocks to another buffer's."""
    pool, spare = pool_of(size), np.ones((_AHEAD, size), dtype=np.uint8)
    count = max(1, int(gigabytes * 1e9 / size))
    began = time.process_time()
    for number in range(count):
        spare[number % _AHEAD][:] = pool[number % len(pool)]
    return (time.process_time() - began) / (count * size) * 1e9


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def send(path: str) -> None:
    """Sends what is asked for. Answers each line of the standard input with its CPU seconds."""
    if path == "tcp":

        def refuse(backlog: int) -> Any:
            raise OSError("not wanted")

        local.listen = refuse
    server, blocks = PrefillServer(("127.0.0.1", 0), SECRET), Blocks()
    server.start(blocks)
    print(server.port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    server.close()


def receive(port: int, count: int, size: int, num_prompts: int, *, copies: bool) -> int:
    """Receives `count` blocks of each of `num_prompts` prompts; returns the bytes through shared
    memory."""
    pool = pool_of(size)
    arrived, spare = threading.Event(), Buffers(ROLE_SPARE_BYTES)
    receiver = Receiver(("127.0.0.1", port), SECRET)
    numbers = {digest_of(number): number for number in range(count)}
    request = PrefillRequest(bytes(16), np.array([count, size, copies], dtype=np.int32).tobytes())

    def give(data: memoryview) -> None:
        spare.give(np.frombuffer(data, dtype=np.uint8))

    prompts = [
        Incoming(request, numbers, [size], lambda n: spare.take(n).data, give, arrived.set)
        for _ in range(num_prompts)
    ]
    taken = dict.fromkeys(prompts, 0)
    for prompt in prompts:
        receiver.start(prompt)
    while min(taken.values()) < count:
        arrived.clear()
        for prompt, number in taken.items():
            while number < count and (block := prompt.take(0, number)) is not None:
                if copies:
                    pool[number % len(pool)] = np.frombuffer(block.data, dtype=np.uint8)
                block.release()
                number += 1
            taken[prompt] = number
            if prompt.failure is not None:
                raise SystemExit(prompt.failure)
        if min(taken.values()) < count:
            arrived.wait(0.1)
    receiver.close()
    return sum(prompt.num_shared_bytes for prompt in prompts)


@contextmanager
def sending(path: str) -> Iterator[tuple[int, Callable[[], float]]]:
    """The port of a process that sends, and its CPU seconds."""
    sender = subprocess.Popen(
        [sys.executable, __file__, "--send", path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stdin, stdout = sender.stdin, sender.stdout
    assert stdin is not None and stdout is not None

    def seconds() -> float:
        stdin.write("\n")
        stdin.flush()
        return float(stdout.readline())

    try:
        yield int(stdout.readline()), seconds
    finally:
        stdin.close()
        sender.wait(60)


def measured(
    path: str, port: int, sender_seconds: Callable[[], float], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each of `CASES`."""
    found = []
    for size, num_prompts in CASES:
        count = max(1, int(options.gigabytes * 1e9 / size / num_prompts))
        num_bytes = count * num_prompts * size
        copy = min(copy_seconds(size, options.gigabytes) for _ in range(options.repeat))
        row: dict[str, Any] = {"path": path, "block_bytes": size, "prompts": num_prompts}
        for copies in (False, True):
            runs = []
            receive(port, 64, size, num_prompts, copies=copies)  # provides the memory
            for _ in range(options.repeat):
                began = time.perf_counter(), sender_seconds(), time.process_time()
                num_shared = receive(port, count, size, num_prompts, copies=copies)
                ended = time.perf_counter(), sender_seconds(), time.process_time()
                if num_shared != (path == "shared") * num_bytes:
                    raise SystemExit(f"{num_shared} bytes came through shared memory")
                runs.append([(b - a) / num_bytes * 1e9 for a, b in zip(began, ended)])
            wall, sending, receiving = map(min, zip(*runs))
            if copies:
                row["with_copies_gb_per_s"] = round(1 / wall, 2)
                row["copies_cpu_s_per_gb"] = round(2 * copy, 3)
                row["with_copies_cpu_s_per_gb"] = round(sending + receiving, 3)
            else:
                row["gb_per_s"] = round(1 / wall, 2)
                row["sender_cpu_s_per_gb"] = round(sending, 3)
                row["receiver_cpu_s_per_gb"] = round(receiving, 3)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=5, help="the best one counts")
    parser.add_argument("--name", default="transfer-cpu", help="of the file of results")
    parser.add_argument("--send", choices=PATHS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        send(options.send)
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for path in PATHS:
        with sending(path) as (port, sender_seconds):
            found[path] = measured(path, port, sender_seconds, options)
    transfers = [row for rows in zip(*found.values()) for row in rows]
    print_table(list(transfers[0]), [[str(value) for value in row.values()] for row in transfers])
    speedups = {
        name: [
            round(shared[name] / tcp[name], 2) for shared, tcp in zip(found["shared"], found["tcp"])
        ]
        for name in ("gb_per_s", "with_copies_gb_per_s")
    }
    print("shared memory is faster than TCP by factors of", speedups)
    results = {"environment": environment(), "transfers": transfers, "speedups": speedups}
    print(save(options.name, results))


if __name__ == "__main__":
    main()
