"""ModelPool: loads models when requests need them, and unloads others to make room.

A model is *in use* while a request runs on it or waits for it, and is then never unloaded. All
state belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from mlx_paged.errors import ModelLoadError
from mlx_paged.server.catalog import ModelFiles, ModelState, ModelStatus
from mlx_paged.server.config import DEFAULT_TAG
from mlx_paged.server.errors import (
    MEMORY_BUDGET,
    RETRY_AFTER,
    ApiError,
    model_not_found,
    unavailable,
)
from mlx_paged.server.router.process import LoadedModel, ProcessFailedError, ServingProcess
from mlx_paged.server.router.routing import Replica, RoutedRequest
from mlx_paged.server.router.spec import DEFAULT_NAMES, PROCESS_BYTES, ModelSpec, check_names

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GIB = 1 << 30
# Seconds to wait for an idle process to exit.
_IDLE_DRAIN = 10.0
# Seconds to wait for room: a client that switches models often sends its next request just before
# the previous one ends here.
_PATIENCE = 1.0


class KeepAlive(Enum):
    """Sentinel for a request without `keep_alive`, which leaves the model's value unchanged."""

    AS_BEFORE = "as before"


class PooledModel:
    """One model of a pool.

    Attributes:
        process: The process that serves it; None if not running.
        loading: Task that starts the process; returns the error if that fails. None if idle.
        stopping: Task that ends the process; None if idle.
        failure: Why the last load failed or the process died; None otherwise.
        loaded: Last report of the process; None before the first load.
        num_requests: Requests that run on the model or wait for it.
        num_waiting: Requests that wait for it to load.
        unused: Set while num_requests is 0.
        keep_alive: Seconds to keep the model loaded without requests; None: no limit.
        last_used: Unix time when its last request ended; None before the first.
        turn: Logical time of that end, which orders models by their last use.
        timer: Unloads the model when keep_alive has passed.
        expires_at: Unix time at which the timer fires.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.files = ModelFiles(spec.path)
        self.process: ServingProcess | None = None
        self.loading: asyncio.Task[ApiError | None] | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.failure: str | None = None
        self.loaded: LoadedModel | None = None
        self.num_requests = 0
        self.num_waiting = 0
        self.unused = asyncio.Event()
        self.unused.set()
        self.keep_alive = spec.ttl
        self.last_used: float | None = None
        self.turn = 0
        self.timer: asyncio.TimerHandle | None = None
        self.expires_at: float | None = None

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.spec.name

    @property
    def state(self) -> ModelState:
        """Its state."""
        if self.loading is not None:
            return ModelState.LOADING
        if self.failure is not None:
            return ModelState.FAILED
        # The memory stays in use until the process has exited.
        return ModelState.UNLOADED if self.process is None else ModelState.LOADED

    @property
    def is_loaded(self) -> bool:
        """True if its process accepts requests."""
        return self.process is not None and self.loading is None and self.stopping is None

    @property
    def replicas(self) -> Sequence[Replica]:
        """The processes that take its requests; none unless it is loaded."""
        return self.process.replicas if self.process is not None and self.is_loaded else ()

    @property
    def is_idle(self) -> bool:
        """True if it is loaded and has no requests."""
        return self.is_loaded and self.num_requests == 0

    @property
    def memory(self) -> int:
        """Bytes that the model takes when loaded: measured, or estimated before the first load."""
        if self.loaded is not None:
            return self.loaded.memory
        spec = self.spec
        processes = spec.num_processes * PROCESS_BYTES
        return spec.num_copies * ((self.files.weight_bytes or 0) + spec.kv_bytes + processes)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of its adapters."""
        return self.spec.adapters if self.loaded is None else self.loaded.adapters


class Lease:
    """Keeps a model loaded for one request, from `ModelPool.lease` to `release`."""

    def __init__(self, pool: ModelPool, model: PooledModel) -> None:
        self._pool, self._model = pool, model
        self._replica: Replica | None = None
        self._is_released = False

    @property
    def model(self) -> PooledModel:
        """The model."""
        return self._model

    async def ready(self) -> ServingProcess:
        """Waits until the model is loaded; returns its process.

        Raises:
            ApiError: 429, too many requests wait; 503, it cannot be loaded now, and why; 507, it
                does not fit.
        """
        return await self._pool.wait_loaded(self._model)

    async def place(self, request: RoutedRequest) -> Path:
        """Waits as `ready` does; returns the socket of the process that answers a request.

        Raises:
            ApiError: See `ready`; or 503, none of the model's replicas runs now.
        """
        process = await self.ready()
        replica = await process.choose(request)
        self.enter(replica)
        return replica.socket

    def enter(self, replica: Replica) -> None:
        """Counts the request toward a replica until the lease is released."""
        assert self._replica is None and not self._is_released
        self._replica = replica
        replica.num_requests += 1

    def release(self) -> None:
        """Ends the lease, so the pool may unload the model."""
        if not self._is_released:
            self._is_released = True
            if self._replica is not None:
                self._replica.num_requests -= 1
            self._pool.end_request(self._model)


class ModelPool:
    """The models of a router (a `ModelCatalog`).

    Args:
        specs: The models; requests that name none get the first.
        start: Starts the process of a model.
        budget: Maximum bytes of all loaded models together.
        max_waiting: Maximum requests that may wait for one model to load.
        patience: Seconds that a load waits for other models to become idle.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        start: Callable[[ModelSpec], Awaitable[ServingProcess]],
        *,
        budget: int,
        max_waiting: int = 1024,
        patience: float = _PATIENCE,
    ) -> None:
        specs = tuple(specs)
        check_names(specs)
        self.models = tuple(PooledModel(spec) for spec in specs)
        self.budget = budget
        self._start = start
        self._max_waiting = max_waiting
        self._patience = patience
        self._making_room = asyncio.Lock()
        self._turn = 0
        self._is_closing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    # The catalog.

    def statuses(self) -> list[ModelStatus]:
        """See `ModelCatalog`."""
        return [self._status_of(model) for model in self.models]

    def status(self, name: str | None) -> ModelStatus:
        """See `ModelCatalog`."""
        return self._status_of(self.find(name))

    async def load(self, name: str) -> None:
        """See `ModelCatalog`."""
        lease = self.lease(name)
        try:
            await lease.ready()
        finally:
            lease.release()

    async def unload(self, name: str) -> None:
        """See `ModelCatalog`. Unloads pinned models too, because the caller named this one."""
        model = self.find(name)
        while model.loading is not None or model.num_requests:
            if model.num_requests:
                await model.unused.wait()
            elif model.loading is not None:
                model.loading.cancel()
                await asyncio.wait({model.loading})
        await self._unload(model)

    @contextlib.asynccontextmanager
    async def unloaded(self, names: Collection[str]) -> AsyncIterator[None]:
        """See `ModelCatalog`."""
        models = [self.find(name) for name in names]
        while True:
            for model in models:
                await self.unload(model.name)
            async with self._making_room:  # The lock keeps new processes from starting.
                if all(model.process is None for model in models):
                    yield
                    return

    def begin_loading(self, model: PooledModel) -> None:
        """Starts loading a model, without waiting."""
        self._spawn(_quietly(self.load(model.name)))

    def begin_unloading(self, model: PooledModel) -> None:
        """Unloads a model once its requests have ended, without waiting."""
        self._spawn(self.unload(model.name))

    def set_keep_alive(self, name: str, seconds: float | None) -> None:
        """See `ModelCatalog`."""
        model = self.find(name)
        model.keep_alive = seconds
        self._restart_idle_timer(model)

    def _status_of(self, model: PooledModel) -> ModelStatus:
        spec, loaded = model.spec, model.loaded
        return ModelStatus(
            spec.name,
            model.state,
            spec.aliases,
            spec.path,
            model.files,
            memory=model.memory if model.process is not None else None,
            pinned=spec.pinned,
            expires_at=model.expires_at,
            last_used=model.last_used,
            failure=model.failure,
            adapters=model.adapters,
            max_model_len=None if loaded is None else loaded.max_model_len,
            input_modalities=() if loaded is None else loaded.input_modalities,
        )

    # Names.

    def find(self, name: str | None) -> PooledModel:
        """Returns the model that a name means: its own, an alias, or an adapter; None: the first.

        Raises:
            ApiError: 404.
        """
        if name is None or name in DEFAULT_NAMES:
            return self.models[0]
        for model in self.models:
            if name in model.spec.names:
                return model
        for model in self.models:
            if name in model.adapters:
                return model
        if name.endswith(DEFAULT_TAG):
            return self.find(name.removesuffix(DEFAULT_TAG))
        names = [n for m in self.models for n in (m.name, *m.spec.aliases, *m.adapters)]
        raise model_not_found(name, names)

    # The spare process.

    def has_use_for_spare(self, num_bytes: int) -> bool:
        """True if a model that is not running could use a spare process of this size."""
        if self._is_closing or self._in_use() + num_bytes > self.budget:
            return False
        return any(m.process is None and m.spec.can_use_spare for m in self.models)

    @property
    def is_loading(self) -> bool:
        """True while any model is loading."""
        return any(model.loading is not None for model in self.models)

    # Requests.

    def lease(
        self, name: str | None, keep_alive: float | KeepAlive | None = KeepAlive.AS_BEFORE
    ) -> Lease:
        """Leases a model to a request, which must call `release`.

        Args:
            keep_alive: Seconds that the model stays loaded after its last request; None: no limit.

        Raises:
            ApiError: 404.
        """
        model = self.find(name)
        model.num_requests += 1
        model.unused.clear()
        self._restart_idle_timer(model)
        if not isinstance(keep_alive, KeepAlive):
            model.keep_alive = keep_alive
        return Lease(self, model)

    async def wait_loaded(self, model: PooledModel) -> ServingProcess:
        """See `Lease.ready`."""
        while not model.is_loaded:
            if self._is_closing:
                raise _shutting_down()
            if model.num_waiting >= self._max_waiting:
                raise ApiError(
                    429,
                    f"the queue is full: {model.num_waiting} requests wait for the model "
                    f"{model.name!r} to load",
                    code="queue_full",
                    headers={"Retry-After": str(RETRY_AFTER)},
                )
            if model.loading is None:
                self._start_loading(model)
            loading = model.loading
            assert loading is not None
            model.num_waiting += 1
            try:
                # All requests share one load, which continues if some of them disconnect.
                await asyncio.wait({loading})
            finally:
                model.num_waiting -= 1
            error = self._broken_off(model) if loading.cancelled() else loading.result()
            if error is not None:
                raise ApiError(
                    error.status, error.message, code=error.code, headers=error.headers
                ) from error
        assert model.process is not None
        return model.process

    def end_request(self, model: PooledModel) -> None:
        """See `Lease.release`."""
        model.num_requests -= 1
        model.last_used = time.time()
        self._turn += 1
        model.turn = self._turn
        if model.num_requests == 0:
            model.unused.set()
            self._restart_idle_timer(model)

    # Loading.

    def _start_loading(self, model: PooledModel) -> None:
        def end(_: object) -> None:  # Runs before the tasks that await this one resume.
            model.loading = None
            self._restart_idle_timer(model)

        model.loading = self._spawn(self._load(model))
        model.loading.add_done_callback(end)

    async def _load(self, model: PooledModel) -> ApiError | None:
        """Starts a model's process; returns an error if that fails."""
        began = time.monotonic()
        model.failure = None
        try:
            model.files.check()  # Unload no other model for one that cannot be loaded.
            if model.stopping is not None:
                await asyncio.wait({model.stopping})
            process = await self._start_in_room(model)
            model.loaded = await process.loaded()
        except ApiError as no_room:
            return no_room
        except (ProcessFailedError, ModelLoadError, OSError) as failure:
            model.failure = str(failure)
            logger.error("the model %s could not be loaded: %s", model.name, failure)
            error = unavailable(
                f"the model {model.name!r} could not be loaded: {failure}", "model_failed"
            )
        except asyncio.CancelledError:
            error = self._broken_off(model)
        else:
            self._spawn(self._watch(model, process))
            seconds = time.monotonic() - began
            logger.info("the model %s is loaded, after %.1f s", model.name, seconds)
            self._spawn(self._shrink())
            return None
        if model.process is not None:
            await self._stop(model)
        return error

    def _broken_off(self, model: PooledModel) -> ApiError:
        if self._is_closing:
            return _shutting_down()
        return unavailable(f"the model {model.name!r} was unloaded", "unloaded")

    async def _start_in_room(self, model: PooledModel) -> ServingProcess:
        """Starts a model's process once there is room for it.

        Waits for models that are loading, and briefly for requests to end.

        Raises:
            ApiError: 503 or 507, it does not fit beside the models that must stay.
        """
        give_up_at = time.monotonic() + self._patience
        while True:
            async with self._making_room:
                in_the_way = await self._make_room(model)
                if not in_the_way:
                    logger.info("loading the model %s", model.name)
                    model.process = await self._start(model.spec)
                    return model.process
            loading = [m.loading for m in in_the_way if m.loading is not None]
            if loading:
                await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)
                give_up_at = time.monotonic() + self._patience
            elif not await _any_unused(in_the_way, give_up_at - time.monotonic()):
                raise self._no_room(model)

    async def _make_room(self, model: PooledModel) -> list[PooledModel]:
        """Unloads idle models, least recently used first, until a model fits.

        Returns:
            The models in use that leave it no room; empty if it fits.

        Raises:
            ApiError: 507, it does not fit beside the pinned ones.
        """
        while self._in_use(model) + model.memory > self.budget:
            if not self._fits_beside_pinned(model):
                raise self._no_room(model)
            others = [m for m in self.models if m.process is not None and m is not model]
            unpinned = [m for m in others if not m.spec.pinned]
            if stopping := [m.stopping for m in others if m.stopping is not None]:
                await asyncio.wait(stopping)
            elif idle := [m for m in unpinned if m.is_idle]:
                await self._unload(min(idle, key=lambda m: m.turn))
            else:
                return unpinned
        return []

    async def _shrink(self) -> None:
        """Unloads idle models while the loaded ones exceed the budget."""
        async with self._making_room:
            while self._in_use() > self.budget:
                idle = [m for m in self.models if m.is_idle and not m.spec.pinned]
                if not idle:
                    logger.warning(
                        "the loaded models take %.1f GiB, and --memory-budget is %.1f GiB",
                        self._in_use() / _GIB, self.budget / _GIB,
                    )  # fmt: skip
                    return
                await self._unload(min(idle, key=lambda m: m.turn))

    def _in_use(self, other_than: PooledModel | None = None) -> int:
        """Returns the bytes that running processes take from the budget."""
        return sum(m.memory for m in self.models if m.process is not None and m is not other_than)

    def _fits_beside_pinned(self, model: PooledModel) -> bool:
        """True if a model fits once every unpinned one is unloaded."""
        others = (m for m in self.models if m.process is not None and m is not model)
        return sum(m.memory for m in others if m.spec.pinned) + model.memory <= self.budget

    def _no_room(self, model: PooledModel) -> ApiError:
        others = [m for m in self.models if m.process is not None and m is not model]
        stay = ", ".join(f"{m.name} {m.memory / _GIB:.1f} GiB ({_why_it_stays(m)})" for m in others)
        message = (
            f"the model {model.name!r} needs {model.memory / _GIB:.1f} GiB, but "
            f"{self._in_use(model) / _GIB:.1f} of {self.budget / _GIB:.1f} GiB (--memory-budget) "
            f"are in use: {stay or 'by no model'}"
        )
        if self._fits_beside_pinned(model):
            return unavailable(message, MEMORY_BUDGET)
        return ApiError(507, message, code="model_too_large")

    async def _watch(self, model: PooledModel, process: ServingProcess) -> None:
        """Marks a model as failed when its process dies."""
        how = await process.ended()
        if model.process is process and model.stopping is None:
            model.failure = f"its process has ended ({how})"
            logger.error("the model %s failed: %s", model.name, model.failure)
            await self._stop(model)

    # Unloading.

    def _restart_idle_timer(self, model: PooledModel) -> None:
        """Restarts or clears a model's idle timer."""
        if model.timer is not None:
            model.timer.cancel()
        model.timer = model.expires_at = None
        if model.is_idle and not model.spec.pinned and model.keep_alive is not None:
            loop = asyncio.get_running_loop()
            model.expires_at = time.time() + model.keep_alive
            model.timer = loop.call_later(model.keep_alive, self._expire, model)

    def _expire(self, model: PooledModel) -> None:
        self._spawn(self._unload(model))

    async def _unload(self, model: PooledModel) -> None:
        """Ends a model's process if the model is idle."""
        if model.is_idle:
            logger.info("unloading the model %s", model.name)
            await self._stop(model)

    async def _stop(self, model: PooledModel, drain_timeout: float = _IDLE_DRAIN) -> None:
        """Ends a model's process and waits for it."""
        if model.process is None:
            return
        if model.stopping is None:
            model.stopping = self._spawn(self._end_process(model, model.process, drain_timeout))
            self._restart_idle_timer(model)
        await asyncio.wait({model.stopping})

    async def _end_process(
        self, model: PooledModel, process: ServingProcess, drain_timeout: float
    ) -> None:
        try:
            await process.stop(drain_timeout)
        finally:
            model.process = model.stopping = None

    # Shutdown.

    def drain(self) -> None:
        """Stops loading models. Requests waiting for one get 503."""
        if not self._is_closing:  # A second cancel would interrupt the stop of their processes.
            self._is_closing = True
            for model in self.models:
                if model.loading is not None:
                    model.loading.cancel()

    async def close(self, drain_timeout: float) -> None:
        """Ends all processes.

        Args:
            drain_timeout: Seconds for running requests to finish.
        """
        self.drain()
        loading = [model.loading for model in self.models if model.loading is not None]
        if loading:
            await asyncio.wait(loading)
        running = [model for model in self.models if model.process is not None]
        if drain_timeout == 0:  # They may be draining already.
            await asyncio.gather(*(m.process.stop(0.0) for m in running if m.process is not None))
        await asyncio.gather(*(self._stop(model, drain_timeout) for model in running))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)  # The loop itself holds tasks weakly.
        task.add_done_callback(self._tasks.discard)
        return task


async def _quietly(loading: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(ApiError):  # The model's state shows the failure.
        await loading


async def _any_unused(models: Iterable[PooledModel], seconds: float) -> bool:
    """Waits until one of some models has no requests; False if that takes too long."""
    ends = [asyncio.ensure_future(m.unused.wait()) for m in models]
    try:
        limit = max(0.0, seconds)
        done, _ = await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
    return bool(done)


def _why_it_stays(model: PooledModel) -> str:
    if model.num_requests:
        return "1 request" if model.num_requests == 1 else f"{model.num_requests} requests"
    return "pinned" if model.spec.pinned else str(model.state)


def _shutting_down() -> ApiError:
    return unavailable("the server is shutting down", "shutting_down")
