"""`mlx-paged doctor`."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON: for a bug report.")
    ] = False,
) -> None:
    """Look at this machine and installation: what is wrong, and what to do about it.

    Tries every kernel against NumPy, measures memory bandwidth, and says which models fit. Takes
    some seconds. The exit status is 1 where something is broken, 0 otherwise.

    Examples:
      mlx-paged doctor
      mlx-paged doctor --json > doctor.json
    """
    from mlx_paged.doctor import report
    from mlx_paged.doctor.examine import Sources, examine

    if json:
        examination = examine()
        typer.echo(report.dumps(examination))
        raise typer.Exit(examination.exit_status)

    from rich.console import Console

    from mlx_paged.doctor import terminal

    progress = Console(stderr=True)
    with progress.status("looking") as status:
        examination = examine(Sources(on_phase=lambda phase: status.update(f"looking at {phase}")))
    terminal.show(examination, Console(highlight=False))
    raise typer.Exit(examination.exit_status)
