"""Tests defaults of requests: the model's generation config, overrides, and limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import embedded
from support.server_helpers import running
from typer.testing import CliRunner

from mlx_paged import SamplingParams
from mlx_paged.cli.main import app
from mlx_paged.demo import model_path
from mlx_paged.engine.loading import load
from mlx_paged.errors import InvalidParameterError
from mlx_paged.server.bodies import ChatBody, CompletionBody
from mlx_paged.server.chat import chat_params
from mlx_paged.server.completions import completion_params
from mlx_paged.server.config import (
    GenerationDefaults,
    ServerConfig,
    generation_config_of,
    overrides_of,
)

PROMPT = "def is_even(n: int) -> bool:\n"
CONFIG = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
    "max_new_tokens": 40, "eos_token_id": [2, 7], "do_sample": True, "pad_token_id": 0,
}  # fmt: skip


def chat(defaults: GenerationDefaults, **body: Any) -> SamplingParams:
    asked = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **body})
    return chat_params(asked, ServerConfig(), defaults)


def complete(defaults: GenerationDefaults, **body: Any) -> SamplingParams:
    asked = CompletionBody.model_validate({"prompt": "x", **body})
    return completion_params(asked, ServerConfig(), defaults, 1)


def test_they_hold_where_a_request_is_silent() -> None:
    defaults = GenerationDefaults.of(CONFIG)
    for params in (chat(defaults), complete(defaults)):
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            assert getattr(params, name) == CONFIG[name]
        asked = chat(defaults, temperature=0, top_p=1.0, top_k=-1)
        assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0, 1, -1, 0.05)
    silent = chat(GenerationDefaults.of({"temperature": None, "do_sample": False}))
    assert silent == SamplingParams(max_tokens=None)


def test_max_new_tokens_limits_every_answer() -> None:
    defaults = GenerationDefaults.of(CONFIG)
    assert chat(defaults).max_tokens == 40
    assert chat(defaults, max_tokens=100).max_tokens == 40
    assert chat(defaults, max_completion_tokens=9).max_tokens == 9
    assert complete(defaults).max_tokens == 16
    assert complete(defaults, max_tokens=100).max_tokens == 40
    assert chat(GenerationDefaults()).max_tokens is None


def test_what_the_sources_give(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(CONFIG))
    assert generation_config_of("auto") is None
    assert generation_config_of("vllm") == {}
    assert generation_config_of(str(tmp_path)) == CONFIG
    assert overrides_of('{"temperature": 0, "max_new_tokens": 5}') == {
        "temperature": 0, "max_new_tokens": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "field"),
    [("[]", "generation_config"), ("{", "generation_config"),
     ('{"eos_token_id": "end"}', "eos_token_id"), ('{"eos_token_id": [2, true]}', "eos_token_id"),
     ('{"eos_token_id": -1}', "eos_token_id"), ('{"eos_token_id": [2, -7]}', "eos_token_id")],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InvalidParameterError) as error:
        generation_config_of(str(tmp_path))
    assert error.value.field == field


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "max_new_tokens"])
def test_a_value_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} of the generation config"):
        GenerationDefaults.of({name: "much"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--generation-config", "/nowhere"], "generation_config"),
        (["--override-generation-config", "{"], "JSON object"),
        (["--override-generation-config", '{"eos_token_id": 5}'], "eos_token_id"),
        (["--override-generation-config", '{"top_p": 3}'], "top_p"),
    ],
)
def test_a_wrong_option_is_named(monkeypatch, options, said) -> None:
    monkeypatch.setattr("mlx_paged.server.run.serve", lambda *_, **__: 0)
    monkeypatch.setattr("mlx_paged.server.logs.configure", lambda *_: None)
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code != 0 and said in str(result.exception)


def test_the_models_own_is_read_and_can_be_replaced() -> None:
    own = json.loads((Path(model_path()) / "generation_config.json").read_text())
    assert embedded().generation_config == own
    replaced = load(generation_config={"eos_token_id": 300})
    assert replaced.tokenizer.eos_token_ids == {*own["eos_token_id"], 300}
    assert replaced.generation_config == {"eos_token_id": 300}


def test_a_server_heeds_them() -> None:
    config = ServerConfig(override_generation_config={"temperature": 0, "max_new_tokens": 6})
    body = {"messages": [{"role": "user", "content": "Return the n-th Fibonacci number"}]}
    with running(config) as server, server.client() as client:
        told = client.get("/server_info").json()["generation_defaults"]
        assert told == {"sampling": {"temperature": 0, "top_p": 0.95}, "max_new_tokens": 6}
        two = [client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
        greedy = client.post("/v1/chat/completions", json={**body, "temperature": 0}).json()
        for answer in two:
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 6
            assert answer["choices"][0]["message"] == greedy["choices"][0]["message"]
    # An end token of another directory's file ends answers.
    end = {"eos_token_id": server.engine.engine.tokenizer.encode(" return")[-1]}
    with running(generation_config=end) as server, server.client() as client:
        asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        answer = client.post("/v1/completions", json=asked).json()["choices"][0]
        assert answer["finish_reason"] == "stop" and "return" not in answer["text"]
        told = client.get("/server_info").json()["generation_defaults"]
        assert told == {"sampling": {}, "max_new_tokens": None}


def test_a_file_of_options_has_them_as_a_mapping(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "override-generation-config: {temperature: 0.5}\ndisable-log-requests: true\n"
        "no-enable-prefix-caching: true\n"
    )
    seen: list[Any] = []
    monkeypatch.setattr("mlx_paged.server.run.serve", lambda *a, **_: seen.append(a[1]) or 0)
    monkeypatch.setattr("mlx_paged.server.logs.configure", lambda *_: None)
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert result.exit_code == 0, result.output
    assert seen[0].override_generation_config == {"temperature": 0.5}
    assert seen[0].log_requests is False
