"""Batches through the engine, also in a process that is interrupted or killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import TIMEOUT

from mlx_paged.cli import batch as batches
from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app
from mlx_paged.engine import engine

COMMAND = [sys.executable, "-m", "mlx_paged.cli.main", "generate"]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process. Returns status and stderr."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        status = status_of(app, ["generate", *map(str, arguments)])
        return status, capsys.readouterr().err

    return run


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Output lines by custom_id; every one must be whole, and none there twice."""
    content = path.read_text()
    assert content == "" or content.endswith("\n")
    lines = [json.loads(each) for each in content.splitlines()]
    assert len({each["id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


NUM_LINES = 32


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A batch that takes some seconds, with sampled answers among the greedy ones."""
    lines = [
        line(
            f"r{i}", CHAT, messages=ask(f"Return the sum of {i} and the square of n"), seed=i,
            temperature=0.8 if i % 3 == 0 else 0, max_tokens=48, ignore_eos=True,
        )
        for i in range(NUM_LINES)
    ]  # fmt: skip
    write(tmp_path / "in", lines)
    yield tmp_path / "in", tmp_path / "out"


def interrupt_in_the_middle(
    batch: tuple[Path, Path], sig: signal.Signals
) -> tuple[int, str, dict[str, dict[str, Any]]]:
    """Runs four lines at a time; signals when some are done. Returns status, stderr, lines."""
    source, output = batch
    process = start("-i", source, "-o", output, "--max-num-seqs", "4")
    deadline = time.monotonic() + TIMEOUT
    while not output.exists() or output.read_bytes().count(b"\n") < 10:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(sig)
    status, _, told = finish(process)
    content = output.read_bytes()
    whole = content[: content.rindex(b"\n") + 1]
    lines = {a["custom_id"]: a for a in map(json.loads, whole.decode().splitlines())}
    assert 10 <= len(lines) < NUM_LINES
    return status, told, lines


def choices(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The answers without times, and without what depends on the prefix cache."""
    return {name: answer["response"]["body"]["choices"] for name, answer in answers.items()}


def test_a_killed_run_is_resumed_with_the_same_results(batch, run, tmp_path) -> None:
    source, output = batch
    status, _, before = interrupt_in_the_middle(batch, signal.SIGKILL)
    assert status == -signal.SIGKILL
    kept = output.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    with output.open("ab") as file:  # as if it had been killed in the middle of a line
        file.write(b'{"id": "batch_req_40_0123')
    status, told = run("-i", source, "-o", output)
    assert status == 0, told
    assert (
        "is incomplete" in told and f"{len(before)} of {NUM_LINES} lines are done already" in told
    )
    assert output.read_bytes().startswith(kept), "finished lines are left as they are"
    status, told = run("-i", source, "-o", tmp_path / "uninterrupted")
    assert status == 0, told
    assert choices(read(output)) == choices(read(tmp_path / "uninterrupted"))
    # And once more: there is nothing to do, so no model is loaded.
    done = output.read_bytes()
    status, told = run("-i", source, "-o", output, "--model", "/nowhere")
    assert (status, output.read_bytes()) == (0, done), told


def test_ctrl_c_leaves_a_whole_file_and_status_130(batch) -> None:
    _, output = batch
    status, told, before = interrupt_in_the_middle(batch, signal.SIGINT)
    assert status == 130, told
    assert read(output).keys() == before.keys()
    assert f"{len(before)} of {NUM_LINES} lines are done; run the same command again" in told
    assert "Traceback" not in told


def test_bodies_mean_what_they_mean_to_the_server(run, tmp_path) -> None:
    lines = [
        line("chat", CHAT, messages=ask("Reverse a string"), temperature=0, max_tokens=40),
        line("several", CHAT, messages=ask("Reverse a string"), n=3, seed=1, max_tokens=5),
        line("logprobs", CHAT, messages=ask("x"), logprobs=True, top_logprobs=2, max_tokens=2),
        line("plain", PLAIN, prompt="def add(a, b):", temperature=0, max_tokens=8, echo=True),
        line("two", PLAIN, prompt=["def a(", "def b("], max_tokens=2, logprobs=1),
        line("default", PLAIN, prompt="def add(a, b):", ignore_eos=True),
        line("wrong", CHAT, messages=ask("x"), temperature=-1),
        line("unsupported", CHAT, messages=ask("x"), tools=TOOLS),
        line("too long", PLAIN, prompt=[5] * 5000),
        line("model", CHAT, messages=ask("x"), model="gpt-4o"),
        line("named", CHAT, messages=ask("x"), model="mine", max_tokens=1),
        line("response", "/v1/responses", input="x", max_output_tokens=2),
        line("vector", "/v1/embeddings", input="x"),
    ]
    write(tmp_path / "in", lines)
    names = ["--served-model-name", "mine", "--served-model-name", "other"]
    status, told = run("-i", tmp_path / "in", "-o", tmp_path / "out", *names)
    assert status == 3, told
    assert "8 lines answered, 5 failed" in told
    found = {name: answer["response"] for name, answer in read(tmp_path / "out").items()}
    bodies = {name: response["body"] for name, response in found.items()}
    assert "text[::-1]" in bodies["chat"]["choices"][0]["message"]["content"]
    assert bodies["chat"]["usage"]["completion_tokens"] > 5
    assert [c["index"] for c in bodies["several"]["choices"]] == [0, 1, 2]
    [choice] = bodies["logprobs"]["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert bodies["plain"]["choices"][0]["text"].startswith("def add(a, b):")
    assert len(bodies["two"]["choices"]) == 2
    assert bodies["default"]["usage"]["completion_tokens"] == 16, "OpenAI's default"
    assert bodies["named"]["model"] == "mine"
    assert bodies["response"]["object"] == "response" and bodies["response"]["store"] is False
    assert bodies["vector"]["error"]["code"] == "wrong_runner"
    errors = {
        name: (found[name]["status_code"], bodies[name]["error"]["param"])
        for name in ("wrong", "unsupported", "too long", "model")
    }
    assert errors == {
        "wrong": (400, "temperature"),
        "unsupported": (400, "tools"),
        "too long": (400, "prompt"),
        "model": (404, "model"),
    }


def test_lines_are_embedded_scored_and_ranked(run, tmp_path) -> None:
    sides = {"text_1": "import os", "text_2": ["import sys", "class Stack:"]}
    documents = {"query": "import os", "documents": ["class Stack:", "import os"]}
    lines = [line("vectors", "/v1/embeddings", input=["a", "b"], encoding_format="base64")]
    lines += [line(url, url, **sides) for url in ("/score", "/v1/score")]
    lines += [line(url, url, **documents) for url in ("/rerank", "/v1/rerank", "/v2/rerank")]
    lines += [line("chat", CHAT, messages=ask("x"))]
    write(tmp_path / "in", lines)
    status, told = run("-i", tmp_path / "in", "-o", tmp_path / "out", "--runner", "pooling")
    assert status == 3 and "6 lines answered, 1 failed" in told, told
    found = {name: answer["response"] for name, answer in read(tmp_path / "out").items()}
    assert len(found["vectors"]["body"]["data"]) == 2
    for url in ("/score", "/v1/score"):
        first, second = (entry["score"] for entry in found[url]["body"]["data"])
        assert first > second
    for url in ("/rerank", "/v1/rerank", "/v2/rerank"):
        assert [result["index"] for result in found[url]["body"]["results"]] == [1, 0]
    assert found["chat"]["status_code"] == 400


def test_pipes() -> None:
    content = json.dumps(line("a", PLAIN, prompt="def a(", max_tokens=2)) + "\nnonsense\n"
    command = [*COMMAND, "-i", "-"]
    done = subprocess.run(
        command, input=content, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 3, done.stderr
    assert {json.loads(x)["custom_id"] for x in done.stdout.splitlines()} == {"a", None}
    assert "1 lines answered, 1 failed" in done.stderr


def test_a_batch_that_fails_as_a_whole(run, tmp_path) -> None:
    (tmp_path / "in").write_text("nonsense\n")
    status, told = run("-i", tmp_path / "in", "-o", tmp_path / "out")
    assert status == 1
    assert "no line could be answered: see the errors in the output" in told


def test_many_lines_run_in_few_steps(tmp_path, monkeypatch) -> None:
    """They are batched, not answered one by one."""
    write(
        tmp_path / "in",
        [
            line(f"r{i}", PLAIN, prompt=f"def f{i}(", max_tokens=8, ignore_eos=True)
            for i in range(64)
        ],
    )
    steps = []
    step = engine.Engine.step

    def counted(self: engine.Engine) -> Any:
        steps.append(self)
        return step(self)

    monkeypatch.setattr(engine.Engine, "step", counted)
    batches.run(batches.Batch(tmp_path / "in", tmp_path / "out"))
    assert len(read(tmp_path / "out")) == 64
    assert 0 < len(steps) < 64 * 8 / 4
