"""Codex CLI reads a file and answers: `python scripts/agents/codex.py` (see `runner.py`)."""

from __future__ import annotations

import json
from pathlib import Path

from runner import ANSWER, NOTE, TASK, WORD, Agent, Body, Exchange, configuration, main

_COMMAND = f"cat {NOTE}"
# More fields of the provider, which is the last table of codex.toml.
_NO_RETRIES = "request_max_retries = 0\nstream_max_retries = 0\n"


class Codex(Agent):
    """Codex CLI: /v1/responses, streamed."""

    package = "@openai/codex"
    program = "codex"

    def command(self, program: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
        (home / "config.toml").write_text(configuration("codex.toml", url) + _NO_RETRIES)
        (home / "answer.json").write_text(json.dumps(ANSWER))
        command = [
            str(program), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access",
            "--json", "--output-schema", str(home / "answer.json"), TASK,
        ]  # fmt: skip
        return command, {"CODEX_HOME": str(home)}

    def change(self, path: str, body: Body) -> None:
        """The first request must run one command; the second has its output, and must answer."""
        if any(item["type"] == "function_call_output" for item in body["input"]):
            body["tool_choice"] = "none"
            return
        body["tool_choice"] = {"type": "function", "name": "exec_command"}
        [tool] = [tool for tool in body["tools"] if tool.get("name") == "exec_command"]
        tool["parameters"] = {
            "type": "object",
            "properties": {"cmd": {"type": "string", "enum": [_COMMAND]}},
            "required": ["cmd"],
            "additionalProperties": False,
        }

    def check(self, exchanges: list[Exchange], output: str) -> None:
        asked, answered = [e for e in exchanges if e.path == "/v1/responses"]
        assert asked.body is not None and answered.body is not None
        kinds = {tool["type"] for tool in asked.body["tools"]}
        assert kinds >= {"function", "namespace", "web_search"}, kinds
        [call] = [e["item"] for e in asked.events if e["type"] == "response.output_item.done"]
        assert (call["type"], call["name"]) == ("function_call", "exec_command")
        for exchange in (asked, answered):
            assert exchange.events[-1]["type"] == "response.completed"
        [result] = [i for i in answered.body["input"] if i["type"] == "function_call_output"]
        assert result["call_id"] == call["call_id"] and WORD in result["output"]
        told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        types = [event["type"] for event in told]
        assert types[-1] == "turn.completed" and not {"error", "turn.failed"} & set(types), types
        items = [event["item"] for event in told if event["type"] == "item.completed"]
        [ran] = [item for item in items if item["type"] == "command_execution"]
        assert ran["exit_code"] == 0 and WORD in ran["aggregated_output"]
        assert json.loads(items[-1]["text"]) == {"word": WORD}


if __name__ == "__main__":
    main(Codex())
