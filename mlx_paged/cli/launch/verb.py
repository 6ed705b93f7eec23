"""`mlx-paged launch`: runs a coding agent on a local model."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from mlx_paged import private_folder
from mlx_paged.cli.entry import print_line
from mlx_paged.cli.launch.agents import AGENTS, KEY_VARIABLE, Agent, Setup, Target
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.extras import needs_extra

_URL = "http://127.0.0.1:8000"
_NAMES = ", ".join(AGENTS)


def launch(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help=f"One of {_NAMES}.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS...]", help="Arguments of the agent, after --."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A name that the running server serves; or the directory, GGUF file or Hugging "
            "Face id for a server to start.",
            envvar="MLX_PAGED_MODEL",
        ),
    ] = None,
    server: Annotated[
        str,
        typer.Option(
            "--server",
            metavar="URL",
            help="The server, which is started if none answers there and the address is local.",
        ),
    ] = _URL,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="API key of the server.", envvar=KEY_VARIABLE),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="YAML file of `serve`'s options, for a server to start.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", "--print", help="Show what would be started and set, and start nothing."
        ),
    ] = False,
) -> None:
    """Start a coding agent on a local model.

    A server that is started for it ends with it. The agent is set up for this run only: by
    environment variables, arguments and a temporary folder, never in your own files.

    Examples:
      mlx-paged launch codex
      mlx-paged launch claude --model mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit
      mlx-paged launch opencode -- run "Which functions does utils.py have?"
      MLX_PAGED_MAX_MODEL_LEN=65536 mlx-paged launch qwen --model ./my-model --dry-run
    """
    found = AGENTS.get(agent)
    if found is None:
        raise InvalidParameterError("agent", f"one of {_NAMES}", agent)
    if shutil.which(found.program) is None and not dry_run:
        raise MlxPagedError(f"{found.title} is not installed: {found.install}")
    with needs_extra("server", "a server"):
        from mlx_paged.cli.launch.server import Server, command_of, own_server
        from mlx_paged.server.config import default_model_name
    wanted = Server(server, api_key)
    with private_folder.temporary() as folder:
        starts = not wanted.is_up()
        command = command_of(wanted, model, config)
        if starts:
            _check_start(wanted.is_local, server, model, config)
        if dry_run:
            target = Target(wanted.url, default_model_name(model), None, api_key)
            if not starts:
                target = wanted.target(model)
            _show(found, target, folder, arguments or (), command if starts else None)
            return
        running: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if starts:
            print_line(f"starting `mlx-paged {shlex.join(command)}`")
            running = own_server(wanted, command, api_key, folder / "server.log")
        with running:
            target = wanted.target(None if starts else model)
            if found.needs_tools and not target.takes_tools:
                print_line(
                    f"the chat template of {target.model} does not support tools, which "
                    f"{found.title} needs: MLX_PAGED_TOOL_TEMPLATE=1 describes them in a message"
                )
            status = _run(found, target, folder, arguments or ())
    sys.exit(status)


def _check_start(is_local: bool, url: str, model: str | None, config: Path | None) -> None:
    """Checks that a server can be started.

    Raises:
        MlxPagedError: The address is on another machine, or no model was given.
    """
    if not is_local:
        raise MlxPagedError(
            f"no server answers at {url}, and one can be started only at a local address"
        )
    if model is None and config is None:
        raise MlxPagedError(
            f"no server answers at {url}: give --model to start one, or run `mlx-paged serve MODEL`"
        )


def _show(
    agent: Agent, target: Target, folder: Path, arguments: Sequence[str], start: list[str] | None
) -> None:
    """Prints what would run as a shell script, without the key."""
    setup = agent.setup(target, folder)
    if start is not None:
        typer.echo(f"mlx-paged {shlex.join(start)} &")
    if setup.files:
        typer.echo(f"mkdir -p {shlex.quote(str(folder))}")
    for path, content in setup.files.items():
        typer.echo(f"cat > {shlex.quote(str(path))} <<'END'\n{content}\nEND")
    for variable in setup.without:
        typer.echo(f"unset {variable}")
    for variable, value in setup.environment.items():
        shown = f"${KEY_VARIABLE}" if value == target.api_key else shlex.quote(value)
        typer.echo(f"export {variable}={shown}")
    typer.echo(shlex.join(_command(agent, agent.program, setup, arguments)))
    if shutil.which(agent.program) is None:
        print_line(f"{agent.title} is not installed: {agent.install}")


def _command(agent: Agent, program: str, setup: Setup, arguments: Sequence[str]) -> list[str]:
    return [program, *setup.arguments, *(arguments or agent.default)]


def _run(agent: Agent, target: Target, folder: Path, arguments: Sequence[str]) -> int:
    """Runs an agent; returns its exit status, or 128 plus the signal that ended it."""
    setup = agent.setup(target, folder)
    for path, content in setup.files.items():
        path.write_text(content)
    environment = {k: v for k, v in os.environ.items() if k not in setup.without}
    program = shutil.which(agent.program)
    assert program is not None
    command = _command(agent, program, setup, arguments)
    with _Signals() as signals:
        signals.process = subprocess.Popen(command, env=environment | dict(setup.environment))
        status = signals.process.wait()
    return 128 - status if status < 0 else status


class _Signals:
    """Leaves signals to the agent: ignores Ctrl-C, which the terminal sends to both processes, and
    forwards SIGTERM and SIGHUP."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        # Handlers instead of SIG_IGN, which the agent would inherit.
        for sig in (signal.SIGINT, signal.SIGQUIT):
            self._before[sig] = signal.signal(sig, self._ignore)
        for sig in (signal.SIGTERM, signal.SIGHUP):
            self._before[sig] = signal.signal(sig, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)

    def _ignore(self, sig: int, _: FrameType | None) -> None:
        pass

    def _forward(self, sig: int, _: FrameType | None) -> None:
        if self.process is not None:
            self.process.send_signal(sig)
