"""Blocks on disk: whatever the disk does, a block is right or missing, and there is one warning."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import TIMEOUT

from mlx_paged.offload import index, writer
from mlx_paged.offload.folder import OffloadFolder
from mlx_paged.offload.store import FIRST_KEY, BlockStore

MODEL = bytes(range(16))
SIZES = [3000, 64]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_LOOK_SECONDS", 0.0)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator:
    stores = []

    def make(quota: int = 1 << 20, **options) -> BlockStore:
        folder = OffloadFolder(tmp_path / "kv", quota, 0, **options)
        stores.append(BlockStore(folder, MODEL, {"model": "m"}, SIZES))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def content(digest: bytes, group: int) -> bytes:
    return random.Random(digest + bytes([group])).randbytes(SIZES[group])


def put(store: BlockStore, *digests: bytes) -> None:
    for digest in digests:
        for group in range(2):
            store.write(digest, group, memoryview(content(digest, group)))
    assert store.flush()


def get(store: BlockStore, digest: bytes, group: int = 0) -> bytes | None:
    store.look()
    key = store.key(digest, group)
    if not key:
        return None
    assert key >= FIRST_KEY
    store.pin(key)
    out, done = bytearray(SIZES[group]), threading.Event()
    read = store.read(key, memoryview(out), done)
    is_good = read is not None and read.result(TIMEOUT)
    assert read is None or done.wait(TIMEOUT)
    store.unpin(key)
    store.note_read(key, is_good=is_good)
    return bytes(out) if is_good else None


NAMES = [bytes([i]) * 16 for i in range(8)]


def test_blocks_survive_a_restart_and_another_process_sees_them(open_store) -> None:
    one, other = open_store(), open_store()
    put(one, *NAMES[:3])
    for store in (one, other, open_store()):
        for name in NAMES[:3]:
            assert [get(store, name, g) for g in range(2)] == [content(name, g) for g in range(2)]
        assert get(store, NAMES[3]) is None and not store.warnings.counts


def test_a_block_is_known_as_soon_as_it_is_handed_over(open_store) -> None:
    store = open_store()
    store.write(NAMES[0], 0, memoryview(content(NAMES[0], 0)))
    assert store.has(NAMES[0], 0) and not store.has(NAMES[0], 1)
    assert store.flush() and store.has(NAMES[0], 0)


def test_a_pinned_block_outlives_its_file(open_store, tmp_path: Path) -> None:
    store = open_store()
    put(store, NAMES[0])
    key = store.key(NAMES[0], 0)
    store.pin(key)
    [path] = tmp_path.rglob("*.kv")
    path.unlink()
    out = bytearray(SIZES[0])
    read = store.read(key, memoryview(out), threading.Event())
    assert read is not None and read.result(TIMEOUT) and out == content(NAMES[0], 0)
    store.unpin(key)
    assert get(store, NAMES[0]) is None and not store.warnings.counts


def test_a_damaged_block_takes_its_segment_along(open_store, tmp_path: Path, caplog) -> None:
    store = open_store()
    put(store, *NAMES[:3])
    put(store, NAMES[3])
    path = sorted(tmp_path.rglob("*.kv"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # a block of the second group
    path.write_bytes(data)
    assert get(store, NAMES[0]) == content(NAMES[0], 0)
    assert get(store, NAMES[2], 1) is None
    assert get(store, NAMES[0]) is None and not path.exists()
    assert get(store, NAMES[3]) == content(NAMES[3], 0)
    assert store.num_damaged == 1 and len(caplog.records) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_write_that_fails_is_one_warning(
    open_store, monkeypatch: pytest.MonkeyPatch, caplog, tmp_path: Path, number: int
) -> None:
    store = open_store()
    put(store, NAMES[0])
    broken = [True]
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        if broken[0] and len(data) in SIZES:
            raise OSError(number, os.strerror(number))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    for _ in range(3):
        monkeypatch.setattr(writer, "_PAUSE_SECONDS", 0.0)
        put(store, NAMES[1])
        assert not store.has(NAMES[1], 0)
    [record] = caplog.records
    assert os.strerror(number) in record.getMessage() and store.warnings.counts["write"] == 3
    assert not list(tmp_path.rglob("*.tmp"))
    broken[0] = False
    put(store, NAMES[1])
    assert get(store, NAMES[0]) and get(store, NAMES[1])


def test_a_full_quota_is_no_fault_of_the_caller(open_store, caplog) -> None:
    store = open_store(70 << 10)  # less than the slack and a page
    put(store, NAMES[0])
    assert get(store, NAMES[0]) is None and store.is_paused and store.room == 0
    assert len(caplog.records) == 1 and "quota" in caplog.text


def test_what_was_deleted_by_another_process_is_a_miss(open_store, tmp_path: Path) -> None:
    store = open_store()
    put(store, *NAMES[:2])
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    assert get(store, NAMES[0]) is None and store.is_empty and not store.warnings.counts


def test_what_this_process_wrote_can_be_distrusted(open_store) -> None:
    one, other = open_store(), open_store()
    put(one, NAMES[0])
    put(other, NAMES[1])
    assert get(one, NAMES[1]) is not None
    one.distrust()
    assert get(one, NAMES[0]) is None and get(one, NAMES[1]) == content(NAMES[1], 0)


def test_segments_are_of_the_right_size(
    open_store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(writer, "FULL_BYTES", 16_000)
    store = open_store()
    for name in (bytes([i]) * 16 for i in range(40)):
        store.write(name, 0, memoryview(content(name, 0)))
    assert store.flush()
    sizes = [path.stat().st_size - 4096 for path in tmp_path.rglob("*.kv")]
    assert sum(sizes) == 40 * SIZES[0] and max(sizes) <= 16_000 + SIZES[0]
    assert sum(size < 16_000 for size in sizes) <= 1
    assert not store.warnings.counts


def test_many_threads_and_two_stores(open_store) -> None:
    """Writers, readers and evictions at once: every block is right or missing."""
    stores, names = [open_store(300 << 10) for _ in range(2)], [bytes([i]) * 16 for i in range(60)]
    errors: list[object] = []

    def use(store: BlockStore, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            name = rng.choice(names)
            if rng.random() < 0.5:
                put(store, name)
            elif get(store, name) not in (None, content(name, 0)):
                errors.append(name)

    threads = [threading.Thread(target=use, args=(s, i)) for i, s in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not any(s.warnings.counts for s in stores)
