"""Claude Code reads a file and answers: `python scripts/agents/claude_code.py`; see `runner.py`."""

from __future__ import annotations

import json
from pathlib import Path

from runner import ANSWER, NOTE, TASK, WORD, Agent, Body, Exchange, configuration, main


class ClaudeCode(Agent):
    """Claude Code: /v1/messages, streamed."""

    package = "@anthropic-ai/claude-code"
    program = "claude"

    def command(self, program: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        command = [
            str(program), "--print", "--output-format", "stream-json", "--verbose",
            "--allowedTools", "Read", "--", TASK,
        ]  # fmt: skip
        lines = configuration("claude_code.env", url).splitlines()
        return command, dict(line.split("=", 1) for line in lines if not line.startswith("#"))

    def change(self, path: str, body: Body) -> None:
        """The first request must read the note; the second contains it, and must answer."""
        if _results(body):
            body["tool_choice"] = {"type": "none"}
            body["output_config"] = {"format": {"type": "json_schema", "schema": ANSWER}}
            return
        body["tool_choice"] = {
            "type": "tool", "name": "Read", "disable_parallel_tool_use": True,
        }  # fmt: skip
        [tool] = [tool for tool in body["tools"] if tool["name"] == "Read"]
        tool["input_schema"] = {
            "type": "object",
            "properties": {"file_path": {"type": "string", "enum": [NOTE]}},
            "required": ["file_path"],
            "additionalProperties": False,
        }

    def check(self, exchanges: list[Exchange], output: str) -> None:
        assert any(e.method == "HEAD" and e.path == "/" for e in exchanges)
        asked, answered = [e for e in exchanges if e.path.startswith("/v1/messages")]
        assert asked.body is not None and answered.body is not None
        assert asked.body["messages"][-1]["role"] == "system"
        assert len(asked.body["tools"]) > 20 and asked.body["thinking"]["type"] == "adaptive"
        [call] = [e["content_block"] for e in asked.events if "content_block" in e]
        assert (call["type"], call["name"]) == ("tool_use", "Read")
        for exchange, reason in ((asked, "tool_use"), (answered, "end_turn")):
            assert exchange.events[-1]["type"] == "message_stop"
            assert exchange.events[-2]["delta"]["stop_reason"] == reason
        [result] = _results(answered.body)
        assert result["tool_use_id"] == call["id"] and not result.get("is_error")
        assert WORD in json.dumps(result["content"])
        # The instructions are cached; the tools are not, because this request may call none.
        usage = answered.events[-2]["usage"]
        assert usage["cache_read_input_tokens"] > 1000, usage
        told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert told[-1]["type"] == "result" and told[-1]["is_error"] is False, told[-1]
        assert told[-1]["num_turns"] == 2 and json.loads(told[-1]["result"]) == {"word": WORD}


def _results(body: Body) -> list[Body]:
    """Tool results among the messages."""
    contents = [m["content"] for m in body["messages"] if isinstance(m["content"], list)]
    return [block for blocks in contents for block in blocks if block["type"] == "tool_result"]


if __name__ == "__main__":
    main(ClaudeCode())
