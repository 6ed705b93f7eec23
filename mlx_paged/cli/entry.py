"""Runs a verb: exit status, errors in one line, `--debug` for tracebacks, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from enum import IntEnum
from types import FrameType
from typing import Annotated, Any

import typer

from mlx_paged import _exit_interrupted
from mlx_paged.cli import other_flags
from mlx_paged.cli.options import spread_values
from mlx_paged.errors import InstallationError, InvalidParameterError, MlxPagedError, StepError

PROGRAM = "mlx-paged"
DEBUG_VARIABLE = "MLX_PAGED_DEBUG"


class ExitCode(IntEnum):
    """Exit status of the program."""

    OK = 0
    FAILED = 1  # an error, printed on stderr; or the reader of stdout closed it
    USAGE = 2
    INCOMPLETE = 3  # some lines of a batch failed
    INTERRUPTED = 130  # Ctrl-C


class _Debug:
    """Global state of ``--debug``: `on` if errors show their traceback."""

    on = False


def run(app: typer.Typer) -> None:
    """Runs the command line and ends the process.

    Ctrl-C raises an exception only while the verb runs. Before and after, where nothing would catch
    it, it ends the process immediately (`mlx_paged._exit_interrupted`).
    """
    status: int = ExitCode.INTERRUPTED
    if signal.getsignal(signal.SIGINT) in (_exit_interrupted, signal.default_int_handler):
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                status = status_of(app)
            finally:
                signal.signal(signal.SIGINT, _exit_interrupted)
        except KeyboardInterrupt:  # a second Ctrl-C, while the first was being reported
            signal.signal(signal.SIGINT, _exit_interrupted)
    else:  # ignored, as in background jobs of a shell
        status = status_of(app)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        status = ExitCode.FAILED
    sys.exit(status)


def status_of(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status. Errors are printed on stderr."""
    _Debug.on = False
    try:
        command: Any = _with_debug(typer.main.get_command(app))
        _convert_parameter_errors(command)
        given = sys.argv[1:] if arguments is None else arguments
        status = command.main(spread_values(given), prog_name=PROGRAM, standalone_mode=False)
        if status == ExitCode.INTERRUPTED:
            print_line("interrupted")
        return status if isinstance(status, int) else ExitCode.OK
    except KeyboardInterrupt:
        print_line("interrupted")
        return ExitCode.INTERRUPTED
    except typer.Abort:
        print_line("aborted")
        return ExitCode.FAILED
    except BrokenPipeError:
        _drop_output()
        return ExitCode.FAILED
    except typer.TyperException as error:
        return _report_misuse(error)
    except MlxPagedError as error:
        _trace()
        print_line(str(error))
        return ExitCode.FAILED
    except Exception as error:
        _trace()
        missing = InstallationError.of(error) if isinstance(error, ImportError) else None
        if missing is not None:
            print_line(str(missing))
            return ExitCode.FAILED
        if _follows_interrupt(error):
            print_line("interrupted")
            return ExitCode.INTERRUPTED
        hint = "" if _Debug.on else "; run with --debug for the traceback"
        print_line(f"internal error: {type(error).__name__}: {error}{hint}")
        return ExitCode.FAILED


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Turns Ctrl-C into an event, which the caller checks between two steps of the engine.

    An exception in the middle of a step would leave the engine in an inconsistent state.
    """
    interrupted = threading.Event()

    def handle(_: int, __: FrameType | None) -> None:
        interrupted.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def print_line(message: str) -> None:
    """Prints a message on stderr, as one line with the name of the program."""
    with contextlib.suppress(BrokenPipeError):
        print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)


def _follows_interrupt(error: BaseException) -> bool:
    """Returns True if an error was raised while a Ctrl-C was handled, as by clean-up code."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__context__
    return seen is not None


def _report_misuse(error: typer.TyperException) -> int:
    """Prints wrong usage as one line, or the help if there are no arguments; returns the status."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    if context is not None and context.command.name == "serve":
        message = other_flags.with_hint(message, getattr(error, "option_name", None))
    path = PROGRAM if context is None else context.command_path
    if type(error).__name__ != "NoArgsIsHelpError":
        _trace()
        print_line(f"{message.rstrip('.')} (see '{path} --help')")
    elif message:
        print(message, file=sys.stderr)
    return error.exit_code


def _trace() -> None:
    if _Debug.on:
        traceback.print_exc()


def _drop_output() -> None:
    """Redirects stdout, whose reader has closed it, so that the final flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_debug(on: bool) -> None:
    _Debug.on = _Debug.on or on


def _with_debug(command: Any) -> Any:
    """Adds ``--debug`` to a command and all its subcommands."""
    parameters = typer.main.get_command(_debug_app).params
    [option] = [parameter for parameter in parameters if parameter.name == "debug"]
    pending = [command]
    while pending:
        each = pending.pop()
        each.params.append(option)
        pending += getattr(each, "commands", {}).values()
    return command


def _convert_parameter_errors(command: Any) -> None:
    """Makes invalid values of options usage errors, even if the engine detects them."""
    for each in getattr(command, "commands", {}).values():
        _convert_parameter_errors(each)
    if getattr(command, "commands", None):
        return
    invoke = command.invoke

    def invoked(context: typer.Context) -> Any:
        try:
            return invoke(context)
        except InvalidParameterError as error:
            raise _usage_error(context, error) from error

    command.invoke = invoked


def _usage_error(context: typer.Context, error: InvalidParameterError) -> Exception:
    """Converts an error about a parameter to a usage error about the option that set it."""
    if isinstance(error, StepError):  # The error concerns an answer, not an option.
        return error
    name, *rest = re.split(r"[.\[]", error.field)
    names = {name}
    if name == "structured_outputs":
        kinds = rest[:1] or ("json", "json_object", "regex", "choice", "grammar")
        names = {*kinds, *(f"{kind}_schema" for kind in kinds)}
    for parameter in context.command.params:
        flags = (flag.lstrip("-").replace("-", "_") for flag in parameter.opts)
        if names.isdisjoint([parameter.name, *flags]):
            continue
        source = context.get_parameter_source(parameter.name or "")
        if getattr(source, "name", "DEFAULT") == "DEFAULT":
            continue
        reason = str(error).removeprefix(error.field).removeprefix(":").strip()
        hint = next((flag for flag in parameter.opts if flag.startswith("--")), parameter.name)
        return typer.BadParameter(reason, context, param_hint=f"'{hint}'")
    return error


_debug_app = typer.Typer(add_completion=False)


@_debug_app.command()
def _options(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show tracebacks of errors.",
            envvar=DEBUG_VARIABLE,
            is_eager=True,
            expose_value=False,
            callback=_set_debug,
        ),
    ] = False,
) -> None: ...
