"""The Vercel AI SDK (npm `ai`) against the server: chat completions, and responses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.npm import packages_of_npm, run_node
from support.scripted_engine import ScriptedEngine
from support.server_helpers import ENGINE, running

from mlx_paged.server.config import ServerConfig

PACKAGES = {
    "ai": "6.0.326",
    "@ai-sdk/openai": "3.0.141",
    "@ai-sdk/openai-compatible": "2.0.91",
    "zod": "4.6.7",
}
SCRIPT = Path(__file__).parent / "clients" / "vercel.mjs"
MODELS = ("compatible", "chat", "responses")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The output of the script."""
    packages = packages_of_npm(PACKAGES)
    options: dict[str, Any] = {**ENGINE, "max_model_len": 2048}
    thinks = lambda: ScriptedEngine.from_model(**options, reasoning_parser="qwen3")  # noqa: E731
    config = ServerConfig(tool_template=True)
    with running(config, thinks) as scripted, running(config, **options) as free:
        assert isinstance(scripted.engine, ScriptedEngine)
        for _ in range(2 * len(MODELS)):
            scripted.engine.says(f"<think>A call.</think>\n\nOne moment.\n{CALL}", "It rains.")
        printed = run_node(SCRIPT, packages, scripted.url, free.url)
        prompts = scripted.engine.prompts
    return {**printed, "prompts": prompts}


@pytest.mark.parametrize("model", MODELS)
def test_a_tool_is_called_and_its_result_answered(found, model) -> None:
    report = found[model]
    assert report["errors"] == []
    for steps in (report["whole"], report["streamed"]):
        first, last = steps
        assert first["text"].strip() == "One moment." and first["reason"] == "tool-calls"
        assert first["calls"] == [{"name": "get_weather", "input": {"city": "Oslo"}}]
        assert first["results"] == ["It rains in Oslo."]
        assert last["text"] == "It rains." and last["reason"] == "stop"
    assert {"tool-input-start", "tool-input-delta", "tool-call", "text-delta"} <= {*report["types"]}
    assert report["usage"]["inputTokens"] > 0 and report["usage"]["outputTokens"] > 0
    answered = [prompt for prompt in found["prompts"] if "It rains in Oslo." in prompt]
    assert len(answered) == 2 * len(MODELS)
    assert all(re.search(r'"city": ?"Oslo"', prompt) for prompt in answered)


@pytest.mark.parametrize("model", ["compatible", "responses"])
def test_reasoning(found, model) -> None:
    """(Its `openai.chat` reads none, and its `openai.responses` the summary that it asks for.)"""
    for steps in (found[model]["whole"], found[model]["streamed"]):
        assert steps[0]["reasoning"] == "A call."
    assert "reasoning-delta" in found[model]["types"]


@pytest.mark.parametrize("model", MODELS)
def test_forced_calls_and_objects(found, model) -> None:
    report = found[model]
    for [call] in report["forced"]:
        assert call["name"] == "get_weather" and call["input"]["city"] in ("Oslo", "Rome")
    for value in (report["object"], report["streamedObject"]):
        assert value["sky"] in ("clear", "cloudy", None) and len(value["days"]) <= 2
    assert report["partial"] > 0
