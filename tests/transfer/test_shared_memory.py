"""Blocks between two processes of one machine go through shared memory, whatever goes wrong."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.waiting import TIMEOUT

from mlx_paged.offload.segments import Block
from mlx_paged.transfer import local, memory, receiver, server, wire
from mlx_paged.transfer.memory import SharedMemory, Slot
from mlx_paged.transfer.receiver import Arrived, Incoming, Receiver
from mlx_paged.transfer.server import Outgoing, PrefillServer
from mlx_paged.transfer.wire import PrefillRequest

SECRET = bytes(range(16))
SIZE = 3 * memory._PAGE - 8
# Descriptors and mappings of shared memory have this name.
_NAME = "mlx-paged-kv"


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content_of(number: int) -> bytes:
    return bytes([number % 251 + 1]) * SIZE


class Prompts:
    """A `Prefiller`. Tests add the blocks of its only prompt."""

    max_tokens = 1

    def __init__(self) -> None:
        self.outgoing: Outgoing | None = None
        self.began = threading.Event()

    def refusal(self, request: PrefillRequest) -> str | None:
        return None

    def begin(self, outgoing: Outgoing) -> None:
        self.outgoing = outgoing
        self.began.set()

    def wake(self) -> None:
        pass

    def given(self) -> Outgoing:
        assert self.began.wait(TIMEOUT) and self.outgoing is not None
        return self.outgoing

    def add(self, *numbers: int) -> list[Slot]:
        """Copies blocks to shared memory and adds them."""
        slots = []
        for number in numbers:
            slot = self.given().take_slot(SIZE)
            assert slot is not None
            slot.data[:] = content_of(number)
            self.given().add(Block(digest_of(number), 0, slot.data, slot.free), slot)
            slots.append(slot)
        return slots


class Origin:
    """A server in this process."""

    def __init__(self) -> None:
        self.prompts = Prompts()
        self.server = PrefillServer(("127.0.0.1", 0), SECRET)
        self.server.start(self.prompts)

    @property
    def memory(self) -> SharedMemory:
        assert self.server._memory is not None
        return self.server._memory

    @property
    def is_free(self) -> bool:
        return self.memory.num_free_bytes == self.memory.num_bytes - memory._PAGE


@pytest.fixture
def origin() -> Iterator[Origin]:
    made = Origin()
    yield made
    made.server.close()


class Asked:
    """A prompt of `count` blocks that is received."""

    def __init__(self, port: int, count: int = 16) -> None:
        self.receiver = Receiver(("127.0.0.1", port), SECRET)
        self.incoming = self.new(count)
        self.receiver.start(self.incoming)

    @staticmethod
    def new(count: int) -> Incoming:
        return Incoming(
            PrefillRequest(bytes(16), bytes(4)),
            {digest_of(number): number for number in range(count)},
            [SIZE],
            lambda size: memoryview(bytearray(size)),
            lambda data: None,
            lambda: None,
        )

    def take(self, number: int) -> Arrived:
        """Waits for a block."""
        found: list[Arrived | None] = []

        def is_there() -> bool:
            assert self.incoming.failure is None, self.incoming.failure
            found.append(self.incoming.take(0, number))
            return found[-1] is not None

        wait_until(is_there, f"block {number} does not come")
        assert found[-1] is not None
        return found[-1]

    def close(self) -> None:
        self.incoming.cancel()
        self.receiver.close()


@pytest.fixture
def asked(origin: Origin) -> Iterator[Asked]:
    made = Asked(origin.server.port)
    yield made
    made.close()


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Runs code that has this file's names in a process of its own."""
    folder = Path(__file__).parent
    head = f"import sys; sys.path[:0] = {[str(folder), str(folder.parent)]!r}\n"
    head += f"from {Path(__file__).stem} import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


# --- Places ---------------------------------------------------------------------------------------


def test_places_do_not_overlap_and_are_reused() -> None:
    rng, shared = random.Random(1), SharedMemory(64 * memory._PAGE)
    slots: list[Slot] = []
    refused = 0
    for _ in range(3000):
        if slots and rng.random() < 0.5:
            slot = slots.pop(rng.randrange(len(slots)))
            assert bytes(slot.data) == content(slot)  # no other one wrote to it
            slot.free()
            slot.free()  # does nothing
        else:
            size = rng.randint(1, 9 * memory._PAGE)
            taken = shared.take(size)
            if taken is None:
                refused += 1
                continue
            assert taken.data.nbytes == size and taken.offset >= memory._PAGE
            taken.data[:] = content(taken)
            slots.append(taken)
        used = sum(-(-slot.data.nbytes // memory._PAGE) for slot in slots) * memory._PAGE
        assert shared.num_free_bytes == 64 * memory._PAGE - used
    assert refused
    slots.clear()
    del slot, taken  # nothing frees them but the collection
    assert shared.take(64 * memory._PAGE) is not None
    assert shared.take(0) is None
    shared.close()
    assert shared.take(1) is None


def content(slot: Slot) -> bytes:
    return bytes([slot.offset // memory._PAGE]) * slot.data.nbytes


def test_the_lowest_place_is_used() -> None:
    shared = SharedMemory(64 * memory._PAGE)
    first, second = shared.take(1), shared.take(1)
    assert first is not None and second is not None
    offset = first.offset
    first.free()
    third = shared.take(1)
    assert third is not None and third.offset == offset
    shared.close()


def test_pages_of_free_places_are_given_back() -> None:
    page, shared = memory._PAGE, SharedMemory(64 * memory._PAGE)
    slots = [shared.take(size) for size in (page, 5 * page, 2 * page, 9 * page)]
    for slot in filled(slots):
        slot.data[:] = content(slot)
    first, second, third, fourth = filled(slots)
    assert shared.discard_free() == 0 and num_pages(shared) in (None, 18)
    second.free()
    fourth.free()
    assert shared.discard_free() == 14 * page and num_pages(shared) in (None, 4)
    assert shared.discard_free() == 0
    assert all(bytes(slot.data) == content(slot) for slot in (first, third))
    # A place that was given back is used again.
    again = shared.take(6 * page)
    assert again is not None
    again.data[:] = content(again)
    assert bytes(again.data) == content(again) and num_pages(shared) in (None, 10)
    again.free()
    assert shared.discard_free() == 6 * page and num_pages(shared) in (None, 4)
    shared.close()


def filled(slots: list[Slot | None]) -> list[Slot]:
    return [slot for slot in slots if slot is not None]


def num_pages(shared: SharedMemory) -> int | None:
    """Pages that the memory takes, with that of its token; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    return os.fstat(shared.fd).st_blocks * 512 // memory._PAGE


def test_memory_of_an_impossible_size() -> None:
    shared = SharedMemory(memory._PAGE)
    for num_bytes in (shared.num_bytes + 1, 1 << 63, (1 << 64) - 1):
        with pytest.raises(OSError, match="cannot map"):
            memory.MemoryView(shared.fd, num_bytes)
    shared.close()


def test_a_system_that_keeps_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory(memory._PAGE)
    slot = shared.take(1)
    assert slot is not None
    slot.free()
    for advice in (None, -1):  # no such advice, and one that fails
        monkeypatch.setattr(memory, "_DISCARD", advice)
        assert shared.discard_free() == 0
    monkeypatch.undo()
    assert shared.discard_free() == memory._PAGE
    shared.close()


# --- Between processes ----------------------------------------------------------------------------

_RECEIVES = """
asked = Asked(int(sys.argv[1]))
for number in range(3):
    block = asked.take(number)
    assert block.is_shared and bytes(block.data) == content_of(number)
    if number < 2:
        block.release()
print("has it", flush=True)
sys.stdin.readline()
assert bytes(block.data) == content_of(2)
block.release()
asked.take(3).release()
wait_until(lambda: asked.incoming.is_over, "no end")
print("done", asked.incoming.failure, flush=True)
"""


def test_a_place_is_not_used_while_another_process_reads_it(origin: Origin) -> None:
    process = child(_RECEIVES, origin.server.port)
    try:
        slots = origin.prompts.add(0, 1, 2)
        assert line_of(process) == "has it"
        wait_until(lambda: len(origin.prompts.given()._lent) == 1, "places do not come back")
        # The free places are used again; the one that is read is not.
        [again] = origin.prompts.add(3)
        assert again.offset == slots[0].offset
        origin.prompts.given().end()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert line_of(process) == "done None"
        wait_until(lambda: origin.is_free, "places are lost")
    finally:
        kill(process)


@pytest.mark.parametrize("moment", ["before the end", "after the end", "stopped"])
def test_a_receiver_that_is_killed_gives_everything_back(origin: Origin, moment: str) -> None:
    process = child(_RECEIVES, origin.server.port)
    try:
        origin.prompts.add(0, 1, 2)
        assert line_of(process) == "has it"
        outgoing = origin.prompts.given()
        if moment == "after the end":
            outgoing.end()
            wait_until(lambda: outgoing.is_gone, "the end is not sent")
        wait_until(lambda: len(outgoing._lent) == 1, "places do not come back")
        if moment == "stopped":
            process.send_signal(signal.SIGSTOP)
            outgoing._full_since = -1e9  # as if it had used no block for very long
            wait_until(lambda: outgoing.is_gone, "it is not given up")
            assert origin.server.share_of(1) == server.MAX_WAITING_BYTES - SIZE
        assert not origin.is_free and process.poll() is None
    finally:
        kill(process)
    wait_until(lambda: origin.is_free, "the place of a dead process stays occupied")
    wait_until(lambda: outgoing.is_gone, "no one notices")
    wait_until(lambda: not origin.server._ending and not origin.server._connections, "it stays")
    # The next one is served.
    later = Asked(origin.server.port)
    wait_until(lambda: origin.prompts.given() is not outgoing, "no prompt came")
    origin.prompts.add(0)
    assert bytes(later.take(0).data) == content_of(0)
    later.close()


_SENDS = """
origin = Origin()
print(origin.server.port, flush=True)
origin.prompts.add(0, 1)
slot = origin.prompts.given().take_slot(SIZE)
slot.data[: SIZE // 2] = bytes(SIZE // 2)
print("in the middle", flush=True)
sys.stdin.readline()
"""


def test_a_sender_that_is_killed_within_a_block() -> None:
    before = shared_memory()
    process = child(_SENDS)
    try:
        asked = Asked(int(line_of(process)))
        first = asked.take(0)
        assert line_of(process) == "in the middle"
        second = asked.take(1)
        process.kill()
        wait_until(partial(has_failed, asked.incoming), "no one notices")
        assert asked.incoming.num_blocks == 2  # and nothing of the third one
        # The memory stays while it is read.
        assert bytes(first.data) == content_of(0) and bytes(second.data) == content_of(1)
    finally:
        kill(process)
    first.release()
    second.release()
    asked.close()
    del first, second, asked
    wait_until(lambda: gc.collect() >= 0 and shared_memory() <= before, "memory is lost")


def test_a_closed_memory_keeps_its_descriptor() -> None:
    """A thread that was passing it on would have passed the next file that was opened."""
    memory = SharedMemory(SIZE)
    memory.close()
    with open(__file__):
        assert os.fstat(memory.fd).st_size == memory.num_bytes


def has_failed(incoming: Incoming) -> bool:
    return incoming.failure is not None


def shared_memory() -> set[str]:
    """This process's mappings and descriptors of shared memory, and the names that any process
    could open. Linux only."""
    if sys.platform != "linux":
        return set()
    with open("/proc/self/maps") as file:
        found = {line for line in file if _NAME in line}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if _NAME in target:
            found.add(target)
    return found | {name for name in os.listdir("/dev/shm") if name.startswith("mlxp")}


def test_a_cancelled_prompt_keeps_the_block_that_is_read(origin: Origin, asked: Asked) -> None:
    origin.prompts.add(0, 1, 2)
    block = asked.take(1)
    wait_until(lambda: asked.incoming.num_blocks == 3, "a block is missing")
    asked.incoming.cancel()
    outgoing = origin.prompts.given()
    wait_until(lambda: len(outgoing._lent) == 1, "places do not come back")

    def has_noticed() -> bool:
        if not outgoing.is_gone:
            origin.prompts.add(3)  # which no one reads
        return outgoing.is_gone

    wait_until(has_noticed, "it computes in vain")
    assert bytes(block.data) == content_of(1) and not origin.is_free
    block.release()
    wait_until(lambda: origin.is_free, "places are lost")


def test_a_server_that_ends_does_not_touch_what_is_read(origin: Origin, asked: Asked) -> None:
    origin.prompts.add(0)
    block = asked.take(0)
    origin.server.close()
    wait_until(lambda: asked.incoming.failure is not None, "no one notices")
    assert origin.prompts.given().take_slot(SIZE) is None
    assert bytes(block.data) == content_of(0)
    block.release()


def test_blocks_without_a_place_are_sent_in_order(
    origin: Origin, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where shared memory is full, bytes go through the socket, between those that need not."""
    outgoing = origin.prompts.given()
    for number in range(16):
        if number % 3:
            origin.prompts.add(number)
        else:
            outgoing.add(Block(digest_of(number), 0, memoryview(content_of(number))))
    outgoing.end()
    for number in range(16):
        block = asked.take(number)
        assert bytes(block.data) == content_of(number) and block.is_shared == bool(number % 3)
        block.release()
    wait_until(lambda: asked.incoming.is_over, "no end")
    assert asked.incoming.failure is None
    wait_until(lambda: origin.is_free, "places are lost")


def test_a_block_is_released_if_the_records_before_it_cannot_be_sent() -> None:
    """The receiver leaves while a block without a slot waits behind one in shared memory."""
    connection = mock.Mock()
    connection.send_now.side_effect = ConnectionError("gone")
    shared = SharedMemory(2 * SIZE)
    outgoing = Outgoing(PrefillRequest(bytes(16), bytes(4)), connection, lambda: None, shared)
    slot = outgoing.take_slot(SIZE)
    assert slot is not None
    outgoing.add(Block(digest_of(0), 0, slot.data, slot.free), slot)
    released = mock.Mock()
    outgoing.add(Block(digest_of(1), 0, memoryview(content_of(1)), released))
    with pytest.raises(ConnectionError, match="gone"):
        outgoing.send()
    released.assert_called_once_with()
    outgoing.leave()
    outgoing.release_all()
    assert outgoing.num_waiting_bytes == 0


def test_a_transfer_without_a_thread_fails(origin: Origin, asked: Asked) -> None:
    """Threads that could not be started do not count against the maximum of later ones."""
    made = Receiver(("127.0.0.1", origin.server.port), SECRET)
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start")):
        for _ in range(receiver.MAX_TRANSFERS):
            made.start(incoming := asked.new(16))
            assert incoming.failure == "no thread could be started: can't start"
    for number in range(receiver.MAX_TRANSFERS):
        made.start(incoming := asked.new(16))
        incoming.cancel()
        assert made._regular._num_threads == number + 1
    made.close()


def test_a_socket_that_takes_little_at_a_time(origin: Origin) -> None:
    """Records wait in order, and so do places that are given back."""
    asked = Asked(origin.server.port, count=4000)
    outgoing = origin.prompts.given()
    send = outgoing._connection.send_now
    with mock.patch.object(outgoing._connection, "send_now", lambda data: send(data[:5])):
        origin.prompts.add(*range(100))
        outgoing.end()
        for number in range(100):
            block = asked.take(number)
            assert bytes(block.data) == content_of(number)
            block.release()
        wait_until(lambda: asked.incoming.is_over, "no end")
    assert asked.incoming.failure is None
    wait_until(lambda: origin.is_free, "places are lost")
    asked.close()


# --- Where it is not possible ---------------------------------------------------------------------


def check_tcp(origin: Origin) -> None:
    """Blocks come over TCP, and the prompt does not fail."""
    asked = Asked(origin.server.port)
    outgoing = origin.prompts.given()
    assert not outgoing.shares_memory and outgoing.take_slot(SIZE) is None
    outgoing.add(Block(digest_of(0), 0, memoryview(content_of(0))))
    outgoing.end()
    block = asked.take(0)
    assert bytes(block.data) == content_of(0) and not block.is_shared
    wait_until(lambda: asked.incoming.is_over, "no end")
    assert asked.incoming.failure is None and not asked.incoming.num_shared_bytes
    asked.close()


def test_a_server_on_another_machine(origin: Origin) -> None:
    origin.server._local_name = b"\0mlx-paged-kv-of-another-machine"
    check_tcp(origin)


def test_a_system_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_anonymous_memory", mock.Mock(side_effect=OSError("none")))
    origin = Origin()
    check_tcp(origin)
    origin.server.close()


def test_a_receiver_that_finds_other_memory(origin: Origin) -> None:
    origin.server._shared_memory().token = bytes(memory.TOKEN_BYTES)
    check_tcp(origin)


def test_a_receiver_that_cannot_tell_the_token(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "accept", blind)
    check_tcp(origin)


def blind(connection: Any, known: object) -> Any:
    fd, _, _ = connection.read_memory(TIMEOUT)
    os.close(fd)
    connection.send(bytes(memory.TOKEN_BYTES), TIMEOUT)
    connection.read(1, time.monotonic() + TIMEOUT)
    raise AssertionError("the server goes on")


def test_a_local_socket_of_one_with_another_secret(origin: Origin) -> None:
    other = PrefillServer(("127.0.0.1", 0), b"another secret!!")
    other.start(Prompts())
    origin.server._local_name = other._local_name
    check_tcp(origin)
    other.close()


def test_a_server_that_was_restarted_on_the_same_port(origin: Origin, asked: Asked) -> None:
    origin.prompts.add(0)
    origin.prompts.given().end()
    asked.take(0).release()
    linker = asked.receiver._linker
    assert linker._known is not None
    port = origin.server.port
    origin.server.close()
    wait_until(lambda: not has_listener(linker._known.local_name), "it listens")
    later = PrefillServer(("127.0.0.1", port), SECRET)
    later.start(prompts := Prompts())
    link = linker.connect()
    assert link.memory is not None and linker._known.local_name == later._local_name
    link.connection.send_request(PrefillRequest(bytes(16), bytes(4)), TIMEOUT)
    assert prompts.given().shares_memory
    link.connection.close()
    later.close()


def test_two_threads_that_find_the_server_restarted(origin: Origin) -> None:
    """One forgets the old local socket while the other one is about to use it."""
    reads = iter([wire.Welcome(1, b"\0mlx-paged-kv-of-no-one")])

    def known(*value: object) -> wire.Welcome | None:
        return None if value else next(reads, None)

    made = mock.PropertyMock(side_effect=known)
    with mock.patch.object(local.Linker, "_known", made, create=True):
        link = local.Linker(("127.0.0.1", origin.server.port), SECRET).connect()
    assert link.memory is not None
    link.connection.close()


def has_listener(name: bytes) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(name) == 0


# --- As on a Mac ----------------------------------------------------------------------------------


def test_named_memory_and_sockets_leave_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systems without memory files and abstract sockets have names, which do not stay."""
    monkeypatch.setattr(memory, "_anonymous_memory", memory._posix_memory)
    monkeypatch.setattr(local, "listen", local._listen_at_file)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    # One server was killed, and another one listens.
    processes = [child(_LISTENS_AT_FILE, tmp_path) for _ in range(2)]
    try:
        left, running = (Path(line_of(process)) for process in processes)
        kill(processes[0])
        check_named_memory_and_sockets(tmp_path, left, running)
    finally:
        for process in processes:
            kill(process)
    if before:
        assert not [n for n in set(os.listdir("/dev/shm")) - before if n.startswith("mlxp")]


_LISTENS_AT_FILE = """
tempfile.tempdir = sys.argv[1]
sock, name = local._listen_at_file(1)
print(os.fsdecode(name), flush=True)
sys.stdin.readline()
"""


def check_named_memory_and_sockets(folder: Path, left: Path, running: Path) -> None:
    assert left.is_socket() and running.is_socket()
    origin = Origin()
    assert running.is_socket() and not left.parent.exists()
    assert len(list(folder.iterdir())) == 2
    assert Path(os.fsdecode(origin.server._local_name)).parent.stat().st_mode & 0o777 == 0o700
    asked = Asked(origin.server.port)
    origin.prompts.add(0)
    block = asked.take(0)
    assert block.is_shared and bytes(block.data) == content_of(0)
    block.release()
    asked.close()
    origin.server.close()
    assert list(folder.iterdir()) == [running.parent]
