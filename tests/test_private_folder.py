"""Folders of processes that were killed go, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from mlx_paged import private_folder

_MAKES = """
import sys, tempfile
from mlx_paged import private_folder
tempfile.tempdir = sys.argv[1]
path = private_folder.make()
(path / "file").touch()
print(path, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(folder: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Path]]]:
    """Starts a process that has a folder; returns both."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", _MAKES, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert (path / "file").exists()
        return process, path

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_folder_of_a_process_that_was_killed(owner) -> None:
    process, left = owner()
    _, used = owner()
    process.kill()
    process.wait()
    own = private_folder.make()
    assert not left.exists() and (used / "file").exists()
    assert own.stat().st_mode & 0o777 == 0o700
    assert private_folder.make() != own and own.exists()  # nor those of this process


def test_a_folder_that_is_no_longer_needed(folder: Path) -> None:
    descriptors = len(os.listdir("/dev/fd"))
    own, other = private_folder.make(), folder / "mlx-paged-run-other"
    (own / "file").touch()
    other.mkdir()
    for path in (own, own, other):
        private_folder.remove(path)
    assert list(folder.iterdir()) == [other]
    assert len(os.listdir("/dev/fd")) == descriptors


def test_what_does_not_belong_to_a_dead_process_stays(folder: Path, owner, monkeypatch) -> None:
    process, left = owner()
    process.kill()
    process.wait()
    (folder / "mlx-paged-run-file").touch()
    (folder / "mlx-paged-run-link").symlink_to(left)
    (folder / "mlx-paged-other").mkdir()
    (folder / "new-mlx-paged-run-starting").mkdir()  # is not locked yet
    before = set(folder.iterdir())
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)  # all of it belongs to another user
    own = private_folder.make()
    assert set(folder.iterdir()) == before | {own}
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    private_folder.remove(own)
    own = private_folder.make()
    assert set(folder.iterdir()) == (before - {left}) | {own}


def test_a_file_system_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(private_folder.fcntl, "flock", fail)
    paths = [private_folder.make() for _ in range(2)]
    assert set(folder.iterdir()) == set(paths)
    for path in paths:
        private_folder.remove(path)
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_renamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = len(os.listdir("/dev/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", mock.Mock(side_effect=OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            private_folder.make()
    assert not list(folder.iterdir()) and len(os.listdir("/dev/fd")) == descriptors
