"""What all requests share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.defaults import GenerationDefaults
from mlx_paged.server.errors import ApiError, unavailable
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.text import TextService


class Phase(StrEnum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass
class Context:
    """The engine, and what stands around it.

    Attributes:
        defaults: What holds where a request is silent; the model has a say in it.
        text: Set when the engine stands.
        failure: Why the engine does not.
    """

    engine: AsyncEngine
    config: ServerConfig
    metrics: Metrics
    started: float = field(default_factory=time.time)
    draining: bool = False
    failure: Exception | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    _text: TextService | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def phase(self) -> Phase:
        """Where the server is in its life."""
        if self.draining:
            return Phase.DRAINING
        if self.failure is not None or not self.engine.is_alive:
            return Phase.DEAD
        return Phase.LOADING if self._text is None else Phase.READY

    @property
    def has_text(self) -> bool:
        """Whether the engine ever stood."""
        return self._text is not None

    @property
    def text(self) -> TextService:
        """The tokenizer; only once the engine stands."""
        assert self._text is not None
        return self._text

    async def start(self) -> None:
        """Waits for the engine, and makes what depends on it; `failure` tells what went wrong."""
        try:
            await self.engine.ready()
            engine = self.engine.engine
            self.defaults = GenerationDefaults.of(
                {**engine.generation_config, **self.config.override_generation_config}
            )
            stats = await self.engine.stats()
            text = TextService(
                engine.tokenizer, self.config, engine.max_model_len, engine.vocab_size
            )
            pool_tokens = stats.usage.num_usable_blocks * engine.config.block_size
            self.metrics.attach(
                engine, self.config.model_name, engine.max_model_len or pool_tokens, stats
            )
            self._text = text
        except Exception as error:
            self.failure = error
        finally:
            self._ready.set()

    async def started_or_failed(self) -> None:
        """Waits until `start` is through."""
        await self._ready.wait()

    def close(self) -> None:
        """Lets go of threads."""
        if self._text is not None:
            self._text.close()

    def check_takes_requests(self) -> None:
        """503 while the model loads, when the server shuts down, and when the engine is dead."""
        if self.phase is Phase.READY:
            return
        self.metrics.reject(self.phase.value)
        raise {
            Phase.LOADING: unavailable("the model is still being loaded", "loading"),
            Phase.DRAINING: unavailable("the server is shutting down", "shutting_down"),
            Phase.DEAD: unavailable("the engine has stopped", "engine_unavailable"),
        }[self.phase]

    def check_model(self, model: str | None) -> None:
        """404 for a model that is not served."""
        if model is not None and model not in self.config.served_model_names:
            names = ", ".join(self.config.served_model_names)
            raise ApiError(
                404,
                f"there is no model of that name here, only: {names}",
                param="model",
                code="model_not_found",
            )
