"""`mlx-paged doctor`."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print a full report as JSON.")] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="On a GPU: check and time its kernels again, for later starts too."
        ),
    ] = False,
) -> None:
    """Check this machine and installation, and say how to fix problems.

    Tests every kernel against NumPy and lists the models that fit. Takes a few seconds. The exit
    status is 1 if something is broken.

    Examples:
      mlx-paged doctor
      mlx-paged doctor --json > doctor.json
      mlx-paged doctor --calibrate
    """
    from mlx_paged.doctor.report import examine

    if json:
        report = examine(calibrates=calibrate)
        typer.echo(report.dumps())
        raise typer.Exit(report.exit_status)

    from rich.console import Console

    from mlx_paged.doctor import terminal

    with Console(stderr=True).status("looking") as status:
        report = examine(lambda phase: status.update(f"looking at {phase}"), calibrates=calibrate)
    terminal.show(report, Console(highlight=False))
    raise typer.Exit(report.exit_status)
