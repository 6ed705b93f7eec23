"""RouterService: the `server.run.Service` that serves several models."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prometheus_client import Gauge

from mlx_paged import private_folder
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError
from mlx_paged.server.quiet_gc import QuietGC
from mlx_paged.server.router.app import create_router
from mlx_paged.server.router.context import RouterContext
from mlx_paged.server.router.pool import Lease, ModelPool, PooledModel
from mlx_paged.server.router.process import REPLICA, ModelProcess, ServingProcess
from mlx_paged.server.router.replicas import ReplicaSet
from mlx_paged.server.router.routing import Replica
from mlx_paged.server.router.spare import SPARE_BYTES, Spare
from mlx_paged.server.router.spec import ModelSpec

logger = logging.getLogger(__name__)

_GIB = 1 << 30
# Seconds between checks that no request is running, when garbage may be collected.
_LOOK_INTERVAL = 0.25


class RouterService:
    """Serves several models; see `run.Service`.

    Args:
        entry: The module whose `main` serves one model in its own process.
        address: The address that the server listens on; "" for a Unix domain socket.
        budget: Maximum bytes of all loaded models.
        max_waiting: See `ModelPool`.
        keeps_spare: Keep a process ready for the next model (`spare`).
    """

    is_loading = False  # Only the model processes load.

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        config: ServerConfig,
        address: str,
        *,
        entry: str,
        budget: int,
        max_waiting: int = 1024,
        keeps_spare: bool = False,
    ) -> None:
        self._entry = entry
        self._folder = private_folder.make()  # of the processes' sockets
        self._numbers = itertools.count()
        self._background: dict[Replica, list[Lease]] = {}
        self._pool = ModelPool(specs, self._start, budget=budget, max_waiting=max_waiting)
        self.app = create_router(self._pool, config, address)
        self._context: RouterContext = self.app.state.context
        self._spare = Spare(
            self._start_spare,
            is_useful=lambda: keeps_spare and self._pool.has_use_for_spare(SPARE_BYTES),
            may_start=lambda: not self._pool.is_loading,
        )
        gauge = Gauge(
            "mlx_paged:spare_process",
            "1: a process has imported everything and waits for a model.",
            registry=self._context.metrics.registry,
        )
        gauge.set_function(lambda: self._spare.is_ready)

    @property
    def is_draining(self) -> bool:
        """See `Service`."""
        return self._context.draining

    def drain(self) -> None:
        """See `Service`."""
        self._context.drain()

    async def finish(self, seconds: float) -> None:
        """See `Service`."""
        await self._pool.close(seconds)
        await self._spare.close()
        private_folder.remove(self._folder)

    async def watch(self, address: str) -> int | None:
        """Preloads models. Keeps running if one of several fails."""
        self._context.is_preloading = True
        names = ", ".join(model.name for model in self._pool.models)
        budget = self._pool.budget / _GIB
        logger.info("ready: models %s at %s, within %.1f GiB", names, address, budget)
        with QuietGC(lambda: self._context.is_quiet) as collector:
            for model in self._pool.models:
                if model.spec.preload and not await self._preload(model) and self._is_useless:
                    return 1
            self._context.is_preloading = False
            while True:
                await asyncio.sleep(_LOOK_INTERVAL)
                collector.look()
                await self._spare.look()

    async def _preload(self, model: PooledModel) -> bool:
        """Loads a model; False if it cannot be loaded."""
        try:
            await self._pool.load(model.name)
        except ApiError as error:  # The reason is logged, unless there was no room.
            logger.warning("the model %s is not preloaded: %s", model.name, error.message)
            return False
        return True

    @property
    def _is_useless(self) -> bool:
        """True if there is no other model to serve once one has failed."""
        return len(self._pool.models) == 1 and not self.is_draining

    async def _start(self, spec: ModelSpec) -> ServingProcess:
        start = partial(self._start_one, spec)
        if spec.num_replicas > 1:
            return ReplicaSet(spec, start)
        spare = self._spare.take() if spec.can_use_spare else None
        if spare is None:
            return await start(0)
        spare.launch(spec, partial(self._hold, spec.name))
        return spare

    async def _start_one(self, spec: ModelSpec, number: int) -> ModelProcess:
        """Starts the process of one replica."""
        environment = dict(spec.environments[number])
        if spec.num_replicas > 1:
            environment[REPLICA] = str(number)
        hold = partial(self._hold, spec.name)
        return await ModelProcess.start(
            self._entry, spec, self._new_socket(), self._context.ledger.charge, hold, environment
        )

    async def _start_spare(self) -> ModelProcess:
        return await ModelProcess.start_without_model(
            self._entry, self._new_socket(), self._context.ledger.charge, {}
        )

    def _new_socket(self) -> Path:
        return self._folder / f"{next(self._numbers)}.sock"

    def _hold(self, name: str, replica: Replica, count: int) -> None:
        """Holds one lease per background response of a replica, so the model stays loaded."""
        leases = self._background.setdefault(replica, [])
        while len(leases) < count:
            lease = self._pool.lease(name)
            lease.enter(replica)
            leases.append(lease)
        while len(leases) > count:
            leases.pop().release()
        if not leases:
            del self._background[replica]
