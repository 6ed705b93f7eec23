"""Tests the OpenAI SDK, sync and async, and the frameworks on top of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.server_helpers import RunningServer, running
from support.waiting import TIMEOUT

from mlx_paged.server.config import ServerConfig

MESSAGES: Any = [{"role": "user", "content": "Return the n-th Fibonacci number"}]
PROMPT = "def is_even(n: int) -> bool:\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(
        ServerConfig(api_keys=("secret",)), max_num_waiting=8, max_model_len=1024
    ) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def run_async(server: RunningServer, work: Any) -> Any:
    async def main() -> Any:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="secret", max_retries=0
        ) as client:
            return await asyncio.wait_for(work(client), TIMEOUT)

    return asyncio.run(main())


def test_models(client) -> None:
    assert [m.id for m in client.models.list()] == ["mlx-paged-demo"]
    assert client.models.retrieve("mlx-paged-demo").owned_by == "mlx-paged"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_chat_whole_and_streamed_sync_and_async(server, client) -> None:
    asked: dict[str, Any] = {
        "model": "mlx-paged-demo", "messages": MESSAGES, "max_completion_tokens": 40,
        "temperature": 0.8, "seed": 11, "n": 2, "logprobs": True, "top_logprobs": 2,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": -1},
        "stop": ["\n\n\n"], "user": "someone",
        "extra_body": {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.05, "min_tokens": 3,
                       "cache_salt": "x", "return_token_ids": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    assert len(texts) == 2 and all(texts) and whole.usage and whole.usage.prompt_tokens_details
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content

    def gather(chunks: list[Any]) -> list[str]:
        found = ["", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                found[choice.index] += choice.delta.content or ""
        return found

    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked, **options))
    assert gather(chunks) == texts
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    async def work(client: openai.AsyncOpenAI) -> Any:
        again = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, **options)
        return again, [chunk async for chunk in stream]

    again, chunks = run_async(server, work)
    assert [choice.message.content for choice in again.choices] == texts == gather(chunks)


def test_the_stream_helper(client) -> None:
    with client.chat.completions.stream(
        model="mlx-paged-demo", messages=MESSAGES, max_tokens=400, temperature=0
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content


def test_completions_whole_and_streamed_sync_and_async(server, client) -> None:
    asked: dict[str, Any] = {
        "model": "mlx-paged-demo", "prompt": [PROMPT, "x = "], "max_tokens": 15, "temperature": 0,
        "logprobs": 1, "echo": True,
    }  # fmt: skip
    whole = client.completions.create(**asked)
    texts = [choice.text for choice in whole.choices]
    found = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == texts

    async def work(client: openai.AsyncOpenAI) -> list[str]:
        found = ["", ""]
        async for chunk in await client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.text
        return found

    assert run_async(server, work) == texts
    [best] = client.completions.create(
        model="mlx-paged-demo", prompt=PROMPT, best_of=3, n=1, seed=1, max_tokens=5
    ).choices
    assert best.text


def test_errors_are_the_sdks_own(server, client) -> None:
    def chat(**change: Any) -> Any:
        asked: dict[str, Any] = {"model": "mlx-paged-demo", "messages": MESSAGES, "max_tokens": 2}
        return client.chat.completions.create(**{**asked, **change})

    with pytest.raises(openai.BadRequestError) as bad:
        chat(temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        chat(max_tokens=5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as tools:
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert tools.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        chat(model="gpt-9")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.RateLimitError) as full:
        chat(n=128)
    assert full.value.response.headers["retry-after"]


def test_a_cancelled_task_ends_its_request(server) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        async def read() -> None:
            stream = await client.chat.completions.create(
                model="mlx-paged-demo", messages=MESSAGES, max_tokens=900, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for _ in stream:
                seen.set()

        seen = asyncio.Event()
        task = asyncio.create_task(read())
        await seen.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_async(server, work)
    assert server.wait_idle().num_running == 0


def test_langchain(server) -> None:
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import SecretStr

    key = SecretStr("secret")
    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key=key, model="mlx-paged-demo",
                      temperature=0, max_tokens=24)  # type: ignore[call-arg] # fmt: skip
    whole = chat.invoke("Return the n-th Fibonacci number")
    assert whole.content and whole.usage_metadata and whole.usage_metadata["output_tokens"] == 24
    assert "".join(str(c.content) for c in chat.stream("Return the n-th Fibonacci number")) == (
        whole.content
    )
    assert asyncio.run(chat.ainvoke("Return the n-th Fibonacci number")).content == whole.content
    plain = OpenAI(base_url=f"{server.url}/v1", api_key=key, model="mlx-paged-demo",
                   temperature=0, max_tokens=8)  # fmt: skip
    assert plain.invoke(PROMPT)


def test_llama_index(server) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        api_base=f"{server.url}/v1", api_key="secret", model="mlx-paged-demo", max_tokens=24,
        temperature=0, is_chat_model=True,
    )  # fmt: skip
    message = ChatMessage(role="user", content="Return the n-th Fibonacci number")
    whole = model.chat([message]).message.content
    assert whole and [*model.stream_chat([message])][-1].message.content == whole
    plain = OpenAILike(
        api_base=f"{server.url}/v1", api_key="secret", model="mlx-paged-demo", max_tokens=8,
        temperature=0, is_chat_model=False,
    )  # fmt: skip
    assert plain.complete(PROMPT).text


def test_the_recipe_for_opencode(server, monkeypatch) -> None:
    """Requests of OpenCode's provider package, set up from the documented file."""
    text = (Path(__file__).parents[2] / "docs/agents.md").read_text()
    [recipe] = re.findall(r"```json\n(\{\n  \"\$schema\": .*?\n\})\n```", text, re.DOTALL)
    config = json.loads(recipe)
    name, _, model = config["model"].partition("/")
    provider = config["provider"][name]
    assert config["enabled_providers"] == [name] and config["small_model"] == config["model"]
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    limit = provider["models"][model]["limit"]
    # No tools are offered: the server would refuse them.
    agent = config["agent"][config["default_agent"]]
    assert agent["tools"] == {"*": False} and provider["models"][model]["tool_call"] is False
    options = provider["options"]
    assert options["apiKey"] == "{env:MLX_PAGED_API_KEY}"
    base = options["baseURL"].replace("http://127.0.0.1:8000", server.url)
    with httpx.Client(headers={"Authorization": "Bearer secret"}, timeout=300) as client:
        [served] = client.get(f"{base}/models").json()["data"]
        assert served["id"] == model and limit["output"] < limit["context"]
        body = {
            "model": model, "max_tokens": limit["output"], "stream": True, "top_p": 1,
            "temperature": 0, "stream_options": {"include_usage": True},
            "messages": [{"role": "system", "content": agent["prompt"]}, *MESSAGES],
        }  # fmt: skip
        found = [json.loads(line.removeprefix("data: "))
                 for line in client.post(f"{base}/chat/completions", json=body).text.split("\n")
                 if line.startswith("data: {")]  # fmt: skip
        said = "".join(c["delta"].get("content") or "" for e in found for c in e["choices"])
        assert said.startswith("def ") and found[-1]["usage"]["completion_tokens"] > 5
        tools = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
        refused = client.post(f"{base}/chat/completions", json={**body, "tools": tools})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
