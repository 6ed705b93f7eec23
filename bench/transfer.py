"""Blocks from a prefill engine to a decode engine over loopback, without the engines.

python bench/transfer.py

Each end is a process, as in production, with a connection for each prompt. Wall time needs two free
cores; the CPU seconds that each end takes for a gigabyte do not. Checksums are included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from typing import Any

import mlx_paged.extension  # noqa: F401  (before mlx.core)

# isort: split
import numpy as np
from harness import environment, print_table, save

from mlx_paged.engine.offload.buffers import ROLE_SPARE_BYTES, Buffers
from mlx_paged.offload.segments import Block
from mlx_paged.transfer.receiver import Incoming, Receiver
from mlx_paged.transfer.server import Outgoing, PrefillServer
from mlx_paged.transfer.wire import PrefillRequest

SECRET = bytes(16)
# (bytes of a block, prompts at once). A block of 16 tokens of a 3B model has 1.8 MB.
CASES = [(1 << 17, 1), (2 << 20, 1), (2 << 20, 4)]
# Blocks of a prompt that wait to be sent.
_AHEAD = 4


class Blocks:
    """A `Prefiller` that sends the same block for each digest, until the prompt's last one.

    A prompt's tokens are the number of its blocks, and their bytes.
    """

    def __init__(self) -> None:
        self.max_tokens = 2

    def refusal(self, request: PrefillRequest) -> str | None:
        return None

    def begin(self, outgoing: Outgoing) -> None:
        threading.Thread(target=self._add, args=(outgoing,), daemon=True).start()

    def _add(self, outgoing: Outgoing) -> None:
        count, size = np.frombuffer(outgoing.request.tokens, dtype=np.int32).tolist()
        data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        room = threading.Semaphore(_AHEAD)
        for number in range(count):
            room.acquire()
            outgoing.add(Block(digest_of(number), 0, data.data, room.release))
        outgoing.end()

    def wake(self) -> None:
        pass


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def send() -> None:
    """Sends what is asked for. Answers each line of the standard input with its CPU seconds."""
    server, blocks = PrefillServer(("127.0.0.1", 0), SECRET), Blocks()
    server.start(blocks)
    print(server.port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    server.close()


def receive(port: int, count: int, size: int, num_prompts: int) -> None:
    """Receives `count` blocks of each of `num_prompts` prompts."""
    arrived, spare = threading.Event(), Buffers(ROLE_SPARE_BYTES)
    receiver = Receiver(("127.0.0.1", port), SECRET)
    numbers = {digest_of(number): number for number in range(count)}
    request = PrefillRequest(bytes(16), np.array([count, size], dtype=np.int32).tobytes())

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
            while number < count and (data := prompt.take(0, number)) is not None:
                give(data)
                number += 1
            taken[prompt] = number
            if prompt.failure is not None:
                raise SystemExit(prompt.failure)
        if min(taken.values()) < count:
            arrived.wait(0.1)
    receiver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=5, help="the best one counts")
    parser.add_argument("--name", default="transfer-cpu", help="of the file of results")
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        send()
        return
    sender = subprocess.Popen(
        [sys.executable, __file__, "--send"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stdin, stdout = sender.stdin, sender.stdout
    assert stdin is not None and stdout is not None
    port = int(stdout.readline())

    def sender_seconds() -> float:
        stdin.write("\n")
        stdin.flush()
        return float(stdout.readline())

    found: list[dict[str, Any]] = []
    for size, num_prompts in CASES:
        count = max(1, int(options.gigabytes * 1e9 / size / num_prompts))
        gigabytes = count * num_prompts * size / 1e9
        runs = []
        for _ in range(options.repeat):
            began = time.perf_counter(), sender_seconds(), time.process_time()
            receive(port, count, size, num_prompts)
            ended = time.perf_counter(), sender_seconds(), time.process_time()
            runs.append([(b - a) / gigabytes for a, b in zip(began, ended)])
        wall, sending, receiving = map(min, zip(*runs))
        found.append(
            {
                "block_bytes": size,
                "prompts": num_prompts,
                "gb_per_s": round(1 / wall, 2),
                "sender_cpu_s_per_gb": round(sending, 3),
                "receiver_cpu_s_per_gb": round(receiving, 3),
            }
        )
    stdin.close()
    sender.wait(60)
    print_table(list(found[0]), [[str(value) for value in row.values()] for row in found])
    print(save(options.name, {"environment": environment(), "transfers": found}))


if __name__ == "__main__":
    main()
