"""AdapterStore: caches adapters in main memory, by path."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from mlx_paged.engine.lora.files import Adapter, Version, read_adapter, version_of
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.errors import AdapterError, InvalidParameterError
from mlx_paged.formatting import format_size
from mlx_paged.model.lora import AdapterTargets

logger = logging.getLogger(__name__)


class _Turn:
    """Lets one thread at a time read an adapter.

    Attributes:
        num_threads: Threads that read it or wait to.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_threads = 0


class AdapterStore:
    """Reads adapters and keeps the most recently used ones. Thread-safe.

    The next request rereads files that have changed. Running requests keep their adapter, which
    lives as long as any request or the device needs it. Threads block each other only while reading
    the same adapter.

    Args:
        targets: The layers of the model that adapters may change.
        max_rank: Maximum rank of an adapter.
        max_adapters: Maximum number of adapters to keep.
    """

    def __init__(self, targets: AdapterTargets, *, max_rank: int, max_adapters: int) -> None:
        self._targets = targets
        self._max_rank = max_rank
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._reading: dict[Path, _Turn] = {}
        self._adapters: OrderedDict[Path, tuple[Version, Adapter]] = OrderedDict()

    def get(self, request: LoRARequest) -> Adapter:
        """Returns the adapter of a request; reads its files if they have changed.

        If changed files cannot be read, as while they are being written, returns the previous one.

        Raises:
            AdapterError: Files are missing, damaged or of an unsupported kind.
            InvalidParameterError: A rank above `max_lora_rank`.
        """
        path = _path_of(request)
        known = self._find(path)
        try:
            if known is None or version_of(path) != known[0]:
                return self._load(request.lora_name, path, known)
        except AdapterError:
            if known is None:
                raise
            logger.warning(
                "adapter %r: its changed files cannot be read, so the previous version stays",
                request.lora_name,
                exc_info=True,
            )
        return known[1]

    def load(self, request: LoRARequest) -> Adapter:
        """Reads an adapter, even if it is cached.

        Raises:
            AdapterError, InvalidParameterError: See `get`.
        """
        path = _path_of(request)
        return self._load(request.lora_name, path, self._find(path))

    def discard(self, request: LoRARequest) -> None:
        """Drops an adapter."""
        with self._lock:
            self._adapters.pop(_path_of(request), None)

    def _find(self, path: Path) -> tuple[Version, Adapter] | None:
        with self._lock:
            known = self._adapters.get(path)
            if known is not None:
                self._adapters.move_to_end(path)
            return known

    def _load(self, name: str, path: Path, known: tuple[Version, Adapter] | None) -> Adapter:
        """Reads an adapter, unless another thread has done so since `_find` returned `known`."""
        with self._turn(path):
            found = self._find(path)
            if found is not known and found is not None and found[0] == version_of(path):
                return found[1]
            version = version_of(path)
            adapter = self._read(name, path, version)
            with self._lock:
                self._adapters[path] = version, adapter
                self._adapters.move_to_end(path)
                while len(self._adapters) > self._max_adapters:
                    self._adapters.popitem(last=False)
            return adapter

    @contextlib.contextmanager
    def _turn(self, path: Path) -> Iterator[None]:
        with self._lock:
            turn = self._reading.setdefault(path, _Turn())
            turn.num_threads += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.num_threads -= 1
                if not turn.num_threads:
                    del self._reading[path]

    def _read(self, name: str, path: Path, version: Version) -> Adapter:
        adapter = read_adapter(name, path, self._targets)
        if version_of(path) != version:
            raise AdapterError(str(path), "its files changed while they were read; try again")
        if adapter.rank > self._max_rank:
            expected = f"at least {adapter.rank}, the rank of {str(path)!r},"
            raise InvalidParameterError("max_lora_rank", expected, self._max_rank)
        logger.info(
            "adapter %r: rank %d, %d layers, %s",
            name,
            adapter.rank,
            len(adapter.layers),
            format_size(adapter.nbytes),
        )
        return adapter


def _path_of(request: LoRARequest) -> Path:
    return Path(request.lora_path).expanduser().absolute()


def salted(adapter: Adapter | None, cache_salt: str | None) -> str | None:
    """Returns the cache salt of a request, so that only equal adapters share cached prefixes.

    No salt that a client chooses can equal one with an adapter.
    """
    if adapter is not None:
        return f"\0lora/{adapter.digest}/{cache_salt or ''}"
    if isinstance(cache_salt, str) and cache_salt.startswith("\0"):
        return f"\0{cache_salt}"
    return cache_salt
