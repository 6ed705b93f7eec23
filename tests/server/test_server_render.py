"""vLLM's further paths: prompts in terms of the model, and requests that another one ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.server_helpers import RunningServer, running, validate

from mlx_paged.server.config import ServerConfig
from mlx_paged.server.render import GenerateRequest

ASK = [{"role": "user", "content": "Return the n-th prime"}]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(ServerConfig(("demo",)), max_model_len=512) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


# --- Render ---------------------------------------------------------------------------------------


def test_a_chat_is_rendered_as_it_is_answered(client) -> None:
    options = {"temperature": 0, "max_tokens": 12, "seed": 3, "stop": ["zzz"], "min_tokens": 2}
    rendered = client.post(f"{CHAT}/render", json={"messages": ASK, **options}).json()
    validate(GenerateRequest, rendered)
    answer = client.post(CHAT, json={"messages": ASK, **options, "return_token_ids": True}).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"] and rendered["features"] is None
    params = rendered["sampling_params"]
    assert {name: params[name] for name in options} == options
    again = {"prompt": rendered["token_ids"], **options}
    [choice] = client.post(PLAIN, json=again).json()["choices"]
    assert choice["text"] == answer["choices"][0]["message"]["content"]


def test_without_a_limit_the_rest_of_the_context_is_the_limit(client) -> None:
    schema = {"type": "object", "properties": {}}
    structured = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {
        "messages": ASK, "response_format": structured, "stream": True, "model": "demo",
        "stream_options": {"include_usage": True}, "cache_salt": "s", "request_id": "mine",
    }  # fmt: skip
    rendered = client.post(f"{CHAT}/render", json=body).json()
    params = rendered["sampling_params"]
    assert params["max_tokens"] + len(rendered["token_ids"]) == 512
    assert params["structured_outputs"]["json"] == schema
    assert (rendered["stream"], rendered["cache_salt"]) == (True, "s")
    assert rendered["stream_options"] == {"include_usage": True}
    assert rendered["request_id"] == "chatcmpl-mine" and rendered["model"] == "demo"


def test_prompts_of_completions_are_a_list(client) -> None:
    texts = ["def a(", "class B:"]
    rendered = client.post(f"{PLAIN}/render", json={"prompt": texts, "n": 2}).json()
    for one, text in zip(rendered, texts, strict=True):
        validate(GenerateRequest, one)
        assert one["token_ids"] == client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert (one["sampling_params"]["n"], one["sampling_params"]["max_tokens"]) == (2, 16)
    assert rendered[0]["request_id"] != rendered[1]["request_id"]
    [cut] = client.post(
        f"{PLAIN}/render", json={"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2}
    ).json()
    assert cut["token_ids"] == [7, 8]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": ASK, "temperature": -1}, "temperature"),
        (CHAT, {"messages": ASK, "audio": {}}, "audio"),
        (CHAT, {"messages": ASK, "max_tokens": 600}, "max_tokens"),
        (PLAIN, {"prompt": [5] * 600}, "prompt"),
        (PLAIN, {"prompt": [1 << 20]}, "prompt"),
    ],
)
def test_what_is_not_answered_is_not_rendered(client, path, body, param) -> None:
    error = client.post(f"{path}/render", json=body)
    answer = client.post(path, json=body)
    assert error.status_code == 400 and error.json()["error"]["param"] == param, error.text
    assert error.json() == answer.json()


# --- Abort ----------------------------------------------------------------------------------------

LONG = {"max_tokens": 480, "ignore_eos": True}


def begun(server: RunningServer, path: str, request_id: str, **body: Any) -> Any:
    """A request that runs; returns what waits for its answer."""
    answers: list[httpx.Response] = []
    headers = {"X-Request-Id": request_id}

    def ask() -> None:
        answers.append(httpx.post(server.url + path, json=body, headers=headers, timeout=300))

    thread = threading.Thread(target=ask)
    thread.start()
    server.until(lambda: any(w.trace.request_id == request_id for w in server.context.underway))

    def answer() -> httpx.Response:
        thread.join()
        return answers[0]

    return answer


@pytest.mark.parametrize("given", ["one", "chatcmpl-one"])
def test_a_request_is_ended_by_its_id(server, client, given) -> None:
    answer = begun(server, CHAT, "one", messages=ASK, n=3, **LONG)
    other = begun(server, PLAIN, "other", prompt="x", max_tokens=300, ignore_eos=True)
    asked = {"request_ids": [given, "unknown", "chatcmpl-unknown"]}
    assert client.post("/abort_requests", json=asked).json() == {"aborted": [given]}
    found = answer()
    assert found.status_code == 499 and found.json()["error"]["code"] == "aborted"
    assert found.headers["x-should-retry"] == "false"
    assert other().status_code == 200
    assert not server.context.underway
    server.wait_idle()
    assert client.post("/abort_requests", json=asked).json() == {"aborted": []}


def test_a_request_is_ended_while_the_engine_takes_it(server, client, monkeypatch) -> None:
    submit, is_ended = server.engine.submit, threading.Event()

    async def slow(request: Any) -> Any:
        stream = await submit(request)
        while not is_ended.is_set():
            await asyncio.sleep(0.001)
        return stream

    monkeypatch.setattr(server.engine, "submit", slow)
    answer = begun(server, PLAIN, "early", prompt="x", **LONG)
    asked = {"request_ids": ["early"]}
    assert client.post("/abort_requests", json=asked).json() == {"aborted": ["early"]}
    is_ended.set()
    assert answer().status_code == 499
    server.wait_idle()


def test_a_stream_ends_with_the_error(server, client) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = sdk.completions.create(
        model="demo", prompt="x", stream=True, max_tokens=480, extra_body={"ignore_eos": True}
    )
    first = next(stream)
    client.post("/abort_requests", json={"request_ids": [first.id]})
    with pytest.raises(openai.APIError, match="aborted"):
        for _ in stream:
            pass
    server.wait_idle()


def test_wrong_ids_are_refused(client) -> None:
    for body in ({}, {"request_ids": "x"}, {"request_ids": [1]}):
        error = client.post("/abort_requests", json=body)
        assert error.status_code == 400
        assert error.json()["error"]["param"].startswith("request_ids")


def test_texts_are_ended_too() -> None:
    with running(runner="pooling", max_num_seqs=1) as server:
        answer = begun(server, "/v1/embeddings", "mine", input=["word " * 900] * 500)
        assert httpx.post(
            f"{server.url}/abort_requests", json={"request_ids": ["embd-mine"]}
        ).json() == {"aborted": ["embd-mine"]}
        assert answer().status_code == 499
        server.wait_idle()
        assert not server.context.underway
