"""Builds the offloading of an engine: host memory, disk, and connections to other engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.kv_cache_config import KVCacheConfig
from mlx_paged.engine.offload.identity import identity_of
from mlx_paged.engine.offload.offloading import Offloading
from mlx_paged.engine.roles.ends import ends_of
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.block_bytes import NoAccessError, SharedBlockBytes
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.paged_model import PagedModel
from mlx_paged.model.staged_blocks import StagedBlockBytes
from mlx_paged.offload.folder import OffloadFolder
from mlx_paged.offload.store import BlockStore


def build_offloading(
    paged: PagedModel,
    model: LoadedModel,
    config: EngineConfig,
    kv_config: KVCacheConfig,
    max_model_len: int | None,
    head: PagedModel | None,
) -> Offloading | None:
    """Creates the tier for evicted blocks and its connections; None if they are dropped.

    Args:
        head: The draft head whose blocks are stored with the target's; None if there is none.

    Raises:
        InvalidParameterError: Blocks of this model cannot be restored on this device, or the folder
            or the role's address is unusable.
    """
    folder = config.kv_offload_dir
    if not (config.kv_offloading_size or folder or config.role) or not config.enable_prefix_caching:
        return None
    if config.role is not None and config.runner != "generate":
        expected = f"None for the runner {config.runner!r}, which generates nothing"
        raise InvalidParameterError("role", expected, config.role)
    others = [spec for spec in paged.layout.group_specs if spec not in kv_config.windows]
    groups = [others, *([window] for window in kv_config.windows)]
    has_own_memory = paged.platform.has_cuda
    try:
        blocks = (StagedBlockBytes if has_own_memory else SharedBlockBytes)(paged, groups, head)
    except NoAccessError as error:
        names = ("kv_offloading_size", "kv_offload_dir", "role")
        name = next(name for name in names if getattr(config, name))
        expected = f"None ({error})"
        raise InvalidParameterError(name, expected, getattr(config, name)) from error
    capacity, block_size = config.kv_offloading_bytes, config.block_size
    if folder is None and config.role is None:
        return Offloading(blocks, capacity, block_size)
    identity, about = identity_of(paged, model, config, max_model_len, head)
    receiver, server = ends_of(config)
    store = None if folder is None else _store(folder, config, identity, about, blocks.num_bytes)
    return Offloading(
        blocks,
        capacity,
        block_size,
        store,
        identity,
        receiver=receiver,
        min_prefill_tokens=config.prefill_min_tokens,
        server=server,
    )


def _store(
    folder: str | Path,
    config: EngineConfig,
    identity: bytes,
    about: Mapping[str, Any],
    block_bytes: list[int],
) -> BlockStore:
    """Opens the store of blocks on disk.

    Raises:
        InvalidParameterError: The folder is unusable.
    """
    try:
        shared = OffloadFolder(Path(folder).expanduser(), config.kv_offload_bytes)
        return BlockStore(shared, identity, about, block_bytes)
    except OSError as error:
        expected = f"a writable folder ({error.strerror or error})"
        raise InvalidParameterError("kv_offload_dir", expected, str(folder)) from error
