"""Servers whose chat templates write calls as no listed format does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.server_helpers import ENGINE, running
from support.tool_templates import TEMPLATES, Invented

from mlx_paged.server.config import ServerConfig

CHATS = "/v1/chat/completions"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"what": {"enum": ["a", "b"]}, "many": {"type": "boolean"}},
    "required": ["what", "many"],
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Find it."}],
    "tools": [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 150,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "template",
    [
        t
        for t in TEMPLATES
        if t.name in ("attributes", "elements", "arguments_as_text", "identified", "functions")
    ],
    ids=lambda t: t.name,
)
def test_forced_calls_and_their_history(template: Invented) -> None:
    with (
        running(ServerConfig(chat_template=template.source), **ENGINE) as server,
        server.client() as client,
    ):
        answer = client.post(CHATS, json=BODY)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert not message["content"]
        [call] = message["tool_calls"]
        assert call["function"]["name"] == "find"
        assert json.loads(call["function"]["arguments"]).keys() == {"what", "many"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
        body = {**BODY, "messages": [*BODY["messages"], message, result]}
        assert client.post(CHATS, json={**body, "tool_choice": "none"}).status_code == 200
        parsing = client.get("/server_info").json()["parsing"]
        assert parsing["tool_calls"] == "derived"
        assert "{name}" in parsing["tool_call_syntax"]
        assert parsing["no_tool_calls"] is None


def test_why_tools_are_refused() -> None:
    template = Invented("none", "{{ calls[0].function.name }}", "json").source
    with (
        running(ServerConfig(chat_template=template), **ENGINE) as server,
        server.client() as client,
    ):
        answer = client.post(CHATS, json=BODY)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "tools"
        reason = "none can be derived: it renders calls without their arguments"
        assert reason in error["message"]
        parsing = client.get("/server_info").json()["parsing"]
        assert parsing["tool_calls"] is None
        assert reason in parsing["no_tool_calls"]
