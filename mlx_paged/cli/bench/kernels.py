"""`mlx-paged bench kernels`: its options, and the output of its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mlx_paged.bench.kernels.cases import DTYPE_BYTES, LAYER, OPS, Case, cases, defaults
from mlx_paged.bench.results import check_writable, checkout, write_csv, write_json
from mlx_paged.cli.bench.options import (
    BLOCK_SIZES,
    ListOf,
    Values,
    at_least,
    list_option,
    one_of,
    parse_list,
)
from mlx_paged.cli.options import option, with_options
from mlx_paged.cli.progress import progress_bar
from mlx_paged.errors import InvalidParameterError, MlxPagedError

_GRID, _HOW, _OUT = "Cases (repeatable, or comma-separated)", "How", "Output"
_MIN_CASES_FOR_BAR = 4


@dataclass(frozen=True)
class GridOptions:
    """Values for the fields of `Case`; the benchmark measures all combinations."""

    op: Annotated[
        ListOf, list_option(_GRID, "Primitives: " + ", ".join(OPS) + ".", "all of the backend's")
    ] = None
    batch: Annotated[ListOf, list_option(_GRID, "Sequences per batch.", "1,16")] = None
    context: Annotated[ListOf, list_option(_GRID, "Mean tokens per sequence.", "1024,4096")] = None
    rows: Annotated[
        ListOf,
        list_option(
            _GRID,
            "Query tokens per sequence: 1 is decode, up to 8 drafts, more a prefill chunk.",
            "1",
        ),
    ] = None
    kv_heads: Annotated[ListOf, list_option(_GRID, "KV heads.", "8")] = None
    group: Annotated[ListOf, list_option(_GRID, "Query heads per KV head.", "4")] = None
    head_dim: Annotated[ListOf, list_option(_GRID, "Head dimension of keys and values.", "128")] = (
        None
    )
    block_size: Annotated[
        ListOf, list_option(_GRID, "Tokens per KV block: 8, 16, 32 or 64.", "32")
    ] = None
    dtype: Annotated[
        ListOf,
        list_option(
            _GRID, "float32, float16 or bfloat16.", "float32 on the CPU, bfloat16 on a GPU"
        ),
    ] = None
    window: Annotated[
        ListOf, list_option(_GRID, "Sliding window in tokens. 0 or none: no window.", "none")
    ] = None
    skew: Annotated[
        ListOf,
        list_option(_GRID, "Make an eighth of the sequences this many times longer.", "1"),
    ] = None

    def values(self) -> dict[str, list[Any]]:
        """Parses the values given for each field.

        Raises:
            InvalidParameterError: A value is invalid.
        """
        return {name: parse_list(name, getattr(self, name), *_VALUES[name]) for name in _VALUES}


def _window(word: str) -> int | None:
    """Parses a window; returns None for ``0`` and ``none``."""
    return at_least(0)[1]("0" if word.lower() == "none" else word) or None


_VALUES: dict[str, Values] = {
    "op": one_of(OPS),
    **dict.fromkeys(("batch", "context", "rows", "kv_heads", "group"), at_least(1)),
    "head_dim": ("multiples of 8 up to 576", one_of(range(8, 577, 8), int)[1]),
    "block_size": one_of(BLOCK_SIZES, int),
    "dtype": one_of(DTYPE_BYTES),
    "window": ("integers of at least 0, or none", _window),
    "skew": at_least(1),
}


@dataclass(frozen=True)
class RunOptions:
    """Device and settings of the measurement."""

    device: Annotated[
        Literal["cpu", "gpu"] | None,
        option(_HOW, "Device to run on.", show_default="the best available"),
    ] = None
    quick: Annotated[bool, option(_HOW, "Measure a few points only; takes seconds.", "--quick")] = (
        False
    )
    rounds: Annotated[
        int | None, option(_HOW, "Samples per case.", min=3, show_default="9; 5 if quick")
    ] = None
    past_cache: Annotated[
        int, option(_HOW, "MiB read between two launches on the same data.", min=0)
    ] = 256
    seed: Annotated[int, option(_HOW, "Seed for inputs and tables.")] = 0


@dataclass(frozen=True)
class Files:
    """Files for the results."""

    json: Annotated[Path | None, option(_OUT, "JSON file for all results.")] = None
    csv: Annotated[Path | None, option(_OUT, "CSV file for all rows.")] = None
    plot: Annotated[
        Path | None, option(_OUT, "Plot of attention's share of copy bandwidth (.svg, .png, .pdf).")
    ] = None


@with_options()
def kernels(
    *,
    grid: GridOptions,
    how: RunOptions,
    files: Files,
    compare: Annotated[
        tuple[Path, Path] | None,
        option(
            _OUT,
            "Compare two files of --json instead of measuring.",
            metavar="BEFORE AFTER",
        ),
    ] = None,
) -> None:
    """Measure every native primitive against this machine's bandwidth.

    Attention is compared with MLX's dense attention and with gathering
    first; everything with a plain copy, whose bandwidth is the roof. All
    take turns in each round, so that drift affects all alike. Each
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
    from mlx_paged.bench.kernels.report import check_picture

    given = grid.values()
    for field, path in vars(files).items():
        check_writable(field, path)
    if files.plot is not None:
        check_picture(files.plot)
    if compare is None:
        _measure(given, how, files)
        return
    named = [name for name, values in given.items() if values]
    named += [name for name, value in (("plot", files.plot), ("device", how.device)) if value]
    if named or how.quick:
        refused = [*named, *(["quick"] if how.quick else [])]
        raise InvalidParameterError("compare", "alone, as it measures nothing,", refused)
    _compare(*compare, files)


def _compare(before: Path, after: Path, files: Files) -> None:
    from mlx_paged.bench.kernels import report

    compared = report.compare(report.load(before, "compare"), report.load(after, "compare"))
    typer.echo(report.comparison_table(compared))
    if files.json is not None:
        write_json(files.json, {"benchmark": "kernels-compared", **compared})
    if files.csv is not None:
        write_csv(files.csv, compared["results"])
    if not compared["results"]:
        raise MlxPagedError("no case is in both files, so nothing was compared")


def _measure(given: dict[str, list[Any]], how: RunOptions, files: Files) -> None:
    from mlx_paged.bench.kernels import measure, report
    from mlx_paged.bench.kernels.data import COUNTING
    from mlx_paged.bench.results import device_name, processor

    checkout()  # Read before measuring, because the checkout may change during the run.
    where = measure.use_device(how.device)
    ops = given.pop("op") or [name for name in OPS if where == "cpu" or name not in LAYER]
    grid = defaults(where, quick=how.quick) | {name: v for name, v in given.items() if v}
    served, refused = measure.divide(cases(ops, grid), where)
    for line in report.left_out(refused):
        typer.echo(line, err=True)
    if not served:
        raise MlxPagedError("no case of this grid can be measured here; see the reasons above")

    settings = measure.Settings(
        how.rounds or (5 if how.quick else 9), how.past_cache << 20, how.seed
    )
    shown = None if len(served) >= _MIN_CASES_FOR_BAR else False
    with progress_bar("", len(served), shown=shown, passive=True) as advance:

        def on_case(case: Case, is_done: bool) -> None:
            advance(int(is_done), f"{case.op} {case.batch} x {case.context or case.rows}")

        results = measure.measure(served, where, settings, on_case)

    typer.echo(report.results_table(results))
    typer.echo("\n" + report.copy_line(results))
    if files.json is not None:
        write_json(
            files.json,
            {
                "benchmark": "kernels",
                "device": where,
                "settings": {
                    "rounds": settings.rounds,
                    "past_cache_bytes": settings.past_cache,
                    "seed": settings.seed,
                },
                "counting": {name: COUNTING[name] for name in ops},
                "results": results,
                "refused": refused,
            },
        )
    if files.csv is not None:
        write_csv(files.csv, results)
    if files.plot is not None:
        report.draw_picture(files.plot, results, device_name() if where == "gpu" else processor())
    for path in vars(files).values():
        if path is not None:
            typer.echo(f"wrote {path}")
