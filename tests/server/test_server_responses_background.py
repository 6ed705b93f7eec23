"""Responses in the background: states, events from any place on, cancelling, bounds, the end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from support.responses_helpers import (
    EVENT,
    PATH,
    ask,
    check_pieces,
    check_response,
    kinds,
    plain,
    refused,
    text_of,
)
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running
from support.waiting import TIMEOUT

from mlx_paged.engine.client import EngineRequest
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.context import RequestLog
from mlx_paged.server.errors import ApiError
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.metrics import Metrics
from mlx_paged.server.responses_api.background import BackgroundRuns

ENDLESS: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
STORED = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(max_stored_bytes=STORED)
    options: dict[str, Any] = {**ENGINE, "max_model_len": 2048}
    with running(config, lambda: ScriptedEngine.from_model(**options)) as server:
        yield server


@pytest.fixture(autouse=True)
def engine(server: RunningServer) -> ScriptedEngine:
    """Nothing is left to say of a test that failed."""
    assert isinstance(server.engine, ScriptedEngine)
    server.engine.script.clear()
    return server.engine


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class Gate:
    """Holds generations before a piece, or the last one if there are fewer."""

    def __init__(self, before: int) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self._before = before

    def hold(self, pieces: Any) -> Any:
        async def held(generation: Generation) -> AsyncIterator[Piece]:
            place = 0
            async for piece in pieces(generation):
                is_last = piece.finish_reason is not None
                if place == self._before or (is_last and place < self._before):
                    self.reached.set()
                    await asyncio.to_thread(self.opened.wait, 300)
                place += 1
                yield piece

        return held


@pytest.fixture
def gate(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(getattr(request, "param", 0))
    monkeypatch.setattr(Generation, "pieces", gate.hold(Generation.pieces))
    yield gate
    gate.opened.set()


def begin(client: httpx.Client, **body: Any) -> dict[str, Any]:
    found = ask(client, background=True, **body)
    assert found["status"] == "queued" and found["background"] and found["output"] == []
    return found


def get(client: httpx.Client, response_id: str) -> dict[str, Any]:
    answer = client.get(f"{PATH}/{response_id}")
    assert answer.status_code == 200, answer.text
    check_response(answer.json())
    found: dict[str, Any] = answer.json()
    return found


def ended(client: httpx.Client, server: RunningServer, response_id: str) -> dict[str, Any]:
    server.until(lambda: get(client, response_id)["status"] not in ("queued", "in_progress"))
    return get(client, response_id)


def read(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            EVENT.validate_python(event)
            yield event


def events_of(client: httpx.Client, response_id: str, **query: Any) -> list[dict[str, Any]]:
    answer = client.get(f"{PATH}/{response_id}", params={"stream": "true", **query})
    assert answer.status_code == 200, answer.text
    return list(read(iter(answer.text.split("\n"))))


# States.


def test_a_response_is_queued_then_runs_then_is_what_it_would_have_been(
    client, server, sdk, engine, gate
) -> None:
    engine.says("Hello there", "Hello there")
    first = begin(client, metadata={"k": "v"})
    assert gate.reached.wait(300)
    queued = sdk.responses.retrieve(first["id"])
    assert queued.status == "queued" and queued.metadata == {"k": "v"}
    assert client.get("/load").json() == {"server_load": 1}
    items = client.get(f"{PATH}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"] == [{"type": "input_text", "text": "hello"}]
    error = refused(client, previous_response_id=first["id"])
    assert "in progress" in error["message"] and error["param"] == "previous_response_id"
    gate.opened.set()
    found = ended(client, server, first["id"])
    assert found["status"] == "completed" and found["id"] == first["id"]
    whole = ask(client)
    assert plain(found["output"]) == plain(whole["output"])
    assert client.get("/load").json() == {"server_load": 0}
    engine.says("And more")
    assert text_of(ask(client, previous_response_id=first["id"])) == "And more"


@pytest.mark.parametrize("gate", [2], indirect=True)
def test_events_come_again_from_any_place_and_go_on(client, server, sdk, engine, gate) -> None:
    """A client catches up with exactly the events that another one has read."""
    engine.says("one two three four five six")
    with client.stream("POST", PATH, json={"input": "a", "background": True, "stream": True}) as s:
        lines = read(s.iter_lines())
        seen = [next(lines) for _ in range(3)]
        assert gate.reached.wait(300)
        response_id = seen[0]["response"]["id"]
        assert get(client, response_id)["status"] == "in_progress"
    # (The reader has gone; the response goes on.)
    following = sdk.responses.retrieve(response_id, stream=True, starting_after=1)
    after = [next(following)]
    gate.opened.set()
    after += list(following)
    whole = events_of(client, response_id)
    assert [e["sequence_number"] for e in whole] == list(range(len(whole)))
    assert whole[:3] == seen
    assert [e.to_dict() for e in after] == whole[2:]
    assert kinds(whole)[:3] == ["created", "queued", "in_progress"]
    assert kinds(whole)[-1] == "completed"
    check_pieces(whole)
    assert whole[-1]["response"] == get(client, response_id)
    assert events_of(client, response_id, starting_after=4) == whole[5:]
    assert events_of(client, response_id, starting_after=len(whole)) == []
    server.until(lambda: server.num_ended("abort") == 0)


# Cancelling.


def test_a_response_is_cancelled(client, server, sdk) -> None:
    aborted = server.num_ended("abort")
    first = begin(client, **ENDLESS)
    found: list[dict[str, Any]] = []

    def follow() -> None:
        with server.client() as other:
            found.extend(events_of(other, first["id"]))

    reader = threading.Thread(target=follow)
    reader.start()
    server.until(lambda: get(client, first["id"])["status"] == "in_progress")
    cancelled = sdk.responses.cancel(first["id"])
    assert cancelled.status == "cancelled" and cancelled.usage is not None
    reader.join(300)
    check_pieces(found)
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"] == get(client, first["id"])
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"
    assert sdk.responses.cancel(first["id"]) == cancelled  # (once more changes nothing)
    server.until(lambda: server.num_ended("abort") == aborted + 1)
    server.wait_idle()
    error = refused(client, previous_response_id=first["id"])
    assert "cancelled" in error["message"]


def test_a_response_that_is_deleted_ends(client, server) -> None:
    first = begin(client, **ENDLESS)
    assert client.delete(f"{PATH}/{first['id']}").json()["deleted"]
    assert client.get(f"{PATH}/{first['id']}").status_code == 404
    assert server.wait_idle().num_running == 0


def test_a_failure_is_told_to_who_asks(client, server, engine, monkeypatch) -> None:
    ids, submit = [], engine.submit

    async def noted(request: EngineRequest) -> Any:
        ids.append(request.request_id)
        return await submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    first = begin(client, **ENDLESS)
    server.call(engine.abort(ids[0]))
    found = ended(client, server, first["id"])
    assert found["status"] == "failed" and found["error"]["code"] == "server_error"


# Refusals and bounds.


def test_what_is_wrong_is_refused_by_name(client, engine) -> None:
    assert refused(client, background=True, store=False)["param"] == "background"
    engine.says("a")
    whole = ask(client)
    for query, param in (
        ({"stream": "yes"}, "stream"), ({"stream": "true"}, "stream"),
        ({"starting_after": "1"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        ({"include_obfuscation": "true"}, "include_obfuscation"),
    ):  # fmt: skip
        answer = client.get(f"{PATH}/{whole['id']}", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    unknown = client.get(f"{PATH}/resp_x", params={"stream": "true"})
    assert unknown.status_code == 404


def test_an_answer_that_cannot_be_stored_fails(client, server, engine, monkeypatch) -> None:
    """Its client would ask for it for ever."""
    monkeypatch.setattr(server.context.models.default.response_store, "max_bytes", 3000)
    engine.says("word " * 400)
    found = ended(client, server, begin(client)["id"])
    assert found["status"] == "failed" and "--max-stored-bytes" in found["error"]["message"]
    assert refused(client, background=True, input="x" * 8000)["param"] == "input"


class FakeAdapter:
    """A response whose events a test gives."""

    def __init__(self, response_id: str) -> None:
        self.id, self.status = response_id, "in_progress"
        self.generation: Any = self
        self.trace = RequestLog("r", "POST", PATH, "")
        self.closed = 0
        self.given: asyncio.Queue[bytes | None] = asyncio.Queue()

    def close(self) -> None:
        self.closed += 1

    def stopped(self, failure: ApiError | None) -> Iterator[bytes]:
        yield f"stopped {failure.code if failure else 'by the client'}".encode()

    def failed(self, error: ApiError) -> bytes:
        self.status = "failed"
        return f"failed {error.code}".encode()

    async def events(self) -> AsyncIterator[bytes]:
        while (event := await self.given.get()) is not None:
            yield event


def test_logs_are_bounded_and_the_oldest_events_go_first() -> None:
    async def scenario() -> None:
        runs = BackgroundRuns(Metrics(), 3, 100_000, log=False)
        adapters = [FakeAdapter(f"resp_{i}") for i in range(3)]
        made = [runs.start(a, a.events()) for a in adapters]  # type: ignore[arg-type]
        with pytest.raises(ApiError, match="at most 3"):
            runs.check_room()
        for adapter in adapters[:2]:
            for event in (b"x" * 1000, None):
                adapter.given.put_nowait(event)
            while runs.running(adapter.id):
                await asyncio.sleep(0)
        runs.check_room()
        slow = made[2].follow(0)
        for i in range(1000):
            adapters[2].given.put_nowait(b"%04d" % i * 250)
            if i == 1:
                assert await anext(slow) == b"0000" * 250
        adapters[2].given.put_nowait(None)
        while runs.running("resp_2"):
            await asyncio.sleep(0)
            assert runs.num_bytes <= 100_000
        assert runs.num_bytes == sum(run.num_bytes for run in made) > 30_000
        # Logs of others that had ended went before it, then its own beginning.
        assert runs.find("resp_0") is runs.find("resp_1") is None
        assert not made[0].num_bytes and not made[1].num_bytes
        with pytest.raises(ApiError, match="are no longer kept"):
            made[2].check_has(0)
        assert b"events_not_kept" in await anext(slow)  # (it was too slow)
        last = [event async for event in made[2].follow(990)]
        assert last == [b"%04d" % i * 250 for i in range(990, 1000)]
        assert made[2].adapter is None and made[2].num_readers == 1

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


def test_the_end_of_the_server_ends_them() -> None:
    """At once where nobody reads; others go on until the end."""

    async def scenario() -> None:
        runs = BackgroundRuns(Metrics(), 9, 100_000, log=False)
        adapters = [FakeAdapter(f"resp_{i}") for i in range(3)]
        alone = runs.start(adapters[0], adapters[0].events())  # type: ignore[arg-type]
        read = runs.start(adapters[1], adapters[1].events())  # type: ignore[arg-type]
        following = read.follow(0)
        adapters[1].given.put_nowait(b"a")
        assert await anext(following) == b"a"
        runs.drain()
        late = runs.start(adapters[2], adapters[2].events())  # type: ignore[arg-type]
        while runs.running("resp_0") or runs.running("resp_2"):
            await asyncio.sleep(0)
        for run in (alone, late):
            assert [e async for e in run.follow(0)] == [b"stopped shutting_down"]
        adapters[1].given.put_nowait(b"b")
        assert await anext(following) == b"b"
        await runs.close()
        assert [e async for e in following] == [b"stopped shutting_down"]
        assert all(adapter.closed for adapter in adapters)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


@pytest.mark.parametrize("can_report", [True, False])
def test_a_response_ends_even_if_its_last_events_cannot_be_made(caplog, can_report) -> None:
    """It would count as running, hold its prompt, and keep its readers waiting forever."""

    class Faulty(FakeAdapter):
        def stopped(self, failure: ApiError | None) -> Iterator[bytes]:
            raise ValueError("no last events")

        def failed(self, error: ApiError) -> bytes:
            if not can_report:
                raise ValueError("no last event either")
            return super().failed(error)

    async def scenario() -> None:
        metrics = Metrics()
        runs = BackgroundRuns(metrics, 1, 100_000)
        adapter = Faulty("resp_0")
        run = runs.start(adapter, adapter.events())  # type: ignore[arg-type]
        reader = run.follow(0)
        adapter.given.put_nowait(b"a")
        assert await anext(reader) == b"a"
        await runs.close()
        assert [event async for event in reader] == [b"failed internal_error"] * can_report
        assert runs.running("resp_0") is None and runs.find("resp_0") is run
        assert run.has_ended and run.adapter is None and adapter.closed
        assert metrics.server_load == 0

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))
    assert "a background response failed" in caplog.text and "no last events" in caplog.text
