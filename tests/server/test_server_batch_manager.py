"""The life of a batch: its time, a full disk, and a stop at any moment. Answers are scripted."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.waiting import TIMEOUT

from mlx_paged.errors import (
    EngineDeadError,
    InvalidParameterError,
    MemoryPressureError,
    MlxPagedError,
)
from mlx_paged.server.batches.folder import Folder
from mlx_paged.server.batches.in_process import InProcess
from mlx_paged.server.batches.journal import Journal
from mlx_paged.server.batches.lines import BatchRequest, Line, parse
from mlx_paged.server.batches.manager import BatchManager
from mlx_paged.server.batches.records import BatchRecord
from mlx_paged.server.batches.runner import Reply
from mlx_paged.server.errors import ApiError, from_engine, unavailable

URL = "/v1/completions"
Post = Callable[[str, bytes, str], Awaitable[Reply]]


async def echo(url: str, body: bytes, request_id: str) -> Reply:
    await asyncio.sleep(0)
    return Reply(200, request_id, body)


def until(number: int, then: Callable[[], Awaitable[Any]]) -> Post:
    """Answers `number` lines; the next ones do something else first."""
    count = 0

    async def post(url: str, body: bytes, request_id: str) -> Reply:
        nonlocal count
        count += 1
        if count > number:
            await then()
        return await echo(url, body, request_id)

    return post


async def hang() -> None:
    await asyncio.Event().wait()


async def die() -> None:
    raise EngineDeadError("a test")


class Life:
    """Servers one after the other over one folder, with a batch of some lines."""

    def __init__(self, path: Path, num_lines: int = 10) -> None:
        self.path, self.now = path, 1000.0
        folder = Folder(path)
        upload = folder.begin_upload()
        for i in range(num_lines):
            line = {"custom_id": f"r{i}", "method": "POST", "url": URL, "body": {"prompt": "x"}}
            upload.add(json.dumps(line).encode() + b"\n")
        self.file = folder.keep(upload, "in", "batch", None)
        folder.close()
        self.id = ""

    def run(
        self,
        post: Post,
        act: Callable[[BatchManager], Awaitable[Any]],
        batch_id: str = f"batch_{0:032x}",
    ) -> BatchRecord:
        """A server, until something is done; returns the batch as the next one finds it."""

        async def live() -> None:
            manager = BatchManager(Folder(self.path), post, lambda: self.now)
            manager.start(4, 1 << 20)
            if not self.id:
                record = BatchRecord(batch_id, "openai", URL, 1000, 4600, "1h", self.file.id)
                self.id = (await manager.create(record)).id
            try:
                await asyncio.wait_for(act(manager), TIMEOUT)
            finally:
                await manager.close()

        asyncio.run(live())
        folder = Folder(self.path)
        record = BatchManager(folder, echo).get(self.id)
        folder.close()
        assert record is not None
        return record

    def outputs(self, file_id: str | None) -> dict[str, Any]:
        if file_id is None:
            return {}
        content = (self.path / "files" / f"{file_id}.data").read_text().splitlines()
        found = {each["custom_id"]: each for each in map(json.loads, content)}
        assert len(found) == len(content)
        return found

    async def ended(self, manager: BatchManager) -> None:
        while not manager.get(self.id).has_ended:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)

    def answered(self, number: int) -> Callable[[BatchManager], Awaitable[None]]:
        async def wait(manager: BatchManager) -> None:
            while manager.get(self.id).completed < number:  # type: ignore[union-attr]
                await asyncio.sleep(0.001)

        return wait


def test_a_stop_at_any_line_loses_none(tmp_path) -> None:
    life = Life(tmp_path)
    for number in (1, 2, 5):
        record = life.run(until(number, hang), life.answered(number))
        assert record.status == "in_progress" and record.completed >= number
    record = life.run(echo, life.ended)
    assert (record.status, record.completed, record.total) == ("completed", 10, 10)
    assert len(life.outputs(record.output_file_id)) == 10 and record.error_file_id is None


def test_a_dead_engine_leaves_the_rest_for_the_next_start(tmp_path) -> None:
    life = Life(tmp_path)

    async def stopped(manager: BatchManager) -> None:
        while manager._tasks:
            await asyncio.sleep(0.001)

    assert life.run(until(3, die), stopped).status == "in_progress"
    assert life.run(echo, life.ended).completed == 10


def test_a_batch_expires(tmp_path) -> None:
    life = Life(tmp_path)
    record = life.run(until(4, hang), life.answered(4))
    life.now = 4601
    record = life.run(until(0, hang), life.ended)
    assert (record.status, record.completed, record.expired_at) == ("expired", 4, 4601)
    rest = life.outputs(record.error_file_id)
    assert len(life.outputs(record.output_file_id)) == 4 and len(rest) == 6
    assert {each["error"]["code"] for each in rest.values()} == {"batch_expired"}
    assert {each["response"] for each in rest.values()} == {None}


@pytest.mark.parametrize("step", ["_end", "_write_rest", "_publish"])
def test_an_ending_that_is_broken_off_is_done_again(tmp_path, monkeypatch, step) -> None:
    """As if the process ended right before a step of a cancelled batch."""
    life = Life(tmp_path)

    async def cancelled(manager: BatchManager) -> None:
        broken = asyncio.Event()

        def stop(*_: Any) -> Any:
            manager._tasks[life.id].get_loop().call_soon_threadsafe(broken.set)
            raise EngineDeadError("a test")

        with monkeypatch.context() as patch:
            patch.setattr(manager, step, stop)
            await life.answered(3)(manager)
            await manager.cancel(life.id)
            await broken.wait()

    record = life.run(until(3, hang), cancelled)
    assert record.status == "cancelling"
    record = life.run(until(0, die), life.ended)
    assert (record.status, record.completed, record.failed) == ("cancelled", 3, 0)
    assert len(life.outputs(record.output_file_id)) == 3
    assert len(life.outputs(record.error_file_id)) == 7


def test_a_batch_is_cancelled_before_it_runs(tmp_path) -> None:
    life = Life(tmp_path)

    async def cancelled(manager: BatchManager) -> None:
        await manager.cancel(life.id)
        await life.ended(manager)

    async def cancelled_while_it_begins(manager: BatchManager) -> None:
        while manager.get(life.id).in_progress_at is None:  # type: ignore[union-attr]
            await asyncio.sleep(0)
        await cancelled(manager)

    for number, act in enumerate((cancelled, cancelled_while_it_begins)):
        life.id = ""
        record = life.run(until(0, hang), act, f"batch_{number:032x}")
        assert (record.status, record.completed) == ("cancelled", 0)
        assert len(life.outputs(record.error_file_id)) == 10


def test_a_stop_ends_the_check_of_lines(tmp_path, monkeypatch) -> None:
    """The process waits for the thread, and a file may have a million lines."""
    life, begun = Life(tmp_path), threading.Event()
    managers: list[BatchManager] = []
    numbers: list[int] = []

    def parse_slowly(line: Line, urls: Sequence[str]) -> BatchRequest:
        numbers.append(line.number)
        begun.set()
        while not (managers and managers[0]._closed):
            time.sleep(0.001)
        return parse(line, urls)

    async def stop_within_a_line(manager: BatchManager) -> None:
        managers.append(manager)
        assert await asyncio.to_thread(begun.wait, 60)

    monkeypatch.setattr("mlx_paged.server.batches.manager.parse", parse_slowly)
    assert life.run(echo, stop_within_a_line).status == "validating"
    assert numbers == [1]
    monkeypatch.undo()
    assert life.run(echo, life.ended).completed == 10


def test_a_damaged_output_fails_its_batch_alone(tmp_path) -> None:
    life = Life(tmp_path)
    record = life.run(until(2, hang), life.answered(2))
    (tmp_path / "files" / f"{record.output_file_id}.data").write_bytes(b"damaged\n")
    record = life.run(echo, life.ended)
    assert record.status == "failed" and "is not batch output" in record.errors[0]["message"]
    life.id = ""
    assert life.run(echo, life.ended, f"batch_{1:032x}").status == "completed"


def test_a_full_disk_fails_the_batch(tmp_path, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise MlxPagedError("cannot write out: No space left on device")

    life = Life(tmp_path)
    input_alone = {f"{life.file.id}.json", f"{life.file.id}.data"}

    async def output_removed(manager: BatchManager) -> None:
        await life.ended(manager)
        while {path.name for path in (tmp_path / "files").iterdir()} != input_alone:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(Journal, "append", full)
    record = life.run(echo, output_removed)
    assert record.status == "failed"
    assert [error["code"] for error in record.errors] == ["storage_error"]


def test_a_batch_whose_failure_cannot_be_written_has_failed(tmp_path, monkeypatch) -> None:
    """It would be in progress for ever, and nobody could cancel it; the next start tries again."""

    def write(folder: Folder, batch_id: str, record: dict[str, Any]) -> None:
        if record["status"] != "validating":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_batch(folder, batch_id, record)

    life, write_batch = Life(tmp_path), Folder.write_batch
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write_batch", write)
        assert life.run(echo, life.ended).status == "validating"
    assert life.run(echo, life.ended).completed == 10


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_upload_that_does_not_fit_leaves_nothing(tmp_path, monkeypatch, number) -> None:
    """Its content, its record or their names do not, and neither does closing it."""
    fsync, count = os.fsync, iter(range(9))

    def full(fd: int) -> None:
        if next(count) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    class Full(io.BytesIO):
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    folder = Folder(tmp_path)
    upload = folder.begin_upload()
    upload.add(b"x")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", full)
        folder.keep(upload, "in", "batch", None)
    folder.discard(upload)
    unclosed = folder.begin_upload()
    unclosed.close()
    unclosed._file = Full()
    folder.discard(unclosed)
    assert not list((tmp_path / "files").iterdir()) and not folder.files


def test_batches_created_at_once_have_a_limit(tmp_path, monkeypatch) -> None:
    life = Life(tmp_path)
    monkeypatch.setattr("mlx_paged.server.batches.manager.MAX_UNFINISHED", 3)

    async def create_many(manager: BatchManager) -> None:
        records = [
            BatchRecord(f"batch_{i:032x}", "openai", URL, 1000, 4600, "1h", life.file.id)
            for i in range(1, 6)
        ]
        tried = await asyncio.gather(*map(manager.create, records), return_exceptions=True)
        assert [isinstance(each, ApiError) for each in tried] == [False] * 2 + [True] * 3

    life.run(until(0, hang), create_many)


def test_files_of_others_are_left_alone(tmp_path) -> None:
    life = Life(tmp_path)
    foreign = {
        "files/notes.txt": "mine", "files/package.json": "{}", "files/sub/x.data": "",
        "batches/todo.json": "[]", "batches/a.input": "",
    }  # fmt: skip
    for name, content in foreign.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert life.run(echo, life.ended).status == "completed"
    assert all((tmp_path / name).read_text() == content for name, content in foreign.items())


@pytest.mark.parametrize("content", ["[]", "{}", '{"id": "file-%s"}' % ("0" * 32)])
def test_a_record_that_is_none_is_refused_by_its_name(tmp_path, content) -> None:
    Folder(tmp_path).close()
    name = f"file-{'0' * 32}"
    record = tmp_path / "files" / f"{name}.json"
    record.write_text(content)
    with pytest.raises(InvalidParameterError, match=name):
        Folder(tmp_path)
    record.unlink()
    Folder(tmp_path).close()  # It is not locked any more.


def test_lines_wait_for_a_busy_server_but_not_for_ever() -> None:
    busy, answers = 3, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal busy
        asked = await receive()
        too_much = asked["body"] == b"too much"
        status = 429 if too_much or busy else 200
        busy = max(0, busy - (not too_much))
        answers.append(status)
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def post() -> list[Reply]:
        endpoint = InProcess(app)
        bodies = (b"x", b"x", b"too much", b"too much")
        posts = (endpoint.post(URL, body, str(i)) for i, body in enumerate(bodies))
        return await asyncio.wait_for(asyncio.gather(*posts), TIMEOUT)

    assert [reply.status_code for reply in asyncio.run(post())] == [200, 200, 429, 429]
    assert answers.count(429) >= 4


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_lines_wait_while_memory_is_short(path) -> None:
    """In both forms of errors: a server that has failed ends the batch, this one goes on."""
    refusals = [
        from_engine(MemoryPressureError(1.0), "id"),
        unavailable("bodies", "body_memory"),
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if refusals:
            await refusals.pop().response({**scope, "path": path})(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    assert asyncio.run(InProcess(app).post(path, b"{}", "1")).status_code == 200
    refusals.append(unavailable("the engine takes no requests", "engine_unavailable"))
    with pytest.raises(EngineDeadError):
        asyncio.run(InProcess(app).post(path, b"{}", "1"))


def test_a_line_is_sent_again_while_the_server_goes_on_without_its_model() -> None:
    left = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            await unavailable("its process has ended", "model_failed").response(scope)(
                scope, receive, send
            )
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    ends = iter((False, False, False, False, False, True))
    client = InProcess(app, lambda: next(ends))
    for failures, status in ((2, 200), (5, 503)):
        left = failures
        assert asyncio.run(client.post(URL, b"{}", "1")).status_code == status
    assert left == 2, "the answer is the third failure"
    with pytest.raises(EngineDeadError):  # The server ends, and another one answers the line.
        asyncio.run(client.post(URL, b"{}", "1"))
