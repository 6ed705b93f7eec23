"""mlx-lm's server, started with the drop-in, beside the same server without it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.models import dense_greedy, embedded, save_tiny, tiny_config
from support.waiting import TIMEOUT, until

from mlx_paged.demo.prompts import CHATS, SYSTEM_PROMPT

COMMANDS = {
    "paged": [sys.executable, "-m", "mlx_paged.drop_in", "mlx_lm.server"],
    "plain": [sys.executable, "-c", "import mlx_paged; from mlx_lm.server import main; main()"],
}

# Connections that a server holds before it accepts them: the system resets others while it is busy.
AT_ONCE = ThreadingHTTPServer.request_queue_size + 1


class Server:
    """A server in a process of its own."""

    def __init__(self, kind: str, model: Path, log: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        env = {k: v for k, v in os.environ.items() if k != "MLX_PAGED_DISABLE"}
        if kind == "plain":
            env["MLX_PAGED_DISABLE"] = "1"
        self.log = log.open("w+")
        arguments = ["--model", str(model), "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            [*COMMANDS[kind], *arguments], env=env, stdout=self.log, stderr=self.log
        )
        until(self.is_ready)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.text()
        with contextlib.suppress(OSError):
            return self.get("/health")[0] == 200
        return False

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def get(self, path: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def post(self, path: str, **body: Any) -> Any:
        """The answer as an object; of a stream, its events in order."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, (response.status, text, self.text())
        if not body.get("stream"):
            return json.loads(text)
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:5] == "data:"]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        options = {"max_tokens": 16, "temperature": 0, **options}
        return self.post("/v1/completions", prompt=prompt, **options)

    def chat(self, request: str, system: str | None = SYSTEM_PROMPT, **options: Any) -> Any:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": request})
        options = {"max_tokens": 16, "temperature": 0, **options}
        return self.post("/v1/chat/completions", messages=messages, **options)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=TIMEOUT)
        self.log.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in float32."""
    path = tmp_path_factory.mktemp("embedded")
    config = {k: v for k, v in embedded().config.items() if not k.startswith("quantization")}
    save_tiny(path, config, embedded().model)
    return path


@pytest.fixture(scope="module")
def servers(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    logs = tmp_path_factory.mktemp("logs")
    started = [Server(kind, directory, logs / kind) for kind in COMMANDS]
    yield started
    for server in started:
        server.stop()


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def cached_tokens(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_completions_and_chats_answer_as_without_it(servers) -> None:
    paged, plain = servers
    for request in CHATS[:1]:
        for options in ({}, {"seed": 3, "temperature": 0.7}, {"repetition_penalty": 1.2}):
            expected = plain.complete(f"# {request}\ndef ", **options)
            for _ in range(2):
                actual = paged.complete(f"# {request}\ndef ", **options)
                assert text_of(actual) == text_of(expected)
                assert actual["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        assert text_of(paged.chat(request)) == text_of(plain.chat(request))


def test_streams(servers) -> None:
    paged, plain = servers
    answers = []
    for server in (paged, plain, paged):
        events = server.chat(CHATS[4], stream=True, max_tokens=30)
        answers.append("".join(e["choices"][0]["delta"].get("content") or "" for e in events))
    assert answers[0] == answers[1] == answers[2] != ""


def test_many_at_once(servers) -> None:
    paged, plain = servers
    requests = [(request, limit) for request in CHATS[:4] for limit in (4, 12)]
    expected = [text_of(plain.chat(r, max_tokens=n)) for r, n in requests]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda job: text_of(paged.chat(job[0], max_tokens=job[1])), requests)
        assert list(found) == expected
    assert paged.get("/health")[0] == 200


def test_log_probabilities(servers) -> None:
    answers = [s.complete("def f(", logprobs=True, top_logprobs=3) for s in servers]
    ours, theirs = (a["choices"][0]["logprobs"] for a in answers)
    assert ours["tokens"] == theirs["tokens"] if "tokens" in ours else ours.keys() == theirs.keys()


def test_prompts_seen_before_are_not_computed(servers) -> None:
    paged, _ = servers
    first = paged.chat("Sort a list of words by length")
    again = paged.chat("Sort a list of words by length")
    assert text_of(again) == text_of(first)
    num_tokens = again["usage"]["prompt_tokens"]
    assert cached_tokens(again) == num_tokens - 1 or cached_tokens(again) == num_tokens


@pytest.mark.parametrize("options", [{}, {"seed": 1}], ids=["batched", "alone"])
def test_empty_prompts_and_exact_hits_are_answered(servers, options) -> None:
    paged, plain = servers
    empty = paged.complete("", **options)
    assert empty["usage"]["prompt_tokens"] == 1
    assert text_of(empty)
    text, num_tokens, whole = exact_hit()
    paged.complete(text, max_tokens=num_tokens, **options)
    assert text_of(paged.complete(whole, **options)) == text_of(plain.complete(whole, **options))
    assert paged.get("/health")[0] == 200


def exact_hit() -> tuple[str, int, str]:
    """A prompt, a number of tokens to answer it with, and both together: the latter is a prompt of
    which the cache has all when the former has been answered.
    """
    tokenizer = embedded().tokenizer
    for text in ("def add(a, b):\n", "import os\n", "x = 1\n"):
        prompt = tokenizer.encode(text)
        for num_tokens in range(1, 8):
            tokens = prompt + dense_greedy(prompt, num_tokens)
            whole = tokenizer.decode(tokens, skip_special_tokens=True)
            if tokenizer.encode(whole) == tokens:
                return text, num_tokens, whole
    raise AssertionError("no such prompt")


def test_plain_mlx_lm_dies_of_it(directory, tmp_path) -> None:
    """The day this fails, the seams for exact hits have become superfluous."""
    text, num_tokens, whole = exact_hit()
    server = Server("plain", directory, tmp_path / "log")
    try:
        server.complete(text, max_tokens=num_tokens)
        server.complete("y = 2\n", max_tokens=1)  # the first one's cache is kept after its answer
        with pytest.raises((AssertionError, OSError)):
            server.complete(whole)
        assert server.get("/health")[0] != 200
    finally:
        server.stop()


def test_a_draft_model(directory, tmp_path, servers) -> None:
    draft = tmp_path / "draft"
    save_tiny(draft, tiny_config("llama", vocab_size=embedded().vocab_size))
    server = Server("paged", directory, tmp_path / "log", "--draft-model", str(draft))
    try:
        for request in (*CHATS[:2], *CHATS[:2]):
            assert text_of(server.chat(request)) == text_of(servers[1].chat(request))
    finally:
        server.stop()
