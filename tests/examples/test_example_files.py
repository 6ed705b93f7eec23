"""The configuration files in `examples/` are valid, and no example is without a test."""

from __future__ import annotations

import ast
import json
import plistlib
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support.example_programs import EXAMPLES, commands

from mlx_paged.cli.main import app

ROOT = EXAMPLES.parent
FILES = sorted(
    path.relative_to(EXAMPLES).as_posix()
    for path in EXAMPLES.rglob("*")
    if path.is_file() and not re.search(r"/(\.|__pycache__)", f"/{path.relative_to(EXAMPLES)}")
)
READMES = [name for name in FILES if name.endswith("README.md")]
COMPOSE = ["monitoring/compose.yaml", "open-webui/compose.yaml"]


def text(name: str) -> str:
    return (EXAMPLES / name).read_text()


def served(arguments: list[str]) -> dict[str, Any]:
    """The options of `mlx-paged serve` as it reads them.

    Raises:
        click.UsageError: One of them does not exist, or has a wrong value.
    """
    verb = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return verb.make_context("serve", list(arguments)).params


def test_every_example_is_tested_and_listed() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    table = text("README.md")
    for name in FILES:
        if name in READMES:
            continue
        assert f'"{name}"' in tests or f"examples/{name}" in tests, f"no test names {name}"
    for name in FILES:
        assert name == "README.md" or f"]({name})" in table, f"README.md does not list {name}"


@pytest.mark.parametrize("name", READMES)
def test_commands_and_links_of_a_readme(name) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", text(name)):
        assert (EXAMPLES / name).parent.joinpath(target).exists(), target
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text(name), re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:2] == ["mlx-paged", "serve"]:
            served([word for word in words[2:] if word != "&"])
        for word in words:
            if word.startswith("examples/"):
                assert (ROOT / word.rstrip(";")).exists(), line


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_a_docstring_says_how_to_run_it(name) -> None:
    program = ["uvicorn", "--app-dir"] if name == "async_server.py" else ["python"]
    found = commands(name)
    [own] = [each for each in found if each[: len(program)] == program]
    assert name == "async_server.py" or own[1:] == [f"examples/{name}"]
    for each in found:
        if each[:2] == ["mlx-paged", "serve"]:
            served(each[2:])
    source = text(name)
    assert len(source.splitlines()) <= 60
    assert ast.get_docstring(ast.parse(source)).splitlines()[1] == ""


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_pin_images_and_open_ports_to_this_machine_only(name) -> None:
    compose = yaml.safe_load(text(name))
    assert compose["services"]
    named = set(compose["volumes"])
    for service in compose["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["ports"]
        for port in service["ports"]:
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in named or (EXAMPLES / name).parent.joinpath(source).exists(), source


def test_monitoring_files_belong_together() -> None:
    services = yaml.safe_load(text("monitoring/compose.yaml"))["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    [source] = yaml.safe_load(
        text("monitoring/grafana/provisioning/datasources/prometheus.yaml")
    )["datasources"]  # fmt: skip
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert source["type"] == "prometheus" and source["isDefault"] and host in services
    assert [ports.split(":")[2] for ports in services[host]["ports"]] == [port]
    [provider] = yaml.safe_load(
        text("monitoring/grafana/provisioning/dashboards/mlx-paged.yaml")
    )["providers"]  # fmt: skip
    [dashboard] = [place for place in mounts.values() if place.endswith(".json")]
    assert provider["type"] == "file"
    assert dashboard.startswith(provider["options"]["path"] + "/")
    [file] = [file for file, place in mounts.items() if place == dashboard]
    uid = json.loads((EXAMPLES / "monitoring" / file).read_text())["uid"]
    [[web]] = [re.findall(r"127\.0\.0\.1:(\d+):", port) for port in services["grafana"]["ports"]]
    assert f"http://127.0.0.1:{web}/d/{uid}" in text("monitoring/README.md")
    own = yaml.safe_load(text("monitoring/prometheus.yml"))
    assert own["scrape_configs"][0]["static_configs"][0]["targets"]


def variables(name: str) -> dict[str, str]:
    lines = [line for line in text(name).splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def served_with(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of `serve` by variables, each of which must be one of its own."""
    verb = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option.envvar for option in verb.params}
    assert environment.keys() <= known, environment.keys() - known
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    return served([])


def test_the_service_of_systemd(tmp_path, monkeypatch) -> None:
    unit = text("deploy/mlx-paged.service")
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    program, verb, *arguments = shlex.split(settings["ExecStart"])
    assert verb == "serve"
    served(arguments)
    options = served_with(variables("deploy/mlx-paged.env"), monkeypatch)
    assert options["host"] == "127.0.0.1" and options["api_keys"]
    assert int(settings["TimeoutStopSec"]) > options["shutdown_timeout"]
    own = dict(pair.split("=") for pair in shlex.split(settings["Environment"]))
    for folder in (own.pop("HF_HOME"), own["MLX_PAGED_FILES_DIR"]):
        assert folder.startswith(f"/var/lib/{settings['StateDirectory']}")
    served_with(own, monkeypatch)
    for place in (program, settings["EnvironmentFile"]):
        assert place in text("deploy/README.md") or Path(place).parent.name == "bin"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_service(tmp_path) -> None:
    unit = tmp_path / "mlx-paged.service"
    here = text("deploy/mlx-paged.service").replace("/opt/mlx-paged/bin/mlx-paged", "/bin/true")
    unit.write_text(here)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    told = [line for line in done.stderr.splitlines() if "mlx-paged" in line]
    assert done.returncode == 0 and told == [], done.stderr


def test_the_agent_of_launchd(monkeypatch) -> None:
    agent = plistlib.loads((EXAMPLES / "deploy/mlx-paged.plist").read_bytes())
    program, verb, *arguments = agent["ProgramArguments"]
    assert Path(program).is_absolute() and verb == "serve"
    assert served(arguments)["model"] == arguments[0]
    options = served_with(agent["EnvironmentVariables"], monkeypatch)
    assert agent["ExitTimeOut"] > options["shutdown_timeout"]
    assert agent["KeepAlive"] == {"SuccessfulExit": False} and agent["RunAtLoad"] is True
    assert agent["StandardErrorPath"] in text("deploy/README.md")


def served_agent_model() -> tuple[str, int]:
    """The name and the context of the server that agents/README.md starts."""
    block = re.search(r"```bash\n(mlx-paged serve .*?)```", text("agents/README.md"), re.DOTALL)
    options = served(shlex.split(block[1].replace("\\\n", " "))[2:])
    [name] = options["served_model_names"]
    return name, options["max_model_len"]


def documented(pattern: str) -> str:
    """The one block of code in docs/ that matches a pattern."""
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    blocks = re.findall(r"```\w+\n(.*?)```", pages, re.DOTALL)
    [found] = [block for block in blocks if re.search(pattern, block)]
    return found


#: As scripts/agents gives it to the agents that it runs.
CONFIGURATION = runpy.run_path(str(ROOT / "scripts/agents/runner.py"))["configuration"]


def test_codex() -> None:
    config = tomllib.loads(text("agents/codex.toml"))
    name, context = served_agent_model()
    assert config["model"] == name and config["model_context_window"] == context
    proven = tomllib.loads(CONFIGURATION("codex.toml", "http://127.0.0.1:1"))
    assert proven["model_providers"]["mlx-paged"]["base_url"] == "http://127.0.0.1:1/v1"
    assert proven["model"] == "mlx-paged-demo"
    assert config == tomllib.loads(documented("model_provider ="))


def test_claude_code() -> None:
    found = variables("agents/claude_code.env")
    name, context = served_agent_model()
    assert found["ANTHROPIC_MODEL"] == found["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == name
    assert found["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == str(context)
    proven = CONFIGURATION("claude_code.env", "http://127.0.0.1:1").splitlines()
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:1" in proven
    assert "ANTHROPIC_MODEL=mlx-paged-demo" in proven
    block = documented("export ANTHROPIC_BASE_URL")
    assert found == dict(re.findall(r"^export (\w+)=(\S+)", block, re.MULTILINE))


def test_opencode() -> None:
    config = json.loads(text("agents/opencode.json"))
    name, context = served_agent_model()
    assert config["model"] == config["small_model"] == f"mlx-paged/{name}"
    provider = config["provider"]["mlx-paged"]
    [(served_name, model)] = provider["models"].items()
    assert served_name == name and model["tool_call"] is True
    assert model["limit"]["context"] == context
    proven = json.loads(CONFIGURATION("opencode.json", "http://127.0.0.1:1"))
    assert proven["provider"]["mlx-paged"]["options"]["baseURL"] == "http://127.0.0.1:1/v1"
    # The one in the docs is for the embedded model, without tools.
    in_docs = json.loads(documented("opencode.ai/config.json"))["provider"]["mlx-paged"]
    assert {**provider, "models": None} == {**in_docs, "models": None}
