"""make_engine: loads a model and makes its engine, on one rank or on several."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.ranks import launch
from mlx_paged.engine.ranks.collectives import Collectives
from mlx_paged.engine.ranks.lead import Ranks
from mlx_paged.engine.ranks.life import Group, close_with
from mlx_paged.engine.ranks.messages import START, Message
from mlx_paged.errors import InvalidParameterError
from mlx_paged.kernels import OnKernel
from mlx_paged.model.loader import LoadedModel

_newest: weakref.ref[Group] | None = None  # of this process


def make_engine(
    model: str | Path | LoadedModel | None,
    config: EngineConfig,
    *,
    dtype: str = "auto",
    generation_config: Mapping[str, Any] | None = None,
    on_kernel: OnKernel | None = None,
) -> Engine:
    """Loads a model and makes its engine, on as many ranks as its options ask for.

    Under `mlx.launch`, only rank 0 returns: the others follow it, and then end.

    Args:
        model, dtype, generation_config: See `mlx_paged.load`. Or a loaded model.
        on_kernel: See `Engine`.

    Raises:
        InvalidParameterError: Several ranks are not possible here.
        EngineDeadError: Another rank failed meanwhile.
        ModelLoadError, UnsupportedModelError: See `mlx_paged.load`.
    """
    global _newest
    if config.num_ranks == 1:
        if not isinstance(model, LoadedModel):
            model = load(model, dtype=dtype, generation_config=generation_config)
        return Engine(model, config, on_kernel=on_kernel)
    if isinstance(model, LoadedModel):
        expected = "1 for a model that is loaded already"
        raise InvalidParameterError(config.ranks_option, expected, config.num_ranks)
    follow_if_launched(config.num_ranks)
    before = None if _newest is None else _newest()
    if before is not None and before.failure is None:
        expected = "1 in a process that has an engine of several ranks"
        raise InvalidParameterError(config.ranks_option, expected, config.num_ranks)
    ranks = _ranks(config)
    _newest = weakref.ref(ranks.group)
    try:
        with ranks.group.loading():
            return _make(ranks, model, config, dtype, generation_config, on_kernel)
    except BaseException as error:
        failure = ranks.group.failure
        ranks.group.close()
        if failure is not None and isinstance(error, Exception):
            raise ranks.group.failed(error) from error
        raise


def _make(
    ranks: Ranks,
    model: str | Path | None,
    config: EngineConfig,
    dtype: str,
    generation_config: Mapping[str, Any] | None,
    on_kernel: OnKernel | None,
) -> Engine:
    from mlx_paged.engine.ranks.follow import start_fields

    size, hosts = config.tensor_parallel_size, ranks.hosts
    fields = start_fields(model, dtype, config, hosts)
    ranks.group.send(Message(START, fields).encode())
    collectives = Collectives.of(ranks.collective, size, hosts, ranks.group.wait)
    loaded = load(model, dtype=dtype, generation_config=generation_config, shard=collectives.divide)
    engine = Engine(loaded, config, on_kernel=on_kernel, ranks=ranks)
    close_with(engine, ranks.group)
    return engine


def _ranks(config: EngineConfig) -> Ranks:
    size, option = config.num_ranks, config.ranks_option
    if launch.launched_rank() is not None:
        collective = launch.join({}, "any")
        if collective.size() != size:
            expected = f"{collective.size()}, the number of processes of mlx.launch,"
            raise InvalidParameterError(option, expected, size)
        group = Group(launch.accept(collective))
        return Ranks(group, collective, launch.ring_hosts(size, "any"))
    followers, environment, backend = launch.start(size, option)
    group = Group(followers)
    try:
        group.gather()
        collective = launch.join(environment, backend, group.wait)
    except BaseException:
        group.close()
        raise
    finally:
        launch.remove_host_file(environment)
    return Ranks(group, collective, launch.ring_hosts(size, backend))


def follow_if_launched(size: int) -> None:
    """Follows rank 0 if this is another rank under `mlx.launch`; then it never returns."""
    if size > 1 and (launch.launched_rank() or 0) > 0:
        from mlx_paged.engine.ranks.process import follow_launched

        follow_launched()
