"""EngineService: the `server.run.Service` that serves one model."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp

from mlx_paged.engine.client import EngineClient
from mlx_paged.errors import MlxPagedError
from mlx_paged.server.app import create_app
from mlx_paged.server.config import GenerationDefaults, ServerConfig
from mlx_paged.server.context import Context
from mlx_paged.server.quiet_gc import QuietGC
from mlx_paged.server.router.link import RouterLink

logger = logging.getLogger(__name__)

# Seconds between checks that the engine is alive.
_WATCH_INTERVAL = 0.25


class EngineService:
    """Serves one engine.

    Args:
        engine: It may still be loading.
        address: The address that the server listens on; "" for a Unix domain socket.
        link: Connects this process to its router; None: there is none.
    """

    def __init__(
        self,
        engine: EngineClient,
        config: ServerConfig,
        address: str,
        link: RouterLink | None = None,
    ) -> None:
        self._engine = engine
        self._link = link
        app = create_app(engine, config, address)
        self._context: Context = app.state.context
        self.app: ASGIApp = app if link is None else link.around(app)
        if link is not None:
            self._context.background.on_count = link.count_background

    @property
    def is_draining(self) -> bool:
        """See `Service`."""
        return self._context.draining

    @property
    def is_loading(self) -> bool:
        """See `Service`."""
        return not self._context.models.default.is_loaded and self._engine.is_alive

    def drain(self) -> None:
        """See `Service`."""
        self._context.drain()

    async def finish(self, seconds: float) -> None:
        """See `Service`."""
        if self._context.models.default.is_loaded:
            await self._engine.shutdown(seconds)

    async def watch(self, address: str) -> int | None:
        """Logs that the engine is ready; returns when it has failed or stopped."""
        model = self._context.models.default
        await model.started_or_failed()
        if self._link is not None:
            await self._link.started(model)
        if model.failure is None:
            logger.info("ready: model %s at %s", model.name, address)
            defaults = model.defaults
            if defaults != GenerationDefaults():
                limit = defaults.max_new_tokens
                logger.info(
                    "default sampling parameters: %s",
                    {**defaults.sampling, **({} if limit is None else {"max_new_tokens": limit})},
                )
            with QuietGC(lambda: self._context.is_quiet) as collector:
                while self._engine.is_alive:
                    await asyncio.sleep(_WATCH_INTERVAL)
                    collector.look()
            if self._context.draining:
                return None
        failure = model.failure
        if failure is not None and self._engine.is_alive:
            # Not the engine's failure, which the engine has already logged.
            expected = isinstance(failure, MlxPagedError)
            logger.critical("%s", failure, exc_info=None if expected else failure)
        return 1
