"""`mlx-paged launch`: agents' configuration, servers that end with the agent, and signals.

Agents are stand-ins on PATH that call the server.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server_helpers import RunningServer, running, until

from mlx_paged import private_folder
from mlx_paged.cli.entry import status_of
from mlx_paged.cli.launch.agents import AGENTS, Setup, Target
from mlx_paged.cli.launch.server import Server
from mlx_paged.cli.main import app
from mlx_paged.demo import model_path
from mlx_paged.errors import MlxPagedError
from mlx_paged.server.config import ServerConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
TARGET = Target("http://127.0.0.1:8000", "qwen3-coder", 65536)
# Asks the server for an answer, and reports what it was started with.
AGENT = """#!{python}
import json, os, sys, urllib.request

url = os.environ["TEST_URL"]
body = {{"messages": [{{"role": "user", "content": "Hi"}}], "max_tokens": 2}}
def ask():
    request = urllib.request.Request(
        f"{{url}}/v1/chat/completions", json.dumps(body).encode(),
        {{"Content-Type": "application/json", "Authorization": "Bearer secret"}},
    )
    return json.load(urllib.request.urlopen(request, timeout=300))["model"]

files = {{k: open(v).read() for k, v in os.environ.items() if v.endswith(".json")}}
print(json.dumps({{
    "arguments": sys.argv[1:], "environment": dict(os.environ), "files": files, "model": ask(),
}}), flush=True)
{then}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(served_model_names=("demo", "second"), api_keys=("secret",))
    with running(config, max_model_len=512) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def agents(folder: Path, then: str = "sys.exit(7)") -> Path:
    """A folder for PATH with all agents."""
    bin = folder / "bin"
    bin.mkdir()
    for agent in AGENTS.values():
        (bin / agent.program).write_text(AGENT.format(python=sys.executable, then=then))
        (bin / agent.program).chmod(0o755)
    return bin


def variables(home: Path, bin: Path, url: str) -> dict[str, str]:
    return {
        "HOME": str(home), "PATH": f"{bin}:{os.environ['PATH']}", "TEST_URL": url,
        "TMPDIR": str(home.parent), "ANTHROPIC_AUTH_TOKEN": "of another server",
    }  # fmt: skip


Launch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Launch:
    """Runs `launch` in this process; returns its status and what all have written."""

    def run(bin: Path, url: str, *arguments: str) -> tuple[int, str, str]:
        for name, value in variables(home, bin, url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", str(home.parent))
        capfd.readouterr()
        try:
            status = status_of(app, ["launch", "--server", url, *arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *capfd.readouterr()

    return run


def launched(
    home: Path, bin: Path, url: str, *arguments: str, **options: Any
) -> subprocess.Popen[str]:
    environment = {**os.environ, **variables(home, bin, url)}
    return subprocess.Popen(
        [sys.executable, "-m", "mlx_paged", "launch", "--server", url, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def free_url() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/live")
    except httpx.TransportError:
        return False
    return True


# Configuration.


def setup(name: str, target: Target = TARGET) -> Setup:
    return AGENTS[name].setup(target, Path("/folder"))


def test_codex_gets_the_entries_of_the_example() -> None:
    arguments = setup("codex").arguments
    assert arguments[::2] == ("-c",) * (len(arguments) // 2)
    given = tomllib.loads("\n".join(arguments[1::2]))
    assert given == tomllib.loads((EXAMPLES / "codex.toml").read_text())
    with_key = setup("codex", Target("http://a", "b", None, "secret"))
    assert 'model_providers.mlx-paged.env_key="MLX_PAGED_API_KEY"' in with_key.arguments
    assert with_key.environment == {"MLX_PAGED_API_KEY": "secret"}


def test_claude_gets_the_variables_of_the_example() -> None:
    lines = (EXAMPLES / "claude_code.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert setup("claude").environment == variables


def test_opencode_gets_the_file_of_the_example() -> None:
    found = setup("opencode")
    [(path, content)] = found.files.items()
    assert json.loads(content) == json.loads((EXAMPLES / "opencode.json").read_text())
    assert found.environment == {"OPENCODE_CONFIG": str(path), "MLX_PAGED_API_KEY": "none"}
    plain = Target("http://127.0.0.1:8000", "mlx-paged-demo", 4096, takes_tools=False)
    config = json.loads(next(iter(setup("opencode", plain).files.values())))
    block = (EXAMPLES.parents[1] / "docs/agents.md").read_text().split("```json\n")[1]
    documented = json.loads(block.split("```")[0])
    for each in (config, documented):
        each["agent"]["ask"].pop("prompt")
    assert config == documented


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_is_told_server_model_and_key(name: str) -> None:
    for target in (TARGET, Target("http://127.0.0.1:8000", "my-model", None, "a-key")):
        found = setup(name, target)
        told = [*found.arguments, *found.environment.values(), *found.files.values()]
        for part in (target.url, target.model, *([target.api_key] if target.api_key else [])):
            assert any(part in each for each in told), part
    assert AGENTS[name].install.split()[0] in ("npm", "pip", "brew")


# Errors.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["emacs"], "must be one of codex, claude"),
        (["codex", "--server", "localhost"], "a URL like"),
        (["codex", "--server", "http://192.0.2.1.invalid"], "only at a local address"),
        (["codex", "--server", "{free}"], "give --model to start one"),
        (["codex", "--server", "{server}"], "give --api-key"),
        (["codex", "--server", "{server}", "--api-key", "secret", "--model", "third"],
         "does not serve 'third', only: demo, second"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_are_one_line(
    server, tmp_path, monkeypatch, capsys, arguments: list[str], error: str
) -> None:
    monkeypatch.setenv("PATH", str(agents(tmp_path)))
    places = {"free": free_url(), "server": server.url}
    assert status_of(app, ["launch", *(each.format(**places) for each in arguments)]) in (1, 2)
    captured = capsys.readouterr()
    assert error in captured.err and captured.err.count("\n") == 1


def test_a_missing_agent_is_told_with_its_installation(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert status_of(app, ["launch", "claude", "--model", "x"]) == 1
    assert "not installed: npm install -g @anthropic-ai/claude-code" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(launch, tmp_path) -> None:
    url = free_url()
    config = tmp_path / "serve.yaml"
    config.write_text("no_such_option: 1\n")
    status, _, error = launch(agents(tmp_path), url, "codex", "--config", str(config))
    assert status == 1 and "the server did not start" in error
    assert "no_such_option" in error and not answers(url)


def test_a_dry_run_is_a_script(server, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(agents(tmp_path)))
    url = free_url()
    given = ["launch", "claude", "--server", url, "--model", "./my-model", "--dry-run", "--", "-p"]
    assert status_of(app, given) == 0 and not answers(url)
    start, *lines, last = capsys.readouterr().out.splitlines()
    port = url.rpartition(":")[2]
    assert start == f"mlx-paged serve ./my-model --host 127.0.0.1 --port {port} &"
    assert "export ANTHROPIC_MODEL=./my-model" in lines and "unset ANTHROPIC_AUTH_TOKEN" in lines
    assert shlex.split(last) == ["claude", "-p"]
    given = ["launch", "aider", "--server", server.url, "--api-key", "secret", "--print"]
    assert status_of(app, given) == 0
    shown = capsys.readouterr().out
    made, written = shown.splitlines()[:2]
    folder = made.removeprefix("mkdir -p ")
    assert written.startswith(f"cat > {folder}/") and not Path(folder).exists()
    assert "secret" not in shown and "export OPENAI_API_KEY=$MLX_PAGED_API_KEY" in shown
    assert "export AIDER_MODEL=openai/demo" in shown and '"max_input_tokens": 512' in shown


def test_a_model_of_several_is_loaded_first(capsys) -> None:
    """Agents are told its context, which is known then."""
    states = [{"value": "unloaded"}, {"value": "loading"}, {"value": "loaded"}]
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"parsing": {"tool_calls": None}})
        if request.method == "POST":
            assert json.loads(request.content) == {"model": "a/second"}
            return httpx.Response(200, json={"success": True})
        entry: dict[str, Any] = {"id": "a/second", "status": states.pop(0)}
        if not states:
            entry["max_model_len"] = 4096
        is_list = request.url.path == "/v1/models"
        return httpx.Response(200, json={"data": [{"id": "first"}, entry]} if is_list else entry)

    server = Server("http://a")
    server._client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://a")
    assert server.target("a/second") == Target("http://a", "a/second", 4096, takes_tools=False)
    assert ("POST", "/models/load") in asked and asked.count(("GET", "/v1/models/a/second")) == 2
    assert "loads a/second" in capsys.readouterr().err
    states[:] = [{"value": "unloaded"}, {"value": "unloaded", "failed": True, "reason": "broken"}]
    with pytest.raises(MlxPagedError, match="cannot load a/second: broken"):
        server.target("a/second")


# Runs.


@pytest.mark.parametrize("name", ["opencode", "claude"])
def test_an_agent_on_a_server_that_runs(server, launch, home, tmp_path, name: str) -> None:
    status, output, error = launch(
        agents(tmp_path), server.url, "--api-key", "secret", "--model", "second", name,
        "--", "run", "--model", "x",
    )  # fmt: skip
    assert status == 7, error
    report = json.loads(output)
    assert report["arguments"] == ["run", "--model", "x"] and report["model"] == "demo"
    environment = report["environment"]
    if name == "opencode":
        config = json.loads(report["files"]["OPENCODE_CONFIG"])
        assert config["model"] == "mlx-paged/second"
        assert config["provider"]["mlx-paged"]["models"]["second"]["limit"]["context"] == 512
        assert not Path(environment["OPENCODE_CONFIG"]).exists(), "the folder is gone"
    else:
        assert environment["ANTHROPIC_BASE_URL"] == server.url
        assert "ANTHROPIC_AUTH_TOKEN" not in environment
        assert "does not support tools" in error
    assert answers(server.url), "a server that ran before still runs"
    assert list(home.iterdir()) == [], "the user's files are left alone"


INTERRUPTED = """
import signal

def interrupted(*_):
    os.write(1, f"{ask()}\\n".encode())  # The server still answers.
    sys.exit(5)

signal.signal(signal.SIGINT, interrupted)
# The signal may come as soon as this is read; `print` would not be done then.
os.write(1, b"waits\\n")
signal.pause()
"""


def test_ctrl_c_is_for_the_agent_and_the_server_ends_with_it(home, tmp_path) -> None:
    url = free_url()
    process = launched(
        home, agents(tmp_path, INTERRUPTED), url, "aider", "--model", str(model_path()),
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    report = json.loads(process.stdout.readline())
    assert report["environment"]["AIDER_MODEL"] == f"openai/{report['model']}"
    assert process.stdout.readline() == "waits\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, error = process.communicate(timeout=300)
    assert (process.returncode, output) == (5, f"{report['model']}\n"), error
    assert "starting `mlx-paged serve" in error and not answers(url)
    assert not list(tmp_path.glob("*mlx-paged-run-*"))


def test_nothing_is_left_if_the_launcher_is_killed(home, tmp_path, monkeypatch) -> None:
    """(Its folder is removed by the next process that makes one.)"""
    url = free_url()
    waits = "print(os.getpid(), flush=True)\nimport signal\nsignal.pause()"
    process = launched(
        home, agents(tmp_path, waits), url, "qwen", "--model", str(model_path()),
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    report = json.loads(process.stdout.readline())
    assert report["arguments"][:2] == ["--auth-type", "openai"]
    agent = int(process.stdout.readline())
    process.kill()
    process.wait()
    until(lambda: not answers(url))
    os.kill(agent, signal.SIGKILL)
    process.communicate()
    [left] = tmp_path.glob("mlx-paged-run-*")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_folder.temporary() as folder:
        assert list(tmp_path.glob("mlx-paged-run-*")) == [folder] != [left]
    assert not folder.exists()


def test_signals_of_programs_are_passed_on(server, launch, tmp_path) -> None:
    ready = tmp_path / "ready"
    waits = f"import signal\nopen({str(ready)!r}, 'w').close()\nsignal.pause()"
    before = signal.getsignal(signal.SIGTERM)

    def send() -> None:
        until(ready.exists)
        assert signal.getsignal(signal.SIGTERM) != before  # It would end the tests.
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    given = (server.url, "--api-key", "secret", "goose")
    status, output, _ = launch(agents(tmp_path, waits), *given)
    sender.join()
    assert status == 128 + signal.SIGTERM
    assert json.loads(output)["arguments"] == ["session"]
    assert signal.getsignal(signal.SIGTERM) == before
