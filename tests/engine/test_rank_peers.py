"""Ranks connect their GPUs' memory together or not at all; here they are threads, and memory is a
dictionary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_paged.engine.ranks import follow, peers
from mlx_paged.engine.ranks.messages import LIMITS, START, Message
from mlx_paged.engine.ranks.peers import connect_peers, mapped_buffers, share_memory
from mlx_paged.platform import Platform

SIZE = 4


class Exchanged:
    """Gives every rank's bytes to all ranks."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(SIZE, timeout=300)
        self._shown = [b""] * SIZE
        self.rounds = 0

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(own: bytes) -> list[bytes]:
            self._shown[rank] = own
            self._barrier.wait()
            shown = list(self._shown)
            if self._barrier.wait() == 0:
                self.rounds += 1
            assert len({len(each) for each in shown}) == 1
            return shown

        return exchange


@dataclass
class FakeMemory:
    """Addresses of rank r's buffer are 1000 * r there, and end with the mapping rank elsewhere."""

    rank: int
    has_buffer: bool = True
    cannot_open: set[int] = field(default_factory=set)

    def make(self) -> tuple[int, bytes]:
        if not self.has_buffer:
            raise RuntimeError("no memory is left")
        return 1000 * self.rank, bytes([self.rank]) * 64

    def open(self, handle: bytes) -> int:
        if handle[0] in self.cannot_open:
            raise RuntimeError("peer access is not supported")
        assert handle == bytes([handle[0]]) * 64
        return 1000 * handle[0] + self.rank


def alone() -> mx.distributed.Group:
    """A group of this process, also after another test has joined ranks in it."""
    group = mx.distributed.init(backend="mpi")
    assert group.size() == 1
    return group


def connect(*memories: FakeMemory) -> tuple[list[list[int] | str], int]:
    """Each rank's buffers or reason, and the exchanges that took."""
    exchanged = Exchanged()
    with ThreadPoolExecutor(SIZE) as pool:
        found = pool.map(
            lambda memory: mapped_buffers(memory, memory.rank, exchanged.of(memory.rank)), memories
        )
        return list(found), exchanged.rounds


def test_every_rank_maps_the_buffers_of_all() -> None:
    found, rounds = connect(*map(FakeMemory, range(SIZE)))
    assert found[1] == [1, 1000, 2001, 3001] and rounds == 2
    assert all(buffers[rank] == 1000 * rank for rank, buffers in enumerate(found))


def test_no_rank_connects_without_the_buffer_of_one() -> None:
    memories = [FakeMemory(rank, has_buffer=rank != 2) for rank in range(SIZE)]
    found, rounds = connect(*memories)
    assert found[2] == "no memory is left" and rounds == 1
    assert found[0] == found[1] == found[3] == "ranks [2] have no memory to share"


def test_no_rank_connects_if_one_cannot_map_another_ones_memory() -> None:
    memories = [FakeMemory(rank, cannot_open={0} if rank == 3 else set()) for rank in range(SIZE)]
    found, rounds = connect(*memories)
    assert found[3] == "rank 0: peer access is not supported" and rounds == 2
    assert found[0] == "ranks [3] cannot map the others' memory"


def test_ranks_of_several_machines_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter([b"a" * 16, b"a" * 16, b"b" * 16, b"a" * 16])
    monkeypatch.setattr(peers, "_machine", lambda: next(names))
    found, rounds = connect(*map(FakeMemory, range(SIZE)))
    assert set(found) == {"the ranks are on several machines"} and rounds == 1


@pytest.mark.parametrize("wrong", [(), (2,), range(SIZE)])
def test_all_ranks_forget_memory_in_which_one_gets_a_wrong_sum(
    wrong: Collection[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    using: set[int] = set()
    calls = SimpleNamespace(
        use_peer_memory=lambda group, buffers: using.add(group.rank()),
        try_peer_memory=lambda group: group.rank() not in wrong,
        forget_peer_memory=lambda group: using.remove(group.rank()),
    )
    monkeypatch.setattr(peers, "ext", calls)
    exchanged = Exchanged()

    def share(rank: int) -> str | None:
        group = SimpleNamespace(rank=lambda: rank)
        return share_memory(FakeMemory(rank), group, exchanged.of(rank))  # type: ignore[arg-type]

    with ThreadPoolExecutor(SIZE) as pool:
        reasons = set(pool.map(share, range(SIZE)))
    assert reasons == ({"the GPUs do not see each other's writes"} if wrong else {None})
    assert using == (set() if wrong else set(range(SIZE)))


def test_an_environment_variable_leaves_sums_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PEER_SUMS, "0")
    found, _ = connect(*map(FakeMemory, range(SIZE)))
    assert found[0] == f"{peers.PEER_SUMS} is 0"


@pytest.mark.parametrize("count", [1, 4, 7])
def test_tokens_are_shared_in_whole_chunks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    sizes = []

    def all_sum(x: mx.array, *, group: object) -> mx.array:
        sizes.append(x.shape[0])
        return 2 * x

    monkeypatch.setattr(mx.distributed, "all_sum", all_sum)
    shared = peers.shared_tokens(mx.arange(count), alone())
    assert shared.tolist() == [2 * i for i in range(count)] and sizes[0] % 4 == 0


def test_other_ranks_hosts_are_as_far_ahead_as_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimpleNamespace(model=SimpleNamespace(parts_ahead=1, platform=Platform.current()))
    fields = {"parts_ahead": 5, "cache_limit": 123 << 20}
    messages = [Message(START), Message.decode(Message(LIMITS, fields).encode())]
    limits: list[int] = []

    class Channel:
        def receive(self) -> Message:
            if not messages:
                raise EOFError
            return messages.pop(0)

    monkeypatch.setattr(follow, "_runner", lambda *_: runner)
    monkeypatch.setattr(follow, "limit_run_ahead", lambda _, step_bytes: limits.append(step_bytes))
    before = mx.set_cache_limit(0)
    try:
        follow.follow(Channel(), alone())  # type: ignore[arg-type]
        assert runner.model.parts_ahead == 5 and limits == [123 << 20]
        assert mx.set_cache_limit(before) == 123 << 20
    finally:
        mx.set_cache_limit(before)


def test_a_group_without_shared_memory_sums_as_before() -> None:
    group = alone()
    connect_peers(group)
    x = mx.arange(4, dtype=mx.float32)
    assert mx.array_equal(peers.summed(x, group=group), x)
    assert mx.array_equal(peers.summed(x), x)
