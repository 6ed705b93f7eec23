"""Folders of segments: the quota holds for everything, at every moment, for several processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlx_paged.offload.folder import NoSpace, OffloadFolder

KIB = 1 << 10
MODEL = bytes(16)


def folder_of(tmp_path: Path, quota: int = 400 * KIB, **options) -> OffloadFolder:
    return OffloadFolder(tmp_path / "kv", quota, **{"free_bytes": lambda path: 1 << 40, **options})


def put(folder: OffloadFolder, num_bytes: int, *, used_at: int | None = None) -> Path:
    fd, path = folder.create(folder.model(MODEL), num_bytes)
    os.write(fd, bytes(num_bytes))
    path = folder.publish(fd, path)
    os.close(fd)
    if used_at is not None:
        os.utime(path, (used_at, used_at))
    return path


def du(path: Path) -> int:
    """Bytes of the folder, as `du` counts them."""
    found = subprocess.run(["du", "-sk", path], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0]) * KIB


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    old, older, new = (put(folder, 100 * KIB, used_at=at) for at in (2000, 1000, 3000))
    more = put(folder, 100 * KIB)
    assert not older.exists() and old.exists() and new.exists() and more.exists()
    assert du(folder.path) <= folder.quota
    put(folder, 300 * KIB)
    assert not (old.exists() or new.exists() or more.exists())
    assert du(folder.path) <= folder.quota


def test_what_cannot_fit_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    kept = put(folder, 100 * KIB)
    (folder.path / "not ours").write_bytes(bytes(250 * KIB))
    with pytest.raises(NoSpace, match="the quota"):
        folder.create(folder.model(MODEL), 300 * KIB)
    assert not kept.exists()  # all were tried, and nothing else was touched
    assert (folder.path / "not ours").exists()


def test_a_smaller_quota_holds_at_the_next_start(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for i in range(3):
        put(folder, 100 * KIB, used_at=1000 + i)
    other = folder.path / ("ab" * 16)
    other.mkdir()
    (other / "1.kv").write_bytes(bytes(50 * KIB))  # another model's, and newest
    smaller = folder_of(tmp_path, 220 * KIB)
    smaller.trim()
    assert du(folder.path) <= 220 * KIB
    assert (other / "1.kv").exists()


def test_a_reserve_of_the_file_system_stays_free(tmp_path: Path) -> None:
    free = [1000 * KIB]
    folder = folder_of(tmp_path, 1 << 30, reserve=500 * KIB, free_bytes=lambda path: free[0])
    put(folder, 400 * KIB)
    free[0] = 600 * KIB
    with pytest.raises(NoSpace, match="stay free"):
        folder.create(folder.model(MODEL), 501 * KIB + 400 * KIB)
    put(folder, 100 * KIB)
    free[0] = 100 * KIB
    with pytest.raises(NoSpace):
        folder.create(folder.model(MODEL), 1)
    assert not list(folder.model(MODEL).iterdir())  # given back to the file system


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    path = put(folder, 10)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "lock").stat().st_mode & 0o777 == 0o600


def test_leftovers_of_killed_writers_are_deleted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    fd, alive = folder.create(folder.model(MODEL), 10 * KIB)
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from mlx_paged.offload.folder import OffloadFolder\n"
        "folder = OffloadFolder(Path(sys.argv[1]), 1 << 20, 0)\n"
        "print(folder.create(folder.model(bytes(16)), 10)[1], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, folder.path], capture_output=True, text=True, check=False
    )
    killed = Path(run.stdout.strip())
    assert killed.exists() and run.returncode == -9
    folder.trim()
    assert alive.exists() and not killed.exists()
    os.close(fd)


def test_no_segment_is_renamed_while_files_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count would list its old name, find no file of it, and miss its bytes."""
    folder, were_locked = folder_of(tmp_path), []
    rename = Path.rename

    def note(path: Path, target: Path) -> Path:
        with (folder.path / "lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                were_locked.append(False)
            except BlockingIOError:
                were_locked.append(True)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", note)
    put(folder, 100 * KIB)
    assert were_locked == [True]


def test_many_writers_stay_within_the_quota(tmp_path: Path) -> None:
    """Threads hold the lock as processes do; a watcher counts all the time."""
    quota, stop, most = 600 * KIB, threading.Event(), [0]

    def work(seed: int) -> None:
        folder, rng = folder_of(tmp_path, quota), random.Random(seed)
        for _ in range(25):
            with contextlib.suppress(NoSpace):
                put(folder, rng.randrange(1, 150) * KIB)

    def watch() -> None:
        folder = folder_of(tmp_path, quota)
        while not stop.is_set():
            with folder.locked():
                most[0] = max(most[0], sum(file.num_bytes for file in folder.files()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert quota // 2 < most[0] <= quota
    assert du(tmp_path / "kv") <= quota + 8 * KIB, "files, and the blocks of two directories"
