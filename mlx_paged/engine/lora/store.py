"""AdapterStore: the adapters in main memory, by the path of their files."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path

from mlx_paged.engine.lora.files import Adapter, Version, read_adapter, version_of
from mlx_paged.engine.lora.request import LoRARequest
from mlx_paged.errors import AdapterError, InvalidParameterError
from mlx_paged.model.lora import AdapterTargets

logger = logging.getLogger(__name__)


class AdapterStore:
    """Reads adapters, and keeps those used last. Any thread may call it.

    Files that change are read again by the next request. Requests that run keep their adapter,
    which lives as long as any request or the device needs it.

    Args:
        targets: The layers of the model that adapters may change.
        max_rank: Maximum rank of an adapter.
        max_adapters: Maximum adapters to keep.
    """

    def __init__(self, targets: AdapterTargets, *, max_rank: int, max_adapters: int) -> None:
        self._targets = targets
        self._max_rank = max_rank
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._adapters: OrderedDict[Path, tuple[Version, Adapter]] = OrderedDict()

    def get(self, request: LoRARequest) -> Adapter:
        """Returns the adapter of a request; reads its files unless they have not changed.

        Raises:
            AdapterError: Files that are missing, damaged, or of a kind that is not served.
            InvalidParameterError: A rank above `max_lora_rank`.
        """
        path = Path(request.lora_path).expanduser().absolute()
        with self._lock:
            version = version_of(path)
            known = self._adapters.get(path)
            if known is not None and known[0] == version:
                self._adapters.move_to_end(path)
                return known[1]
            adapter = self._read(request.lora_name, path, version)
            self._adapters[path] = version, adapter
            self._adapters.move_to_end(path)
            while len(self._adapters) > self._max_adapters:
                self._adapters.popitem(last=False)
            return adapter

    def _read(self, name: str, path: Path, version: Version) -> Adapter:
        adapter = read_adapter(name, path, self._targets)
        if version_of(path) != version:
            raise AdapterError(str(path), "its files changed while they were read; try again")
        if adapter.rank > self._max_rank:
            expected = f"at least {adapter.rank}, the rank of {str(path)!r},"
            raise InvalidParameterError("max_lora_rank", expected, self._max_rank)
        logger.info(
            "adapter %r: rank %d, %d layers, %.1f MB",
            name,
            adapter.rank,
            len(adapter.layers),
            adapter.nbytes / 1e6,
        )
        return adapter


def salted(adapter: Adapter | None, cache_salt: str | None) -> str | None:
    """Returns the salt of a request's prefixes, which adapters with other files do not share.

    A salt that a client chose never equals one with an adapter.
    """
    if adapter is not None:
        return f"\0lora/{adapter.digest}/{cache_salt or ''}"
    if isinstance(cache_salt, str) and cache_salt.startswith("\0"):
        return f"\0{cache_salt}"
    return cache_salt
