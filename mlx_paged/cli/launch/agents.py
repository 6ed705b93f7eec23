"""The coding agents that `launch` supports: how to install each and set it up for one run.

Settings are environment variables, arguments, and files in a temporary folder. The user's own
configuration is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Placeholder for agents that require a key, if the server does not.
NO_KEY = "none"
#: Environment variable with the server's key.
KEY_VARIABLE = "MLX_PAGED_API_KEY"

_PROVIDER = "mlx-paged"
# A long prompt may take minutes until its first token.
_IDLE_TIMEOUT_MS = 900_000
# One answer may have 1/_ANSWER_SHARE of the context, for agents that need a limit.
_ANSWER_SHARE = 8


@dataclass(frozen=True)
class Target:
    """The model that an agent works with.

    Attributes:
        url: URL of its server, without ``/v1``.
        model: Name of the model on the server.
        context_len: Maximum tokens of prompt and answer; None: unknown.
        api_key: The server's key, if it has one.
        takes_tools: False if the chat template does not support tools.
    """

    url: str
    model: str
    context_len: int | None = None
    api_key: str | None = None
    takes_tools: bool = True

    @property
    def key(self) -> str:
        """The key, or a placeholder."""
        return self.api_key or NO_KEY


@dataclass(frozen=True)
class Setup:
    """Arguments, variables and files for one run of an agent.

    Attributes:
        arguments: Arguments before those of the user.
        environment: Environment variables to set.
        without: Conflicting environment variables to remove.
        files: Contents of files by path, in the temporary folder.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Attributes:
        title: Name of the agent.
        program: Name of its executable.
        install: The command that installs it.
        setup: Takes a model and a folder; returns a setup that puts its files in the folder.
        needs_tools: False if the agent works with models that do not call tools.
        default: Arguments if the user gives none.
    """

    title: str
    program: str
    install: str
    setup: Callable[[Target, Path], Setup]
    needs_tools: bool = True
    default: tuple[str, ...] = ()


def _codex(target: Target, folder: Path) -> Setup:
    """Passes entries of config.toml as arguments, to keep the user's other settings."""
    provider = f"model_providers.{_PROVIDER}"
    entries: dict[str, str | int] = {"model": target.model, "model_provider": _PROVIDER}
    if target.context_len is not None:
        entries["model_context_window"] = target.context_len
    entries |= {
        f"{provider}.name": _PROVIDER,
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_idle_timeout_ms": _IDLE_TIMEOUT_MS,
    }
    if target.api_key:
        entries[f"{provider}.env_key"] = KEY_VARIABLE
    # JSON strings are valid TOML.
    arguments = [f"{name}={json.dumps(value)}" for name, value in entries.items()]
    return Setup(
        tuple(part for argument in arguments for part in ("-c", argument)),
        {KEY_VARIABLE: target.api_key} if target.api_key else {},
    )


def _claude(target: Target, folder: Path) -> Setup:
    environment = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_API_KEY": target.key,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if target.context_len is not None:
        environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(target.context_len)
    return Setup(environment=environment, without=("ANTHROPIC_AUTH_TOKEN",))


def _opencode(target: Target, folder: Path) -> Setup:
    model: dict[str, object] = {"tool_call": target.takes_tools}
    if target.context_len is not None:
        output = max(1, target.context_len // _ANSWER_SHARE)
        model["limit"] = {"context": target.context_len, "output": output}
    name = f"{_PROVIDER}/{target.model}"
    config: dict[str, object] = {
        "$schema": "https://opencode.ai/config.json",
        "enabled_providers": [_PROVIDER],
        "model": name,
        "small_model": name,
        "provider": {
            _PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": _PROVIDER,
                "options": {
                    "baseURL": f"{target.url}/v1",
                    "apiKey": f"{{env:{KEY_VARIABLE}}}",
                },
                "models": {target.model: model},
            }
        },
    }
    if not target.takes_tools:
        ask = {"mode": "primary", "prompt": "You write code.", "tools": {"*": False}}
        config |= {"default_agent": "ask", "agent": {"ask": ask}}
    file = folder / "opencode.json"
    return Setup(
        environment={"OPENCODE_CONFIG": str(file), KEY_VARIABLE: target.key},
        files={file: json.dumps(config, indent=2)},
    )


def _qwen(target: Target, folder: Path) -> Setup:
    environment = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model,
    }
    return Setup(("--auth-type", "openai"), environment)


def _goose(target: Target, folder: Path) -> Setup:
    environment = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": target.model,
        "OPENAI_HOST": target.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": target.key,
    }
    if target.context_len is not None:
        environment["GOOSE_CONTEXT_LIMIT"] = str(target.context_len)
    return Setup(environment=environment)


def _aider(target: Target, folder: Path) -> Setup:
    name = f"openai/{target.model}"
    environment = {
        "OPENAI_API_BASE": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "AIDER_MODEL": name,
        "AIDER_WEAK_MODEL": name,
    }
    if target.context_len is None:
        return Setup(environment=environment)
    file = folder / "models.json"
    about = {
        "max_input_tokens": target.context_len,
        "max_output_tokens": max(1, target.context_len // _ANSWER_SHARE),
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return Setup(
        environment={**environment, "AIDER_MODEL_METADATA_FILE": str(file)},
        files={file: json.dumps({name: about}, indent=2)},
    )


def _copilot(target: Target, folder: Path) -> Setup:
    return Setup(
        environment={
            "COPILOT_PROVIDER_BASE_URL": f"{target.url}/v1",
            "COPILOT_PROVIDER_API_KEY": target.key,
            "COPILOT_PROVIDER_WIRE_API": "responses",
            "COPILOT_MODEL": target.model,
        }
    )


#: Agents by their name on the command line.
AGENTS: dict[str, Agent] = {
    "codex": Agent("Codex CLI", "codex", "npm install -g @openai/codex", _codex),
    "claude": Agent("Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "opencode": Agent(
        "OpenCode", "opencode", "npm install -g opencode-ai", _opencode, needs_tools=False
    ),
    "qwen": Agent("Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "goose": Agent(
        "goose", "goose", "brew install block-goose-cli", _goose, default=("session",)
    ),
    "aider": Agent("aider", "aider", "pip install aider-install && aider-install", _aider,
                   needs_tools=False),
    "copilot": Agent("Copilot CLI", "copilot", "npm install -g @github/copilot", _copilot),
}  # fmt: skip
