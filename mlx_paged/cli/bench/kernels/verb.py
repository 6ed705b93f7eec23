"""`mlx-paged bench kernels`: options, and what becomes of the results."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged.cli.bench.kernels.cases import DTYPE_BYTES, LAYER, OPS, Case, cases, defaults
from mlx_paged.cli.bench.options import at_least, one_of, parse_list, read_head_dim, read_window
from mlx_paged.errors import InvalidParameterError, MlxPagedError

if TYPE_CHECKING:
    from rich.progress import Progress

GRID, HOW, OUT = "What is measured (repeatable, or by commas)", "How", "What becomes of it"
# Shorter runs need no bar.
_LONG = 4


class Device(StrEnum):
    """Where ops run."""

    CPU = "cpu"
    GPU = "gpu"


def _grid(text: str, default: str) -> Any:
    return typer.Option(help=text, show_default=default, rich_help_panel=GRID, metavar="LIST")


def kernels(
    op: Annotated[
        list[str] | None, _grid("Primitives: " + ", ".join(OPS) + ".", "all of the backend's")
    ] = None,
    batch: Annotated[list[str] | None, _grid("Sequences.", "1,16")] = None,
    context: Annotated[
        list[str] | None, _grid("Tokens of a sequence, on average.", "1024,4096")
    ] = None,
    rows: Annotated[
        list[str] | None,
        _grid("Query tokens of a sequence: 1 decode, up to 8 drafts, more a prefill chunk.", "1"),
    ] = None,
    kv_heads: Annotated[list[str] | None, _grid("KV heads.", "8")] = None,
    group: Annotated[list[str] | None, _grid("Query heads of a KV head.", "4")] = None,
    head_dim: Annotated[list[str] | None, _grid("Of keys and values.", "128")] = None,
    block_size: Annotated[list[str] | None, _grid("Tokens: 8, 16, 32, 64.", "32")] = None,
    dtype: Annotated[
        list[str] | None,
        _grid("float32, float16, bfloat16.", "float32 on the CPU, bfloat16 on a GPU"),
    ] = None,
    window: Annotated[
        list[str] | None, _grid("Tokens that a row sees; 0 or none: all.", "none")
    ] = None,
    skew: Annotated[
        list[str] | None,
        _grid("An eighth of the sequences is so many times as long as the others.", "1"),
    ] = None,
    device: Annotated[
        Device | None,
        typer.Option(help="Where to run.", rich_help_panel=HOW, show_default="the best there is"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few points, in seconds.", rich_help_panel=HOW)
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=3, help="Samples of each.", rich_help_panel=HOW, show_default="9; 5 if quick"
        ),
    ] = None,
    past_cache: Annotated[
        int,
        typer.Option(
            min=0, help="MiB that launches read before the same again.", rich_help_panel=HOW
        ),
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of inputs and tables.", rich_help_panel=HOW)] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write everything.", rich_help_panel=OUT)
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write rows.", rich_help_panel=OUT)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw attention's share of copy bandwidth (.svg, .png, .pdf).",
            rich_help_panel=OUT,
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Two files of --json: measure nothing, tell what became faster or slower.",
            rich_help_panel=OUT,
            metavar="BEFORE AFTER",
        ),
    ] = None,
) -> None:
    """Measure every native primitive against what this machine can do.

    Attention is timed beside MLX's dense attention and beside gathering
    first; everything beside a plain copy, whose bandwidth is the roof. All
    take turns in each round, so that a drifting machine drifts for all. Each
    op is first checked against a float64 reference on the same inputs; a
    wrong result ends the run with exit status 1.

    Examples:
      mlx-paged bench kernels --quick
      mlx-paged bench kernels --op paged_attention --batch 1,8,32 \\
          --context 1024,4096,16384 --group 4,8 --plot roof.svg
      mlx-paged bench kernels --op paged_attention --rows 1,4,256 --window 0,1024
      mlx-paged bench kernels --batch 32 --skew 1,32 --json before.json
      mlx-paged bench kernels --compare before.json after.json
    """
    given = {
        "op": parse_list("op", op, "of " + ", ".join(OPS), one_of(OPS)),
        "batch": parse_list("batch", batch, "integers of at least 1", at_least(1)),
        "context": parse_list("context", context, "integers of at least 1", at_least(1)),
        "rows": parse_list("rows", rows, "integers of at least 1", at_least(1)),
        "kv_heads": parse_list("kv_heads", kv_heads, "integers of at least 1", at_least(1)),
        "group": parse_list("group", group, "integers of at least 1", at_least(1)),
        "head_dim": parse_list("head_dim", head_dim, "multiples of 8 up to 576", read_head_dim),
        "block_size": parse_list(
            "block_size", block_size, "of 8, 16, 32, 64", one_of((8, 16, 32, 64), int)
        ),
        "dtype": parse_list("dtype", dtype, "of " + ", ".join(DTYPE_BYTES), one_of(DTYPE_BYTES)),
        "window": parse_list("window", window, "integers of at least 0, or none", read_window),
        "skew": parse_list("skew", skew, "integers of at least 1", at_least(1)),
    }
    _check_files(json, csv, plot)
    if compare is not None:
        named = [name for name, values in given.items() if values]
        named += [name for name, value in (("plot", plot), ("device", device)) if value]
        if named or quick:
            refused = [*named, *(["quick"] if quick else [])]
            raise InvalidParameterError("compare", "alone, as it measures nothing,", refused)
        _compare(*compare, json, csv)
        return
    _measure(given, device, quick, rounds, past_cache, seed, json, csv, plot)


def _check_files(json: Path | None, csv: Path | None, plot: Path | None) -> None:
    from mlx_paged.cli.bench.kernels import plot as picture
    from mlx_paged.cli.bench.results import check_writable

    for field, path in (("json", json), ("csv", csv), ("plot", plot)):
        check_writable(field, path)
    if plot is not None:
        picture.check(plot)


def _compare(before: Path, after: Path, json: Path | None, csv: Path | None) -> None:
    from mlx_paged.cli.bench.kernels import compare
    from mlx_paged.cli.bench.results import write_csv, write_json

    compared = compare.compare(compare.load(before, "compare"), compare.load(after, "compare"))
    typer.echo(compare.text(compared))
    if json is not None:
        write_json(json, {"benchmark": "kernels-compared", **compared})
    if csv is not None:
        write_csv(csv, compared["results"])
    if not compared["results"]:
        raise MlxPagedError("no case is in both files, so nothing was compared")


def _measure(
    given: dict[str, list[Any]],
    device: str | None,
    quick: bool,
    rounds: int | None,
    past_cache: int,
    seed: int,
    json: Path | None,
    csv: Path | None,
    plot: Path | None,
) -> None:
    from mlx_paged.cli.bench.environment import checkout, device_name, processor
    from mlx_paged.cli.bench.kernels import measure, show
    from mlx_paged.cli.bench.kernels import plot as picture
    from mlx_paged.cli.bench.kernels.work import COUNTING
    from mlx_paged.cli.bench.results import write_csv, write_json

    checkout()  # of what is measured: the checkout may move on meanwhile
    where = measure.use_device(device)
    ops = given.pop("op") or [name for name in OPS if where == "cpu" or name not in LAYER]
    grid = defaults(where, quick=quick) | {name: v for name, v in given.items() if v}
    served, refused = measure.divide(cases(ops, grid), where)
    for line in show.left_out(refused):
        typer.echo(line, err=True)
    if not served:
        raise MlxPagedError("no case of this grid can be measured here; see the reasons above")

    settings = measure.Settings(rounds or (5 if quick else 9), past_cache << 20, seed)
    progress = _progress(len(served))
    with progress or nullcontext():
        results = measure.measure(served, where, settings, _on_case(progress, len(served)))

    typer.echo(show.results_table(results))
    typer.echo("\n" + show.copy_line(results))
    if json is not None:
        write_json(
            json,
            {
                "benchmark": "kernels",
                "device": where,
                "settings": {
                    "rounds": settings.rounds,
                    "past_cache_bytes": settings.past_cache,
                    "seed": seed,
                },
                "counting": {name: COUNTING[name] for name in ops},
                "results": results,
                "refused": refused,
            },
        )
    if csv is not None:
        write_csv(csv, [_without_samples(row) for row in results])
    if plot is not None:
        name = device_name() if where == "gpu" else processor()
        picture.draw(plot, results, name)
    for path in (json, csv, plot):
        if path is not None:
            typer.echo(f"wrote {path}")


def _progress(count: int) -> Progress | None:
    """A bar on standard error, if that is a terminal and the grid is long."""
    if count < _LONG or not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # by a thread, it would take time from what is measured
    )


def _on_case(progress: Progress | None, count: int) -> Any:
    if progress is None:
        return lambda case, row: None
    task = progress.add_task("", total=count)

    def on_case(case: Case, row: dict[str, Any] | None) -> None:
        description = f"{case.op} {case.batch} x {case.context or case.rows}"
        progress.update(
            task, description=description, advance=0 if row is None else 1, refresh=True
        )

    return on_case


def _without_samples(row: dict[str, Any]) -> dict[str, Any]:
    """A row for CSV: figures only."""

    def lean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: lean(v) for k, v in value.items() if k != "samples"}
        return "/".join(map(str, value)) if isinstance(value, list) else value

    return {name: lean(value) for name, value in row.items()}
