"""Files and batches over HTTP: with the SDK, through restarts, and beside other requests."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.server_helpers import RunningServer, drained, process, running, until, validate

from mlx_paged.errors import InvalidParameterError
from mlx_paged.server.batches import bodies
from mlx_paged.server.batches.folder import Folder
from mlx_paged.server.batches.uploads import receiving
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
LIMIT = 1 << 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "files"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    config = ServerConfig(
        ("demo",), files_dir=str(folder), max_file_size=LIMIT, max_files_size=4 * LIMIT
    )
    with running(config, max_num_seqs=4, max_num_waiting=4) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def line(custom_id: str, url: str = PLAIN, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"def {custom_id}(", "max_tokens": 2, **body} if url == PLAIN else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def started(sdk: openai.OpenAI, lines: list[Any], url: str = PLAIN, **options: Any) -> Any:
    file = sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return sdk.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", **options
    )  # type: ignore[call-overload]


def ended(sdk: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: sdk.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"))
    return sdk.batches.retrieve(batch_id)


def read(sdk: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of an output file by custom_id; none is there twice."""
    if file_id is None:
        return {}
    lines = [json.loads(each) for each in sdk.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# --- Files ----------------------------------------------------------------------------------------


def test_a_file_is_stored_under_a_name_of_the_server(sdk, client, folder) -> None:
    content = bytes(range(256)) * 200
    file = sdk.files.create(file=("../../a\n/../b.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("b.jsonl", len(content), "batch")
    validate(bodies.FileAnswer, client.get(f"/v1/files/{file.id}").json())
    answer = client.get(f"/v1/files/{file.id}/content")
    assert answer.content == content == sdk.files.content(file.id).read()
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"
    for path in folder.rglob("*"):
        is_folder = path.is_dir()
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if is_folder else 0o600), path
    assert sorted(path.name for path in folder.parent.iterdir()) == ["files"]
    assert sdk.files.delete(file.id).deleted
    assert not list(folder.rglob(f"{file.id}*"))
    for path in (file.id, "..%2F..%2Fetc%2Fpasswd", f"{file.id}/content"):
        refused(client.get(f"/v1/files/{path}"), 404)
    with pytest.raises(openai.NotFoundError):
        sdk.files.delete(file.id)


def test_files_come_in_pages_and_go_when_their_time_is_over(sdk, client, server) -> None:
    kept = {"anchor": "created_at", "seconds": 3600}
    ids = [
        sdk.files.create(file=(f"{i}", b"x"), purpose="batch", expires_after=kept).id
        for i in range(3)
    ]
    page = sdk.files.list(limit=2, order="asc", after=ids[0])
    assert [file.id for file in page.data] == ids[1:] and not page.has_more
    assert {file.id for file in sdk.files.list(limit=1)} >= set(ids)  # (of all pages)
    assert not sdk.files.list(purpose="batch_output", limit=1).data
    validate(bodies.FileList, client.get("/v1/files").json())
    for query in ("limit=0", "limit=x", "order=up", "after=file-1", "color=red"):
        assert refused(client.get(f"/v1/files?{query}"), 400)["param"] == query.partition("=")[0]
    manager = server.context.batches
    assert manager is not None
    now, manager._now = manager._now, lambda: now() + 3601
    try:
        refused(client.get(f"/v1/files/{ids[0]}"), 404)
        assert not {file.id for file in sdk.files.list()} & set(ids)
    finally:
        manager._now = now


FORM = {"purpose": "batch"}
ONE = {"file": ("a", b"x")}


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({}, ONE, "purpose"),
        ({"purpose": "assistants"}, ONE, "purpose"),
        ({**FORM, "color": "red"}, ONE, "color"),
        ({**FORM, "expires_after[seconds]": "3600"}, ONE, "expires_after"),
        ({**FORM, "expires_after[seconds]": "1"}, ONE, "expires_after[seconds]"),
        ({**FORM, "file": "no file"}, {"other": ("a", b"x")}, "file"),
        (FORM, [("file", ("a", b"x")), ("file", ("b", b"x"))], "file"),
    ],
)
def test_a_wrong_form_is_refused_by_the_field(client, folder, fields, files, param) -> None:
    answer = client.post("/v1/files", data=fields, files=files)
    assert refused(answer, 400)["param"] == param
    assert not list(folder.rglob("*.part"))


def test_uploads_have_limits_and_a_type_of_their_own(client, sdk, folder) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        sdk.files.create(file=("a", b"x" * (LIMIT + 1)), purpose="batch")
    assert error.value.status_code == 413 and f"{LIMIT} bytes" in str(error.value)
    kept = []
    with pytest.raises(openai.APIStatusError, match="delete some"):
        while True:
            kept.append(sdk.files.create(file=("a", b"x" * LIMIT), purpose="batch").id)
    assert 1 <= len(kept) <= 4
    for file_id in kept:
        sdk.files.delete(file_id)
    for kind in ("application/json", "text/plain", "multipart/form-data", None):
        headers = {} if kind is None else {"Content-Type": kind}
        error = refused(client.post("/v1/files", content=b"{}", headers=headers), 415)
        assert "multipart/form-data" in error["message"]
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    long = b"--b\r\nX: " + b"x" * 5000 + b"\r\n\r\n\r\n--b--\r\n"
    for content in (b"{}", b"--b\r\n", b'--b\r\nContent-Disposition: form-data; name="file"', long):
        refused(client.post("/v1/files", content=content, headers=form), 400)
    foreign = {"Origin": "http://evil.test"}
    answer = client.post("/v1/files", data=FORM, files=ONE, headers=foreign)
    assert refused(answer, 403)["code"] == "cross_origin"
    assert not list(folder.rglob("*.part"))


def test_uploads_at_the_same_time_share_the_limit_of_all_files(tmp_path) -> None:
    async def upload_two() -> None:
        folder, config = Folder(tmp_path), ServerConfig(max_files_size=10)
        async with receiving(folder, config, "the file") as second:
            async with receiving(folder, config, "the file") as first:
                first.take(b"x" * 8)
                folder.keep(first.upload, "in", "batch", None)
            with pytest.raises(ApiError, match="at most 10 bytes"):
                second.take(b"x" * 8)
            second.take(b"x" * 2)

    asyncio.run(upload_two())


def test_an_upload_that_stands_still_ends(folder, tmp_path) -> None:
    config = ServerConfig(files_dir=str(tmp_path), read_timeout=0.5)
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    )
    with running(config) as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head)
        answer = drained(sock)
    assert b" 408 " in answer and b"too slowly" in answer
    assert not list(tmp_path.rglob("*.part"))


def test_without_a_folder_there_are_no_files() -> None:
    with running(ServerConfig(), wait=False) as server:
        for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
            error = refused(httpx.get(server.url + path), 404)
            assert error["code"] == "files_disabled" and "--files-dir" in error["message"]


def test_one_server_uses_a_folder(server, folder, tmp_path) -> None:
    with pytest.raises(InvalidParameterError, match="no other server uses"):
        Folder(folder)
    (tmp_path / "a").touch()
    with pytest.raises(InvalidParameterError, match="can be written"):
        Folder(tmp_path / "a")


# --- Batches --------------------------------------------------------------------------------------


def test_the_sdk_runs_a_batch(sdk, client) -> None:
    lines = [line(f"f{i}") for i in range(20)]
    lines += [line("wrong", temperature=-1), line("several", prompt=["a", "b"], n=2)]
    batch = started(sdk, lines, metadata={"a": "b"})
    assert batch.status == "validating" and batch.output_file_id is None
    with pytest.raises(openai.BadRequestError, match="still reads"):
        sdk.files.delete(batch.input_file_id)
    batch = ended(sdk, batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (22, 21, 1)
    answers, errors = read(sdk, batch.output_file_id), read(sdk, batch.error_file_id)
    assert answers.keys() == {each["custom_id"] for each in lines} - {"wrong"}
    assert len(answers["several"]["response"]["body"]["choices"]) == 4
    assert answers["f0"]["response"]["body"]["usage"]["completion_tokens"] == 2
    [(name, error)] = errors.items()
    assert name == "wrong" and error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    validate(bodies.BatchAnswer, client.get(f"/v1/batches/{batch.id}").json())
    output = sdk.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        sdk.batches.cancel(batch.id)


def test_a_response_of_a_batch_is_not_stored(sdk) -> None:
    lines = [line("r", "/v1/responses", input="x", max_output_tokens=1)]
    batch = ended(sdk, started(sdk, lines, "/v1/responses").id)
    body = read(sdk, batch.output_file_id)["r"]["response"]["body"]
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(body["id"])
    assert batch.error_file_id is None


def test_a_file_with_a_wrong_line_fails_as_a_whole(sdk) -> None:
    lines = [line("a"), line("a"), line("b", CHAT), {"custom_id": "c"}, {"custom_id": 7}, 7]
    deep = line("d", prompt=[[]])
    for _ in range(120):
        deep["body"]["prompt"] = [deep["body"]["prompt"]]
    batch = ended(sdk, started(sdk, [*lines, deep]).id)
    assert batch.status == "failed" and batch.output_file_id is None
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "duplicate_custom_id"),
        *((i, "invalid_request") for i in (3, 4)),
        (5, "invalid_custom_id"),
        (6, "invalid_json_line"),
        (7, "invalid_request"),
    ]
    assert ended(sdk, started(sdk, []).id).errors.data[0].code == "empty_file"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"endpoint": "/v1/embeddings"}, None),
        ({"input_file_id": "file-1"}, "input_file_id"),
        ({"completion_window": "24"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}},
         "output_expires_after.seconds"),
    ],
)  # fmt: skip
def test_a_wrong_batch_is_refused_by_the_field(client, sdk, body, param) -> None:
    file = sdk.files.create(file=("in", b"x"), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": PLAIN, "completion_window": "24h", **body}
    error = refused(client.post("/v1/batches", json=asked), 400)
    assert error["param"] == param, error
    sdk.files.delete(file.id)


def test_a_batch_does_not_hold_up_others_and_can_be_cancelled(sdk, client, server) -> None:
    long = {"max_tokens": 200, "ignore_eos": True}
    batch = started(sdk, [line(f"f{i}", **long) for i in range(30)])
    until(lambda: server.stats().num_running == 4 and server.stats().num_waiting >= 4)
    # The queue of four is full of lines, and yet takes other requests; they go first.
    body = {"prompt": "import", "max_tokens": 3, "n": 4}
    for _ in range(3):
        assert client.post(PLAIN, json=body).status_code == 200
    assert sdk.batches.retrieve(batch.id).status == "in_progress"
    assert server.stats().num_preemptions > 0
    until(lambda: sdk.batches.retrieve(batch.id).request_counts.completed >= 2)
    assert sdk.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(sdk, batch.id)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    answers, rest = read(sdk, batch.output_file_id), read(sdk, batch.error_file_id)
    assert len(answers) == batch.request_counts.completed >= 2 and len(answers) + len(rest) == 30
    assert {each["error"]["code"] for each in rest.values()} == {"batch_cancelled"}
    assert batch.request_counts.failed == 0
    server.wait_idle()
    every = client.get("/v1/batches", params={"limit": 100}).json()["data"]
    newest = client.get("/v1/batches", params={"limit": 1}).json()
    assert newest["data"][0]["id"] == batch.id and newest["has_more"] == (len(every) > 1)
    assert batch.id in [each.id for each in sdk.batches.list(limit=2)]


def test_a_file_is_read_while_another_client_deletes_it(client) -> None:
    content = jsonl([line(f"r{i}") for i in range(400)])

    def read(file_id: str) -> httpx.Response:
        return client.get(f"/v1/files/{file_id}/content")

    with ThreadPoolExecutor(8) as threads:
        for _ in range(6):
            files = {"file": ("in.jsonl", content)}
            file_id = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
            reading = [threads.submit(read, file_id) for _ in range(8)]
            assert client.delete(f"/v1/files/{file_id}").status_code == 200
            for answer in (each.result() for each in reading):
                assert answer.status_code == 404 or answer.content == content


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_507(sdk, client, monkeypatch, number) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "a test")

    data = {"purpose": "batch"}
    stored = client.post("/v1/files", files={"file": ("in", jsonl([line("a")]))}, data=data)
    file_id = stored.json()["id"]
    batch = {"input_file_id": file_id, "endpoint": PLAIN, "completion_window": "24h"}
    with monkeypatch.context() as patch:
        for name in ("begin_upload", "write_batch", "delete"):
            patch.setattr(Folder, name, refuse)
        answers = [
            client.post("/v1/files", files={"file": ("in", b"x")}, data=data),
            client.post("/v1/batches", json=batch),
            client.delete(f"/v1/files/{file_id}"),
        ]
    assert [answer.status_code for answer in answers] == [507] * 3
    assert client.delete(f"/v1/files/{file_id}").status_code == 200


def test_a_killed_server_goes_on_with_its_batches(tmp_path) -> None:
    options = ("--files-dir", str(tmp_path / "files"), "--max-num-seqs", "4")
    lines = [line(f"f{i}", max_tokens=40, ignore_eos=True, temperature=0) for i in range(24)]

    def client_of(url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def done(sdk: openai.OpenAI) -> Callable[[], int]:
        return lambda: sdk.batches.retrieve(batch.id).request_counts.completed

    with process(*options) as (first, url):
        sdk = client_of(url)
        batch = started(sdk, lines)
        until(lambda: done(sdk)() >= 4)
        reported = done(sdk)()
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert reported < 24
    (tmp_path / f"files/files/{0:032x}.part").touch()
    with process(*options, until="live") as (second, url):
        sdk = client_of(url)
        assert done(sdk)() >= reported  # (before the model is loaded)
        batch = ended(sdk, batch.id)
        assert batch.status == "completed" and batch.request_counts.completed == 24
        assert len(read(sdk, batch.output_file_id)) == 24
        assert not list(tmp_path.rglob("*.part"))
        # SIGTERM leaves the rest for the next start.
        batch = started(sdk, lines)
        until(lambda: done(sdk)() >= 1)
        second.send_signal(signal.SIGTERM)
        assert second.wait() == 0
    [record] = [r for r in Folder(tmp_path / "files").batches() if r["id"] == batch.id]
    assert record["status"] == "in_progress"
