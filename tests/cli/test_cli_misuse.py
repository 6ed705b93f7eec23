"""A wrong command line gives one line that says what to change."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mlx_paged.cli import other_flags
from mlx_paged.cli.entry import ExitCode, status_of
from mlx_paged.cli.main import app
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.server.listener import bind


def said(capsys: Any, *arguments: str) -> tuple[int, str]:
    """(exit status, the line on stderr)."""
    status = status_of(app, arguments)
    [line] = capsys.readouterr().err.splitlines()
    return status, line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "--top-p", "3", "hi"], "Invalid value for '--top-p': must be a number in"),
        (["generate", "--min-p", "2", "hi"], "Invalid value for '--min-p': must be"),
        (["serve", "--gpu-memory-utilization", "3"], "'--gpu-memory-utilization': must be None or"),
        (["generate", "--regex", "[a", "hi"], "'--regex': must be a valid grammar"),
        (["serve", "--block-size", "7"], "Invalid value for '--block-size': must be"),
    ],
)
def test_a_value_that_the_engine_refuses_is_wrong_usage(arguments, told, capsys) -> None:
    status, line = said(capsys, *arguments)
    assert status == ExitCode.USAGE and told in line, line
    assert line.endswith(f"(see 'mlx-paged {arguments[0]} --help')")


def test_a_value_of_the_environment_is_wrong_usage_too(capsys, monkeypatch) -> None:
    monkeypatch.setenv("MLX_PAGED_GPU_MEMORY_UTILIZATION", "3")
    status, line = said(capsys, "serve")
    assert status == ExitCode.USAGE and "'--gpu-memory-utilization': must be" in line


def test_an_error_about_what_no_option_gave_is_none_of_usage(capsys) -> None:
    made = typer.Typer()

    @made.command()
    def verb(top_p: float = 1.0) -> None:
        raise InvalidParameterError("top_p", "less", top_p)

    assert status_of(made, []) == ExitCode.FAILED
    assert capsys.readouterr().err == "mlx-paged: top_p must be less but got 1.0\n"
    assert status_of(made, ["--top-p", "2"]) == ExitCode.USAGE


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--continuous-batching", "nothing is needed"),
        ("--cache-memory-percent=0.2", "--gpu-memory-utilization or --kv-cache-memory"),
        ("--prompt-cache-size=3", "--kv-cache-memory"),
        ("--max-tokens=512", "max_new_tokens"),
        ("--ssd-cache-dir=kv", "--kv-offload-dir"),
        ("--ssd-cache-max-gb=8", "--kv-offload-gib"),
        ("--swap-space=4", "--kv-offloading-size"),
        ("--rate-limit=60", "--requests-per-minute"),
        ("--temp=0.5", "--override-generation-config"),
    ],
)
def test_flags_of_other_servers_get_a_hint(flag: str, told: str, capsys) -> None:
    status, line = said(capsys, "serve", flag)
    assert status == ExitCode.USAGE and told in line
    assert f"No such option: {flag.partition('=')[0]}: " in line


def test_an_option_that_no_server_has_gets_none(capsys) -> None:
    status, line = said(capsys, "serve", "--quux")
    assert status == ExitCode.USAGE
    assert re.fullmatch(
        r"mlx-paged: No such option: --quux.* \(see 'mlx-paged serve --help'\)", line
    )
    assert "nothing is needed" not in said(capsys, "generate", "--continuous-batching")[1]


def test_hints_name_options_that_there_are() -> None:
    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {flag for each in serve.params for flag in (*each.opts, *each.secondary_opts)}
    for hint in other_flags._HINTS.values():
        assert set(re.findall(r"--[a-z][a-z-]+", hint)) <= known, hint


def test_a_port_that_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MlxPagedError, match=rf"port {port} of 127.0.0.1 is in use: .*--port$"):
            bind("127.0.0.1", port, 60)
    with pytest.raises(InvalidParameterError, match="host must be an address of this machine"):
        bind("192.0.2.1", port, 60)


@pytest.mark.parametrize("verb", (["generate", "hi"], ["serve"]))
def test_mlx_without_a_backend(verb: list[str], tmp_path: Path) -> None:
    """(On Linux, where the extra was left out.)"""
    (tmp_path / "mlx").mkdir()
    error = "libmlx.so: cannot open shared object file: No such file or directory"
    (tmp_path / "mlx/core.py").write_text(f"raise ImportError({error!r})")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "mlx_paged.cli.main", *verb],
        check=False, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == ExitCode.FAILED
    [line] = done.stderr.splitlines()
    assert line.startswith("mlx-paged: MLX has no backend here") and "'mlx-paged[cpu]'" in line
