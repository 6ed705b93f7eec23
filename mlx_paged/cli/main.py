"""`mlx-paged`: the entry point. Verbs import heavy modules only when called: `--help` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_paged import __version__, unpatch
from mlx_paged.cli import entry, transformers_import
from mlx_paged.cli.bench import bench
from mlx_paged.cli.cache import cache
from mlx_paged.cli.chat.verb import chat
from mlx_paged.cli.demo import demo
from mlx_paged.cli.doctor import doctor
from mlx_paged.cli.eval import evaluate
from mlx_paged.cli.generate import generate
from mlx_paged.cli.launch.verb import launch
from mlx_paged.cli.models import list_models, pull, remove, show
from mlx_paged.cli.serve.verb import serve

app = typer.Typer(name=entry.PROGRAM, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Paged attention, prefix sharing and continuous batching for MLX.

    Examples:
      mlx-paged demo
      mlx-paged chat
      mlx-paged generate "Return the n-th Fibonacci number"
      mlx-paged serve mlx-community/Qwen3-0.6B-4bit

    Exit status: 0 done, 1 failed, 2 wrong usage, 3 lines of a batch failed, 130 interrupted.
    """
    if version:
        typer.echo(__version__)
        raise typer.Exit()


app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(launch)
app.command()(pull)
app.command("list")(list_models)
app.command()(show)
app.command("rm")(remove)
app.command()(demo)
app.command("eval")(evaluate)
app.command()(doctor)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")


def main() -> None:
    """Runs the command line and ends the process; see `entry`."""
    transformers_import.arrange()
    unpatch()  # The engine does not need a patched mlx-lm, and comparisons need an unpatched one.
    entry.run(app)


if __name__ == "__main__":
    main()
