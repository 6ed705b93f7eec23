"""Embeddings, pooling, scores and reranking: bodies, answers, limits, and what a runner refuses."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import logging
import re
import threading
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types import embedding_create_params
from support.models import embedded, embedded_twin
from support.openapi_document import PATHS, check_path
from support.server_helpers import RunningServer, events, running, until, validate
from typer.testing import CliRunner

import mlx_paged
from mlx_paged import LLM
from mlx_paged.cli.main import app
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.loading import load
from mlx_paged.engine.pooling.params import PoolerConfig
from mlx_paged.engine.pooling.runner import PooledPrompt
from mlx_paged.errors import EngineOverloadedError, InvalidParameterError
from mlx_paged.server import cohere, embeddings, engine_service, logs, pooling_bodies, run
from mlx_paged.server.api import API
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.pooling_bodies import (
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)

SERVER = Path(mlx_paged.__file__).parent / "server"
TEXTS = ["def is_even(n: int) -> bool:", "class Stack:", "import os", "def is_odd(n):"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "x"},
    "/pooling": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v2/rerank": {"query": "x", "documents": ["y"]},
    "/v2/embed": {"texts": ["x"]},
}
ENGINE: dict[str, Any] = {"runner": "pooling", "max_model_len": 128}
# Between forwards of other company, of a prompt whose beginning was cached, and of none.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(ServerConfig(served_model_names=("demo", "other")), **ENGINE) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """``[len(TEXTS), hidden_size]`` by the offline engine, which others compare with mlx-lm."""
    llm = LLM(load(), runner="pooling", block_size=8, num_gpu_blocks_override=400)
    return np.array([output.outputs.embedding for output in llm.embed(TEXTS)])


def post(client: httpx.Client, path: str, kind: type, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    validate(kind, response.json())
    return response.json()


def embed(client: httpx.Client, **body: Any) -> np.ndarray:
    answer = post(client, "/v1/embeddings", pooling_bodies.EmbeddingAnswer, **body)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.array([entry["embedding"] for entry in answer["data"]])


def refusal(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


# Embeddings.


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_sdk_gets_embeddings(sdk: openai.OpenAI, expected: np.ndarray, encoding: Any) -> None:
    given = {} if encoding is None else {"encoding_format": encoding}
    answer = sdk.embeddings.create(model="other", input=TEXTS, **given)
    vectors = [entry.embedding for entry in answer.data]
    if encoding == "base64":  # (unless it is asked for, the client decodes it itself)
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    assert np.abs(np.array(vectors) - expected).max() < TOLERANCE
    num_tokens = sum(len(embedded().tokenizer.encode(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    assert answer.model == "other" and answer.object == "list"


def test_both_encodings_are_the_same_numbers(client: httpx.Client) -> None:
    numbers = embed(client, input=TEXTS)  # (from here on the cache has all of them)
    numbers = embed(client, input=TEXTS, encoding_format="float")
    answer = post(client, "/v1/embeddings", pooling_bodies.EmbeddingAnswer, input=TEXTS,
                  encoding_format="base64", endianness="little", embed_dtype="float32")  # fmt: skip
    for row, entry in zip(numbers, answer["data"]):
        found = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
        assert np.abs(found - row).max() < TOLERANCE and found.shape == row.shape


def test_an_input_is_a_text_or_tokens_or_a_list_of_either(client, expected) -> None:
    tokens = [embedded().tokenizer.encode(text) for text in TEXTS]
    for given in (TEXTS, tokens):
        assert np.abs(embed(client, input=given) - expected).max() < TOLERANCE
        assert np.abs(embed(client, input=given[0]) - expected[:1]).max() < TOLERANCE


def test_dimensions_cut_and_scale_again(client, sdk, expected) -> None:
    wanted = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1)[:, None]
    assert np.abs(embed(client, input=TEXTS, dimensions=16) - wanted).max() < TOLERANCE
    answer = sdk.embeddings.create(model="demo", input=TEXTS, dimensions=16)
    assert np.abs(np.array([e.embedding for e in answer.data]) - wanted).max() < TOLERANCE
    width = expected.shape[1]
    assert embed(client, input="x", dimensions=width).shape == (1, width)
    error = refusal(client, "/v1/embeddings", input="x", dimensions=width + 1)
    assert error["param"] == "dimensions" and f"at most {width}" in error["message"]


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_vectors_may_keep_their_length(client, expected, name: str) -> None:
    raw = embed(client, input=TEXTS, **{name: False})
    lengths = np.linalg.norm(raw, axis=1)
    assert (np.abs(lengths - 1) > 0.1).all()
    assert np.abs(raw / lengths[:, None] - expected).max() < TOLERANCE
    error = refusal(client, "/v1/embeddings", input="x", normalize=True, use_activation=False)
    assert error["param"] == "use_activation"


def test_prompts_are_cut_to_their_last_tokens(client) -> None:
    tokens = list(range(10, 210))
    kept = embed(client, input=tokens[-128:])
    assert np.abs(embed(client, input=tokens, truncate_prompt_tokens=-1) - kept).max() < TOLERANCE
    few = embed(client, input=tokens, truncate_prompt_tokens=5)
    assert np.abs(few - embed(client, input=tokens[-5:])).max() < TOLERANCE
    for limit in (0, 129):
        error = refusal(client, "/v1/embeddings", input=tokens, truncate_prompt_tokens=limit)
        assert error["param"] == "truncate_prompt_tokens"


def test_pooling_has_the_same_vectors(client, expected) -> None:
    body = {"input": TEXTS, "task": "embed"}
    answer = post(client, "/pooling", pooling_bodies.PoolingAnswer, **body)
    assert [entry["object"] for entry in answer["data"]] == ["pooling"] * len(TEXTS)
    found = np.array([entry["data"] for entry in answer["data"]])
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("", "invalid_value"), ([], "invalid_value"), ([[]], "invalid_value"),
        (["x", ""], "invalid_value"), ([1, -1], "invalid_value"), ([[1], [1 << 20]],
        "invalid_value"), ({"text": "x"}, "invalid_value"), (3, "invalid_value"),
        (["x"] * 2049, "invalid_value"), (list(range(10, 139)), "context_length_exceeded"),
        ("word " * 5000, "context_length_exceeded"), (None, "missing_field"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused_by_name(client, given: Any, code: str) -> None:
    error = refusal(client, "/v1/embeddings", input=given)
    assert re.split(r"[.[]", error["param"])[0] == "input" and error["code"] == code, error


CHAT = [{"role": "user", "content": "What is a prime?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_a_chat_is_embedded_by_the_template(client, path) -> None:
    asked = {"messages": CHAT, "add_generation_prompt": False}
    tokens = client.post("/tokenize", json={**asked, "add_special_tokens": False}).json()["tokens"]
    answer = client.post(path, json={"messages": CHAT}).json()
    [entry] = answer["data"]
    vector = entry.get("embedding") or entry["data"]
    assert np.abs(embed(client, input=tokens) - vector).max() < TOLERANCE
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    with_prompt = embed(client, messages=CHAT[:1], add_generation_prompt=True)
    assert np.abs(with_prompt - embed(client, messages=CHAT[:1])).max() > TOLERANCE
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    for wrong, param in (
        ({"messages": CHAT, "input": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": picture}]}, "messages"),
        ({"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ({"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        ({"input": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({}, "input"),
    ):  # fmt: skip
        assert refusal(client, path, **wrong)["param"] == param


# Cohere's API.


def cohere_embed(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return post(client, "/v2/embed", cohere.CohereAnswer, **body)


def test_cohere_gets_vectors_of_every_type(client, expected) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    answer = cohere_embed(client, model="demo", texts=TEXTS, embedding_types=types,
                          input_type="search_query")  # fmt: skip
    found = answer["embeddings"]
    assert np.abs(np.array(found["float"]) - expected).max() < TOLERANCE
    assert answer["texts"] == TEXTS and answer["meta"]["billed_units"]["input_tokens"] > 4
    for i, vector in enumerate(found["float"]):
        packed = np.frombuffer(base64.b64decode(found["base64"][i]), "<f4")
        assert np.abs(packed - vector).max() < TOLERANCE
        bits = [int("".join("01"[x >= 0] for x in vector[at : at + 8]), 2)
                for at in range(0, len(vector), 8)]  # fmt: skip
        assert found["ubinary"][i] == bits
        assert found["binary"][i] == [byte - 128 for byte in bits]
    assert cohere_embed(client, texts=["x"])["embeddings"].keys() == {"float"}


def test_cohere_cuts_texts_at_either_end(client) -> None:
    tokens = embedded().tokenizer.encode(TEXTS[0])
    for truncate, kept in (("END", tokens[:3]), (None, tokens[:3]), ("START", tokens[-3:])):
        answer = cohere_embed(client, texts=TEXTS[:1], max_tokens=3, truncate=truncate)
        assert answer["meta"]["billed_units"]["input_tokens"] == 3
        found = np.array(answer["embeddings"]["float"])
        assert np.abs(found - embed(client, input=kept)).max() < TOLERANCE
    long = cohere_embed(client, texts=["word " * 50_000])
    assert long["meta"]["billed_units"]["input_tokens"] == 128


def test_cohere_gets_a_prompt_by_the_use_of_a_text(client, server, monkeypatch) -> None:
    prompts = {"query": "Find: ", "mine": "Mine: "}
    info = dataclasses.replace(server.engine.info, prompts=prompts)
    monkeypatch.setattr(server.engine, "_info", info)
    for use, prompt in (("search_query", "Find: "), ("mine", "Mine: "), (None, "")):
        given = {} if use is None else {"input_type": use}
        found = cohere_embed(client, texts=TEXTS[:1], output_dimension=16, **given)
        wanted = embed(client, input=prompt + TEXTS[0], dimensions=16)
        assert np.abs(np.array(found["embeddings"]["float"]) - wanted).max() < TOLERANCE
    message = refusal(client, "/v2/embed", texts=["x"], input_type="clustering")["message"]
    assert "query, mine" in message
    parts = [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    chat = [{"role": "system", "content": "Mine: "}, {"role": "user", "content": "a\nb"}]
    found = cohere_embed(client, inputs=parts, input_type="mine")["embeddings"]["float"]
    wanted = embed(client, messages=chat, add_special_tokens=True)
    assert np.abs(np.array(found) - wanted).max() < TOLERANCE


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"), ({"texts": ["x"], "images": ["data:"]}, "images"),
        ({"texts": ["x"], "inputs": [{"content": [{"type": "text", "text": "x"}]}]}, "inputs"),
        ({"texts": ["x"], "input_type": "poetry"}, "input_type"),
        ({"texts": ["x"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"texts": ["x"], "embedding_types": ["binary"], "output_dimension": 9},
         "embedding_types"),
        ({"texts": ["a b c d e f"], "max_tokens": 2, "truncate": "NONE"}, "texts"),
        ({"texts": ["x", ""]}, "texts"),
    ],
)  # fmt: skip
def test_cohere_is_refused_by_the_field(client, body, param) -> None:
    assert refusal(client, "/v2/embed", **body)["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoding_format", "bytes"), ("embed_dtype", "float16"), ("endianness", "big"),
        ("dimensions", 0), ("messages", [{"role": "user", "content": "x"}]), ("priority", 3),
        ("user", 1), ("normalize", "yes"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(client, field: str, value: Any) -> None:
    error = refusal(client, "/v1/embeddings", input="x", **{field: value})
    assert error["param"] == field and field in error["message"]


# Scores.


def test_scores_are_cosines(client, expected) -> None:
    one = {"text_1": TEXTS[0], "text_2": TEXTS}
    answer = post(client, "/score", pooling_bodies.ScoreAnswer, **one)
    found = [entry["score"] for entry in answer["data"]]
    assert np.abs(np.array(found) - expected @ expected[0]).max() < TOLERANCE
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    each = post(client, "/v1/score", pooling_bodies.ScoreAnswer, text_1=TEXTS, text_2=TEXTS[::-1])
    wanted = (expected * expected[::-1]).sum(axis=1)
    assert np.abs([entry["score"] for entry in each["data"]] - wanted).max() < TOLERANCE
    assert each["usage"]["prompt_tokens"] == 2 * sum(
        len(embedded().tokenizer.encode(text)) for text in TEXTS
    )


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_the_sides_have_several_names(client, names: tuple[str, str]) -> None:
    answer = post(
        client, "/score", pooling_bodies.ScoreAnswer, **{names[0]: "x", names[1]: ["x", "y"]}
    )
    assert answer["data"][0]["score"] == pytest.approx(1, abs=1e-6)
    both = {"text_1": "x", names[0]: "x", "text_2": "y"}
    assert refusal(client, "/score", **both)["param"] == names[0]


def test_sides_that_do_not_fit_are_refused(client) -> None:
    for sides in ({"text_1": ["x", "y"], "text_2": ["x"] * 3}, {"text_2": "x"}, {"text_1": "x"}):
        assert refusal(client, "/score", **sides)["param"] in ("text_1", "text_2")
    assert refusal(client, "/score", text_1=[], text_2="x")["param"] == "text_1"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(client, expected, path: str) -> None:
    query, documents = TEXTS[0], [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
    answer = post(
        client, path, pooling_bodies.RerankAnswer, query=query, documents=documents, model="demo"
    )
    scores = expected[1:] @ expected[0]
    order = np.argsort(-scores).tolist()
    results = answer["results"]
    assert [result["index"] for result in results] == order
    found = np.array([result["relevance_score"] for result in results])
    assert np.abs(found - scores[order]).max() < TOLERANCE
    assert [result["document"]["text"] for result in results] == [TEXTS[1:][i] for i in order]
    body = {"query": query, "documents": documents, "top_n": 1, "return_documents": False}
    best = post(client, path, pooling_bodies.RerankAnswer, **body)
    assert [sorted(result) for result in best["results"]] == [["index", "relevance_score"]]
    assert best["results"][0]["index"] == order[0]


def test_documents_are_cut_where_that_is_asked_for(client) -> None:
    body = {"query": "import os", "documents": ["import os and more of it", "import os"]}
    whole = post(client, "/rerank", pooling_bodies.RerankAnswer, **body)
    assert [result["index"] for result in whole["results"]] == [1, 0]
    count = len(embedded().tokenizer.encode("import os"))
    cut = post(client, "/rerank", pooling_bodies.RerankAnswer, **body, max_tokens_per_doc=count)
    assert [result["index"] for result in cut["results"]] == [0, 1]  # (equal: in their order)
    for wrong in ({"documents": []}, {"documents": [{"title": "x"}]}, {"rank_fields": ["a"]},
                  {"documents": ["x", ""]}, {"top_n": -1}):  # fmt: skip
        error = refusal(client, "/rerank", **{**body, **wrong})
        assert re.split(r"[.[]", error["param"])[0] in wrong


# Parts common to all requests.


def test_every_parameter_of_the_sdk_is_known() -> None:
    asked = typing.get_type_hints(embedding_create_params.EmbeddingCreateParams)
    assert asked.keys() <= EmbeddingBody.model_fields.keys()


@pytest.mark.parametrize("body", [ClassifyBody, EmbeddingBody, PoolingBody, ScoreBody, RerankBody])
def test_every_known_field_is_looked_at(body) -> None:
    code = "".join((SERVER / name).read_text() for name in ("pooling.py", "embeddings.py"))
    # These have one value, or are checked by `Context.served_name`.
    fixed = {"model", "embed_dtype", "endianness", "task", "rank_fields"}
    for name in body.model_fields.keys() - fixed:
        assert f"body.{name}" in code or f'"{name}"' in code, name


def test_paths_are_those_of_the_tests() -> None:
    paths = {o.path for o in API if o.needs_runner == "pooling"}
    assert paths == {*BODIES, "/classify", "/api/embed", "/api/embeddings", "/api/v0/embeddings"}


@pytest.mark.parametrize("path", BODIES)
def test_common_fields_and_errors(client, path: str, caplog) -> None:
    with caplog.at_level(logging.INFO, "mlx_paged.access"):
        body = {**BODIES[path], "request_id": "my-own", "user": "me", "cache_salt": "s"}
        response = client.post(path, json=body)
        # (It is written when the response has been sent.)
        until(lambda: any(_is_line(record, path) for record in caplog.records))
    assert response.status_code == 200 and response.headers["x-request-id"] == "my-own"
    assert response.json()["id"].endswith("-my-own")
    [line] = [record for record in caplog.records if _is_line(record, path)]
    assert (line.user, line.prompt_tokens > 0, line.texts > 0) == ("me", True, True)
    unknown = client.post(path, json={**BODIES[path], "model": "nope"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    assert client.post(path, content="{", headers={"Content-Type": "application/json"}
                       ).json()["error"]["code"] == "invalid_json"  # fmt: skip
    wrong = client.post(path, content="x", headers={"Content-Type": "text/plain"})
    assert wrong.status_code == 415
    assert client.get(path).status_code == 405


def _is_line(record: logging.LogRecord, path: str) -> bool:
    return record.getMessage() == "request" and getattr(record, "path", None) == path


def test_a_salt_keeps_the_cache_apart(client, server) -> None:
    server.call(server.engine.reset_prefix_cache())
    body = {"input": list(range(100, 140))}

    def num_cached(**more: Any) -> int:
        answer = post(client, "/v1/embeddings", pooling_bodies.EmbeddingAnswer, **body, **more)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [num_cached(), num_cached(), num_cached(cache_salt="a")] == [0, 39, 0]
    assert num_cached(cache_salt="a") == 39


def test_metrics_count_texts(client, server) -> None:
    def counts() -> dict[str, float]:
        text = client.get("/metrics").text
        names = (
            "prompt_tokens_total",
            "generation_tokens_total",
            "e2e_request_latency_seconds_count",
        )
        return {n: float(re.search(rf"vllm:{n}{{.*}} (\S+)", text)[1]) for n in names}  # type: ignore[index]

    before, ended = counts(), server.num_ended("stop")
    embed(client, input=[[1, 2, 3], [4, 5]])
    after = counts()
    assert server.num_ended("stop") == ended + 2
    assert [after[name] - before[name] for name in before] == [5, 0, 2]
    server.until(lambda: client.get("/load").json()["server_load"] == 0)


def test_keys_are_needed() -> None:
    with running(ServerConfig(api_keys=("secret",)), **ENGINE) as server:
        for path, body in BODIES.items():
            with server.client() as client:
                assert client.post(path, json=body).status_code == 401
            with server.client(headers={"Authorization": "Bearer secret"}) as client:
                assert client.post(path, json=body).status_code == 200


def test_many_texts_come_back_in_their_order(client, server) -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(10, 1000, rng.integers(1, 9)).tolist() for _ in range(700)]
    steps = server.stats().num_steps
    found = embed(client, input=tokens)
    # They share steps: each has at most `max_num_seqs` of them.
    assert server.stats().num_steps - steps < 700 // 64 * 4
    for i in (0, 1, 256, 257, 511, 699):
        assert np.abs(embed(client, input=tokens[i]) - found[i]).max() < TOLERANCE
    server.wait_idle()


class Gate:
    """An engine whose steps wait until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waits = threading.Event()
        self.opens_after = 300.0
        self.most_waiting = 0

    def make(self, **options: Any) -> AsyncEngine:
        def make_engine() -> Engine:
            engine = Engine(embedded_twin(), EngineConfig(**{**OPTIONS, **options}))
            step = engine.step

            def waiting() -> Any:
                self.waits.set()
                assert self.opened.wait(self.opens_after) or self.opens_after < 300
                return step()

            add = engine.add

            def noting(*args: Any, **kwargs: Any) -> Any:
                output = add(*args, **kwargs)
                self.most_waiting = max(self.most_waiting, engine._scheduler.num_waiting)
                return output

            engine.step = waiting  # type: ignore[method-assign]
            engine.add = noting  # type: ignore[method-assign]
            return engine

        return AsyncEngine(make_engine)


OPTIONS: dict[str, Any] = {"runner": "pooling", "block_size": 8, "num_gpu_blocks_override": 200}


def test_one_request_of_many_texts_does_not_fill_the_queue() -> None:
    gate = Gate()
    make = lambda: gate.make(max_num_waiting=8, max_num_seqs=2)  # noqa: E731
    with running(make_engine=make) as server, server.client() as client:
        answers: list[httpx.Response] = []
        texts = [[i, i + 1] for i in range(40)]
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/embeddings", json={"input": texts}))
        )
        thread.start()
        assert gate.waits.wait(300)
        gate.opened.set()
        thread.join(300)
        assert answers[0].status_code == 200 and len(answers[0].json()["data"]) == 40
    assert 1 <= gate.most_waiting <= 4


def test_texts_that_find_the_queue_full_wait_for_those_before_them(monkeypatch) -> None:
    """Only where none of a request is under way is it refused."""
    submit = AsyncEngine.submit
    refused = []

    async def sometimes(self: AsyncEngine, request: EngineRequest) -> Any:
        prompt: Any = request.prompt
        if prompt[0] > 2 and len(refused) < 50 and prompt[0] not in refused:
            refused.append(prompt[0])
            raise EngineOverloadedError(1, 1)
        return await submit(self, request)

    monkeypatch.setattr(AsyncEngine, "submit", sometimes)
    with running(**ENGINE) as server, server.client() as client:
        assert embed(client, input=[[i] for i in range(60)]).shape[0] == 60
        assert len(refused) == 50
        monkeypatch.setattr(AsyncEngine, "submit", _always_full)
        full = client.post("/v1/embeddings", json={"input": "x"})
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
        assert 'requests_rejected_total{reason="queue_full"} 1.0' in client.get("/metrics").text


def test_a_full_queue_that_has_room_again_is_asked_again(monkeypatch) -> None:
    """Though no other text of the request is under way any more."""
    submit, result = AsyncEngine.submit, embeddings.Embeddings._result
    ended, refused = [], []

    async def noting(self: Any, stream: Any) -> Any:
        output = await result(self, stream)
        ended.append(output)
        return output

    async def late(self: AsyncEngine, request: EngineRequest) -> Any:
        if request.prompt == [7] and not refused:
            refused.append(request.prompt)
            while len(ended) < 9:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            raise EngineOverloadedError(1, 1)
        return await submit(self, request)

    monkeypatch.setattr(embeddings.Embeddings, "_result", noting)
    monkeypatch.setattr(AsyncEngine, "submit", late)
    with running(**ENGINE) as server, server.client() as client:
        assert embed(client, input=[[i] for i in range(10)]).shape[0] == 10 and refused


async def _always_full(*_: Any, **__: Any) -> Any:
    raise EngineOverloadedError(1, 1)


def test_a_client_that_goes_ends_its_texts() -> None:
    gate = Gate()
    with running(make_engine=gate.make) as server:

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
                body = {"input": [list(range(150))] * 3}
                posted = asyncio.ensure_future(client.post("/v1/embeddings", json=body))
                await asyncio.to_thread(gate.waits.wait, 300)
                posted.cancel()
                await asyncio.gather(posted, return_exceptions=True)

        asyncio.run(leave())
        server.until(lambda: server.context.metrics.server_load == 0)
        gate.opened.set()
        server.wait_idle()
        server.until(lambda: server.num_ended("abort") == 3)
        assert server.num_ended("stop") == 0


def test_texts_that_take_too_long_are_given_up() -> None:
    gate = Gate()
    with running(ServerConfig(request_timeout=0.1), gate.make) as server, server.client() as client:
        # The engine's thread stands still until the deadline of what it has taken is over.
        gate.opens_after = 0.2
        response = client.post("/v1/embeddings", json={"input": [[1, 2], [3, 4]]})
        gate.opened.set()
        assert response.status_code == 422
        assert response.json()["error"]["code"] == "request_timeout"
        server.wait_idle()


def test_a_vector_that_cannot_be_made_is_500(client, server, monkeypatch) -> None:
    def failing(self: PooledPrompt) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(PooledPrompt, "result", failing)
    response = client.post("/v1/embeddings", json={"input": ["x", "y"]})
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    monkeypatch.undo()
    assert embed(client, input="x").shape[0] == 1
    server.wait_idle()


# Runners.


def test_a_pooling_server_refuses_to_generate(client, server) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", chat)):
        for more in ({}, {"stream": True}):
            error = refusal(client, path, **body, **more)
            assert error["code"] == "wrong_runner"
            assert "--runner generate" in error["message"] and path in error["message"]
    assert client.get("/server_info").json()["engine_config"]["runner"] == "pooling"
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 128


def test_a_generating_server_refuses_to_pool() -> None:
    with running() as server, server.client() as client:
        for path, body in BODIES.items():
            error = refusal(client, path, **body)
            assert error["code"] == "wrong_runner" and "--runner pooling" in error["message"]
        stream = client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert events(stream)


def test_a_server_may_pool_by_the_mean(expected) -> None:
    llm = LLM(
        load(), runner="pooling", block_size=8, num_gpu_blocks_override=400,
        pooler_config={"pooling_type": "MEAN"},
    )  # fmt: skip
    wanted = np.array([output.outputs.embedding for output in llm.embed(TEXTS)])
    assert np.abs(wanted - expected).max() > 0.01
    engine = {**ENGINE, "pooler_config": {"pooling_type": "MEAN"}}
    with running(**engine) as server, server.client() as client:
        assert np.abs(embed(client, input=TEXTS) - wanted).max() < TOLERANCE


def test_a_reranker_scores_pairs() -> None:
    tokenizer = embedded().tokenizer
    words = tokenizer.convert_ids_to_tokens([400, 700])
    engine: dict[str, Any] = {"hf_overrides": {"classifier_from_token": words}}
    llm = LLM(load(), block_size=8, num_gpu_blocks_override=400, **engine)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    query, documents = TEXTS[0], TEXTS[1:]
    for given in (None, template):
        outputs = llm.score(query, documents, chat_template=given)
        wanted = np.array([output.outputs.score for output in outputs])
        config = ServerConfig(chat_template=given)
        with running(config, **engine) as server, server.client() as client:
            answer = post(
                client, "/score", pooling_bodies.ScoreAnswer, text_1=query, text_2=documents
            )
            found = np.array([entry["score"] for entry in answer["data"]])
            assert np.abs(found - wanted).max() < TOLERANCE
            ranked = post(
                client, "/rerank", pooling_bodies.RerankAnswer, query=query, documents=documents
            )
            assert [r["index"] for r in ranked["results"]] == np.argsort(-wanted).tolist()
            count = sum(len(output.prompt_token_ids) for output in outputs)
            assert ranked["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"] == count
            first = tokenizer.encode(documents[0], add_special_tokens=False)[:2]
            body = {"query": query, "documents": documents[:1], "max_tokens_per_doc": 2}
            cut = post(client, "/rerank", pooling_bodies.RerankAnswer, **body)
            [one] = llm.score(query, tokenizer.decode(first), chat_template=given)
            assert cut["results"][0]["relevance_score"] == pytest.approx(
                one.outputs.score, abs=1e-5
            )
            for path in ("/v1/embeddings", "/pooling"):
                error = refusal(client, path, input="x")
                assert error["code"] == "wrong_runner" and "/rerank" in error["message"]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("path", [p for p in PATHS if re.search("embed|pool|score|rerank", p)])
def test_the_document_is_kept(server, path) -> None:
    check_path(server.url, path, max_examples=3)


def test_a_body_of_many_token_ids_is_taken_up_to_a_bound(client) -> None:
    many = {"input": [list(range(10, 110))] * 1000}
    body = json.dumps(many)
    assert client.post("/v1/embeddings", content=body, headers=JSON).status_code == 200
    # (More values than a body may have of other kinds.)
    more = json.dumps({"input": [list(range(10, 138))] * 2100})
    response = client.post("/v1/embeddings", content=more, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input"


JSON = {"Content-Type": "application/json"}


# The command line.


@pytest.fixture
def options_of(monkeypatch) -> Any:
    """The engine options that a command line, and an environment, of `serve` come to."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(AsyncEngine, "from_model", lambda *_, **options: found.append(options))
    monkeypatch.setattr(engine_service, "EngineService", lambda *_: None)
    monkeypatch.setattr(run, "serve", lambda make_service, *_, **__: make_service("") or 0)

    def parsed(*arguments: str, **environment: str) -> EngineConfig:
        result = CliRunner().invoke(app, ["serve", *arguments], env=environment)
        assert result.exit_code == 0, result.output
        options = found.pop()
        names = {field.name for field in fields(EngineConfig)}
        return EngineConfig(**{name: options[name] for name in names & options.keys()})

    return parsed


def test_options_of_pooling(options_of: Any, tmp_path: Path) -> None:
    assert options_of().runner == "auto" and options_of().pooler_config is None
    whole = options_of("--pooler-config", '{"pooling_type": "MEAN", "dimensions": 3}')
    assert whole.pooler_config == PoolerConfig(pooling_type="MEAN", dimensions=3)
    parts = ("--pooler-config.pooling_type", "mean", "--pooler-config.normalize", "false")
    given = options_of("--runner", "pooling", "--pooler-config", '{"pooling_type": "LAST"}', *parts)
    assert given.pooler_config == PoolerConfig(pooling_type="MEAN", normalize=False)
    variables = {"MLX_PAGED_RUNNER": "pooling", "MLX_PAGED_POOLER_CONFIG_NORMALIZE": "true"}
    assert options_of(**variables).pooler_config == PoolerConfig(normalize=True)
    file = tmp_path / "serve.yaml"
    file.write_text("runner: pooling\npooler-config: {use_activation: false}\n")
    assert options_of("--config", str(file)).pooler_config == PoolerConfig(normalize=False)
    overrides = '{"classifier_from_token": ["no", "yes"]}'
    words = options_of("--hf-overrides", overrides).pooler_config
    assert words == PoolerConfig(classifier_from_token=["no", "yes"])


@pytest.mark.parametrize("name", ["--pooler-config", "--hf-overrides"])
@pytest.mark.parametrize("given", ["x", "[1]", '"x"'])
def test_options_that_are_no_objects_are_refused_by_name(
    monkeypatch, name: str, given: str
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    result = CliRunner().invoke(app, ["serve", name, given])
    assert isinstance(result.exception, InvalidParameterError)
    assert result.exception.field == name.removeprefix("--").replace("-", "_")
