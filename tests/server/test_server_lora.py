"""Adapters as models of the server: every API, the list of models, loading and unloading."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters import fused, greedy, random_layers, write_mlx
from support.models import embedded, embedded_twin
from support.server_helpers import RunningServer, running, validate
from support.waiting import TIMEOUT

from mlx_paged import AsyncEngine
from mlx_paged.errors import AdapterError, InvalidParameterError
from mlx_paged.server import responses
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.lora_modules import LoraModule, lora_modules_of

NUM_TOKENS = 5
PROMPT = "def add(a, b):\n"
ENGINE = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}
SAMPLING = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
# Rounds of loading under load; 500 once, by hand.
ROUNDS = int(os.environ.get("MLX_PAGED_LORA_ROUNDS", "6"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_mlx(folder / f"adapter{i}", random_layers(embedded().model, i), scale=1.0)
        for i in range(3)
    ]


@pytest.fixture(scope="module")
def server(paths: list[Path]) -> Iterator[RunningServer]:
    config = ServerConfig(
        served_model_names=("demo",),
        lora_modules=(("sql", str(paths[0])),),
        allow_runtime_lora_updating=True,
    )
    with running(config, **ENGINE) as server:
        yield server


@cache
def answer(path: Path | None, prompt: str = PROMPT) -> str:
    """mlx-lm's answer with the adapter fused."""
    model = embedded().model if path is None else fused(embedded_twin().model, path)
    tokens = embedded().tokenizer.encode(prompt)
    return embedded().tokenizer.decode(greedy(model, tokens, NUM_TOKENS))


def complete(server: RunningServer, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, **SAMPLING, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT)


def test_an_adapter_is_a_model(server: RunningServer, paths: list[Path]) -> None:
    texts = {}
    for model, path in (("demo", None), ("sql", paths[0]), ("default", None)):
        found = complete(server, model).json()
        assert found["model"] == ("demo" if model == "default" else model)
        texts[model] = found["choices"][0]["text"]
        assert texts[model] == answer(path)
    assert texts["sql"] != texts["demo"]


def test_every_api_takes_it(server: RunningServer) -> None:
    """Chats, responses and messages differ from the model's alone, and name the adapter."""
    messages = [{"role": "user", "content": "Return the sum"}]
    chats = {
        "/v1/chat/completions": {"messages": messages, **SAMPLING},
        "/v1/responses": {"input": "Return the sum", "max_output_tokens": 5, "temperature": 0},
        "/v1/messages": {"messages": messages, "max_tokens": 5, "temperature": 0},
    }
    for path, body in chats.items():
        found = {name: post(server, path, model=name, **body).json() for name in ("sql", "demo")}
        assert found["sql"]["model"] == "sql" and found["demo"]["model"] == "demo"
        texts = {name: _text_of(each) for name, each in found.items()}
        assert texts["sql"] and texts["sql"] != texts["demo"], path
    streamed = post(
        server, "/v1/chat/completions", model="sql", messages=messages, stream=True, **SAMPLING
    )
    assert '"model":"sql"' in streamed.text
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert post(server, path, model="sql", **body).status_code == 200
    counted = post(server, "/v1/messages/count_tokens", model="sql", messages=messages)
    assert counted.json()["input_tokens"] > 0


def _text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    if "output" in answer:
        return answer["output"][-1]["content"][0]["text"]
    return answer["content"][0]["text"]


def test_the_list_of_models(server: RunningServer, paths: list[Path]) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()
    validate(responses.ModelList, listed)
    demo, sql = listed["data"]
    assert (demo["id"], demo["root"], demo["parent"]) == ("demo", "demo", None)
    assert (sql["id"], sql["root"], sql["parent"]) == ("sql", str(paths[0]), "demo")
    assert sql["max_model_len"] == demo["max_model_len"]
    assert httpx.get(f"{server.url}/v1/models/sql").json() == sql
    anthropic = httpx.get(f"{server.url}/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert [each["id"] for each in anthropic.json()["data"]] == ["demo", "sql"]


def test_unknown_adapters(server: RunningServer) -> None:
    refused = complete(server, "other")
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["code"] == "model_not_found" and "demo, sql" in error["message"]
    messages = [{"role": "user", "content": "x"}]
    refused = post(server, "/v1/messages", model="other", messages=messages, max_tokens=1)
    assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{server.url}/v1/models/other").status_code == 404


def test_loading_and_unloading(server: RunningServer, paths: list[Path], tmp_path: Path) -> None:
    load = "/v1/load_lora_adapter"
    loaded = post(server, load, lora_name="new", lora_path=str(paths[1]))
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'new' added successfully."
    assert complete(server, "new").json()["choices"][0]["text"] == answer(paths[1])
    again = post(server, load, lora_name="new", lora_path=str(paths[2]))
    assert again.status_code == 400 and "'new' has already been loaded" in again.text
    in_place = {"lora_name": "new", "lora_path": str(paths[2]), "load_inplace": True}
    assert post(server, load, **in_place).status_code == 200
    assert complete(server, "new").json()["choices"][0]["text"] == answer(paths[2])
    unload = "/v1/unload_lora_adapter"
    assert post(server, unload, lora_name="new").text == (
        "Success: LoRA adapter 'new' removed successfully."
    )
    assert complete(server, "new").status_code == 404
    gone = post(server, unload, lora_name="new")
    assert gone.status_code == 404 and "The lora adapter 'new' cannot be found." in gone.text

    def refused(status: int, message: str, **body: Any) -> None:
        response = post(server, load, **{"lora_name": "bad", "lora_path": "x", **body})
        assert response.status_code == status and message in response.text, response.text

    refused(404, "there is no such directory", lora_path=str(tmp_path / "missing"))
    refused(400, "the directory has no adapter_config.json", lora_path=str(tmp_path))
    refused(400, "'demo' is a name of the model itself", lora_name="demo")
    refused(400, "lora_name", lora_name="")
    refused(400, "lora_path", lora_path=5)
    wide = write_mlx(tmp_path / "wide", random_layers(embedded().model, 1, rank=17))
    refused(400, "max_lora_rank must be at least 17", lora_path=str(wide))
    dora = write_mlx(tmp_path / "dora", random_layers(embedded().model, 1), fine_tune_type="dora")
    refused(400, "fine_tune_type must be 'lora' but got 'dora'", lora_path=str(dora))


def test_files_that_are_gone_do_not_end_an_adapter(server: RunningServer, tmp_path: Path) -> None:
    path = write_mlx(tmp_path / "x", random_layers(embedded().model, 9))
    want = answer(path)
    post(server, "/v1/load_lora_adapter", lora_name="gone", lora_path=str(path))
    (path / "adapters.safetensors").unlink()
    assert complete(server, "gone").json()["choices"][0]["text"] == want
    post(server, "/v1/unload_lora_adapter", lora_name="gone")


def test_metrics(server: RunningServer) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    for label in ('max_lora="2"', 'running_lora_adapters=""', 'waiting_lora_adapters=""'):
        assert label in line


def test_adapters_come_and_go_under_load(server: RunningServer, paths: list[Path]) -> None:
    """No request gets another adapter's tokens, whatever is loaded meanwhile."""
    prompts = [PROMPT, "import math\n", "class Stack:\n"]

    async def asks(client: httpx.AsyncClient, model: str, path: Path | None) -> None:
        for prompt in prompts:
            body = {"model": model, "prompt": prompt, **SAMPLING}
            response = await client.post("/v1/completions", json=body)
            assert response.json()["choices"][0]["text"] == answer(path, prompt), model

    async def load_and_ask(client: httpx.AsyncClient, name: str, first: int) -> None:
        for i in range(first, first + ROUNDS):
            path = paths[i % 3]
            body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
            loaded = await client.post("/v1/load_lora_adapter", json=body)
            assert loaded.status_code == 200, loaded.text
            await asks(client, name, path)
            if i % 2:
                unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
                assert unloaded.status_code == 200

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            tasks = [asyncio.create_task(load_and_ask(client, f"x{i}", i)) for i in range(3)]
            while not all(task.done() for task in tasks):
                await asyncio.gather(asks(client, "sql", paths[0]), asks(client, "demo", None))
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert server.stats().num_faults == 0
    server.wait_idle()


def test_a_server_without_the_options(paths: list[Path]) -> None:
    body = {"lora_name": "x", "lora_path": str(paths[0])}
    with running(ServerConfig(), **ENGINE) as server:
        refused = post(server, "/v1/load_lora_adapter", **body)
        assert refused.status_code == 403 and "--allow-runtime-lora-updating" in refused.text
    with running(ServerConfig(allow_runtime_lora_updating=True)) as server:
        refused = post(server, "/v1/load_lora_adapter", **body)
        assert refused.status_code == 400 and "--enable-lora" in refused.text
        assert "lora_requests_info" not in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize(
    ("module", "error"), [(("x", "missing"), AdapterError), (("demo", ""), InvalidParameterError)]
)
def test_a_wrong_adapter_ends_the_start(
    module: tuple[str, str], error: type[Exception], paths: list[Path]
) -> None:
    name, path = module
    config = ServerConfig(
        served_model_names=("demo",), lora_modules=((name, path or str(paths[0])),)
    )
    make = lambda: AsyncEngine.from_model(num_gpu_blocks_override=100, **ENGINE)  # noqa: E731
    with running(config, make, wait=False) as server:
        server.until(lambda: server.context.models.default.failure)
        assert isinstance(server.context.models.default.failure, error)


def test_modules_of_the_command_line() -> None:
    text = '{"name": "b", "path": "/x=y", "base_model_name": "demo"}'
    assert lora_modules_of(["a=/x", text]) == (LoraModule("a", "/x"), LoraModule("b", "/x=y"))
    for wrong in ("a", "=x", "a=", '{"name": "a"}', '{"name": "a", "path": 1}', "{"):
        with pytest.raises(InvalidParameterError, match="lora_modules must be name=path"):
            lora_modules_of([wrong])
    with pytest.raises(InvalidParameterError, match="unique names"):
        lora_modules_of(["a=x", "a=y"])
