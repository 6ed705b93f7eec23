"""One client's request leaves the others their turns: bounds before parsing, work in pieces.

No test measures time: they count what is called, what is alive, and how often others had a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from support.event_loops import turns_during
from support.server_helpers import RunningServer, events, running

from mlx_paged.core import FinishReason
from mlx_paged.engine import request_stream
from mlx_paged.engine.outputs import Logprob, PositionReport, RequestOutput, SequenceUpdate
from mlx_paged.engine.request_stream import MAX_UPDATES, Channel
from mlx_paged.server import body_bounds, completions, requests, streaming
from mlx_paged.server.bodies import ChatBody, CompletionBody, DetokenizeBody
from mlx_paged.server.body_bounds import MAX_DEPTH, MAX_FIELDS, MAX_VALUES, BodyBounds
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError
from mlx_paged.server.lazy_json import Lazy, json_bytes, json_pieces

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
PROMPT = "def is_even(n: int) -> bool:\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(max_model_len=128) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Notes every call of a function, which is called all the same."""
    calls, function = [], getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, noted)
    return calls


# Bounds of a body.


def scanned(body: bytes, size: int = 1 << 16, **options: Any) -> BodyBounds:
    bounds = BodyBounds(**options)
    for begin in range(0, len(body), size):
        bounds.feed(body[begin : begin + size])
    return bounds


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {f"k{i},": random_value(rng, depth - 1) for i in range(rng.randrange(4))}
    return [None, rng.random(), 'a"b\\', "[{,:é\n", rng.randrange(99)][kind]


def num_values(value: Any) -> int:
    """Strings, lists, objects, and the commas between entries."""
    if isinstance(value, str):
        return 1
    if isinstance(value, dict):
        entries = [*value.values()]
        return 1 + len(value) + max(0, len(value) - 1) + sum(map(num_values, entries))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(num_values, value))
    return 0


def test_the_scan_counts_what_is_there_however_it_is_cut() -> None:
    rng = random.Random(7)
    for _ in range(200):
        body = {f'f"{i}\\': random_value(rng, 4) for i in range(rng.randrange(1, 6))}
        raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()
        for size in (1, 2, 3, 7, 1 << 16):
            bounds = scanned(raw, size)
            assert bounds.num_values == 1 + sum(map(num_values, body.values())), raw
            assert bounds.num_fields == len(body)


def test_the_scan_knows_the_field_and_token_ids_are_apart() -> None:
    raw = json.dumps({"prompt": [[1, 2, 3], [4]], "x": [1, 2], "last": {"prompt": 1}}).encode()
    for size in (1, 5, 1000):
        bounds = scanned(raw, size)
        assert (bounds.num_token_ids, bounds.field) == (3, "last")


# (body or its value, parameter, words of the message). The tests serialize these megabytes.
OVER: dict[str, tuple[Any, str | None, str]] = {
    "messages": ({"messages": [USER] * 20_000}, "messages", "65536"),
    "numbers": ({"messages": [1] * 70_000}, "messages", "65536"),
    "parts": ({"messages": [{"content": [{}] * 70_000}]}, "messages", "65536"),
    "strings": (b'{"stop":[' + b'""' * 70_000, "stop", "65536"),
    "keys": ({f"k{i}": 0 for i in range(300)}, "k255", "256 fields"),
    "nested keys": ({"logit_bias": {f"{i}": 0 for i in range(70_000)}},
                    "logit_bias", "65536"),
    "an escaped name": (b'{"promp\\u0074":[' + b"1," * 70_000 + b"1]",
                        "promp\\u0074", "65536"),
    "depth": (b'{"messages":' + b"[" * 200, "messages", "nested"),
    "only depth": (b"[" * 200, None, "nested"),
    "ids": ({"tokens": [1] * 300_000}, "tokens", "262144"),
    "lists of ids": ({"prompt": [[1] * 1000] * 300}, "prompt", "262144"),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER)
def test_too_much_is_refused_by_name(name) -> None:
    raw, param, said = OVER[name]
    raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    for size in (999, 1 << 16):
        with pytest.raises(ApiError) as error:
            scanned(raw, size)
        assert (error.value.status, error.value.param) == (400, param)
        assert said in error.value.message


def test_what_is_not_too_much_passes() -> None:
    scanned(json.dumps({"messages": [USER] * 9000}).encode())
    scanned(json.dumps({"prompt": [5] * 262_144}).encode())
    scanned(json.dumps({"prompt": '[{,"\\' * 100_000}).encode())
    scanned(json.dumps({f"k{i}": 0 for i in range(MAX_FIELDS)}).encode())
    scanned(b'{"a":' + b"[" * (MAX_DEPTH - 1))
    scanned(json.dumps({"prompt": [5] * 400_000}).encode(), max_token_ids=400_000)


@pytest.mark.parametrize(
    "name", ["messages", "parts", "nested keys", "keys", "depth", "ids", "lists of ids"]
)
def test_what_is_too_much_is_never_validated(server, client, monkeypatch, name) -> None:
    raw, param, said = OVER[name]
    raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    validated = [counted(monkeypatch, kind, "model_validate_json")
                 for kind in (ChatBody, CompletionBody, DetokenizeBody)]  # fmt: skip
    path = {"ids": "/detokenize", "lists of ids": "/v1/completions"}.get(name, CHAT)
    for chunked in (False, True):
        content = iter([raw[:50_000], raw[50_000:]]) if chunked else raw
        response = client.post(path, content=content, headers={"content-type": "application/json"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), response.text
        assert said in error["message"] and response.headers["connection"] == "close"
    assert validated == [[], [], []]
    assert client.get("/health").status_code == 200


def test_too_many_prompt_ids_are_an_overlong_context(client) -> None:
    error = client.post("/v1/completions", json={"prompt": [5] * 300_000}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 128 tokens. However")


def test_a_large_body_is_scanned_in_turns(monkeypatch) -> None:
    """Between the pieces of one chunk of the network, other tasks run."""
    monkeypatch.setattr(requests, "_TURN", -1.0)
    turns = []

    async def main() -> None:
        class FakeRequest:
            def __init__(self) -> None:
                self.headers: dict[str, str] = {}

            async def stream(self) -> Any:
                yield b'{"prompt":"' + b"x" * (64 << 10) + b'"}'

        async def other() -> None:
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        context = SimpleNamespace(
            max_body_size=1 << 20,
            config=ServerConfig(),
            hold_body=lambda trace, size: None,
            reading_body=contextlib.nullcontext,
        )
        monkeypatch.setattr(requests, "server_context_of", lambda request: context)
        monkeypatch.setattr(requests, "request_log_of", lambda request: None)
        raw = await requests._received(FakeRequest(), BodyBounds())  # type: ignore[arg-type]
        task.cancel()
        assert len(raw) == (64 << 10) + 13

    asyncio.run(main())
    assert len(turns) >= 7


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [-1] * 5000}),
        (CompletionBody, {"prompt": [[-1]] * 200}),
        (CompletionBody, {"prompt": [1] * 4999 + ["x"]}),
        (ChatBody, {"messages": [1] * 5000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 5000}]}),
    ],
)
def test_a_wrong_list_is_reported_once(kind, body) -> None:
    """An error for each of its entries, and for each form it could have had, took seconds."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(json.dumps(body))
    assert error.value.error_count() < 10


def test_there_is_a_limit_of_prompts(client) -> None:
    error = client.post("/v1/completions", json={"prompt": ["x"] * 257}).json()["error"]
    assert error["param"] == "prompt" and "256" in error["message"]


# Texts.


def test_a_long_conversation_never_reaches_the_template(server, client, monkeypatch) -> None:
    tokenizer = server.engine.engine.tokenizer
    rendered = counted(monkeypatch, tokenizer._tokenizer, "apply_chat_template")
    # (No message is too long alone.)
    messages = [{"role": "user", "content": "x" * 1500}] * 4
    error = client.post(CHAT, json={"messages": messages}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "6000 characters" in error["message"]
    assert rendered == []
    assert client.post(CHAT, json={"messages": [USER], "max_tokens": 1}).status_code == 200
    assert rendered


def test_a_long_text_of_a_template_is_never_tokenized(client, server, monkeypatch) -> None:
    tokenizer = server.engine.engine.tokenizer
    monkeypatch.setattr(tokenizer._tokenizer, "apply_chat_template", lambda *_, **__: "x" * 100_000)
    encoded = counted(monkeypatch, tokenizer._tokenizer, "encode")
    error = client.post(CHAT, json={"messages": [USER]}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "100000 characters" in error["message"]
    assert encoded == []


# Answers.


def test_a_body_is_serialised_in_pieces() -> None:
    body = {"a": 1, "b": Lazy([{"c": Lazy([1, "x"])}, {"c": Lazy([])}]), "d": {"e": [None]},
            "f": {"g": Lazy([2])}}  # fmt: skip
    plain = {"a": 1, "b": [{"c": [1, "x"]}, {"c": []}], "d": {"e": [None]}, "f": {"g": [2]}}
    made: list[int] = []
    assert json.loads(b"".join(json_pieces(body))) == plain
    body["b"] = Lazy(made.append(i) or i for i in range(5))
    pieces = json_pieces(body)
    while not made:
        next(pieces)
    assert made == [0], "an entry is made when its turn comes"
    assert json.loads(json_bytes({"x": [{"y": Lazy([1])}]})) == {"x": [{"y": [1]}]}


def test_others_have_turns_while_an_answer_is_serialised() -> None:
    async def work() -> Any:
        return await streaming.json_response({"x": Lazy("y" * 1000 for _ in range(2000))})

    turns, _ = turns_during(work)
    # (Past a megabyte it is serialised while it is sent.)
    assert turns >= (1 << 20) // streaming._PIECE_SIZE - 1

    async def small() -> Any:
        return await streaming.json_response({"x": Lazy([1, 2])})

    assert turns_during(small)[1].body == b'{"x":[1,2]}'


def test_a_large_answer_is_sent_as_it_is_made(client, monkeypatch) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 5, "n": 3,
             "return_token_ids": True}  # fmt: skip
    client.post("/v1/completions", json=asked)  # (the others read its blocks)
    whole = client.post("/v1/completions", json=asked)
    monkeypatch.setattr(streaming, "_MAX_HELD", 100)
    monkeypatch.setattr(streaming, "_PIECE_SIZE", 50)
    sent = client.post("/v1/completions", json=asked)
    assert "content-length" in whole.headers and "content-length" not in sent.headers
    assert sent.headers["content-type"] == "application/json"
    assert sent.json()["choices"] == whole.json()["choices"]


def test_an_echo_is_streamed_in_several_events(client, monkeypatch) -> None:
    asked = {"prompt": list(range(300, 340)), "max_tokens": 3, "temperature": 0, "logprobs": 2,
             "echo": True}  # fmt: skip
    [whole] = client.post("/v1/completions", json=asked).json()["choices"]
    monkeypatch.setattr(completions, "MAX_UPDATES", 7)
    found = events(client.post("/v1/completions", json={**asked, "stream": True}))
    choices = [event["choices"][0] for event in found]
    assert max(len(choice["logprobs"]["tokens"]) for choice in choices) <= 7
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for key, values in whole["logprobs"].items():
        assert [v for choice in choices for v in choice["logprobs"][key]] == values


def update(index: int, token: int, *, last: bool = False) -> SequenceUpdate:
    return SequenceUpdate("r", index, [token], ["x"], FinishReason.LENGTH if last else None)


def test_a_reader_that_lags_leaves_others_their_turns(monkeypatch) -> None:
    monkeypatch.setattr(request_stream, "_TURN", -1.0)

    async def work() -> int:
        channel = Channel(asyncio.get_running_loop(), 100, [])
        for index in range(100):
            channel.put(update(index, 5, last=True))
        num_deltas = 0
        while await channel.get() is not None:
            num_deltas += 1
        return num_deltas

    turns, num_deltas = turns_during(work)
    assert num_deltas == 100 and turns >= 99


def test_a_delta_has_a_limited_length_and_nothing_is_lost() -> None:
    async def work() -> list[Any]:
        channel = Channel(asyncio.get_running_loop(), 2, [])
        for token in range(MAX_UPDATES + 10):
            channel.put(update(0, token, last=token == MAX_UPDATES + 9))
        channel.put(update(1, 7, last=True))
        found = []
        while (delta := await channel.get()) is not None:
            found.append((delta.index, delta.token_ids))
        return found

    _, found = turns_during(work)
    first = list(range(MAX_UPDATES))
    assert found == [(0, first), (1, [7]), (0, list(range(MAX_UPDATES, MAX_UPDATES + 10)))]


def test_a_whole_answer_is_decoded_as_it_comes(client, monkeypatch) -> None:
    """Not in one piece at its end: hundreds of long answers would take seconds."""
    decoded: list[int] = []
    decode_text = RequestOutput.decode_text

    def noted(output: RequestOutput) -> None:
        decoded.extend(len(vars(answer)["_text"].decoded) for answer in output.outputs)
        decode_text(output)

    monkeypatch.setattr(RequestOutput, "decode_text", noted)
    asked = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "n": 2, "ignore_eos": True}
    choices = client.post("/v1/completions", json=asked).json()["choices"]
    assert decoded == [len(choice["text"]) for choice in choices]


def test_reports_are_made_when_they_are_read(server) -> None:
    """Objects for each alternative of each token kept the collector busy for seconds."""

    async def answer() -> Any:
        from mlx_paged import SamplingParams

        params = SamplingParams(n=4, max_tokens=10, logprobs=20, prompt_logprobs=20)
        return await server.engine.generate(PROMPT, params)

    output = server.call(answer())
    assert len(output.outputs[0].logprobs[0]) >= 20
    assert not [o for o in gc.get_objects() if isinstance(o, Logprob)]
    report = output.outputs[0].logprobs[0]
    assert isinstance(report, PositionReport) and report == dict(report.entries())
    assert list(report) == [token for token, _ in report.entries()]
    assert report[list(report)[-1]] == list(report.entries())[-1][1]
    with pytest.raises(KeyError):
        report[-1]
    assert all(entry.decoded_token for entry in report.values())


def test_limits_are_as_documented() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    for number in (MAX_VALUES, body_bounds.MAX_TOKEN_IDS, MAX_FIELDS, MAX_DEPTH):
        assert f"{number:,}" in text, number
