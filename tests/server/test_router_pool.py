"""The pool of a router: loading, waiting, room, idleness, failures. Its processes do nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import TIMEOUT

from mlx_paged.errors import InvalidParameterError
from mlx_paged.server.catalog import ModelState
from mlx_paged.server.errors import ApiError
from mlx_paged.server.router.pool import ModelPool, PooledModel
from mlx_paged.server.router.process import LoadedModel, ProcessFailedError
from mlx_paged.server.router.spec import PROCESS_BYTES, ModelSpec

GIB = 1 << 30
ACTIONS = ("request", "request", "load", "fail", "end", "die", "unload")


class Process:
    """A process whose model is loaded when the test says so."""

    def __init__(self, machine: Machine, spec: ModelSpec) -> None:
        self.socket = Path(f"/nowhere/{spec.name}")
        self.spec = spec
        self.told = asyncio.Event()
        self.failure: str | None = None
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._machine = machine
        if machine.is_quick:
            self.told.set()

    async def loaded(self) -> LoadedModel:
        await self.told.wait()
        if self.failure is not None:
            raise ProcessFailedError(self.failure)
        return LoadedModel(self._machine.memory.get(self.spec.name, GIB), 64)

    async def ended(self) -> str:
        return await asyncio.shield(self.end)

    async def stop(self, drain_timeout: float) -> None:
        await asyncio.sleep(0)
        if not self.end.done():
            self.end.set_result("SIGTERM")
        self._machine.running.discard(self.spec.name)
        self._machine.events.append(f"-{self.spec.name}")

    def kill(self) -> None:
        raise AssertionError("nothing is killed here")


class Machine:
    """Starts processes, and remembers what happened."""

    def __init__(self, *, is_quick: bool = True, **memory: int) -> None:
        self.is_quick = is_quick
        self.memory = memory
        self.processes: dict[str, Process] = {}
        self.running: set[str] = set()
        self.events: list[str] = []

    async def start(self, spec: ModelSpec) -> Process:
        await asyncio.sleep(0)
        assert spec.name not in self.running, "two processes of one model"
        self.events.append(f"+{spec.name}")
        self.running.add(spec.name)
        self.processes[spec.name] = process = Process(self, spec)
        return process

    def pool(
        self, *specs: ModelSpec, budget: float = 2.5, max_waiting: int = 8, patience: float = 0
    ) -> ModelPool:
        return ModelPool(
            specs or tuple(map(model, "abc")),
            self.start,
            budget=int(budget * GIB),
            max_waiting=max_waiting,
            patience=patience,
        )


def model(name: str, path: str | None = None, **fields: Any) -> ModelSpec:
    """A model that is not on this machine."""
    return ModelSpec(name, path or f"nowhere/{name}", **{"kv_bytes": 600 << 20, **fields})


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test on a loop, and ends it if it hangs."""

    def runs() -> None:
        asyncio.run(asyncio.wait_for(test(), TIMEOUT))

    runs.__name__ = test.__name__
    return runs


def test_before_the_first_load_every_process_of_every_copy_counts() -> None:
    names = ModelSpec("one", None), ModelSpec("two", None, num_processes=2)
    one, two = (PooledModel(spec).memory for spec in names)
    assert two - one == PROCESS_BYTES
    copies = ModelSpec("copies", None, num_processes=2, environments=({}, {}))
    assert PooledModel(copies).memory == 2 * two


async def settled() -> None:
    """Lets all tasks run that need not wait for an event."""
    for _ in range(20):
        await asyncio.sleep(0)


async def at_once(work: Coroutine[Any, Any, None]) -> None:
    """Runs work that must not wait for an event."""
    task = asyncio.create_task(work)
    await settled()
    assert task.done(), "it waits"
    task.result()


async def used(pool: ModelPool, name: str) -> None:
    lease = pool.lease(name)
    await lease.ready()
    lease.release()


def states(pool: ModelPool) -> str:
    return " ".join(f"{status.name}:{status.state}" for status in pool.statuses())


@run
async def test_the_least_recently_used_makes_room() -> None:
    machine = Machine()
    pool = machine.pool()
    for name in ("a", "b", "a", "c"):
        await used(pool, name)
    assert machine.events == ["+a", "+b", "-b", "+c"]
    assert states(pool) == "a:loaded b:unloaded c:loaded"
    assert pool.status("a").memory == GIB and pool.status("b").memory is None
    await pool.close(0)
    assert not machine.running


@run
async def test_a_model_in_use_stays_and_the_error_names_the_budget() -> None:
    machine = Machine()
    pool = machine.pool(model("a"), model("b"), model("c"), model("huge", kv_bytes=9 * GIB))
    leases = [pool.lease(name) for name in ("a", "b")]
    for lease in leases:
        await lease.ready()
    with pytest.raises(ApiError) as caught:
        await used(pool, "c")
    error = caught.value
    assert (error.status, error.code) == (503, "memory_budget") and "Retry-After" in error.headers
    for part in ("'c' needs 1.0 GiB", "2.0 of 2.5 GiB (--memory-budget) are in use"):
        assert part in error.message, error.message
    assert "a 1.0 GiB (1 request), b 1.0 GiB (1 request)" in error.message
    with pytest.raises(ApiError) as caught:
        await used(pool, "huge")
    assert (caught.value.status, caught.value.code) == (507, "model_too_large")
    leases[1].release()
    await used(pool, "c")
    assert machine.events == ["+a", "+b", "-b", "+c"]


@run
async def test_a_load_waits_for_the_end_of_a_request() -> None:
    machine = Machine()
    pool = machine.pool(budget=1.5, patience=60)
    lease = pool.lease("a")
    await lease.ready()
    waiting = asyncio.create_task(used(pool, "b"))
    await settled()
    assert machine.events == ["+a"] and not waiting.done()
    second = pool.lease("a")
    lease.release()
    await settled()
    assert machine.events == ["+a"] and not waiting.done(), "another request has come"
    second.release()
    await waiting
    assert machine.events == ["+a", "-a", "+b"]


@run
async def test_a_load_waits_for_another_one_and_lets_a_third_begin() -> None:
    machine = Machine(is_quick=False)
    small = model("small", kv_bytes=0)
    pool = machine.pool(model("a"), model("b"), small, budget=1.5)
    names = ("a", "b", "small")
    using = [asyncio.create_task(used(pool, name)) for name in names]
    await settled()
    assert machine.events == ["+a", "+small"] and not any(task.done() for task in using)
    machine.is_quick = True
    for process in machine.processes.values():
        process.told.set()
    await asyncio.gather(*using)
    assert machine.events[-1] == "+b" and "-a" in machine.events
    await pool.close(0)


@run
async def test_a_load_that_could_never_fit_does_not_wait() -> None:
    specs = model("a", pinned=True), model("b"), model("large", kv_bytes=2 * GIB)
    pool = Machine().pool(*specs, patience=60)
    leases = [pool.lease(name) for name in ("a", "b")]
    for lease in leases:
        await lease.ready()
    with pytest.raises(ApiError, match="in use") as caught:
        await at_once(used(pool, "large"))
    assert caught.value.code == "model_too_large"


@run
async def test_no_model_goes_for_one_whose_path_is_wrong() -> None:
    machine = Machine()
    pool = machine.pool(model("a"), model("wrong", "/nowhere/wrong"), budget=1.5)
    await used(pool, "a")
    with pytest.raises(ApiError, match="there is no such directory") as caught:
        await at_once(used(pool, "wrong"))
    assert caught.value.code == "model_failed"
    assert machine.events == ["+a"] and states(pool) == "a:loaded wrong:failed"


@run
async def test_a_pinned_model_stays() -> None:
    machine = Machine()
    pool = machine.pool(model("a", pinned=True, ttl=0), model("b"), model("c"))
    for name in ("a", "b", "c"):
        await used(pool, name)
    await settled()
    assert machine.events == ["+a", "+b", "-b", "+c"]
    await pool.unload("a")  # unless somebody asks for it
    assert machine.events[-1] == "-a"


@run
async def test_requests_wait_in_a_bounded_queue_and_may_leave_it() -> None:
    machine = Machine(is_quick=False)
    pool = machine.pool(max_waiting=2)
    waiting = [asyncio.create_task(used(pool, "a")) for _ in range(2)]
    await settled()
    with pytest.raises(ApiError) as caught:
        await at_once(used(pool, "a"))
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert caught.value.headers["Retry-After"] and "2 requests wait" in caught.value.message
    waiting[0].cancel()
    await settled()
    waiting.append(asyncio.create_task(used(pool, "a")))
    await settled()
    assert machine.events == ["+a"] and not waiting[2].done()
    machine.processes["a"].told.set()
    await asyncio.gather(*waiting[1:])
    assert states(pool).startswith("a:loaded")


@run
async def test_a_model_that_fails_says_why_and_is_tried_again() -> None:
    machine = Machine(is_quick=False)
    pool = machine.pool()
    waiting = [asyncio.create_task(used(pool, "a")) for _ in range(3)]
    await settled()
    process = machine.processes["a"]
    process.failure = "its files are damaged"
    process.told.set()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, ApiError) and error.status == 503
        assert error.code == "model_failed" and "its files are damaged" in error.message
    status = pool.status("a")
    assert (status.state, status.failure) == (ModelState.FAILED, "its files are damaged")
    assert not machine.running
    machine.is_quick = True
    await used(pool, "a")
    assert pool.status("a").failure is None and states(pool).startswith("a:loaded")


@run
async def test_a_process_that_dies_is_noticed() -> None:
    machine = Machine()
    pool = machine.pool()
    await used(pool, "a")
    machine.processes["a"].end.set_result("SIGKILL")
    await settled()
    assert pool.status("a").failure == "its process has ended (SIGKILL)"
    await used(pool, "a")
    assert machine.events == ["+a", "-a", "+a"]


@run
async def test_idle_models_are_unloaded_in_time() -> None:
    machine = Machine()
    pool = machine.pool(model("a", ttl=1000), model("b"), model("c"))
    await used(pool, "a")
    assert pool.status("a").expires_at is not None
    lease = pool.lease("a", 0)  # as with Ollama's keep_alive: 0
    await lease.ready()
    assert pool.status("a").expires_at is None
    second = pool.lease("a")
    lease.release()
    await settled()
    assert machine.events == ["+a"], "it is in use"
    second.release()
    await settled()
    assert machine.events == ["+a", "-a"]
    await used(pool, "b")
    pool.set_keep_alive("b", 0)
    await settled()
    assert machine.events == ["+a", "-a", "+b", "-b"]


@run
async def test_unloading_waits_for_requests_and_breaks_off_loading() -> None:
    machine = Machine()
    pool = machine.pool()
    lease = pool.lease("a")
    await lease.ready()
    unloading = asyncio.create_task(pool.unload("a"))
    await settled()
    assert machine.running == {"a"}
    lease.release()
    await unloading
    assert not machine.running
    machine.is_quick = False
    lease = pool.lease("b")
    asking = asyncio.create_task(lease.ready())
    await settled()
    asking.cancel()
    await settled()
    lease.release()  # Its only client has left.
    assert pool.status("b").state is ModelState.LOADING
    await pool.unload("b")
    assert pool.status("b").state is ModelState.UNLOADED and not machine.running


@run
async def test_a_model_stays_unloaded_while_its_files_are_removed() -> None:
    machine = Machine()
    pool = machine.pool()
    await used(pool, "a")
    async with pool.unloaded(["a"]):
        asking = asyncio.create_task(used(pool, "a"))
        await settled()
        assert machine.events == ["+a", "-a"] and not asking.done()
    await asking
    assert machine.events == ["+a", "-a", "+a"]


@run
async def test_a_request_during_an_unload_loads_it_again() -> None:
    machine = Machine()
    pool = machine.pool()
    await used(pool, "a")
    unloading = asyncio.create_task(pool.unload("a"))
    await asyncio.sleep(0)
    await asyncio.gather(used(pool, "a"), unloading)
    assert machine.events == ["+a", "-a", "+a"]


@run
async def test_what_a_model_really_takes_makes_others_leave() -> None:
    machine = Machine(b=2 * GIB)
    pool = machine.pool()
    await used(pool, "a")
    lease = pool.lease("b")
    await lease.ready()
    await settled()
    assert machine.events == ["+a", "+b", "-a"]
    lease.release()


@run
async def test_the_end_while_loading() -> None:
    machine = Machine(is_quick=False)
    pool = machine.pool()
    asking = asyncio.create_task(used(pool, "a"))
    just_begun = asyncio.create_task(used(pool, "b"))
    await settled()
    pool.drain()
    pool.drain()
    last = asyncio.create_task(used(pool, "c"))
    for error in await asyncio.gather(asking, just_begun, last, return_exceptions=True):
        assert isinstance(error, ApiError) and error.code == "shutting_down"
    await pool.close(1.0)
    assert not machine.running


def test_names() -> None:
    machine = Machine()
    pool = machine.pool(model("a", aliases=("first",), adapters=("sql",)), model("b"))
    for name, found in ((None, "a"), ("default", "a"), ("first", "a"), ("sql", "a"), ("b", "b")):
        assert pool.find(name).name == found
    assert pool.find("nowhere/b").name == "b"
    with pytest.raises(ApiError, match="a, first, sql, b"):
        pool.find("c")
    for twice in (model("b", aliases=("a",)), model("b", adapters=("first",)), model("default")):
        with pytest.raises(InvalidParameterError, match="model"):
            machine.pool(model("a", aliases=("first",)), twice)


@given(st.data())
def test_random_requests_keep_within_the_budget(data: st.DataObject) -> None:
    """Any requests, ends, unloads and deaths: within the budget, one process a model, none left."""

    async def play() -> None:
        machine = Machine(is_quick=False)
        pool = machine.pool(model("a", pinned=data.draw(st.booleans())), model("b"), model("c"))
        leases: list[tuple[Any, asyncio.Task[Any]]] = []
        others: list[asyncio.Task[Any]] = []
        for _ in range(data.draw(st.integers(1, 25))):
            action = data.draw(st.sampled_from(ACTIONS))
            name = data.draw(st.sampled_from("abc"))
            if action == "request":
                lease = pool.lease(name)
                leases.append((lease, asyncio.create_task(lease.ready())))
            elif action in ("load", "fail") and name in machine.processes:
                machine.processes[name].failure = "no" if action == "fail" else None
                machine.processes[name].told.set()
            elif action == "end" and leases:
                lease, task = leases.pop(data.draw(st.integers(0, len(leases) - 1)))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                lease.release()
            elif action == "die" and name in machine.running:
                end = machine.processes[name].end
                if not end.done():
                    end.set_result("SIGSEGV")
            elif action == "unload":
                others.append(asyncio.create_task(pool.unload(name)))
            for _ in range(data.draw(st.integers(0, 12))):
                await asyncio.sleep(0)
            assert len(machine.running) <= 2, "beyond the budget"
            for lease, task in leases:
                if task.done() and not task.cancelled() and task.exception() is None:
                    ended = machine.processes[lease.model.name].end.done()
                    assert lease.model.is_loaded or ended or lease.model.loading, "unloaded in use"
        pool.drain()
        for lease, task in leases:
            await asyncio.gather(task, return_exceptions=True)
            lease.release()
        await pool.close(0.0)
        await asyncio.gather(*others)
        assert not machine.running

    asyncio.run(asyncio.wait_for(play(), TIMEOUT))
