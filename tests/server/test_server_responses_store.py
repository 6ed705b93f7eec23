"""Conversations that the server keeps for the Responses API: its store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter
from pydantic_core import to_json
from support.responses_helpers import (
    CRM,
    MODEL,
    PATH,
    WEATHER,
    ask,
    call,
    refused,
    stream,
    text_of,
)
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running, validate

from mlx_paged.server.config import ServerConfig
from mlx_paged.server.responses_api import answers
from mlx_paged.server.responses_api.store import ResponseStore


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(tool_template=True)
    options: dict[str, Any] = {**ENGINE, "max_model_len": 2048}
    with running(config, lambda: ScriptedEngine.from_model(**options)) as server:
        yield server


@pytest.fixture
def engine(server: RunningServer) -> ScriptedEngine:
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


@pytest.fixture
def store(server: RunningServer) -> Iterator[ResponseStore]:
    """A store of its own, with room for four responses."""
    before = server.context.models.default.response_store
    server.context.models.default.response_store = ResponseStore(4, 1 << 20)
    yield server.context.models.default.response_store
    server.context.models.default.response_store = before


# Conversations.


def test_a_conversation_by_previous_response_id(sdk, engine) -> None:
    engine.says(call("get_weather", city="Oslo"), "Rain.", "Bye.")
    first = sdk.responses.create(
        model=MODEL, input="Oslo?", tools=[WEATHER], instructions="Instructed."
    )
    [item] = first.output
    output: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "wet"}
    second = sdk.responses.create(
        model=MODEL, previous_response_id=first.id, input=[output], tools=[WEATHER]
    )
    assert second.output_text == "Rain." and second.previous_response_id == first.id
    prompt = engine.prompts[-1]
    assert "Instructed." not in prompt  # (they are not carried over)
    for text in ("Oslo?", '"arguments": {"city": "Oslo"}', "<tool_response>\nwet"):
        assert text in prompt
    third = sdk.responses.create(model=MODEL, previous_response_id=second.id, input="thanks")
    assert engine.prompts[-1].index("Rain.") < engine.prompts[-1].index("thanks")
    assert third.output_text == "Bye."
    items = sdk.responses.input_items.list(third.id, order="asc", limit=2)
    told = [item.to_dict() for item in items]  # (all pages)
    assert [item["type"] for item in told] == [
        "message", "function_call", "function_call_output", "message", "message",
    ]  # fmt: skip
    assert told[1] == item.to_dict()


def test_a_conversation_that_the_client_keeps(client, engine) -> None:
    """As agents do: every item comes back, with `store: false`."""
    engine.says("<think>\nHm.\n</think>\n\nLet me see.\n" + call("crm__count"), "There are 3.")
    parts = [{"type": "input_text", "text": text} for text in ("How many", "customers?")]
    question = {"type": "message", "role": "user", "content": parts}
    asked: dict[str, Any] = {"tools": [CRM], "store": False}
    first = ask(client, input=[question], **asked)
    called = first["output"][-1]
    output = [{"type": "input_text", "text": "three"}]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": output}
    ask(client, input=[question, *first["output"], result], **asked)
    prompt = engine.prompts[-1]
    assert "How many\ncustomers?" in prompt and "<tool_response>\nthree" in prompt
    assert 'Let me see.\n<tool_call>\n{"name": "crm__count", "arguments": {}}' in prompt
    assert client.get(f"{PATH}/{first['id']}").status_code == 404
    error = refused(client, previous_response_id=first["id"])
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"


def test_items_may_be_referred_to(client, engine, store) -> None:
    """The Vercel SDK names stored items by their ids."""
    engine.says("Hello Ada.", "Goodbye.")
    first = ask(client)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    ask(client, input=[reference, {"role": "user", "content": "bye"}])
    assert "Hello Ada." in engine.prompts[-1]
    client.delete(f"{PATH}/{first['id']}")
    error = refused(client, input=[reference])
    assert (error["param"], error["code"]) == ("input[0].id", "item_not_found")


def test_stored_responses(client, sdk, engine, store) -> None:
    engine.says("One.", "Two.")
    first = ask(client, metadata={"a": "b"})
    assert client.get(f"{PATH}/{first['id']}").json() == first
    assert sdk.responses.retrieve(first["id"]).output_text == "One."
    events = stream(client, previous_response_id=first["id"])
    second = events[-1]["response"]
    assert client.get(f"{PATH}/{second['id']}").json() == second
    page = client.get(f"{PATH}/{second['id']}/input_items").json()
    validate(answers.ItemList, page)
    assert [item["role"] for item in page["data"]] == ["user", "assistant", "user"]
    assert page["first_id"] == page["data"][0]["id"] and not page["has_more"]
    for item in page["data"]:
        TypeAdapter[Any](ResponseItem).validate_python(item)
    assert client.delete(f"{PATH}/{first['id']}").json() == {
        "id": first["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    for path in ("", "/input_items"):
        error = client.get(f"{PATH}/{first['id']}{path}")
        assert (error.status_code, error.json()["error"]["code"]) == (404, "not_found")
    assert client.delete(f"{PATH}/{first['id']}").status_code == 404
    # A response that continues a deleted one is whole.
    assert len(client.get(f"{PATH}/{second['id']}/input_items").json()["data"]) == 3
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first["id"])
    sdk.responses.delete(second["id"])
    assert len(store) == 0 and store.num_bytes == 0


def test_pages_of_items(client, engine) -> None:
    engine.says("Yes.")
    given = [{"role": "user", "id": f"msg_{i}", "content": f"{i}"} for i in range(5)]
    path = f"{PATH}/{ask(client, input=given)['id']}/input_items"

    def ids(**query: Any) -> tuple[list[str], bool]:
        page = client.get(path, params=query).json()
        return [item["id"].removeprefix("msg_") for item in page["data"]], page["has_more"]

    assert ids() == (["4", "3", "2", "1", "0"], False)
    assert ids(order="asc", limit=2) == (["0", "1"], True)
    assert ids(order="asc", limit=2, after="msg_1") == (["2", "3"], True)
    assert ids(limit=2, after="msg_2") == (["1", "0"], False)
    assert ids(after="msg_0") == ([], False)
    for query, param in (
        ({"limit": "0"}, "limit"), ({"limit": "101"}, "limit"), ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"), ({"after": "nope"}, "after"), ({"starting": "1"}, "starting"),
        ({"include": "file_search_call.results"}, "include"),
    ):  # fmt: skip
        error = client.get(path, params=query)
        assert (error.status_code, error.json()["error"]["param"]) == (400, param)


def test_the_oldest_are_forgotten(client, engine, store) -> None:
    def is_there(response: dict[str, Any]) -> bool:
        return bool(client.get(f"{PATH}/{response['id']}").status_code == 200)

    engine.says(*"12345678")
    found = [ask(client, previous_response_id=None) for _ in range(4)]
    assert is_there(found[0])  # used: now the second is the oldest
    found.append(ask(client))
    assert [is_there(each) for each in found] == [True, False, True, True, True]
    assert refused(client, previous_response_id=found[1]["id"])["code"]
    assert len(store) == 4


def test_conversations_at_once(server, engine, store) -> None:
    """Each goes on from its own, though the store forgets nearly all responses."""
    server.context.models.default.response_store = ResponseStore(16, 1 << 20)

    def talk(name: int) -> None:
        with server.client() as client:
            said: list[str] = []
            previous = None
            for turn in range(4):
                given = f"I am {name}, turn {turn}."
                structured = {"choice": [f"hello {name} {turn}"]}
                whole = ask(
                    client, input=given, previous_response_id=previous,
                    structured_outputs=structured,
                )  # fmt: skip
                said += [given, text_of(whole)]
                assert text_of(whole) == f"hello {name} {turn}"
                page = client.get(f"{PATH}/{whole['id']}/input_items", params={"order": "asc"})
                told = [item["content"][0]["text"] for item in page.json()["data"]]
                assert told == said[:-1]
                previous = whole["id"]

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(talk, range(12)))
    assert len(server.context.models.default.response_store) == 16


def test_nothing_is_stored_where_there_is_no_room() -> None:
    options: dict[str, Any] = {**ENGINE, "max_model_len": 256}
    with (
        running(ServerConfig(max_stored_responses=0), **options) as server,
        server.client() as client,
    ):
        whole = ask(client, max_output_tokens=1)
        assert whole["store"] is False
        assert client.get(f"{PATH}/{whole['id']}").status_code == 404
        error = refused(client, previous_response_id=whole["id"])
        assert "--max-stored-responses" in error["message"]


# The store alone.


def naive_chain(parents: dict[str, str | None], name: str | None) -> list[str]:
    found = []
    while name is not None:
        found.append(name)
        name = parents[name]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_store_against_a_naive_one(seed) -> None:
    """Random operations: what is there, in which order it goes, and what it all takes."""
    rng = random.Random(seed)
    store = ResponseStore(12, 6000)
    sizes: dict[str, int] = {}  # of what each response added
    parents: dict[str, str | None] = {}
    heads: dict[str, int] = {}  # of those that are there, the least recently used first
    evicted = 0

    def total() -> int:
        live = {each for name in heads for each in naive_chain(parents, name)}
        return sum(heads.values()) + sum(sizes[name] for name in live)

    for step in range(1500):
        name = f"resp_{step}"
        kind = rng.random()
        if kind < 0.55:
            parent = rng.choice([None, *heads])
            segment = None if parent is None else store.segment(parent)
            if parent is not None:
                heads[parent] = heads.pop(parent)
            given = [{"id": f"in_{step}", "text": "x" * rng.randrange(300)}]
            output = [{"id": f"out_{step}", "text": "y" * rng.randrange(300)}]
            response = {"id": name, "output": output, "text": "z" * rng.choice((9, 200, 5000))}
            sizes[name] = len(to_json(given)) + len(to_json(output))
            parents[name] = parent
            head = len(to_json({k: v for k, v in response.items() if k != "output"}))
            fits = head + sum(sizes[n] for n in naive_chain(parents, name)) <= 6000
            assert store.put(response, given, segment) == fits
            if fits:
                heads[name] = head
                while len(heads) > 12 or total() > 6000:
                    heads.pop(next(iter(heads)))
                    evicted += 1
        elif kind < 0.8 and heads:
            used = rng.choice(list(heads))
            heads[used] = heads.pop(used)
            found = store.get(used)
            assert found is not None and found["output"][0]["id"] == f"out_{used[5:]}"
        elif kind < 0.9 and heads:
            gone = rng.choice(list(heads))
            del heads[gone]
            assert store.delete(gone) and not store.delete(gone)
        else:
            assert store.get(name) is None and store.segment(name) is None
        assert list(store._entries) == list(heads)
        assert store.num_bytes == total() <= 6000
        live = {each for n in heads for each in naive_chain(parents, n)}
        assert set(store._by_item) == {f"out_{n[5:]}" for n in live}
    assert evicted > 100


def test_a_conversation_outlives_its_responses() -> None:
    """One that is being answered goes on from what was forgotten meanwhile."""
    store = ResponseStore(1, 10_000)
    assert store.put({"id": "a", "output": [{"id": "o1"}]}, [{"id": "i1"}], None)
    before = store.segment("a")
    assert store.put({"id": "other", "output": []}, [], None)
    assert store.get("a") is None and store.item("o1") is None
    assert store.put({"id": "b", "output": [{"id": "o2"}]}, [{"id": "i2"}], before)
    assert store.item("o1") == {"id": "o1"} and store.item("o2") == {"id": "o2"}
    assert store.delete("b") and store.num_bytes == 0 and store.item("o1") is None


def test_what_is_too_large_is_not_stored() -> None:
    store = ResponseStore(10, 50)
    assert not store.put({"id": "a", "output": [{"id": "x" * 60}]}, [], None)
    assert len(store) == store.num_bytes == 0
