"""OpenCode reads a file and answers: `python scripts/agents/opencode.py`; see `runner.py`."""

from __future__ import annotations

import json
from pathlib import Path

from runner import ANSWER, NOTE, TASK, WORD, Agent, Body, Exchange, configuration, main


class OpenCode(Agent):
    """OpenCode: /v1/chat/completions, streamed."""

    package = "opencode-ai"
    program = "opencode"

    def command(self, program: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        (home / "opencode.json").write_text(configuration("opencode.json", url))
        return [str(program), "run", "--format", "json", TASK], {
            "OPENCODE_CONFIG": str(home / "opencode.json"),
            "MLX_PAGED_API_KEY": "none",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        }

    def change(self, path: str, body: Body) -> None:
        """The first request with tools must read the note; the next one must answer."""
        if any(message["role"] == "tool" for message in body["messages"]):
            body["tool_choice"] = "none"
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": ANSWER},
            }
        elif body.get("tools"):
            body["tool_choice"] = {"type": "function", "function": {"name": "read"}}
            [tool] = [t["function"] for t in body["tools"] if t["function"]["name"] == "read"]
            tool["parameters"] = {
                "type": "object",
                "properties": {"filePath": {"type": "string", "enum": [NOTE]}},
                "required": ["filePath"],
                "additionalProperties": False,
            }
        else:
            body["max_tokens"] = 16  # the session's title

    def check(self, exchanges: list[Exchange], output: str) -> None:
        chats = [e for e in exchanges if e.path == "/v1/chat/completions" and e.body is not None]
        asked, answered = [e for e in chats if e.body is not None and e.body.get("tools")]
        assert asked.body is not None and answered.body is not None
        assert asked.body["stream"] is True
        names = {tool["function"]["name"] for tool in asked.body["tools"]}
        assert names >= {"bash", "read", "edit"}, names
        assert [c["finish_reason"] for c in asked.choices if c["finish_reason"]] == ["tool_calls"]
        [result] = [m for m in answered.body["messages"] if m["role"] == "tool"]
        assert WORD in result["content"]
        told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert "error" not in {event["type"] for event in told}, told
        [used] = [event["part"] for event in told if event["type"] == "tool_use"]
        assert used["tool"] == "read" and used["state"]["status"] == "completed"
        texts = [event["part"]["text"] for event in told if event["type"] == "text"]
        assert json.loads(texts[-1]) == {"word": WORD}


if __name__ == "__main__":
    main(OpenCode())
