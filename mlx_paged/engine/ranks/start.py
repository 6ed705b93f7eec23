"""make_engine: loads a model and creates its engine, on one rank or on several."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.ranks import launch
from mlx_paged.engine.ranks.lead import Ranks
from mlx_paged.engine.ranks.life import Followers, close_with
from mlx_paged.engine.ranks.messages import START, Message
from mlx_paged.engine.ranks.parallel_groups import ParallelGroups
from mlx_paged.errors import InvalidParameterError
from mlx_paged.kernels import OnKernel
from mlx_paged.model.loader import LoadedModel

_latest: weakref.ref[Followers] | None = None  # of this process's latest engine of several ranks


def make_engine(
    model: str | Path | LoadedModel | None,
    config: EngineConfig,
    *,
    dtype: str = "auto",
    generation_config: Mapping[str, Any] | None = None,
    on_kernel: OnKernel | None = None,
) -> Engine:
    """Loads a model and creates its engine, on as many ranks as its options ask for.

    Under `mlx.launch`, only rank 0 returns: the others follow it, then exit.

    Args:
        model: See `mlx_paged.load`; or, on one rank, a loaded model.
        dtype, generation_config: See `mlx_paged.load`.
        on_kernel: See `Engine`.

    Raises:
        InvalidParameterError: This process or machine cannot run that many ranks.
        EngineDeadError: Another rank failed during the start.
        ModelLoadError, UnsupportedModelError: See `mlx_paged.load`.
    """
    global _latest
    if config.num_ranks == 1:
        if not isinstance(model, LoadedModel):
            model = load(model, dtype=dtype, generation_config=generation_config)
        return Engine(model, config, on_kernel=on_kernel)
    if isinstance(model, LoadedModel):
        expected = "1 for a model that is already loaded"
        raise InvalidParameterError(config.ranks_option, expected, config.num_ranks)
    follow_if_launched(config.num_ranks)
    others = None if _latest is None else _latest()
    if others is not None and others.failure is None:
        expected = "1 while another engine of several ranks runs in this process"
        raise InvalidParameterError(config.ranks_option, expected, config.num_ranks)
    ranks = _ranks(config)
    _latest = weakref.ref(ranks.followers)
    try:
        with ranks.followers.loading():
            return _make(ranks, model, config, dtype, generation_config, on_kernel)
    except BaseException as error:
        failure = ranks.followers.failure
        ranks.followers.close()
        if failure is not None and isinstance(error, Exception):
            raise ranks.followers.failed(error) from error
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
    ranks.followers.send(Message(START, fields).encode())
    ranks.followers.await_ready()  # have imported everything
    groups = ParallelGroups.of(ranks.world, size, hosts, ranks.followers.wait)
    loaded = load(model, dtype=dtype, generation_config=generation_config, shard=groups.divide)
    ranks.followers.await_ready()  # have loaded the model
    engine = Engine(loaded, config, on_kernel=on_kernel, ranks=ranks)
    close_with(engine, ranks.followers)
    return engine


def _ranks(config: EngineConfig) -> Ranks:
    size, option = config.num_ranks, config.ranks_option
    if launch.launched_rank() is not None:
        world = launch.join({}, "any")
        if world.size() != size:
            expected = f"{world.size()}, the number of processes of mlx.launch,"
            raise InvalidParameterError(option, expected, size)
        return Ranks(Followers(launch.accept(world)), world, launch.ring_hosts(size, "any"))
    started, environment, backend = launch.start(size, option)
    followers = Followers(started)
    try:
        followers.gather()
        world = launch.join(environment, backend, followers.wait)
    except BaseException:
        followers.close()
        raise
    finally:
        launch.remove_host_file(environment)
    return Ranks(followers, world, launch.ring_hosts(size, backend))


def follow_if_launched(size: int) -> None:
    """Under `mlx.launch`, follows rank 0 and never returns, unless this is rank 0."""
    if size > 1 and (launch.launched_rank() or 0) > 0:
        from mlx_paged.engine.ranks.process import follow_launched

        follow_launched()
