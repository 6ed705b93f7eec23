"""`mlx-paged serve` with several models, as processes: the APIs of each, and the router's own."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import ollama
import psutil
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.adapters import random_layers, write_mlx
from support.models import embedded
from support.routers import Router, running_router
from support.server_helpers import events, process, until
from typer.testing import CliRunner

from mlx_paged.cli.main import app
from mlx_paged.demo import model_path
from mlx_paged.server.errors import ApiError
from mlx_paged.server.router import forward
from mlx_paged.server.router.forward import keep_alive_of

PROMPT = "def is_even(n: int) -> bool:\n"
GREEDY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
LONG = {**GREEDY, "max_tokens": 2000, "ignore_eos": True, "stream": True}


def other_weights(folder: Path) -> Path:
    """A copy of the embedded model that says something else."""
    shutil.copytree(model_path(), folder)
    weights = mx.load(str(folder / "model.safetensors"))
    key = mx.random.key(1)
    for name, array in weights.items():
        if array.ndim == 2 and array.dtype != mx.uint32:
            key, now = mx.random.split(key)
            noise = 1 + 0.5 * mx.random.normal(array.shape, key=now)
            weights[name] = (array * noise).astype(array.dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def adapter(folder: Path, name: str, seed: int) -> Path:
    return write_mlx(folder / name, random_layers(embedded().model, seed), scale=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def damaged(folder: Path) -> Path:
    """A model that cannot be loaded."""
    (folder / "damaged").mkdir()
    (folder / "damaged/config.json").write_text('{"model_type": "llama"}')
    return folder / "damaged"


@pytest.fixture(scope="module")
def router(folder: Path, damaged: Path) -> Iterator[Router]:
    """Serves "first" and "second" (other weights, options of its own), and "broken"."""
    file = folder / "models.yaml"
    second = {
        "model": str(other_weights(folder / "other")),
        "name": "second",
        "aliases": ["2nd"],
        "options": {
            "max-model-len": 256,
            "max_num_seqs": 4,
            "enable-lora": True,
            "lora-modules": [f"sql={adapter(folder, 'sql', 1)}"],
            "allow_runtime_lora_updating": True,
        },
    }
    file.write_text(json.dumps([second, {"model": str(damaged), "name": "broken"}]))
    with running_router("--model", f"first={model_path()}", "--models-config", str(file)) as found:
        yield found


@pytest.fixture
def client(router: Router) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=300) as client:
        yield client


def complete(client: httpx.Client, model: str | None, **fields: Any) -> str:
    answer = client.post("/v1/completions", json={**GREEDY, "model": model, **fields})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def state_of(client: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/models/{name}").json()["status"]
    return found


def unloaded(client: httpx.Client, name: str) -> None:
    assert client.post("/models/unload", json={"model": name}).json() == {"success": True}
    until(lambda: state_of(client, name)["value"] == "unloaded")


def test_each_model_answers_its_requests(client: httpx.Client) -> None:
    first, second = complete(client, "first"), complete(client, "second")
    assert first != second
    assert complete(client, None) == complete(client, "default") == first
    assert complete(client, "2nd") == second
    chat = {"model": "second", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert client.post(path, json=chat).json()["model"] == "second"
    tokens = client.post("/tokenize", json={"model": "second", "prompt": PROMPT}).json()
    assert tokens["max_model_len"] == 256
    too_long = {**GREEDY, "model": "second", "max_tokens": 300}
    answer = client.post("/v1/completions", json=too_long)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_streams_come_through_byte_for_byte(client: httpx.Client) -> None:
    body = {**GREEDY, "model": "first", "stream": True}
    streamed = client.post("/v1/completions", json=body)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    text = "".join(event["choices"][0]["text"] for event in events(streamed))
    assert text == complete(client, "first")


def test_models_and_their_states(client: httpx.Client) -> None:
    complete(client, "second")
    entries = client.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in entries] == ["first", "second", "2nd", "sql", "broken"]
    assert entries[3]["parent"] == "second"
    found = {entry["id"]: entry for entry in entries}
    assert found["second"]["status"] == found["2nd"]["status"] == {"value": "loaded"}
    assert found["2nd"]["root"] == "second" and found["second"]["aliases"] == ["2nd"]
    assert found["second"]["max_model_len"] == 256
    assert found["second"]["memory"] > found["second"]["size"] > 1_000_000
    assert client.get("/models").json()["data"] == client.get("/v1/models").json()["data"]
    unloaded(client, "2nd")
    assert client.get("/models/second").json()["memory"] is None
    assert client.post("/models/load", json={"model": "second"}).json() == {"success": True}
    until(lambda: state_of(client, "second")["value"] == "loaded")
    headers = {"anthropic-version": "2023-06-01"}
    assert client.get("/v1/models", headers=headers).json()["data"][1]["max_tokens"] == 256


def test_clients_of_ollama(router: Router, client: httpx.Client) -> None:
    ask = [{"role": "user", "content": "hello"}]
    options = {"num_predict": 4, "temperature": 0}
    with ollama.Client(host=router.url) as asking:
        names = [model.model for model in asking.list().models]
        assert names == ["first", "second", "2nd", "sql", "broken"]
        for name in ("first", "2nd:latest"):
            pieces = list(asking.chat(name, ask, stream=True, options=options))
            assert pieces[-1].done and 0 < pieces[-1].eval_count <= 4
        assert {model.model for model in asking.ps().models} == {"first", "second"}
        assert asking.show("second").modelinfo["llama.context_length"] == 256
        # Without a question, keep_alive 0 only unloads, and does not load either.
        for _ in range(2):
            assert asking.generate("second", "", keep_alive=0).done_reason == "unload"
            until(lambda: state_of(client, "second")["value"] == "unloaded")
        assert asking.chat("2nd", [], keep_alive=0).message.content == ""
        assert state_of(client, "second")["value"] == "unloaded"
        assert asking.generate("second", "", keep_alive="1h").done_reason == "load"

        def seconds_left() -> float:
            [status] = [model for model in asking.ps().models if model.model == "second"]
            return status.expires_at.timestamp() - time.time()

        until(lambda: seconds_left() <= 3600)  # It counts once the answer has been sent.
        assert seconds_left() > 0
        asking.generate("second", "", keep_alive=-1)
        with pytest.raises(ollama.ResponseError, match="no model named 'third'"):
            asking.chat("third:latest", ask)
        with pytest.raises(ollama.ResponseError, match="keep_alive must be seconds"):
            asking.chat("first", ask, keep_alive="soon")
    listed = client.get("/api/v0/models").json()["data"]
    assert [model["id"] for model in listed] == ["first", "second", "broken"]
    assert listed[2]["state"] == "not-loaded"
    chat = {"model": "first", "messages": ask, "max_tokens": 2}
    assert client.post("/api/v0/chat/completions", json=chat).json()["stats"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams begin with a comment if their model is not loaded at once."""
    monkeypatch.setattr(forward, "_PATIENCE", 0.0)


def test_a_stream_that_waits_gets_comments(client: httpx.Client, impatient: None) -> None:
    expected = complete(client, "second")
    unloaded(client, "second")
    body = {**GREEDY, "model": "second", "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        text = "".join(answer.iter_text())
    assert text.startswith(": the model is being loaded\n\n")
    told = events(httpx.Response(200, text=text))
    assert "".join(event["choices"][0]["text"] for event in told) == expected


def test_an_error_after_comments_is_an_event(client: httpx.Client, impatient: None) -> None:
    unloaded(client, "second")
    body = {**LONG, "model": "second", "max_tokens": 300}
    answer = client.post("/v1/completions", json=body)
    [error] = events(answer)
    assert error["error"]["code"] == "context_length_exceeded"
    unloaded(client, "second")
    chat = {"model": "second", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}
    text = client.post("/v1/messages", json={**chat, "stream": True}).text
    assert "event: error\ndata: " in text and "max_tokens" in text


def test_a_model_that_cannot_be_loaded_says_why(client: httpx.Client) -> None:
    for _ in range(2):  # It is tried each time.
        answer = client.post("/v1/completions", json={**GREEDY, "model": "broken"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "model_failed"), error
        assert "damaged" in error["message"]
    state = state_of(client, "broken")
    assert state["value"] == "unloaded" and state["failed"] and "damaged" in state["reason"]
    assert client.get("/health").status_code == 200


def test_wrong_requests(client: httpx.Client) -> None:
    unknown = client.post("/v1/completions", json={**GREEDY, "model": "third"})
    assert unknown.status_code == 404 and "first, second, 2nd, sql" in unknown.text
    for body in ("{", "[1]", '{"model": 5}'):
        answer = client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
    assert client.post("/models/unload", json={"model": "third"}).status_code == 404
    assert client.post("/models/load", json={}).json()["error"]["param"] == "model"
    answer = client.post("/v1/completions", json={**GREEDY, "keep_alive": "soon"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "keep_alive")
    assert client.post("/v1/files", json={}).json()["error"]["code"] == "files_disabled"


def test_stored_responses_are_found_on_any_model(client: httpx.Client) -> None:
    complete(client, "first")
    body = {"model": "second", "input": "hello", "max_output_tokens": 4}
    made = client.post("/v1/responses", json=body).json()
    assert client.get(f"/v1/responses/{made['id']}").json()["output"] == made["output"]
    assert client.delete(f"/v1/responses/{made['id']}").json()["deleted"]
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_adapters_belong_to_their_model(client: httpx.Client, folder: Path) -> None:
    unloaded(client, "second")
    adapted = complete(client, "sql")  # It loads its model.
    assert adapted != complete(client, "second")
    assert client.get("/v1/models/sql").json()["parent"] == "second"
    body = {"lora_name": "new", "lora_path": str(adapter(folder, "new", 2)), "model": "second"}
    answer = client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text
    assert complete(client, "new") not in (adapted, complete(client, "second"))
    refused = client.post("/v1/load_lora_adapter", json={**body, "model": "first"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "lora_disabled")
    client.post("/v1/unload_lora_adapter", json={"lora_name": "new", "model": "second"})
    assert client.post("/v1/completions", json={**GREEDY, "model": "new"}).status_code == 404


def test_metrics_name_their_model(client: httpx.Client) -> None:
    complete(client, "first")
    complete(client, "second")
    found: list[tuple[str, dict[str, Metric]]] = []

    def both_answer() -> bool:
        """A model that takes more than two seconds to answer is left out."""
        text = client.get("/metrics").text
        found.append((text, {f.name: f for f in text_string_to_metric_families(text)}))
        samples = found[-1][1]["vllm:generation_tokens"].samples
        return {s.labels["model_name"] for s in samples} == {"first", "second"}

    until(both_answer)
    text, families = found[-1]
    tokens = families["vllm:generation_tokens"]
    by_model = {s.labels["model_name"]: s.value for s in tokens.samples if "total" in s.name}
    assert by_model["first"] >= 12 and by_model["second"] >= 12
    memory = {s.labels.get("model_name") for s in families["process_resident_memory_bytes"].samples}
    assert memory == {None, "first", "second"}
    assert text.count("# TYPE vllm:generation_tokens_total counter") == 1


def test_the_rest_of_the_api(client: httpx.Client) -> None:
    complete(client, "second")
    info = client.get("/server_info", params={"model": "second"}).json()
    assert info["engine_config"]["max_num_seqs"] == 4
    info = client.get("/server_info").json()
    assert [model["id"] for model in info["models"]] == ["first", "second", "broken"]
    assert info["status"] == "ready" and info["memory_budget"] > 1 << 30
    assert client.post("/reset_prefix_cache").json()["num_blocks"] >= 0
    assert client.get("/load").json() == {"server_load": 0}
    assert "/models/load" in client.get("/openapi.json").json()["paths"]
    assert client.get("/").status_code == client.get("/web/page.js").status_code == 200


def test_an_unload_waits_for_a_stream_and_a_client_may_leave(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json={**LONG, "model": "first"}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert client.post("/models/unload", json={"model": "first"}).json()["success"]
        for _ in range(50):
            next(lines)
        assert state_of(client, "first") == {"value": "loaded"}
    until(lambda: state_of(client, "first") == {"value": "unloaded"})  # It has left.
    complete(client, "first")


def test_a_request_can_be_aborted(router: Router, client: httpx.Client) -> None:
    complete(client, "first")
    ended: list[httpx.Response] = []

    def ask() -> None:
        body = {**LONG, "stream": False, "model": "first", "request_id": "mine"}
        ended.append(httpx.post(f"{router.url}/v1/completions", json=body, timeout=300))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: client.post("/abort_requests", json={"request_ids": ["mine"]}).json()["aborted"])
    asking.join(300)
    assert ended[0].status_code == 499 and ended[0].headers["x-request-id"] == "mine"


# Processes.


def test_processes_fail_die_and_end_with_the_server(damaged: Path) -> None:
    models = (f"--model=a={model_path()}", f"--model=b={model_path()}", f"--model=broken={damaged}")
    with (
        process(*models, "--log-format", "json", "--no-spare-process") as (server, url),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        answer = client.post("/v1/completions", json={**GREEDY, "model": "broken"})
        assert answer.status_code == 503 and "damaged" in answer.json()["error"]["message"]
        expected = complete(client, "a")
        [child] = psutil.Process(server.pid).children()
        # Ctrl-C is for the router alone, and Linux divides processors between sessions.
        assert os.getpgid(child.pid) == child.pid
        assert os.getsid(child.pid) == os.getsid(server.pid)
        with client.stream("POST", "/v1/completions", json={**LONG, "model": "a"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.kill()
            text = "\n".join(lines)
        assert "model_failed" in text and text.rstrip().endswith("data: [DONE]")
        until(lambda: state_of(client, "a").get("failed"))
        assert "SIGKILL: the system may be short of memory" in state_of(client, "a")["reason"]
        assert complete(client, "a") == expected
        ends_while_loading_and_with_a_stream(server, url)


def ends_while_loading_and_with_a_stream(server: Any, url: str) -> None:
    """SIGTERM lets a stream of "a" finish, and refuses a request that waits for "b"."""
    found: list[str] = []

    def read(body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            found.extend(answer.iter_lines())

    first = threading.Thread(target=read, args=({**LONG, "model": "a", "max_tokens": 200},))
    first.start()
    until(lambda: found)
    waiting: list[httpx.Response] = []

    def wait() -> None:
        body = {**GREEDY, "model": "b"}
        waiting.append(httpx.post(f"{url}/v1/completions", json=body, timeout=300))

    second = threading.Thread(target=wait)
    second.start()
    until(lambda: len(psutil.Process(server.pid).children()) == 2)
    children = psutil.Process(server.pid).children()
    server.send_signal(signal.SIGTERM)
    second.join(300)
    assert waiting[0].json()["error"]["code"] == "shutting_down", waiting[0].text
    first.join(300)
    assert found[-2] == "data: [DONE]" and '"finish_reason":"length"' in "".join(found)
    _, log = server.communicate(timeout=300)
    assert server.returncode == 0, log
    assert not any(each.is_running() for each in children)
    assert all(line.startswith('{"time"') for line in log.splitlines()), log
    told = [json.loads(line) for line in log.splitlines()]
    ended = [t for t in told if t["message"] == "request" and t.get("completion_tokens") == 200]
    assert [t["model"] for t in ended] == ["a"]


def test_processes_end_with_a_router_that_is_killed() -> None:
    models = (f"--model=a={model_path()}", f"--model=b={model_path()}")
    # In /tmp, because the paths of sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        with process(*models, TMPDIR=folder) as (server, _):
            # The model's and the spare one, which has no socket.
            until(lambda: len(psutil.Process(server.pid).children()) == 2)
            children = psutil.Process(server.pid).children()
            assert len(list(Path(folder).glob("mlx-paged-*/*.sock"))) == 1
            server.kill()
            until(lambda: not any(child.is_running() for child in children))
        assert not list(Path(folder).glob("mlx-paged-*"))


# Loading and unloading under load.


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(100, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_models_come_and_go_under_load(client: httpx.Client, rounds: int) -> None:
    """One model is unloaded and loaded while both get requests: every answer is the right one."""
    expected = {name: complete(client, name) for name in ("first", "second")}
    url, ended = str(client.base_url), threading.Event()
    wrong: list[str] = []
    counts = dict.fromkeys(expected, 0)

    def ask(name: str) -> None:
        with httpx.Client(base_url=url, timeout=300) as own:
            while not ended.is_set():
                answer = own.post("/v1/completions", json={**GREEDY, "model": name})
                if (
                    answer.status_code != 200
                    or answer.json()["choices"][0]["text"] != expected[name]
                ):
                    wrong.append(answer.text)
                counts[name] += 1

    askers = [threading.Thread(target=ask, args=(name,)) for name in ("first", "second", "second")]
    for asker in askers:
        asker.start()
    for _ in range(rounds):
        before = counts["second"]
        client.post("/models/unload", json={"model": "second"})
        until(lambda before=before: counts["second"] > before + 4)
    ended.set()
    for asker in askers:
        asker.join(300)
    assert not wrong and counts["first"] > 4
    assert client.get("/load").json() == {"server_load": 0}
    unloaded(client, "second")  # No request is counted any more.


def test_keep_alive_of_ollama_unloads_a_model(client: httpx.Client) -> None:
    complete(client, "second")
    chat = {"model": "second", "messages": [{"role": "user", "content": "hello"}], "stream": False}
    answer = client.post("/api/chat", json={**chat, "keep_alive": 0, "options": {"num_predict": 4}})
    assert answer.json()["model"] == "second", answer.text
    until(lambda: state_of(client, "second")["value"] == "unloaded")
    assert "second" not in [each["name"] for each in client.get("/api/ps").json()["models"]]
    assert "second" in [each["name"] for each in client.get("/api/tags").json()["models"]]
    body = {**GREEDY, "model": "second", "keep_alive": "10m"}
    assert client.post("/v1/completions", json=body).status_code == 200
    expires_at = client.get("/v1/models/second").json()["expires_at"]
    assert 0 < expires_at - time.time() <= 600
    client.post("/v1/completions", json={**body, "keep_alive": 1e15})  # years end at 9999
    [loaded] = [m for m in client.get("/api/ps").json()["models"] if m["name"] == "second"]
    assert loaded["expires_at"] == "2318-01-01T00:00:00Z"
    client.post("/v1/completions", json={**body, "keep_alive": -1})
    assert client.get("/v1/models/second").json()["expires_at"] is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (5, 5.0),
        ("90", 90.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        (0, 0.0),
        (-1, None),
        ("-1m", None),
    ],
)
def test_times_to_keep_a_model(given: Any, expected: float | None) -> None:
    assert keep_alive_of(given) == expected


@pytest.mark.parametrize("given", ["", "5 m", "m", True, [], "1d", float("inf")])
def test_wrong_times_to_keep_a_model(given: Any) -> None:
    with pytest.raises(ApiError, match="keep_alive"):
        keep_alive_of(given)


# Options.


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("5", "a list of models"),
        ("[{modle: x}]", "models_config[0] must be a mapping of model, name"),
        ("[{model: x, ttl: -1}]", "models_config[0].ttl must be seconds"),
        ("[{model: x, aliases: [y]}]", "models_config[0].name must be given with aliases"),
        ("[{model: x, pinned: maybe}]", "models_config[0].pinned must be true or false"),
        ("[{model: x, options: {port: 3}}]", "port is not an option of a model"),
        ("[{model: x, options: {bogus: 3}}]", "there is no option 'bogus'"),
        ("[{model: x, options: {max-num-seqs: few}}]", "max_num_seqs"),
        ("[{model: x, options: {block_size: 7}}]", "block_size"),
        ("[{model: x, name: first}]", "a name that no other model has"),
        ("[x, {model: y, name: x}]", "a name that no other model has"),
        ("{a: {b: c}", "a YAML file"),
    ],
)
def test_a_wrong_file_of_models_is_refused(tmp_path: Path, entries: str, said: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(entries)
    arguments = ["serve", "--model", f"first={model_path()}", "--models-config", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert said in " ".join((result.output + str(result.exception)).split()).replace("│ ", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory-budget", "4"], "several models"),
        (["--model", "a=x", "--model", "b=y", "--pin-model", "c"], "the name of a model (a, b)"),
        (["--model", "a=x", "--model", "=y"], "NAME=PATH"),
    ],
)
def test_wrong_options_of_several_models(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code != 0 and said in str(result.exception), result.output


def test_one_model_by_name_is_served_without_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("mlx_paged.server.run.serve", lambda *a, **_: seen.append(a[1]) or 0)
    monkeypatch.setattr("mlx_paged.server.logs.configure", lambda *_: None)
    assert CliRunner().invoke(app, ["serve", "--model", f"mine={model_path()}"]).exit_code == 0
    assert seen[0].served_model_names == ("mine",) and seen[0].model == str(model_path())


def test_an_engine_of_several_models_may_have_its_own_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("mlx_paged.server.run.serve", lambda make, *_, **__: make("") or 0)
    monkeypatch.setattr("mlx_paged.server.logs.configure", lambda *_: None)
    monkeypatch.setattr(
        "mlx_paged.server.router.service.RouterService", lambda specs, *_, **__: seen.extend(specs)
    )
    models = [option for name in "ab" for option in ("--model", f"{name}={model_path()}")]
    result = CliRunner().invoke(app, ["serve", *models, "--frontend-multiprocessing"])
    assert result.exit_code == 0, result.output
    for spec in seen:
        _, _, server = pickle.loads(spec.launch)
        assert server.frontend_multiprocessing
        assert spec.num_processes == 2
    assert len(seen) == 2
