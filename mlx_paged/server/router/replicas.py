"""ReplicaSet: several processes that serve one model and are restarted when they die."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import quote

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_paged.server.errors import RETRY_AFTER, unavailable
from mlx_paged.server.router.link import BACKGROUND
from mlx_paged.server.router.metrics import Families, ReplicaMetrics, families_of
from mlx_paged.server.router.process import LoadedModel, ProcessFailedError, ServingProcess
from mlx_paged.server.router.routing import Placement, Reason, Replica, RoutedRequest
from mlx_paged.server.router.spec import ModelSpec
from mlx_paged.server.router.transport import Upstream, UpstreamError

logger = logging.getLogger(__name__)

#: Starts the process of a replica, given its number.
Start = Callable[[int], Awaitable[ServingProcess]]

# Restart backoff in seconds: the first delay, the maximum after doubling, and the run time after
# which a replica starts over with the first.
_FIRST_DELAY, _MAX_DELAY, _STABLE = 1.0, 60.0, 60.0
# Seconds for a replica to answer whether it has a stored response.
_QUERY_TIMEOUT = 10.0


class _Slot:
    """One replica and the processes that run it, one after another.

    Attributes:
        process: The latest process; None before the first.
        replica: The running replica; None while no process has loaded the model.
        loaded: Done once the first process has loaded the model, or failed to.
        num_restarts: Number of restarts so far.
        next_start: `time.monotonic` of the next restart, while waiting for it.
        failure: How the latest process ended.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: ServingProcess | None = None
        self.replica: Replica | None = None
        self.loaded: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        self.num_restarts = 0
        self.next_start: float | None = None
        self.failure = ""


class ReplicaSet:
    """See `ServingProcess`. Loaded once all replicas are; runs until it is stopped.

    When a replica dies, its requests fail, and new ones go to the others.

    Args:
        spec: The model.
        start: Called for each replica, and again after it has ended.
    """

    def __init__(self, spec: ModelSpec, start: Start) -> None:
        self._spec = spec
        self._start = start
        self._placement = Placement()
        self._metrics = ReplicaMetrics()
        self._slots = [_Slot(number) for number in range(spec.num_replicas)]
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keeping = [asyncio.create_task(self._keep(slot)) for slot in self._slots]

    @property
    def replicas(self) -> Sequence[Replica]:
        """See `ServingProcess`."""
        return [slot.replica for slot in self._slots if slot.replica is not None]

    async def choose(self, request: RoutedRequest) -> Replica:
        """See `ServingProcess`."""
        await request.prepare()
        owner = await self._owner(request.previous_response_id)
        replicas = self.replicas
        if not replicas:
            failures = {slot.failure for slot in self._slots if slot.failure}
            starts = [p.next_start for p in self._slots if p.next_start is not None]
            wait = max(0.0, min(starts, default=0.0) - time.monotonic())
            raise unavailable(
                f"no replica of the model {self._spec.name!r} runs now ({'; '.join(failures)})",
                "model_failed",
                RETRY_AFTER + wait,
            )
        return self._placement.choose(replicas, request, owner if owner in replicas else None)

    async def _owner(self, response_id: str | None) -> Replica | None:
        """Returns the replica that holds a stored response, or None."""
        if response_id is None:
            return None
        replicas = self.replicas
        answers = await asyncio.gather(*(_has(replica, response_id) for replica in replicas))
        return next((r for r, has in zip(replicas, answers, strict=True) if has), None)

    def metrics(self, texts: Mapping[Replica, str]) -> Families:
        """See `ServingProcess`. Adds metrics about the replicas themselves."""
        for replica in self.replicas:
            if replica in texts:
                self._metrics.update(replica, texts[replica])
        return self._metrics.families() | families_of(self._own_metrics())

    def _own_metrics(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("mlx_paged:replica_up", "1: it takes requests.", labels=["replica"])
        load = GaugeMetricFamily(
            "mlx_paged:replica_requests", "Requests in flight on a replica.", labels=["replica"]
        )
        restarts = CounterMetricFamily(
            "mlx_paged:replica_restarts", "Times that a replica was restarted.", labels=["replica"]
        )
        placed = CounterMetricFamily(
            "mlx_paged:replica_placements", "Requests, by the rule that chose their replica.",
            labels=["reason"],
        )  # fmt: skip
        for slot in self._slots:
            labels, replica = [str(slot.number)], slot.replica
            up.add_metric(labels, replica is not None)
            load.add_metric(labels, 0 if replica is None else replica.num_requests)
            restarts.add_metric(labels, slot.num_restarts)
        for reason in Reason:
            placed.add_metric([reason.value], self._placement.counts[reason])
        return up, load, restarts, placed

    async def loaded(self) -> LoadedModel:
        """See `ServingProcess`."""
        waiting = [slot.loaded for slot in self._slots]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        for slot in self._slots:
            if slot.loaded.done() and slot.loaded.exception() is not None:
                raise ProcessFailedError(f"replica {slot.number}: {slot.failure}")
        reports = [loaded.result() for loaded in waiting]
        sizes = [report.memory for report in reports]
        memory = max(sizes) if self._spec.has_own_devices else sum(sizes)
        return replace(reports[0], memory=memory)

    async def ended(self) -> str:
        """See `ServingProcess`. Returns only after `stop`."""
        return await asyncio.shield(self._ended)

    async def stop(self, drain_timeout: float) -> None:
        """See `ServingProcess`."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        running = [slot.process for slot in self._slots if slot.process is not None]
        await asyncio.gather(*(process.stop(drain_timeout) for process in running))
        if not self._ended.done():
            self._ended.set_result("it was stopped")

    def kill(self) -> None:
        """See `ServingProcess`."""
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()

    async def _keep(self, slot: _Slot) -> None:
        """Runs a replica, and restarts it whenever it ends."""
        delay = _FIRST_DELAY
        while True:
            began = time.monotonic()
            await self._run(slot)
            if not slot.loaded.done():
                slot.loaded.set_exception(ProcessFailedError(slot.failure))
            if slot.loaded.exception() is not None:
                return  # A model that never loaded would not load the next time either.
            if time.monotonic() - began >= _STABLE:
                delay = _FIRST_DELAY
            logger.error(
                "replica %d of the model %s failed: %s; it restarts in %g s",
                slot.number, self._spec.name, slot.failure, delay,
            )  # fmt: skip
            slot.next_start = time.monotonic() + delay
            await asyncio.sleep(delay)
            slot.next_start = None
            slot.num_restarts += 1
            delay = min(2 * delay, _MAX_DELAY)

    async def _run(self, slot: _Slot) -> None:
        """Runs one process of a replica until it has ended."""
        try:
            process = slot.process = await self._start(slot.number)
            report = await process.loaded()
        except (ProcessFailedError, OSError) as failure:
            slot.failure = f"it could not be loaded: {failure}"
        else:
            [running] = process.replicas
            slot.replica = running
            running.number = slot.number
            if not slot.loaded.done():
                slot.loaded.set_result(report)
            else:
                logger.info("replica %d of the model %s is back", slot.number, self._spec.name)
            slot.failure = f"its process has ended ({await process.ended()})"
            slot.replica = None
            self._metrics.end(running)
        if slot.process is not None:
            await slot.process.stop(0.0)  # Removes the socket of a dead process.


async def _has(replica: Replica, response_id: str) -> bool:
    """Asks a replica whether it has a stored response."""
    target = f"/v1/responses/{quote(response_id, safe='')}/input_items?limit=1"
    headers = [(b"host", b"localhost"), (BACKGROUND, b"1")]  # not logged
    upstream = None
    with suppress(TimeoutError, UpstreamError):
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT):
                upstream = await Upstream.send(replica.socket, "GET", target, headers, b"")
                return upstream.status == 200
        finally:
            if upstream is not None:
                upstream.close()
    return False
