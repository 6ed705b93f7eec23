"""Ollama's API: its own Python client, options, thinking, tools, lists of models, and errors."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest
from support.npm import packages_of_npm, run_node
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, RunningServer, running, validate

import mlx_paged.server.ollama
from mlx_paged.content import MediaSource
from mlx_paged.demo import model_path
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import unavailable
from mlx_paged.server.generation import Generation
from mlx_paged.server.ollama import answers
from mlx_paged.server.ollama.bodies import OllamaChatBody, Options, seconds_of
from mlx_paged.server.ollama.endpoints import _without_bos
from mlx_paged.server.ollama.turns import chat_turn

PACKAGE = Path(mlx_paged.server.ollama.__path__[0])
SCRIPT = Path(__file__).parent / "clients" / "ollama.mjs"
MODEL = "mlx-paged-demo"
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nSix sevens.\n</think>\n\n42"
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"It rains in {city}."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(served_model_names=(MODEL, "other"), tool_template=True)
    options: dict[str, Any] = {**ENGINE, "max_model_len": 1024, "reasoning_parser": "qwen3"}
    with running(config, lambda: ScriptedEngine.from_model(**options)) as server:
        yield server


@pytest.fixture(scope="module")
def free() -> Iterator[RunningServer]:
    """A server whose model writes what it wants, and does not think."""
    with running(max_model_len=1024) as server:
        yield server


@pytest.fixture
def engine(server: RunningServer) -> Iterator[ScriptedEngine]:
    assert isinstance(server.engine, ScriptedEngine)
    server.engine.prompts.clear()
    server.engine.params.clear()
    yield server.engine
    server.engine.script.clear()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    validate(answers.OllamaError, response.json())
    return response.json()["error"]


# Chats.


def test_a_chat(client, engine) -> None:
    engine.says("It rains.")
    answer = client.chat(MODEL, ASK, keep_alive="5m")
    assert answer.message.role == "assistant" and answer.message.content == "It rains."
    assert answer.model == MODEL and answer.done and answer.done_reason == "stop"
    assert answer.prompt_eval_count > 5 and answer.eval_count > 2
    assert all(answer[name] > 0 for name in DURATIONS)
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d.*Z", answer.created_at)
    assert answer.message.thinking is None and answer.message.tool_calls is None


def test_a_stream_is_lines_of_json(http, engine) -> None:
    """Without `stream` the answer is one."""
    engine.says("It rains in Oslo.")
    found = lines(http.post("/api/chat", json={"model": MODEL, "messages": ASK}))
    for line in found:
        validate(answers.OllamaChatAnswer, line)
    *pieces, last = found
    assert len(pieces) > 2 and not any(piece["done"] for piece in pieces)
    assert "".join(piece["message"]["content"] for piece in pieces) == "It rains in Oslo."
    assert last["done"] and last["message"] == {"role": "assistant", "content": ""}
    assert all(last[name] > 0 for name in DURATIONS) and last["eval_count"] > len(pieces)
    assert all(name not in piece for name in DURATIONS for piece in pieces)


def test_thinking_is_a_field_of_its_own(client, engine) -> None:
    engine.says(THOUGHT, THOUGHT, THOUGHT)
    whole = client.chat(MODEL, ASK, think=True)
    assert (whole.message.thinking, whole.message.content) == ("Six sevens.", "42")
    pieces = list(client.chat(MODEL, ASK, stream=True, think="max"))
    assert "".join(piece.message.thinking or "" for piece in pieces) == "Six sevens."
    assert "".join(piece.message.content for piece in pieces) == "42"
    without = client.chat(MODEL, ASK, think=False)
    assert (without.message.thinking, without.message.content) == (None, "42")


def test_a_tool_is_called_and_its_result_answered(client, engine) -> None:
    both = CALL + CALL.replace("Oslo", "Rome")
    engine.says(f"One moment.\n{CALL}", both, "It rains.")
    whole = client.chat(MODEL, ASK, tools=[get_weather])
    [call] = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    assert whole.message.content == "One moment." and whole.done_reason == "stop"
    assert "The weather of a city." in engine.prompts[0]
    pieces = list(client.chat(MODEL, ASK, tools=[get_weather], stream=True))
    calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert [call.function.arguments["city"] for call in calls] == ["Oslo", "Rome"]
    results = [
        {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")},
        {"role": "tool", "content": get_weather("Rome")},
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    last = client.chat(MODEL, [*ASK, message, *results], tools=[get_weather])
    assert last.message.content == "It rains."
    assert "It rains in Oslo." in engine.prompts[2] and "It rains in Rome." in engine.prompts[2]


def test_results_find_their_calls() -> None:
    calls: list[Any] = [
        {"function": {"name": name, "arguments": {}}} for name in ("one", "two", "one")
    ]
    calls[0]["id"] = "given"
    results: list[Any] = [
        {"role": "tool", "tool_name": "two", "content": "b"},
        {"role": "tool", "content": "a"},
        {"role": "tool", "tool_name": "one", "content": "c"},
        {"role": "tool", "tool_call_id": "other", "content": "d"},
        {"role": "tool", "content": "too many"},
    ]
    messages = [{"role": "assistant", "tool_calls": calls}, *results]
    body = OllamaChatBody.model_validate({"messages": messages})
    answer, *found = chat_turn(body).conversation.messages
    first, second, third = (call["id"] for call in answer["tool_calls"])
    assert first == "given" and len({first, second, third}) == 3
    ids = [result["tool_call_id"] for result in found]
    assert ids[:4] == [second, first, third, "other"] and ids[4] not in ids[:4]


def test_calls_are_numbered_and_have_ids(http, engine) -> None:
    engine.says(f"{CALL}{CALL}")
    tool = {"function": {"name": "get_weather", "parameters": {"type": "object"}}}
    body = {"model": MODEL, "messages": ASK, "tools": [tool], "stream": False}
    answer = http.post("/api/chat", json=body).json()
    validate(answers.OllamaChatAnswer, answer)
    calls = answer["message"]["tool_calls"]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


def test_json_and_schemas(free) -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["clear", "cloudy"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    with ollama.Client(host=free.url) as client:
        answer = client.chat(MODEL, ASK, format=schema, options={"num_predict": 40})
        assert json.loads(answer.message.content)["sky"] in ("clear", "cloudy")
        for raw in (False, True):
            text = client.generate(MODEL, "Colors", format=schema, raw=raw).response
            assert json.loads(text)["sky"] in ("clear", "cloudy")
        started = client.chat(MODEL, ASK, format="json", options={"num_predict": 4})
        assert started.message.content.lstrip().startswith("{")
        with pytest.raises(ollama.ResponseError, match="does not support thinking"):
            client.chat(MODEL, ASK, think=True)


def test_the_last_message_is_continued(client, engine) -> None:
    engine.says(" rains.")
    client.chat(MODEL, [*ASK, {"role": "assistant", "content": "It"}])
    assert engine.prompts[0].endswith("It")


# Options.


def test_options_become_parameters(client, engine) -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "seed": 3,
        "stop": ["END"], "repeat_penalty": 1.2, "repeat_last_n": -1, "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_thread": 8, "use_mmap": True, "num_batch": 2, "mirostat": 0, "num_keep": 5,
    }  # fmt: skip
    answer = client.generate(MODEL, "Count.", options=options)
    assert answer.eval_count <= 7
    [params] = engine.params
    assert params.max_tokens == 7 and params.temperature == 0.5 and params.seed == 3
    assert (params.top_k, params.top_p, params.min_p) == (9, 0.8, 0.1)
    assert params.stop_strings == ("END",) and params.repetition_penalty == 1.2
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    client.generate(MODEL, "Count.", options={"num_ctx": 40, "repeat_penalty": 2,
                                              "repeat_last_n": 0, "num_predict": -1})  # fmt: skip
    assert engine.params[1].repetition_penalty == 1
    assert engine.params[1].max_tokens == 40 - len(engine.tokenizer.encode(engine.prompts[1]))


def test_num_ctx_ends_an_answer(client) -> None:
    answer = client.generate(MODEL, "Count.", raw=True, options={"num_ctx": 20, "temperature": 0})
    if answer.done_reason == "length":
        assert answer.prompt_eval_count + answer.eval_count == 20


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mirostat": 1}, "options.mirostat"),
        ({"typical_p": 0.5}, "options.typical_p"),
        ({"tfs_z": 0.5}, "options.tfs_z"),
        ({"top_p": 0}, "options.top_p"),
        ({"temperature": -1}, "options.temperature"),
        ({"penalize_newline": False}, "options.penalize_newline"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "options.repeat_last_n must be -1 or 0"),
        ({"seed": "x"}, "options.seed"),
    ],
    ids=str,
)
def test_options_that_do_not_exist_here(http, options: dict[str, Any], error: str) -> None:
    body = {"model": MODEL, "prompt": "a", "options": options}
    assert error in refused(http.post("/api/generate", json=body))


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("generate", {"suffix": "b"}, "suffix is not supported"),
        ("generate", {"template": "b"}, "template is not supported"),
        ("generate", {"steps": 2}, "steps is not supported"),
        ("generate", {"shift": True}, "shift"),
        ("generate", {"raw": True, "system": "b"}, "system needs a chat template"),
        ("generate", {"images": ["b"]}, "images[0]"),
        ("generate", {"keep_alive": "5 minutes"}, "keep_alive"),
        ("generate", {"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("generate", {"format": {"type": 5}}, "format"),
        ("generate", {"context": [1 << 30]}, "context must be token ids below"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, "images[0]"),
        ("chat", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ("chat", {"messages": ASK, "tools": [{"type": "web"}]}, "tools[0].type"),
        ("chat", {"messages": ASK, "options": {"num_ctx": 5}}, "maximum context length is 5"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_name_the_field(http, path: str, body: dict[str, Any], error: str) -> None:
    given = {"model": MODEL, **({"prompt": "a"} if path == "generate" else {}), **body}
    assert error in refused(http.post(f"/api/{path}", json=given))


def test_unknown_models(client, http) -> None:
    with pytest.raises(ollama.ResponseError, match="no model named") as caught:
        client.chat("llama3", ASK)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError):
        list(client.generate("llama3", "a", stream=True))
    assert "there is no /api/other" in refused(http.get("/api/other"), 404)
    assert "Content-Type" in refused(http.post("/api/chat", content=b"{}"), 415)
    assert refused(http.post("/api/chat", json={"messages": 5}))


def test_an_error_within_a_stream_is_a_line(client, monkeypatch) -> None:
    async def pieces(self: Generation) -> Any:
        raise unavailable("the engine has stopped", "engine_unavailable")
        yield

    monkeypatch.setattr(Generation, "pieces", pieces)
    stream = client.chat(MODEL, ASK, stream=True)
    with pytest.raises(ollama.ResponseError, match="the engine has stopped"):
        list(stream)


# Prompts.


def test_a_prompt_and_its_context(client, engine) -> None:
    engine.says("One.", "Two.")
    first = client.generate(MODEL, "Count to one.", system="You count.")
    assert first.response == "One." and first.done_reason == "stop"
    assert "You count." in engine.prompts[0]
    second = client.generate(MODEL, "Go on.", context=first.context)
    assert second.response == "Two."
    assert engine.prompts[1].startswith(engine.prompts[0]) and "One." in engine.prompts[1]
    assert list(second.context[: len(first.context)]) == list(first.context)


def test_a_context_is_followed_by_no_second_beginning() -> None:
    tokenizer = SimpleNamespace(bos_token_id=7)
    model: Any = SimpleNamespace(renderer=SimpleNamespace(tokenizer=tokenizer))
    assert _without_bos(model, [7, 1, 7]) == [1, 7] and _without_bos(model, [1, 7]) == [1, 7]
    tokenizer.bos_token_id = None
    assert _without_bos(model, [7, 1]) == [7, 1]


def test_a_raw_prompt_is_taken_as_it_is(client, engine) -> None:
    engine.says("pass")
    answer = client.generate(MODEL, "def f():", raw=True)
    assert engine.prompts == ["def f():"] and answer.context is None
    assert answer.response == "pass"


def test_a_streamed_prompt(client, engine) -> None:
    engine.says(THOUGHT)
    *pieces, last = client.generate(MODEL, "Six times seven?", stream=True)
    assert "".join(piece.response for piece in pieces) == "42"
    assert "".join(piece.thinking or "" for piece in pieces) == "Six sevens."
    assert last.done and last.context and last.response == ""


def test_logprobs(client, http, engine) -> None:
    options = {"num_predict": 5}
    answer = client.generate(MODEL, "a", raw=True, logprobs=True, top_logprobs=2, options=options)
    assert len(answer.logprobs) == answer.eval_count
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in answer.logprobs)
    pieces = client.chat(MODEL, ASK, logprobs=True, stream=True, options=options)
    reports = [each for piece in pieces for each in piece.logprobs or ()]
    assert len(reports) == 5 and reports[0].top_logprobs is None


def test_requests_that_only_load(client, http) -> None:
    assert client.generate(MODEL, "").done_reason == "load"
    assert client.chat(MODEL, []).done_reason == "load"
    assert next(iter(client.chat(MODEL, [], stream=True))).done_reason == "load"
    assert client.generate(MODEL, "", keep_alive=0).done_reason == "unload"


# Long chats.


def test_a_long_chat_loses_its_oldest_messages(client, http, engine) -> None:
    turns: list[Any] = [{"role": "system", "content": "You count."}]
    for i in range(40):
        turns += [
            {"role": "user", "content": f"Question {i}."},
            {"role": "assistant", "content": f"Answer {i}."},
        ]
    turns.append({"role": "user", "content": "The last question."})
    engine.says("Done.")
    options = {"num_ctx": 200, "num_predict": 30}
    answer = client.chat(MODEL, turns, options=options)
    assert answer.message.content == "Done."
    [prompt] = engine.prompts
    assert "You count." in prompt and "The last question." in prompt and "Question 39." in prompt
    assert "Question 0." not in prompt
    # As many are left as fit with room for the answer.
    assert 200 - 30 - 40 < answer.prompt_eval_count <= 200 - 30
    body = {"model": MODEL, "messages": turns, "options": options, "truncate": False}
    assert "maximum context length is 200" in refused(http.post("/api/chat", json=body))


def test_a_long_raw_prompt_loses_its_beginning(client, http, engine) -> None:
    engine.says("end")
    prompt = " ".join(map(str, range(300)))
    client.generate(MODEL, prompt, raw=True, options={"num_ctx": 100, "num_predict": 10})
    assert prompt.endswith(engine.prompts[0]) and len(engine.prompts[0]) > 50
    body = {"model": MODEL, "prompt": prompt, "options": {"num_ctx": 100}}
    assert "maximum context length" in refused(http.post("/api/generate", json=body))


# Models.


def test_lists_of_models(client, http) -> None:
    validate(answers.ModelTags, http.get("/api/tags").json())
    validate(answers.LoadedModels, http.get("/api/ps").json())
    listed = client.list().models
    assert [model.model for model in listed] == [MODEL, "other"]
    size = (model_path() / "model.safetensors").stat().st_size
    assert all(model.size == size and len(model.digest) == 64 for model in listed)
    assert listed[0].details.family == "llama" and listed[0].details.format == "safetensors"
    assert listed[0].details.parameter_size.endswith("M")
    [loaded] = client.ps().models
    assert loaded.model == MODEL and loaded.context_length == 1024 and loaded.size_vram == size
    assert loaded.expires_at.year > 2100
    shown = client.show("other")
    assert shown.capabilities[0] == "completion" and "{%" in shown.template
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 1024
    assert shown.modelinfo["general.parameter_count"] * 2 <= 2 * size
    validate(answers.ShownModel, http.post("/api/show", json={"name": MODEL}).json())
    assert "no model named 'x'" in refused(http.post("/api/show", json={"model": "x"}), 404)
    assert refused(http.post("/api/show", json={})) == "model is missing"


def test_the_version_is_one_that_clients_take(http) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", http.get("/api/version").json()["version"])


def test_models_are_changed_elsewhere(client) -> None:
    for call, error in (
        (lambda: client.pull("llama3"), "run `mlx-paged pull llama3`, or start the server with"),
        (lambda: list(client.pull("llama3", stream=True)), "mlx-paged pull"),
        (lambda: client.delete(MODEL), "mlx-paged rm"),
        (lambda: client.create("new", from_=MODEL), "does not create models"),
        (lambda: client.copy(MODEL, "new"), "--served-model-name"),
        (lambda: client.push(MODEL), "does not publish models"),
    ):
        with pytest.raises(ollama.ResponseError, match=error):
            call()


def test_names_with_the_default_tag(client, engine) -> None:
    engine.says("Hello.")
    assert client.chat(f"{MODEL}:latest", ASK).model == MODEL
    assert client.show("other:latest").modelinfo["general.basename"] == MODEL


def test_durations() -> None:
    for given, seconds in (("5m", 300), ("1h30m", 5400), ("-1s", -1), ("0", 0), (7, 7),
                           ("1.5s", 1.5), ("100ms", 0.1), (-1, -1),
                           ("-1", -1), ("30", 30)):  # fmt: skip
        assert seconds_of(given) == pytest.approx(seconds)
    for wrong in ("", "-", "m", "5 m", "5x", "1h-3m"):
        with pytest.raises(ValueError):
            seconds_of(wrong)


def test_every_field_is_looked_at() -> None:
    """Fields work or have one value; those of Ollama's loader say that they change nothing."""
    code = "".join(file.read_text() for file in PACKAGE.glob("*.py"))
    for kind in (OllamaChatBody, Options):
        for name, field in kind.model_fields.items():
            says = (field.description or "").lower()
            fixed = any(words in says for words in ("only ", "changes nothing", "no effect"))
            if not fixed and name not in ("model", "keep_alive"):
                assert f".{name}" in code or f'"{name}"' in code, name


# JavaScript.


def test_the_javascript_package(server, engine) -> None:
    packages = packages_of_npm({"ollama": "0.6.4"})
    engine.says(
        THOUGHT, CALL, "It rains.", f"<think>A call.</think>\n\nOne moment.\n{CALL}", "One."
    )
    found = run_node(SCRIPT, packages, server.url)
    message = found["whole"]["message"]
    assert (message["thinking"], message["content"]) == ("Six sevens.", "42")
    assert found["whole"]["done_reason"] == "stop" and found["whole"]["eval_duration"] > 0
    [call] = found["called"]["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Oslo"}
    assert found["answered"]["message"]["content"] == "It rains."
    assert "It rains in Oslo." in engine.prompts[2]
    streamed = found["streamed"]
    assert (streamed["text"].strip(), streamed["thinking"]) == ("One moment.", "A call.")
    assert [each["function"]["name"] for each in streamed["calls"]] == ["get_weather"]
    assert streamed["last"]["done"] and streamed["last"]["prompt_eval_count"] > 0
    assert found["prompt"] == "One."
    assert found["models"] == [MODEL, "other"] and found["loaded"] == [MODEL]
    assert found["shown"]["details"]["family"] == "llama" and found["version"]
    assert [error[:2] for error in found["errors"]] == [
        ["ResponseError", 404], ["ResponseError", 404], ["ResponseError", 400],
        ["ResponseError", 403],
    ]  # fmt: skip
    assert "no model named" in found["errors"][0][2]
    assert "mlx-paged pull" in found["errors"][3][2]


# Embeddings.


@pytest.fixture(scope="module")
def pooling() -> Iterator[RunningServer]:
    with running(runner="pooling", max_model_len=64) as server:
        yield server


def test_embeddings(pooling) -> None:
    with ollama.Client(host=pooling.url) as client, pooling.client() as http:
        several = client.embed(MODEL, ["one text", "another"])
        assert len(several.embeddings) == 2 and several.prompt_eval_count > 2
        assert all(sum(x * x for x in v) == pytest.approx(1, abs=1e-3) for v in several.embeddings)
        [alone] = client.embed(MODEL, "one text").embeddings
        assert alone == pytest.approx(several.embeddings[0], abs=1e-3)
        [short] = client.embed(MODEL, "one text", dimensions=4).embeddings
        assert len(short) == 4
        older = client.embeddings(MODEL, "one text").embedding
        scale = older[0] / alone[0]
        assert older == pytest.approx([scale * x for x in alone], rel=1e-2, abs=1e-2)
        assert client.embed(MODEL, "").embeddings == []
        # The end of a long text is cut.
        long = " ".join(map(str, range(200)))
        tokens = client.embed(MODEL, long)
        assert tokens.prompt_eval_count == 64
        [more] = client.embed(MODEL, f"{long} and more").embeddings
        assert more == pytest.approx(tokens.embeddings[0], abs=1e-3)
        with pytest.raises(ollama.ResponseError, match="maximum context length is 64"):
            client.embed(MODEL, long, truncate=False)
        body = http.post("/api/embed", json={"model": MODEL, "input": ["a"]}).json()
        validate(answers.EmbedAnswer, body)
        with pytest.raises(ollama.ResponseError, match="--runner generate"):
            client.chat(MODEL, ASK)


def test_a_generating_server_embeds_nothing(client) -> None:
    with pytest.raises(ollama.ResponseError, match="--runner pooling"):
        client.embed(MODEL, "a")


def test_images_are_base64() -> None:
    data = base64.b64encode(b"picture").decode()
    message = {"role": "USER", "content": "What?", "images": [data]}
    body = OllamaChatBody.model_validate({"messages": [message]})
    [made] = chat_turn(body).conversation.messages
    source, text = made["content"]
    assert isinstance(source, MediaSource) and text == "What?" and made["role"] == "user"
    assert source.given == f"data:;base64,{data}" and source.part == "messages[0].images[0]"
