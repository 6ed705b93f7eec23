"""Routers of other projects in front of two servers: smg (sglang-router's successor) and LiteLLM's
proxy, as docs/scale.md shows them.

smg is part of the extra `dev`. LiteLLM's proxy takes 750 MB and has its own
environment: put its `bin` on PATH, or name the program in MLX_PAGED_LITELLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.ports import free_ports
from support.server_helpers import TIMEOUT, process, running, until

MODEL = "mlx-paged-demo"
BODY = {"model": MODEL, "max_tokens": 8, "temperature": 0}
WORDS = ("red", "green", "blue", "gold", "pink", "gray", "teal", "navy", "lime", "plum")


def program(name: str) -> str:
    """Returns the path of a router's program, from its variable, this environment, or PATH."""
    chosen = os.environ.get(f"MLX_PAGED_{name.upper()}")
    beside = Path(sys.executable).parent / name
    return chosen or (str(beside) if beside.exists() else shutil.which(name) or "")


def needs(name: str, package: str) -> pytest.MarkDecorator:
    reason = f"no program `{name}` on PATH: pip install '{package}' in an environment of its own"
    return pytest.mark.skipif(not program(name), reason=reason)


@dataclass
class Fleet:
    """A router with two servers behind it.

    Attributes:
        client: Sends requests to the router.
        served_by: Header of the router's answers with the address of the server.
        urls: Addresses of the servers.
        victim: Process of the second server.
    """

    client: httpx.Client
    served_by: str
    urls: list[str]
    victim: subprocess.Popen[str]

    def chat(self, conversation: str, messages: list[Any], **change: Any) -> tuple[str, Any]:
        """Returns the address of the server that answered, and the answer."""
        headers = {"x-litellm-session-id": conversation}
        answer = self.client.post(
            "/v1/chat/completions", json={**BODY, "messages": messages, **change}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        return answer.headers[self.served_by].removesuffix("/v1"), answer.json()


@contextlib.contextmanager
def two_servers() -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """One server in this process and one in its own, which can be killed."""
    with running() as one, process() as (victim, other):
        yield [one.url, other], victim


@contextlib.contextmanager
def router(command: list[str], log: Path, **env: str) -> Iterator[None]:
    with log.open("w") as out:
        started = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env})
    try:
        yield
        assert started.poll() is None, log.read_text()[-3000:]
    finally:
        started.kill()
        started.wait()


@contextlib.contextmanager
def behind_smg(folder: Path) -> Iterator[Fleet]:
    port, metrics = free_ports(2)
    with two_servers() as (urls, victim):
        command = [program("smg"), "launch", "--host", "127.0.0.1", "--port", str(port),
                   "--prometheus-port", str(metrics), "--policy", "cache_aware",
                   "--worker-urls", *urls]  # fmt: skip
        with (
            router(command, folder / "smg.log"),
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client,
        ):
            until(lambda: client.get("/workers").json()["total"] == 2)
            yield Fleet(client, "x-smg-routed-worker-id", urls, victim)


@contextlib.contextmanager
def behind_litellm(folder: Path) -> Iterator[Fleet]:
    [port], key = free_ports(1), f"sk-{secrets.token_hex(32)}"
    with two_servers() as (urls, victim):
        models = [
            {"model_name": MODEL,
             "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1"}}
            for url in urls
        ]  # fmt: skip
        settings = {
            "optional_pre_call_checks": ["session_affinity"],
            "num_retries": 2,
            "allowed_fails": 0,
        }
        config = folder / "litellm.yaml"  # JSON is YAML
        config.write_text(json.dumps({"model_list": models, "router_settings": settings}))
        command = [program("litellm"), "--config", str(config), "--host", "127.0.0.1",
                   "--port", str(port)]  # fmt: skip
        environment = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        headers = {"authorization": f"Bearer {key}"}
        with (
            router(command, folder / "litellm.log", **environment),
            httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT, headers=headers
            ) as client,
        ):
            until(lambda: client.get("/health/liveliness").status_code == 200)
            yield Fleet(client, "x-litellm-model-api-base", urls, victim)


def check_answers(fleet: Fleet) -> None:
    """Plain and streamed answers have the tokens that the servers give directly."""
    [listed] = {model["id"] for model in fleet.client.get("/v1/models").json()["data"]}
    assert listed == MODEL
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    body = {**BODY, "messages": messages, "max_tokens": 24}
    direct = httpx.post(f"{fleet.urls[0]}/v1/chat/completions", json=body).json()
    text, usage = direct["choices"][0]["message"]["content"], direct["usage"]
    _, answer = fleet.chat("answers", messages, max_tokens=24)
    assert answer["choices"][0]["message"]["content"] == text
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(fleet.client.post("/v1/chat/completions", json=streamed).text)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert len([delta for delta in deltas if delta.get("content")]) > 4  # not one piece
    for found in (answer["usage"], events[-1]["usage"]):
        assert found["completion_tokens"] == usage["completion_tokens"]
        assert found["prompt_tokens"] == usage["prompt_tokens"]


def events_of(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def check_affinity(fleet: Fleet) -> None:
    """Both servers get conversations, and later turns find the cache of earlier ones."""
    used = set()
    for word in WORDS:
        messages = [{"role": "user", "content": f"{word} " * 60}]
        first, answer = fleet.chat(word, messages)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        second, later = fleet.chat(word, messages)
        assert second == first
        cached = later["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= answer["usage"]["prompt_tokens"] - 1
        used.add(first)
    assert used == set(fleet.urls)


def check_kill(fleet: Fleet) -> None:
    """A stream of a killed server ends with an error; the other server answers what comes next."""
    number, server = 0, ""
    while server != fleet.urls[1]:
        number += 1
        messages = [{"role": "user", "content": f"number {number} " * 40}]
        server, _ = fleet.chat(f"number {number}", messages)
        assert number < 64, "no conversation is sent to the second server"
    long = {**BODY, "messages": messages, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"x-litellm-session-id": f"number {number}"}
    lines = []
    with fleet.client.stream(
        "POST", "/v1/chat/completions", json=long, headers=headers
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 4:
                fleet.victim.kill()
    events = events_of("\n".join(lines))
    assert "error" in events[-1], events[-3:]
    assert not any(event["choices"][0].get("finish_reason") for event in events[:-1])
    for turn in range(6):
        server, answer = fleet.chat(f"number {number}", messages)
        assert server == fleet.urls[0]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached >= answer["usage"]["prompt_tokens"] - 1) == (turn > 0)  # not its cache


@needs("smg", "smg==1.13.0")
def test_smg(tmp_path) -> None:
    with behind_smg(tmp_path) as fleet:
        check_answers(fleet)
        check_affinity(fleet)
        check_kill(fleet)


@needs("litellm", "litellm[proxy]==1.106.2")
def test_litellm(tmp_path) -> None:
    with behind_litellm(tmp_path) as fleet:
        check_answers(fleet)
        check_affinity(fleet)
        check_kill(fleet)
