"""`mlx-paged bench`: a module for each thing that is measured."""

from __future__ import annotations

import typer

from mlx_paged.cli.bench.kernels.verb import kernels
from mlx_paged.cli.bench.latency import latency
from mlx_paged.cli.bench.memory import memory
from mlx_paged.cli.bench.serve import serve
from mlx_paged.cli.bench.throughput import throughput

bench = typer.Typer(help="Measure.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure."""


bench.command()(serve)
bench.command()(latency)
bench.command()(throughput)
bench.command()(kernels)
bench.command()(memory)
