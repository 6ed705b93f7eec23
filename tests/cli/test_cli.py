"""Tests every verb: help, exit status, one-line errors, completion."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mlx_paged.cli import entry
from mlx_paged.cli.chat.session import COMMANDS
from mlx_paged.cli.entry import ExitCode, status_of
from mlx_paged.cli.main import app
from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.extras import needs_extra

HEAVY = ("mlx", "mlx_lm", "numpy", "transformers", "starlette", "prompt_toolkit")


def _verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield path
    for name, each in (below or {}).items():
        yield from _verbs(each, (*path, name))


VERBS = sorted(_verbs(typer.main.get_command(app)))


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The program, in a process of its own."""
    command = [sys.executable, "-m", "mlx_paged.cli.main", *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, **options
    )


def failing(error: BaseException) -> typer.Typer:
    """A program of one verb, which fails."""
    made = typer.Typer()

    @made.command()
    def verb() -> None:
        raise error

    return made


# --- Help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [(), *VERBS], ids=" ".join)
def test_help_teaches_with_examples(verb, capsys) -> None:
    assert status_of(app, [*verb, "--help"]) == 0
    shown = capsys.readouterr().out
    examples = shown.partition("Examples:")[2]
    assert "mlx-paged " + " ".join(verb) in examples, "the docstring needs examples"
    assert "--debug" in shown


def test_help_is_instant() -> None:
    """No verb imports what is heavy before it is called."""
    code = f"""
import sys
from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app
for verb in {VERBS!r}:
    assert status_of(app, [*verb, "--help"]) == 0
print(sorted({{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r})), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


# --- Exit status and errors -----------------------------------------------------------------------


def test_an_error_of_ours_is_one_line_and_status_1(capsys) -> None:
    error = InvalidParameterError("top_p", "a number\n in (0, 1]", 3)
    assert status_of(failing(error), []) == ExitCode.FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "mlx-paged: top_p must be a number in (0, 1] but got 3\n"


def test_an_unexpected_error_is_one_line_too(capsys) -> None:
    assert status_of(failing(KeyError("oops")), []) == ExitCode.FAILED
    told = capsys.readouterr().err
    assert told == (
        "mlx-paged: internal error: KeyError: 'oops'; run with --debug for the traceback\n"
    )


@pytest.mark.parametrize("error", [KeyError("oops"), MlxPagedError("oops")])
def test_debug_shows_the_traceback(error, capsys, monkeypatch) -> None:
    assert status_of(failing(error), ["--debug"]) == ExitCode.FAILED
    told = capsys.readouterr().err
    assert told.startswith("Traceback") and told.splitlines()[-1].startswith("mlx-paged: ")
    monkeypatch.setenv(entry.DEBUG_VARIABLE, "1")
    assert status_of(failing(error), []) == ExitCode.FAILED
    assert capsys.readouterr().err.startswith("Traceback")
    monkeypatch.setenv(entry.DEBUG_VARIABLE, "0")
    assert status_of(failing(error), []) == ExitCode.FAILED
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_may_stand_anywhere(place, capsys) -> None:
    arguments = ["generate", "--model", "/nowhere", "-p", "x"]
    arguments.insert(place, "--debug")
    assert status_of(app, arguments) == ExitCode.FAILED
    told = capsys.readouterr().err
    assert told.startswith("Traceback") and "/nowhere" in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "--nope"], "No such option: --nope"),
        (["generate", "-p", "x", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "-p", "x", "-o", "out"], "--output: needs --input"),
        (["generate", "-i", "in", "--seed", "1"], "--seed: has no effect with --input"),
        (["generate", "-i", "in", "-p", "x"], "--prompt: has no effect with --input"),
        (["generate", "-i", "in", "text"], "TEXT: has no effect with --input"),
        (["generate", "two", "words"], "unexpected extra argument(s) (words)"),
        (["chat", "--server", "http://x", "--max-model-len", "9"], "--max-model-len"),
        (["chat", "--markup", "html"], "--markup"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_wrong_usage_is_one_line_with_the_remedy_and_status_2(arguments, told, capsys) -> None:
    assert status_of(app, arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert told in line and re.search(r"\(see 'mlx-paged[ a-z]* --help'\)$", line)


def test_without_a_verb_the_help_is_shown(capsys) -> None:
    assert status_of(app, []) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert "Examples:" in captured.out + captured.err


def test_ctrl_c_is_status_130(capsys) -> None:
    assert status_of(failing(KeyboardInterrupt()), []) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "mlx-paged: interrupted\n"


def test_what_fails_because_of_ctrl_c_is_no_internal_error(capsys) -> None:
    made = typer.Typer()

    @made.command()
    def verb() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise AssertionError("half done")

    assert status_of(made, []) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "mlx-paged: interrupted\n"


def test_ctrl_c_ends_a_process_with_status_130() -> None:
    code = (
        "import time, typer\n"
        "from mlx_paged.cli import entry\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def verb():\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "entry.run(app)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
        assert process.stderr.read() == b"mlx-paged: interrupted\n"


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_nobody_hears_of_a_broken_pipe(size) -> None:
    """Neither where it breaks while we write, nor where it breaks in the last flush."""
    code = (
        "import sys, typer\n"
        "from mlx_paged.cli import entry\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def verb():\n"
        f"    sys.stdin.readline(); sys.stdout.write('x' * {size})\n"
        "entry.run(app)\n"
    )
    reading, writing = os.pipe()
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE
    ) as process:
        os.close(writing)
        os.close(reading)
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(300) == ExitCode.FAILED
        assert process.stderr.read() == b""


def test_a_verb_whose_output_nobody_reads() -> None:
    line = f"{shlex.quote(sys.executable)} -m mlx_paged.cli.main serve --help | head -c 1"
    done = subprocess.run(
        ["bash", "-c", line], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""


def test_a_missing_extra_is_told_with_its_remedy(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "mlx_paged.cli.chat.remote", raising=False)
    assert status_of(app, ["chat", "--server", "http://127.0.0.1:1"]) == ExitCode.FAILED
    [line] = capsys.readouterr().err.splitlines()
    assert "not installed (httpx): pip install 'mlx-paged[chat]'" in line


def test_a_batch_without_the_server_extra_tells_the_remedy() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "from mlx_paged.cli import entry, main\n"
        "sys.exit(entry.status_of(main.app, ['generate', '-i', 'requests.jsonl']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == ExitCode.FAILED
    [line] = done.stderr.splitlines()
    assert "pip install 'mlx-paged[server]'" in line


def test_a_module_of_ours_that_is_missing_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("server", "it"):
        import mlx_paged.nowhere  # noqa: F401


# --- Documentation --------------------------------------------------------------------------------


def test_the_documentation_names_every_verb_and_command_of_the_chat() -> None:
    root = Path(__file__).resolve().parents[2]
    text, readme = (root / "docs/cli.md").read_text(), (root / "README.md").read_text()
    for verb in VERBS:
        assert f"[`mlx-paged {' '.join(verb)}`]" in text
        pattern = r"\b.*\b".join(verb)
        assert re.search(rf"^mlx-paged {pattern}\b|\bmlx-paged {pattern} MODEL", readme, re.M), verb
    documented = re.findall(r"^\| `/(\w+)", text, re.MULTILINE)
    assert documented == list(COMMANDS)
    for code in ExitCode:
        assert re.search(rf"\b{code.value}\b", text.partition("**Exit status**")[2][:200])
    # Links lead somewhere.
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (root / "docs" / target).exists(), target


# --- Completion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "complete -o default -F _mlx_paged_completion"),
        ("zsh", "#compdef"),
        ("fish", "complete --command"),
    ],
)
def test_completion_is_offered_for_every_shell(shell, line) -> None:
    done = run(env={**os.environ, "_MLX_PAGED_COMPLETE": f"source_{shell}"})
    assert done.returncode == 0, done.stderr
    assert line in done.stdout and f"complete_{shell}" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mlx-paged ge", {"generate"}),
        pytest.param("mlx-paged bench se", {"serve"}, marks=pytest.mark.long),
        ("mlx-paged chat --serv", {"--server"}),
        pytest.param("mlx-paged chat --deb", {"--debug"}, marks=pytest.mark.long),
    ],
)
def test_a_shell_is_told_what_fits(words, expected) -> None:
    environment = {
        **os.environ,
        "_MLX_PAGED_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = run(env=environment)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == expected
