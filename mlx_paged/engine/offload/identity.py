"""Identity: a digest of everything that the contents of a KV cache depend on, besides tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

from mlx_paged.checksum import crc32
from mlx_paged.engine.config import EngineConfig
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.pages import host_bytes
from mlx_paged.model.weight_identity import weights_of
from mlx_paged.offload.digests import DIGEST_BYTES

# Change it when blocks of earlier versions must no longer be used.
_VERSION = 1
# Elements of a weight that are summed at once, which bounds the memory.
_PIECE = 1 << 24


def identity_of(
    paged: PagedModel,
    loaded: LoadedModel,
    config: EngineConfig,
    max_model_len: int | None,
    head: PagedModel | None = None,
) -> tuple[bytes, Mapping[str, Any]]:
    """Returns the digest of a model with its cache, and a description.

    It covers the values of all weights, so a model that was trained further under the same name
    does not get its predecessor's blocks.

    Args:
        head: A draft head whose keys and values are in the same blocks.
    """
    layout, platform = paged.layout, paged.platform
    kv_format = "auto" if config.kv_format is None else config.kv_format.name
    about = {
        "model": loaded.name,
        "model_type": loaded.model_type,
        "kv_cache_dtype": kv_format,
        "block_size": paged.block_size,
        "bytes_per_token": layout.bytes_per_token(),
        "bytes_per_state": layout.bytes_per_slot,
    }
    known = {
        **about,
        "model": "",  # a name is not content
        "version": _VERSION,
        "mlx_paged": _package_version(),
        "mlx": mx.__version__,  # type: ignore[attr-defined]
        "device": "cpu" if platform.on_cpu else "cuda" if platform.has_cuda else "metal",
        "config": loaded.config,
        "specs": [repr(spec) for spec in layout.specs],
        "skipped": [str(layer) for layer in config.kv_cache_dtype_skip_layers],
        "activations": config.cpu_activations,
    }
    if "longrope" in json.dumps(loaded.config, default=str):
        known["max_model_len"] = max_model_len  # chooses the factors of short or long contexts
    if head is not None:
        known["head"] = [repr(spec) for spec in head.layout.specs]
    state = blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=16)
    models = [paged.model] if head is None else [paged.model, head.model]
    weights = [(n, mx.contiguous(weight)) for model in models for n, weight in weights_of(model)]
    mx.eval([weight for _, weight in weights])
    with ThreadPoolExecutor() as pool:
        sums = (
            pool.map(_crc, (w for _, w in weights))
            if platform.on_cpu
            else map(_sums, (w for _, w in weights))
        )
        for (name, weight), checksum in zip(weights, sums, strict=True):
            state.update(f"{name} {weight.shape} {weight.dtype} {checksum}\n".encode())
    assert state.digest_size == DIGEST_BYTES
    return state.digest(), about


def _package_version() -> str:
    try:
        return version("mlx-paged")
    except PackageNotFoundError:  # a checkout
        return ""


def _crc(weight: mx.array) -> int:
    """Returns the CRC-32 of a weight in the host's memory."""
    return crc32(host_bytes(weight).data) if weight.nbytes else 0


def _sums(weight: mx.array) -> list[int]:
    """Sums of the bits of a weight, each with another odd factor by position."""
    flat = weight.reshape(-1)
    if flat.dtype.size == 8:
        flat = flat.view(mx.uint32)
    elif flat.dtype.size != 4:
        flat = flat.view(mx.uint16 if flat.dtype.size == 2 else mx.uint8).astype(mx.uint32)
    else:
        flat = flat.view(mx.uint32)
    sums = []
    for begin in range(0, flat.size, _PIECE):
        piece = flat[begin : begin + _PIECE]
        factors = mx.arange(piece.size, dtype=mx.uint32) * 2246822507 + 1
        factors = (factors ^ (factors >> 15)) | 1
        sums += [(piece * factors).sum(), ((piece ^ (piece >> 16)) * (factors + 2)).sum()]
    mx.eval(sums)
    return [int(value) for value in sums]
