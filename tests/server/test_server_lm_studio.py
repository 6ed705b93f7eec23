"""LM Studio's API: lists of models, and OpenAI's answers with statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, events, running, validate

from mlx_paged.server import lm_studio
from mlx_paged.server.catalog import ModelFiles, ModelState, ModelStatus
from mlx_paged.server.config import ServerConfig

MODEL = "mlx-paged-demo"
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options: dict[str, Any] = {**ENGINE, "max_model_len": 1024}
    config = ServerConfig(tool_template=True)
    with running(config, lambda: ScriptedEngine.from_model(**options)) as server:
        yield server


@pytest.fixture
def engine(server: RunningServer) -> Iterator[ScriptedEngine]:
    assert isinstance(server.engine, ScriptedEngine)
    yield server.engine
    server.engine.script.clear()


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_models(http) -> None:
    listed = http.get("/api/v0/models").json()
    validate(lm_studio.StudioModels, listed)
    [found] = listed["data"]
    assert found == http.get(f"/api/v0/models/{MODEL}").json()
    assert (found["id"], found["type"], found["arch"]) == (MODEL, "llm", "llama")
    assert (found["state"], found["compatibility_type"]) == ("loaded", "mlx")
    assert found["loaded_context_length"] == 1024 <= found["max_context_length"]
    missing = http.get("/api/v0/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_a_chat_has_statistics(http, engine) -> None:
    engine.says("It rains.")
    body = {"messages": ASK, "max_tokens": -1, "ttl": 300}
    answer = http.post("/api/v0/chat/completions", json=body).json()
    validate(lm_studio.StudioChatAnswer, answer)
    assert answer["choices"][0]["message"]["content"] == "It rains."
    stats = answer["stats"]
    assert stats["stop_reason"] == "eosFound" and stats["time_to_first_token"] > 0
    tokens = answer["usage"]["completion_tokens"]
    assert stats["tokens_per_second"] * stats["generation_time"] == pytest.approx(tokens)
    assert answer["model_info"]["arch"] == "llama" and answer["model_info"]["format"] == "mlx"
    assert answer["model_info"]["context_length"] == 1024
    assert answer["runtime"]["name"] == "mlx-paged"


@pytest.mark.parametrize(
    ("fields", "answer", "reason"),
    [
        ({"max_tokens": 2}, "It rains in Oslo.", "maxPredictedTokensReached"),
        ({"stop": "rain"}, "It rains in Oslo.", "stopStringFound"),
        ({"tools": [TOOL]}, CALL, "toolCalls"),
    ],
)
def test_why_an_answer_ended(http, engine, fields: dict[str, Any], answer: str, reason) -> None:
    engine.says(answer, answer)
    body = {"messages": ASK, **fields}
    whole = http.post("/api/v0/chat/completions", json=body).json()
    assert whole["stats"]["stop_reason"] == reason
    chunks = events(http.post("/api/v0/chat/completions", json={**body, "stream": True}))
    assert chunks[-1]["stats"]["stop_reason"] == reason
    assert chunks[-1]["choices"][0]["finish_reason"]
    assert all("stats" not in chunk for chunk in chunks[:-1])


def test_the_client_of_openai(server, engine) -> None:
    engine.says("It rains.", "It rains.")
    with openai.OpenAI(base_url=f"{server.url}/api/v0", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model=MODEL, prompt="Weather: ", max_tokens=20)
        assert whole.choices[0].text == "It rains."
        validate(lm_studio.StudioCompletionAnswer, whole.model_dump(exclude_unset=True))
        stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "It rains."
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=ASK)
        with pytest.raises(openai.BadRequestError, match="--runner pooling"):
            client.embeddings.create(model=MODEL, input="a")


@pytest.mark.parametrize(
    ("path", "publisher"),
    [("mlx-community/none", "mlx-community"), ("/models/none", ""), ("./none", ""), ("none", "")],
)
def test_the_publisher_is_of_a_hub_id(path: str, publisher: str) -> None:
    status = ModelStatus("name", ModelState.UNLOADED, path=path, files=ModelFiles(path))
    found = asyncio.run(lm_studio._model(status, "name"))
    validate(lm_studio.StudioModel, found)
    assert found["publisher"] == publisher and found["state"] == "not-loaded"
    assert not Path(path).exists()
