"""Reads adapter files of mlx-lm, mlx-vlm or PEFT.

Uses only NumPy, so that any thread can read an adapter while the engine's thread runs steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, deserialize

from mlx_paged.engine.lora.readers import MlxReader, OlderMlxVlmReader, PeftReader, Reader
from mlx_paged.errors import AdapterError
from mlx_paged.model.lora import AdapterTargets
from mlx_paged.model.lora_slots import LowRank

_CONFIG = "adapter_config.json"
_MLX_WEIGHTS, _PEFT_WEIGHTS = "adapters.safetensors", "adapter_model.safetensors"
_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in main memory. Adapters with equal files are equal.

    Attributes:
        name: For logs and metrics.
        digest: Hash of the files, which identifies the adapter's version.
        rank: Maximum rank of its layers.
        layers: Updates, by the layer's path in the model.
    """

    name: str
    digest: str
    rank: int
    layers: Mapping[str, LowRank] = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Adapter) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def nbytes(self) -> int:
        """Bytes in main memory."""
        return sum(a.nbytes + b.nbytes for a, b in self.layers.values())


class Version(NamedTuple):
    """Identifies the state of files, to detect changes without reading them."""

    stats: tuple[tuple[int, int, int], ...]  # (inode, size, time of the last change in ns)


def version_of(path: Path) -> Version:
    """Returns the version of an adapter's files.

    Raises:
        AdapterError: Files are missing.
    """
    found = []
    try:
        for file in _files_of(path):
            stat = file.stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    except OSError as error:  # Another process may be replacing them.
        raise _unreadable(path, error) from error
    return Version(tuple(found))


def read_adapter(name: str, path: Path, targets: AdapterTargets) -> Adapter:
    """Reads an adapter and matches its tensors with the layers of a model.

    Raises:
        AdapterError: Files are missing or damaged, or the kind of adapter is not supported.
    """
    try:
        config_file, weights_file = _files_of(path)
        config_bytes, weights_bytes = config_file.read_bytes(), weights_file.read_bytes()
        config = json.loads(config_bytes)
        digest = hashlib.sha256(config_bytes)
        digest.update(weights_bytes)
        given = deserialize(weights_bytes)  # type: ignore[no-untyped-call]
        del weights_bytes  # Adapters of experts have gigabytes.
        tensors = {}
        while given:
            key, value = given.pop()
            tensors[key] = _values(value)
    except AdapterError:
        raise
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(config, dict):
        raise AdapterError(str(path), f"{_CONFIG} must be a JSON object but got {config!r}")
    reader: type[Reader] = PeftReader
    if weights_file.name == _MLX_WEIGHTS:
        is_older = "rank" in config and "lora_parameters" not in config
        reader = OlderMlxVlmReader if is_older else MlxReader
    layers = reader(str(path), config, targets).layers_of(tensors)
    rank = max(change.rank for change in layers.values())
    return Adapter(name, digest.hexdigest(), rank, layers)


def _unreadable(path: Path, error: Exception) -> AdapterError:
    return AdapterError(str(path), f"its files cannot be read: {error}")


def _files_of(path: Path) -> tuple[Path, Path]:
    """Returns the paths of an adapter's config and weights.

    Raises:
        AdapterError: A file or the directory is missing.
        OSError: The directory cannot be read.
    """
    if not path.is_dir():
        raise AdapterError(str(path), "there is no such directory", is_missing=True)
    config = path / _CONFIG
    if not config.is_file():
        raise AdapterError(str(path), f"the directory has no {_CONFIG}")
    for name in (_MLX_WEIGHTS, _PEFT_WEIGHTS):
        if (path / name).is_file():
            return config, path / name
    found = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
    names = f"{_MLX_WEIGHTS} or {_PEFT_WEIGHTS}"
    raise AdapterError(str(path), f"the directory must have {names} but has {found}")


def _values(tensor: Mapping[str, Any]) -> np.ndarray:
    """Converts a tensor of a file to float32.

    Raises:
        ValueError: It is not a floating-point tensor.
    """
    dtype, data = tensor["dtype"], tensor["data"]
    if dtype == "BF16":  # the upper half of a float32
        words = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).reshape(tensor["shape"])
    if dtype not in _DTYPES:
        raise ValueError(f"tensors must be floating-point but one is {dtype}")
    values = np.frombuffer(data, _DTYPES[dtype]).reshape(tensor["shape"])
    return values.astype(np.float32, copy=False)
