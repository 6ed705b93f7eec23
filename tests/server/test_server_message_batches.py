"""Batches of Anthropic's API, with its SDK."""

from __future__ import annotations

import functools
import io
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.lazy_module import LazyModule
from support.server_helpers import RunningServer, running, until, validate

from mlx_paged.server.batches.manager import Results
from mlx_paged.server.batches.messages import MessageBatch, MessageBatchList, _results
from mlx_paged.server.batches.splitter import RequestSplitter
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError

anthropic: Any = LazyModule("anthropic")

LIMIT = 8 << 20  # bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    config = ServerConfig(("demo",), files_dir=str(folder), api_keys=("key",), max_file_size=LIMIT)
    with running(config, max_num_seqs=4) as server:
        yield server


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0)


def message(custom_id: str, **params: Any) -> Any:
    messages = [{"role": "user", "content": f"Return {custom_id}"}]
    params = {"model": "demo", "max_tokens": 3, "messages": messages, **params}
    return {"custom_id": custom_id, "params": params}


def ended(sdk: anthropic.Anthropic, batch_id: str) -> Any:
    until(lambda: sdk.messages.batches.retrieve(batch_id).processing_status == "ended")
    return sdk.messages.batches.retrieve(batch_id)


def test_the_sdk_runs_a_batch(sdk, folder) -> None:
    batches = sdk.messages.batches
    requests = [message(f"m{i}") for i in range(6)] + [message("wrong", temperature=-1)]
    batch = batches.create(requests=requests)
    assert batch.processing_status == "in_progress" and batch.results_url is None
    assert batch.request_counts.processing == 7
    with pytest.raises(anthropic.BadRequestError, match="has not ended"):
        batches.delete(batch.id)
    batch = ended(sdk, batch.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 6, 1)
    assert batch.results_url.endswith(f"/v1/messages/batches/{batch.id}/results")
    results = {each.custom_id: each.result for each in batches.results(batch.id)}
    assert results.keys() == {each["custom_id"] for each in requests}
    wrong = results.pop("wrong")
    assert wrong.type == "errored" and wrong.error.error.type == "invalid_request_error"
    assert "temperature" in wrong.error.error.message
    for result in results.values():
        assert result.type == "succeeded" and result.message.usage.output_tokens == 3
    with pytest.raises(anthropic.BadRequestError, match="has ended"):
        batches.cancel(batch.id)
    # It is no batch, and its results are no files, of OpenAI's API.
    headers = {"x-api-key": "key"}
    for path in ("files", "batches"):
        url = str(sdk.base_url).rstrip("/") + f"/v1/{path}"
        assert httpx.get(url, headers=headers).json()["data"] == []
    assert batches.delete(batch.id).type == "message_batch_deleted"
    assert not list(folder.rglob(f"{batch.id}*"))
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(batch.id)


LIST = [{}, {"a": [1, {"b": ']}\\"{['}]}, {"requests": [{}]}, {"c": "\u00e9\n\\"}]


@pytest.mark.parametrize("dumps", [json.dumps, functools.partial(json.dumps, indent=2)])
def test_entries_are_found_wherever_a_body_is_cut(dumps) -> None:
    content = dumps({"a": "requests", "requests": LIST, "b": {"requests": [7]}}).encode()
    for size in range(1, 40):
        splitter = RequestSplitter(1000)
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        found = [entry for piece in pieces for entry in splitter.feed(piece)]
        assert [json.loads(entry) for entry in found] == LIST
        rest = json.loads(splitter.rest)
        assert rest == {"a": "requests", "requests": [], "b": {"requests": [7]}}


@pytest.mark.parametrize(
    "content",
    [
        b'{"requests": [1]}', b'{"requests": ["x"]}', b'{"requests": [{} {}]}',
        b'{"requests": [{},,{}]}', b'{"requests": [,{}]}', b'{"requests": [{},]}',
        b'{"requests": [[]]}', b'{"requests": [], "requests": []}', b'{"requests": [{"a": "%s"}]}',
        b'{"x": "%s%s"}',
    ],
)  # fmt: skip
def test_bodies_of_another_form_are_refused(content) -> None:
    splitter = RequestSplitter(1000)
    with pytest.raises(ApiError) as error:
        list(splitter.feed(content.replace(b"%s", b"x" * 40_000)))
    assert error.value.status == 400


def test_a_large_body_is_taken_and_a_larger_one_is_not(sdk, server, folder) -> None:
    many = [
        message(f"m{i}", messages=[{"role": "user", "content": "x" * 400}]) for i in range(9000)
    ]
    batch = sdk.messages.batches.create(requests=many)
    assert batch.request_counts.processing == 9000
    sdk.messages.batches.cancel(batch.id)
    ended(sdk, batch.id)
    sdk.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.APIStatusError, match=f"{LIMIT} bytes") as error:
        sdk.messages.batches.create(requests=[message("m", system="x" * LIMIT)])
    assert error.value.status_code == 413
    assert not [*folder.rglob("*.part"), *folder.rglob("*.input")]


def test_a_batch_is_canceled(sdk, server) -> None:
    batches = sdk.messages.batches
    long = [message(f"m{i}", max_tokens=400) for i in range(40)]
    batch = batches.create(requests=long)
    until(lambda: server.stats().num_running == 4)
    assert batches.cancel(batch.id).processing_status in ("canceling", "ended")
    batch = ended(sdk, batch.id)
    assert batch.cancel_initiated_at <= batch.ended_at
    counts = batch.request_counts
    assert counts.canceled > 0 and counts.succeeded + counts.canceled == 40
    kinds = [each.result.type for each in batches.results(batch.id)]
    assert kinds.count("canceled") == counts.canceled and len(kinds) == 40


def test_a_batch_that_failed_has_a_result_for_each_message() -> None:
    """Its last output line may be torn."""
    error = {"code": "batch_cancelled", "message": "a test"}
    output = json.dumps({"custom_id": "a", "response": None, "error": error}).encode()
    lines = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'
    opened = Results([io.BytesIO(output + b"\n" + output[:20])], io.BytesIO(lines))
    found = [json.loads(each) for each in _results(opened)]
    kinds = [(each["custom_id"], each["result"]["type"]) for each in found]
    assert kinds == [("a", "canceled"), ("b", "errored")]


def test_results_are_closed_when_their_reader_has_gone(sdk, server, monkeypatch) -> None:
    closed, batches = [], sdk.messages.batches
    monkeypatch.setattr(Results, "close", lambda self: closed.append(self))
    batch = ended(sdk, batches.create(requests=[message("a")]).id)
    path = f"/v1/messages/batches/{batch.id}/results"
    with socket.create_connection(("127.0.0.1", server.port)) as reader:
        reader.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: key\r\n\r\n".encode())
    until(lambda: closed)


def test_batches_come_in_pages(sdk, server) -> None:
    batches = sdk.messages.batches
    ids = [batches.create(requests=[message("m")]).id for _ in range(3)][::-1]
    for batch_id in ids:
        ended(sdk, batch_id)
    first = batches.list(limit=2)
    assert [each.id for each in first.data] == ids[:2] and first.has_more
    assert [each.id for each in batches.list(after_id=ids[0], limit=2).data] == ids[1:]
    assert [each.id for each in batches.list(before_id=ids[2], limit=1).data] == ids[1:2]
    assert [each.id for each in batches.list(limit=2)][:3] == ids
    headers = {"x-api-key": "key"}
    answer = httpx.get(f"{server.url}/v1/messages/batches", headers=headers).json()
    validate(MessageBatchList, answer)
    validate(MessageBatch, answer["data"][0])


@pytest.mark.parametrize(
    ("requests", "told"),
    [
        ([], "requests must be a list that is not empty"),
        ([message("a"), 7], "requests.1 must be an object"),
        ([message("a"), {"custom_id": "b"}], "requests.1.params: field required"),
        ([message("a", x=[[]] * 70_000)], "requests.0: x is too much"),
        ([message("a"), message("a")], "requests.1.custom_id 'a' must be given once"),
        ([message("a b")], "requests.0.custom_id"),
        ([message("a"), message("b", stream=True)], "requests.1.params.stream must be false"),
    ],
)
def test_a_wrong_batch_is_refused_by_the_field(sdk, requests, told) -> None:
    with pytest.raises(anthropic.BadRequestError, match=re.escape(told)):
        sdk.messages.batches.create(requests=requests)
