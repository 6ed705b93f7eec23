"""Batches: lines in, lines out, whatever is interrupted, torn or changed in between."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.errors import EngineDeadError, MlxPagedError
from mlx_paged.server.batches.journal import Journal
from mlx_paged.server.batches.lines import MAX_LINE, LineError, parse, read_lines
from mlx_paged.server.batches.runner import BatchRunner, Reply, Room

CHAT = "/v1/chat/completions"


def request(i: int, **changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"message {i}"}]}
    return {"custom_id": f"r{i}", "method": "POST", "url": CHAT, "body": body, **changes}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def echo(url: str, body: bytes, request_id: str) -> Reply:
    await asyncio.sleep(0)
    return Reply(200, request_id, b'{"echo":%s}' % body)


def run(
    content: bytes,
    output: Path,
    answer: Callable[..., Any] = echo,
    *,
    max_in_flight: int = 8,
    overwrite: bool = False,
) -> BatchRunner:
    """One run, as the verb does it."""
    file = io.BytesIO(content)
    journal = Journal(output, overwrite=overwrite)
    try:
        journal.check(file)
        runner = BatchRunner(answer, journal, room=Room(max_in_flight))
        asyncio.run(runner.run(read_lines(file)))
        return runner
    finally:
        journal.close()


def outputs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# --- Lines ----------------------------------------------------------------------------------------


def test_lines_are_numbered_as_an_editor_numbers_them() -> None:
    content = b"\xef\xbb\xbf{}\n\n  \r\n{ }\r\nlast"
    lines = list(read_lines(io.BytesIO(content)))
    assert [(line.number, line.content) for line in lines] == [
        (1, b"{}"),
        (4, b"{ }"),
        (5, b"last"),
    ]
    assert len({line.id for line in lines}) == 3


def test_a_line_that_is_too_long_is_not_held() -> None:
    content = b"x" * 100 + b"\n" + b"y" * 10 + b"\n"
    first, second = read_lines(io.BytesIO(content), max_line=50)
    assert first.content is None and second.content == b"y" * 10
    with pytest.raises(LineError, match=f"at most {MAX_LINE} bytes"):
        parse(first)


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (b"{", "invalid_json_line", "not valid JSON"),
        (b"[" * 100_000, "invalid_json_line", "not valid JSON"),
        (b"[1]", "invalid_json_line", "must be a JSON object"),
        (b"{}", "invalid_custom_id", "custom_id must be a string, not empty, is missing"),
        (json.dumps(request(1, custom_id=7)).encode(), "invalid_custom_id", "but got 7"),
        (json.dumps(request(1, method="GET")).encode(), "invalid_request", "but got 'GET'"),
        (json.dumps(request(1, url="/v1/files")).encode(), "invalid_request", "/v1/files"),
        (json.dumps(request(1, body="x")).encode(), "invalid_request", "must be an object"),
        (json.dumps(request(1, body={"stream": True})).encode(), "invalid_request", "stream"),
        (json.dumps(request(1, body={"background": 1})).encode(), "invalid_request", "background"),
        (json.dumps(request(1, extra=1)).encode(), "invalid_request", "unknown field 'extra'"),
        (b'{"custom_id": "a", "url": "x"}', "invalid_request", "method is missing"),
    ],
)
def test_a_line_that_is_no_request_becomes_an_error_line(line, code, told, tmp_path) -> None:
    runner = run(line + b"\n" + jsonl([request(2)]), tmp_path / "out")
    by_id = {answer["custom_id"]: answer for answer in outputs(tmp_path / "out")}
    good = by_id.pop("r2")
    [bad] = by_id.values()
    assert good["response"]["status_code"] == 200 and good["error"] is None
    assert bad["response"] is None and bad["error"]["code"] == code
    assert bad["error"]["message"].startswith("line 1: ") and told in bad["error"]["message"]
    assert (runner.counts.answered, runner.counts.failed) == (1, 1)


def test_output_lines_have_openais_fields(tmp_path) -> None:
    given = request(1)
    run(jsonl([given]), tmp_path / "out")
    [answer] = outputs(tmp_path / "out")
    response = {"status_code": 200, "request_id": answer["id"], "body": {"echo": given["body"]}}
    assert answer.pop("id").startswith("batch_req_1_")
    assert answer == {"custom_id": "r1", "response": response, "error": None}


def test_a_custom_id_is_answered_once(tmp_path) -> None:
    content = jsonl([request(1), request(2), request(1)])
    run(content, tmp_path / "out")
    codes = [a["error"] and a["error"]["code"] for a in outputs(tmp_path / "out")]
    assert sorted(codes, key=str) == [None, None, "duplicate_custom_id"]
    # Also where the first one was answered by an earlier run.
    lines = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(x for x in lines if b"duplicate" not in x))
    run(content, tmp_path / "out")
    codes = [a["error"] and a["error"]["code"] for a in outputs(tmp_path / "out")]
    assert sorted(codes, key=str) == [None, None, "duplicate_custom_id"]


# --- Resuming -------------------------------------------------------------------------------------


def test_lines_that_are_done_are_not_done_again(tmp_path) -> None:
    content = jsonl(map(request, range(20)))
    run(content, tmp_path / "out")
    whole = outputs(tmp_path / "out")
    kept = (tmp_path / "out").read_bytes().splitlines(keepends=True)[5:12]
    (tmp_path / "out").write_bytes(b"".join(kept))
    asked: list[str] = []

    async def note(url: str, body: bytes, request_id: str) -> Reply:
        asked.append(request_id)
        return await echo(url, body, request_id)

    run(content, tmp_path / "out", note)
    assert len(asked) == 13
    assert (tmp_path / "out").read_bytes().startswith(b"".join(kept)), "what was there is kept"
    found = outputs(tmp_path / "out")
    assert sorted(found, key=lambda a: a["id"]) == sorted(whole, key=lambda a: a["id"])


def test_a_torn_last_line_is_repaired_wherever_it_was_torn(tmp_path) -> None:
    content = jsonl(map(request, range(3)))
    run(content, tmp_path / "whole", max_in_flight=1)
    whole = (tmp_path / "whole").read_bytes()
    start = whole.index(b"\n", whole.index(b"\n") + 1) + 1  # of the last line
    for end in range(start, len(whole)):
        torn = tmp_path / "torn"
        torn.write_bytes(whole[:end])
        run(content, torn)
        assert torn.read_bytes() == whole


@pytest.mark.parametrize(
    "changed",
    [
        jsonl([request(0), request(1, custom_id="other"), request(2)]),
        jsonl([request(1), request(0), request(2)]),
        jsonl([request(0), request(1)]),
        b"\n" + jsonl(map(request, range(3))),
    ],
)
def test_a_changed_input_is_refused_and_nothing_is_lost(changed, tmp_path) -> None:
    run(jsonl(map(request, range(3))), tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    with pytest.raises(MlxPagedError, match=r"changed.*give another --output, or --overwrite"):
        run(changed, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == before
    run(changed, tmp_path / "out", overwrite=True)
    assert len(outputs(tmp_path / "out")) == len(changed.strip().splitlines())


def test_lines_may_be_added_to_the_input(tmp_path) -> None:
    run(jsonl(map(request, range(3))), tmp_path / "out")
    run(jsonl(map(request, range(5))), tmp_path / "out")
    assert {a["custom_id"] for a in outputs(tmp_path / "out")} == {f"r{i}" for i in range(5)}


@pytest.mark.parametrize("content", [b"my notes\n", b"my notes", b'{"id": "else"}\n', b"\n"])
def test_a_file_that_is_no_output_is_left_alone(content, tmp_path) -> None:
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(MlxPagedError, match="is not batch output"):
        run(jsonl([request(1)]), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


def test_two_runs_do_not_write_one_file(tmp_path) -> None:
    journal = Journal(tmp_path / "out")
    with pytest.raises(MlxPagedError, match="another process writes"):
        Journal(tmp_path / "out")
    journal.close()
    Journal(tmp_path / "out").close()


def test_an_output_that_cannot_be_written(tmp_path) -> None:
    with pytest.raises(MlxPagedError, match=r"cannot write .*: No such file or directory"):
        Journal(tmp_path / "missing" / "out")


def test_what_was_answered_is_written_when_the_engine_dies(tmp_path) -> None:
    async def die(url: str, body: bytes, request_id: str) -> Reply:
        if request_id.startswith("batch_req_8_"):
            raise EngineDeadError("a test")
        return await echo(url, body, request_id)

    content = jsonl(map(request, range(20)))
    with pytest.raises(EngineDeadError):
        run(content, tmp_path / "out", die, max_in_flight=1)
    assert len(outputs(tmp_path / "out")) == 7
    run(content, tmp_path / "out")
    assert len(outputs(tmp_path / "out")) == 20


def test_what_was_answered_is_written_at_ctrl_c(tmp_path) -> None:
    async def hang(url: str, body: bytes, request_id: str) -> Reply:
        if request_id.startswith("batch_req_3_"):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        return await echo(url, body, request_id)

    content = jsonl(map(request, range(5)))
    with pytest.raises(KeyboardInterrupt):
        run(content, tmp_path / "out", hang, max_in_flight=1)
    assert len(outputs(tmp_path / "out")) == 2


def test_a_full_disk_is_told_and_can_be_resumed(tmp_path, monkeypatch) -> None:
    content = jsonl(map(request, range(6)))
    write, written = Journal.append, []

    def full(self: Journal, lines: Any) -> None:
        if written:
            raise MlxPagedError("cannot write out: No space left on device")
        written.append(1)
        write(self, lines)

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(MlxPagedError, match="No space left"):
        run(content, tmp_path / "out")
    monkeypatch.undo()
    run(content, tmp_path / "out")
    assert len(outputs(tmp_path / "out")) == 6


# --- Size -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_memory_stays_bounded_over_a_hundred_thousand_lines(tmp_path) -> None:
    num_lines, line_size = 100_000, 600
    source = tmp_path / "in"
    with source.open("wb") as file:
        for i in range(num_lines):
            body = {"messages": [{"role": "user", "content": f"{i}".ljust(line_size)}]}
            file.write(json.dumps(request(i, body=body)).encode() + b"\n")
    script = """
import asyncio, pathlib, resource, sys
from mlx_paged.server.batches.journal import Journal
from mlx_paged.server.batches.lines import read_lines
from mlx_paged.server.batches.runner import BatchRunner, Reply, Room

now = most = 0

async def echo(url, body, request_id):
    global now, most
    now += 1
    most = max(most, now)
    await asyncio.sleep(0.05 if most < 64 else 0)
    now -= 1
    return Reply(200, request_id, body)

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(2):  # the whole batch, and the look at what is done
    journal = Journal(pathlib.Path(sys.argv[2]))
    journal._syncs = False  # there are tests enough of that, on whatever disk this is
    with open(sys.argv[1], "rb") as file:
        count = journal.check(file)
        runner = BatchRunner(echo, journal, room=Room(64))
        asyncio.run(runner.run(read_lines(file)))
    print(count, journal.done.count, runner.counts.answered, most,
          resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    journal.close()
"""
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = (list(map(int, line.split())) for line in done.stdout.splitlines())
    assert first[:4] == [num_lines, 0, num_lines, 64]
    assert second[:3] == [num_lines, num_lines, 0]
    unit = 1 if sys.platform == "darwin" else 1024
    # A hash for each custom_id and 8 bytes for each line are kept, and nothing else.
    assert second[4] * unit < 24e6 < source.stat().st_size / 3, done.stdout
