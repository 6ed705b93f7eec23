"""`mlx-paged bench`: benchmarks, one module per subject."""

from __future__ import annotations

import typer

from mlx_paged.cli.bench.kernels import kernels
from mlx_paged.cli.bench.media import media
from mlx_paged.cli.bench.memory import memory
from mlx_paged.cli.bench.offline import latency, throughput
from mlx_paged.cli.bench.serve import serve

bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Benchmarks."""


for verb in (serve, latency, throughput, kernels, memory, media):
    bench.command()(verb)
