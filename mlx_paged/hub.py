"""Fetches, lists, describes and removes models of the Hugging Face hub on this machine.

They lie in `huggingface_hub`'s cache, where every program that loads a hub id finds them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import CacheNotFound, DryRunError, HFValidationError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from mlx_paged.errors import InvalidParameterError, ModelLoadError

#: Bytes of disk space that a download must leave free.
RESERVE = 1 << 30

_WEIGHTS = (".safetensors", ".gguf")
_MIB = 1 << 20
# Suffix of a split GGUF file, and the name of files with a vision or audio tower.
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PROJECTOR = "mmproj"
# Suffix of partly downloaded files.
_PART = ".incomplete"


@dataclass(frozen=True)
class CachedModel:
    """One revision of a model in the cache.

    Attributes:
        name: Its hub id.
        revision: Its commit; empty if a download was interrupted before its first file was whole.
        refs: Branches and tags that point to it here.
        path: The directory that `--model` takes, too.
        size: Bytes of its files.
        weight_bytes: Bytes of its weights among them.
        is_complete: False if a download was interrupted.
        last_modified: Unix time of the newest file.
    """

    name: str
    revision: str
    refs: tuple[str, ...]
    path: Path
    size: int
    weight_bytes: int
    is_complete: bool
    last_modified: float

    def config(self) -> dict[str, Any]:
        """Returns ``config.json``; empty if it is missing or unreadable."""
        try:
            config = json.loads((self.path / "config.json").read_text())
        except (OSError, ValueError):
            return {}
        return config if isinstance(config, dict) else {}


@dataclass(frozen=True)
class Download:
    """The files that `pull` would fetch.

    Attributes:
        revision: The commit.
        include: Patterns of the names of its files.
        num_files: Number of files.
        size: Bytes of all files.
        weight_bytes: Bytes of the weights among them.
        missing: Bytes that are not in the cache yet.
        free: Free bytes on the cache's disk.
    """

    revision: str
    include: tuple[str, ...]
    num_files: int
    size: int
    weight_bytes: int
    missing: int
    free: int


def cache_dir() -> Path:
    """The directory of the cache (``HF_HUB_CACHE``)."""
    return Path(constants.HF_HUB_CACHE)


def models(name: str | None = None) -> list[CachedModel]:
    """Returns the revisions of all models in the cache, sorted by name.

    Args:
        name: Only this hub id.
    """
    try:
        found = scan_cache_dir(cache_dir())
    except CacheNotFound:
        return []
    kept, seen = [], set()
    for repo in found.repos:
        if repo.repo_type != "model" or name not in (None, repo.repo_id):
            continue
        is_whole = not _parts(repo.repo_path)
        for revision in repo.revisions:
            weights = [f for f in revision.files if f.file_name.endswith(_WEIGHTS)]
            if not weights and is_whole:
                continue  # a tokenizer or a config that some program looked up
            seen.add(repo.repo_path.name)
            kept.append(
                CachedModel(
                    name=repo.repo_id,
                    revision=revision.commit_hash,
                    refs=tuple(sorted(revision.refs)),
                    path=revision.snapshot_path,
                    size=revision.size_on_disk,
                    weight_bytes=sum(f.size_on_disk for f in weights),
                    is_complete=is_whole and not _missing_shards(revision.snapshot_path),
                    last_modified=revision.last_modified,
                )
            )
    kept += [each for each in _begun(seen) if name in (None, each.name)]
    return sorted(kept, key=lambda each: (each.name.lower(), -each.last_modified))


def _parts(repo: Path) -> list[Path]:
    """Returns the partly downloaded files of a repository."""
    return list((repo / "blobs").glob(f"*{_PART}"))


def _begun(others: Container[str]) -> Iterator[CachedModel]:
    """Yields models whose download has not completed any file yet."""
    for repo in cache_dir().glob("models--*"):
        if repo.name in others or not (parts := _parts(repo)):
            continue
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        stats = [part.stat() for part in parts]
        newest = max(stat.st_mtime for stat in stats)
        size = sum(stat.st_size for stat in stats)
        yield CachedModel(name, "", (), repo, size, 0, False, newest)


def _missing_shards(path: Path) -> bool:
    """True if the index of weights names a missing file."""
    try:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        return not all((path / shard).exists() for shard in set(index["weight_map"].values()))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return True


def plan(name: str, *, revision: str | None = None, include: Sequence[str] = ()) -> Download:
    """Asks the hub what `pull` would fetch.

    Raises:
        InvalidParameterError: No file is like `include`.
        ModelLoadError: The hub does not give it, or the disk has no room for it.
    """
    include = tuple(include) or _needed_patterns()
    files = _snapshot(name, revision, include, dry_run=True)
    if not files:
        raise InvalidParameterError("include", "the name or pattern of a file", list(include))
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    place = cache_dir()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if missing and missing + RESERVE > free:
        raise ModelLoadError(
            name,
            f"the download needs {missing // _MIB:,} MiB and leaves 1 GiB free, but {place} has "
            f"{free // _MIB:,} MiB: remove models (`mlx-paged rm`), or set HF_HUB_CACHE",
        )
    weights = sum(f.file_size or 0 for f in files if f.filename.endswith(_WEIGHTS))
    size = sum(file.file_size or 0 for file in files)
    return Download(files[0].commit_hash, include, len(files), size, weights, missing, free)


def largest_gguf(name: str, most: int, *, revision: str | None = None) -> list[str]:
    """Returns the files of the largest GGUF model of a repository that fits.

    Args:
        most: Maximum bytes of its weights.

    Returns:
        Names of its files; several if it is split. Empty if the repository has safetensors, or no
        GGUF file.

    Raises:
        ModelLoadError: None fits, or the hub does not give it.
    """
    files = _snapshot(name, revision, ["*.gguf", "*.safetensors"], dry_run=True)
    models: dict[str, list[Any]] = {}
    for file in files:
        if file.filename.endswith(".safetensors"):
            return []
        if not Path(file.filename).name.startswith(_PROJECTOR):
            models.setdefault(_SPLIT.sub(".gguf", file.filename), []).append(file)
    if not models:
        return []
    sizes = {key: sum(file.file_size or 0 for file in each) for key, each in models.items()}
    fitting = [key for key, size in sizes.items() if size <= most]
    if not fitting:
        smallest = min(sizes.values())
        raise ModelLoadError(name, _too_large("the smallest of its GGUF files", smallest, most))
    largest = max(fitting, key=lambda key: (sizes[key], key))
    return [file.filename for file in models[largest]]


def check_fits(name: str, wanted: Download, most: int) -> None:
    """Rejects a download whose weights do not fit into memory.

    Args:
        most: Maximum bytes of weights.

    Raises:
        ModelLoadError: They are larger.
    """
    if wanted.weight_bytes > most:
        raise ModelLoadError(name, _too_large("its weights", wanted.weight_bytes, most))


def _too_large(what: str, size: int, most: int) -> str:
    return (
        f"{what} would take {size // _MIB:,} MiB, and this machine has {most // _MIB:,} MiB for "
        "weights"
    )


def pull(name: str, *, revision: str | None = None, include: Sequence[str] = ()) -> Path:
    """Fetches a model. Skips files that are already complete.

    Args:
        revision: A branch, tag or commit; None is the default branch.
        include: Patterns of file names; empty means all that a model needs.

    Returns:
        Its directory.

    Raises:
        ModelLoadError: The hub does not give it.
    """
    return Path(_snapshot(name, revision, include))


def _snapshot(
    name: str, revision: str | None, include: Sequence[str], *, dry_run: bool = False
) -> Any:
    patterns = list(include or _needed_patterns())
    try:
        with _progress_bars(shown=not dry_run and sys.stderr.isatty()):
            return snapshot_download(
                name, revision=revision, allow_patterns=patterns, dry_run=dry_run
            )
    except HFValidationError as error:
        raise InvalidParameterError("model", "a hub id ('owner/model')", name) from error
    except Exception as error:  # (of HTTP, of the hub, of the disk)
        cause = error
        while isinstance(cause, DryRunError) and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        lines = str(cause).strip().splitlines() or [""]
        raise ModelLoadError(
            name,
            f"the download from the Hugging Face hub failed ({type(cause).__name__}: {lines[0]})",
        ) from error


@contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    """Shows or hides the library's progress bars."""
    was_off, level = are_progress_bars_disabled(), hub_logging.get_verbosity()
    (enable_progress_bars if shown else disable_progress_bars)()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)
        (disable_progress_bars if was_off else enable_progress_bars)()


def _needed_patterns() -> tuple[str, ...]:
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS  # takes seconds to import

    return tuple(DEFAULT_ALLOW_PATTERNS)


def stored_bytes(name: str, *, whole: bool = False) -> int:
    """Returns the bytes of a model's files in the cache, of all revisions.

    Args:
        whole: Leave out partly downloaded files.
    """
    total = 0
    for blob in (cache_dir() / f"models--{name.replace('/', '--')}" / "blobs").glob("*"):
        if not (whole and blob.name.endswith(_PART)):
            with suppress(FileNotFoundError):  # A part becomes whole.
                total += blob.stat().st_size
    return total


def repository(model: CachedModel) -> Path:
    """Returns the directory in the cache that has all revisions of a model."""
    return model.path.parents[1] if model.revision else model.path


def remove(chosen: Sequence[CachedModel]) -> int:
    """Removes revisions and the files that only they use; returns the freed bytes."""
    freed = 0
    for each in chosen:
        if not each.revision:
            freed += each.size
            shutil.rmtree(each.path)
    revisions = [each.revision for each in chosen if each.revision]
    if revisions:
        strategy = scan_cache_dir(cache_dir()).delete_revisions(*revisions)
        strategy.execute()
        freed += strategy.expected_freed_size
    return freed


def matching(patterns: Sequence[str]) -> Iterator[tuple[str, list[CachedModel]]]:
    """Yields each ``NAME`` or ``NAME@REVISION`` with the matching revisions.

    A revision may be a branch, a tag, or the beginning of a commit.
    """
    for pattern in patterns:
        name, _, revision = pattern.partition("@")
        yield (
            pattern,
            [
                each
                for each in models(name)
                if not revision or revision in each.refs or each.revision.startswith(revision)
            ],
        )
