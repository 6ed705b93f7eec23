"""Limits of what a key may use in a minute. The clock is the test's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import yaml
from support.server_helpers import RunningServer, running
from websockets.sync.client import connect

from mlx_paged.errors import InvalidParameterError
from mlx_paged.server import rate_limits
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.rate_limits import Limits, keys_of

BODY = {"prompt": [5] * 10, "max_tokens": 4, "ignore_eos": True}
KEYS = [
    "plain",
    {"key": "some", "requests_per_minute": 6, "tokens_per_minute": 30},
    {"key": "any", "requests_per_minute": None, "tokens_per_minute": None},
]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    clock, patch = Clock(), pytest.MonkeyPatch()
    patch.setattr(rate_limits, "time", SimpleNamespace(monotonic=clock.monotonic))
    yield clock
    patch.undo()


@pytest.fixture(scope="module")
def server(clock, tmp_path_factory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(yaml.safe_dump(KEYS))
    config = ServerConfig(api_keys=("one",), api_key_file=str(path), requests_per_minute=2)
    with running(config) as server:
        yield server


def ask(server: RunningServer, key: str, path: str = "/v1/completions", **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    body = {**BODY, **body}
    return httpx.post(f"{server.url}{path}", headers=headers, json=body, timeout=300)


def limits_of(answer: httpx.Response) -> dict[str, str]:
    head = "x-ratelimit-"
    return {k.removeprefix(head): v for k, v in answer.headers.items() if k.startswith(head)}


def test_requests_beyond_the_limit_of_a_key_wait(server, clock) -> None:
    clock.now += 60
    first, second, third = (ask(server, "one") for _ in range(3))
    assert (first.status_code, second.status_code) == (200, 200)
    assert limits_of(first) == {
        "limit-requests": "2", "remaining-requests": "1", "reset-requests": "30s",
    }  # fmt: skip
    assert limits_of(second)["reset-requests"] == "1m0s"
    error = third.json()["error"]
    assert (third.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert error["type"] == "rate_limit_error" and "2 requests per minute" in error["message"]
    assert third.headers["Retry-After"] == "30" and third.headers["X-Request-Id"]
    assert limits_of(third)["remaining-requests"] == "0"
    assert ask(server, "plain").status_code == 200  # another key has its own
    clock.now += 29.5
    assert ask(server, "one").headers["Retry-After"] == "1"
    clock.now += 0.5
    assert ask(server, "one").status_code == 200
    assert ask(server, "one").status_code == 429
    # Other paths are not limited, nor do they use anything.
    headers = {"Authorization": "Bearer one"}
    for _ in range(5):
        answer = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert answer.status_code == 200 and not limits_of(answer)
    # The form is the API's own.
    message = ask(server, "one", "/v1/messages").json()
    assert message["type"] == "error" and message["error"]["type"] == "rate_limit_error"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client,
        pytest.raises(openai.RateLimitError),
    ):
        client.completions.create(model="mlx-paged-demo", prompt="x")


def test_tokens_are_counted_as_they_are_used(server, clock) -> None:
    clock.now += 60
    answer = ask(server, "some")
    assert answer.status_code == 200 and limits_of(answer)["limit-tokens"] == "30"
    assert limits_of(answer)["remaining-tokens"] == "16"
    # (The next one uses more than that.)
    assert limits_of(ask(server, "some", max_tokens=30))["remaining-requests"] == "4"
    refused = ask(server, "some")
    assert (
        refused.status_code == 429 and "30 tokens per minute" in refused.json()["error"]["message"]
    )
    # 30 - 14 - 40 = -24, and 1 is needed: 25 tokens, and 30 come in a minute.
    assert refused.headers["Retry-After"] == "50"
    assert limits_of(refused)["remaining-tokens"] == "0"
    clock.now += 50
    assert ask(server, "some", stream=True).status_code == 200


def test_keys_may_have_no_limit(server) -> None:
    for _ in range(4):
        answer = ask(server, "any", max_tokens=1)
        assert answer.status_code == 200 and not limits_of(answer)


def test_turns_of_a_websocket_are_requests(server, clock) -> None:
    clock.now += 60
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    message = json.dumps({"type": "response.create", "input": "x", "max_output_tokens": 1})
    with connect(url, additional_headers={"Authorization": "Bearer one"}) as connection:
        last = []
        for _ in range(3):
            connection.send(message)
            while True:
                event = json.loads(connection.recv(60))
                if event["type"] in ("response.incomplete", "response.completed", "error"):
                    break
            last.append(event)
    assert [event["type"] == "error" for event in last] == [False, False, True]
    assert (last[-1]["status"], last[-1]["error"]["code"]) == (429, "rate_limit_exceeded")


def test_without_keys_each_address_has_a_limit(clock) -> None:
    with running(ServerConfig(tokens_per_minute=5)) as server:
        statuses = [ask(server, "none").status_code for _ in range(2)]
        info = httpx.get(f"{server.url}/metrics").text
    assert statuses == [200, 429]
    assert 'mlx_paged:requests_rejected_total{reason="rate_limit"} 1.0' in info


def test_the_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    config = ServerConfig(api_keys=("x",), api_key_file=str(path), tokens_per_minute=9)
    path.write_text(yaml.safe_dump(KEYS))
    assert keys_of(config) == {
        "x": Limits(None, 9), "plain": Limits(None, 9), "some": Limits(6, 30), "any": Limits(),
    }  # fmt: skip
    for text, field in (
        ("{", "api_key_file"), ("", "api_key_file"), ("a: 1", "api_key_file"),
        ("- 5", "entry 0 of api_key_file"), ("- {key: a, limit: 1}", "entry 0 of api_key_file"),
        ("- a\n- {key: b, tokens_per_minute: 0}", "tokens_per_minute in entry 1 of api_key_file"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(InvalidParameterError) as refused:
            keys_of(config)
        assert refused.value.field == field, text
