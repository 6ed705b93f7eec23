"""Several models behind one store of files, one budget of tokens, and one WebSocket path."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
import yaml
from support.lazy_module import LazyModule
from support.routers import Router, running_router
from support.server_helpers import until
from support.waiting import TIMEOUT
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from mlx_paged.demo import model_path
from mlx_paged.server import rate_limits
from mlx_paged.server.router.link import ACCOUNT, BACKGROUND
from mlx_paged.server.router.transport import Upstream

anthropic: Any = LazyModule("anthropic")

PLAIN, RESPONSES = "/v1/completions", "/v1/responses"
PROMPT = {"prompt": [5] * 10, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
KEYS = [
    "plain",
    {"key": "limited", "tokens_per_minute": 30},
    {"key": "turns", "requests_per_minute": 2, "tokens_per_minute": 1000},
    {"key": "background", "tokens_per_minute": 40},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("router")


@pytest.fixture(scope="module")
def options(folder: Path) -> tuple[str, ...]:
    (folder / "keys.yaml").write_text(yaml.safe_dump(KEYS))
    return (
        *(f"--model={name}={model_path()}" for name in ("first", "second", "third")),
        *("--files-dir", str(folder / "files"), "--api-key-file", str(folder / "keys.yaml")),
        *("--max-num-seqs", "4", "--max-batch-lines", "6"),
    )


@pytest.fixture(scope="module")
def router(options: tuple[str, ...]) -> Iterator[Router]:
    """Its clients' allowances do not refill."""
    with (
        mock.patch.object(rate_limits, "time", SimpleNamespace(monotonic=lambda: 0.0)),
        running_router(*options) as router,
    ):
        yield router


@pytest.fixture(scope="module")
def sdk(router: Router) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="plain", max_retries=0)


def ask(router: Router, key: str, path: str = PLAIN, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    body = {**PROMPT, **body} if path == PLAIN else body
    return httpx.post(f"{router.url}{path}", headers=headers, json=body, timeout=300)


def unloaded(router: Router, name: str) -> None:
    ask(router, "plain", "/models/unload", model=name)
    until(lambda: state_of(router, name) == "unloaded")


def state_of(router: Router, name: str) -> str:
    headers = {"Authorization": "Bearer plain"}
    found = httpx.get(f"{router.url}/v1/models/{name}", headers=headers).json()
    return str(found["status"]["value"])


# Files and batches.


def line(custom_id: str, model: str | None, **body: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    body = {**PROMPT, **named, **body}
    return {"custom_id": custom_id, "method": "POST", "url": PLAIN, "body": body}


def begun(sdk: openai.OpenAI, lines: list[Any]) -> Any:
    content = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    return sdk.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def ended(sdk: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: sdk.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"))
    return sdk.batches.retrieve(batch_id)


def outputs(sdk: openai.OpenAI, file_id: str) -> dict[str, Any]:
    found = [json.loads(each) for each in sdk.files.content(file_id).text.splitlines()]
    by_id = {each["custom_id"]: each["response"] for each in found}
    assert len(by_id) == len(found), "a line was answered twice"
    return by_id


def test_lines_of_a_batch_go_to_the_models_that_they_name(
    router: Router, sdk: openai.OpenAI
) -> None:
    unloaded(router, "second")
    names = ("first", "second", None)
    lines = [line(f"{name} {i}", name) for i in range(4) for name in names]
    lines.append(line("unknown", "fourth"))
    batch = ended(sdk, begun(sdk, lines).id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (13, 12, 1), sdk.files.content(
        batch.error_file_id
    ).text
    answered = outputs(sdk, batch.output_file_id)
    assert len(answered) == 12 and state_of(router, "second") == "loaded"
    for custom_id, response in answered.items():
        name = custom_id.split()[0]
        assert response["body"]["model"] == ("first" if name == "None" else name)
        assert response["body"]["usage"]["completion_tokens"] == 4
    [refused] = outputs(sdk, batch.error_file_id).values()
    assert refused["status_code"] == 404
    assert refused["body"]["error"]["code"] == "model_not_found"
    assert batch.id in [each.id for each in sdk.batches.list()]
    assert sdk.files.delete(batch.output_file_id).deleted


def test_batches_of_messages_go_to_their_models(router: Router) -> None:
    client = anthropic.Anthropic(base_url=router.url, api_key="plain", max_retries=0)
    chat = {"max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    made = client.messages.batches.create(
        requests=[
            {"custom_id": name, "params": {"model": name, **chat}} for name in ("first", "second")
        ]  # type: ignore[typeddict-item]
    )
    until(lambda: client.messages.batches.retrieve(made.id).processing_status == "ended")
    for each in client.messages.batches.results(made.id):
        assert each.result.type == "succeeded" and each.result.message.model == each.custom_id


def test_a_batch_goes_on_after_a_restart(options: tuple[str, ...], folder: Path) -> None:
    """A router stops with lines in flight and others not begun; the next one answers the rest."""
    own = folder / "restarted"
    options = (*options, "--files-dir", str(own))
    lines = [
        line(str(i), name, prompt=[5 + i] * 3, max_tokens=60 if i > 3 else 2)
        for i, name in enumerate(["first", "second"] * 12)
    ]
    with running_router(*options) as router:
        sdk = openai.OpenAI(base_url=f"{router.url}/v1", api_key="plain")
        batch_id = begun(sdk, lines).id
        until(lambda: sdk.batches.retrieve(batch_id).request_counts.completed >= 3)
    with running_router(*options) as router:
        sdk = openai.OpenAI(base_url=f"{router.url}/v1", api_key="plain")
        before = sdk.batches.retrieve(batch_id)
        assert before.status == "in_progress" and before.request_counts.completed >= 3
        batch = ended(sdk, batch_id)
        assert batch.status == "completed", batch
        found = outputs(sdk, batch.output_file_id)
        assert len(found) == 24 and {each["status_code"] for each in found.values()} == {200}


# Tokens per minute.


def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_tokens_of_all_models_count_for_one_key(router: Router) -> None:
    first = ask(router, "limited", model="first")
    assert first.status_code == 200 and remaining(first) == 30 - 14
    streamed = ask(router, "limited", model="second", stream=True)
    assert streamed.status_code == 200 and "[DONE]" in streamed.text
    third = ask(router, "limited", model="first", max_tokens=1)  # 2 were left.
    assert third.status_code == 200 and remaining(third) == 0
    refused = ask(router, "limited", model="second")
    assert refused.status_code == 429, refused.text
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "30 tokens per minute" in refused.text and int(refused.headers["Retry-After"]) == 20
    assert ask(router, "plain", model="second").status_code == 200


def test_clients_cannot_mark_their_requests_as_the_router_does(router: Router) -> None:
    headers = {"X-Mlx-Paged-Account": "1", "X-Mlx-Paged-Background": "1"}
    headers["Authorization"] = "Bearer plain"
    with mock.patch.object(Upstream, "send", side_effect=Upstream.send) as sent:
        body = {**PROMPT, "model": "first"}
        answer = httpx.post(f"{router.url}{PLAIN}", headers=headers, json=body, timeout=300)
    assert answer.status_code == 200
    names = [name for name, _ in sent.call_args.args[3]]
    assert names.count(ACCOUNT) == 1 and BACKGROUND not in names


def test_a_background_response_is_counted_while_it_runs(router: Router) -> None:
    body = {"model": "first", "input": "hi", "background": True, "max_output_tokens": 30}
    made = ask(router, "background", RESPONSES, ignore_eos=True, **body)
    assert made.status_code == 200, made.text
    until(lambda: ask(router, "background", model="first", max_tokens=1).status_code == 429)


# The WebSocket.


def opened(router: Router, key: str = "plain", **options: Any) -> ClientConnection:
    url = router.url.replace("http", "ws") + RESPONSES
    headers = {"Authorization": f"Bearer {key}"}
    return connect(url, additional_headers=headers, open_timeout=TIMEOUT, **options)


def turn(connection: ClientConnection, **body: Any) -> dict[str, Any]:
    """Sends a message; returns the last event."""
    given = {"type": "response.create", "input": "hello", "max_output_tokens": 4, **body}
    connection.send(json.dumps(given))
    while True:
        event: dict[str, Any] = json.loads(connection.recv(300))
        if event["type"] in ("response.completed", "response.incomplete", "error"):
            return event


def test_the_sdk_takes_turns_with_a_model_over_a_websocket(
    router: Router, sdk: openai.OpenAI
) -> None:
    unloaded(router, "second")
    with sdk.responses.connect() as connection:
        previous = None
        for _ in range(2):
            connection.response.create(
                model="second", input="hello", max_output_tokens=4, previous_response_id=previous
            )
            events = []
            for event in connection:
                events.append(event)
                if event.type in ("response.completed", "response.incomplete"):
                    break
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[-1].response.model == "second"
            previous = events[-1].response.id


def test_a_websocket_keeps_its_model_loaded_and_takes_no_other(router: Router) -> None:
    with opened(router) as connection:
        for model in (7, "fourth"):  # Nothing is connected yet, so the client may try again.
            error = turn(connection, model=model)
            assert error["error"]["param"] == "model", error
        assert turn(connection, model="second")["response"]["model"] == "second"
        error = turn(connection, model="first")
        assert error["status"] == 400 and "this connection uses" in error["error"]["message"]
        connection.send(b"bytes")
        assert "messages must be text" in connection.recv(60)
        ask(router, "plain", "/models/unload", model="second")
        assert turn(connection, model="second")["type"] == "response.incomplete"
        assert state_of(router, "second") == "loaded"
    until(lambda: state_of(router, "second") == "unloaded")


def test_turns_of_a_websocket_count_as_requests_and_tokens(router: Router) -> None:
    with opened(router, "turns") as connection:
        for _ in range(2):
            assert turn(connection, model="first")["type"] == "response.incomplete"
        refused = turn(connection, model="first")
        assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
    answer = ask(router, "turns", model="first")
    assert answer.status_code == 429 and remaining(answer) < 990


def test_a_websocket_ends_with_its_client_and_with_its_server() -> None:
    models = [f"--model={name}={model_path()}" for name in ("first", "second")]
    with contextlib.ExitStack() as connections:
        with running_router(*models) as router:
            first, idle, unused = (connections.enter_context(opened(router)) for _ in range(3))
            given = {"type": "response.create", "model": "first", "input": "x", "ignore_eos": True}
            first.send(json.dumps({**given, "max_output_tokens": 3000}))
            first.recv(60)
            first.close()
            info = f"{router.url}/server_info?model=first"
            until(lambda: httpx.get(info).json()["stats"]["num_running"] == 0)
            assert turn(idle, model="first")["type"] == "response.incomplete"
        for connection in (idle, unused):
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(60)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
