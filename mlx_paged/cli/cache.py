"""`mlx-paged cache`: shows, checks and clears the KV blocks that are kept on disk."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_paged.cli.entry import ExitCode, print_line
from mlx_paged.errors import InvalidParameterError
from mlx_paged.formatting import format_age, format_size

if TYPE_CHECKING:
    from mlx_paged.offload.survey import ModelFiles

cache = typer.Typer(no_args_is_help=True, help="KV blocks kept on disk by --kv-offload-dir.")

_Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="The folder of --kv-offload-dir.", envvar="MLX_PAGED_KV_OFFLOAD_DIR"
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@cache.command()
def show(folder: _Folder, json: _Json = False) -> None:
    """List the models whose blocks a folder holds.

    Examples:
      mlx-paged cache show ~/.cache/mlx-paged/kv
    """
    from mlx_paged.offload.survey import survey

    found = survey(_checked(folder))
    if json:
        typer.echo(json_module.dumps([asdict(each) for each in found], indent=2, default=str))
        return
    if not found:
        print_line(f"no blocks in {folder}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("MODEL", "FORMAT", "TOKENS", "FILES", "SIZE", "USED", "FOLDER"):
        table.add_column(name, no_wrap=name != "MODEL", overflow="fold")
    for each in found:
        table.add_row(*_row(each))
    Console(highlight=False).print(table)
    _print_damaged(found)


@cache.command()
def verify(folder: _Folder, json: _Json = False) -> None:
    """Read all blocks and verify their checksums. Exit status 1 if any is damaged.

    A server that finds a damaged block deletes its file and computes the block again.

    Examples:
      mlx-paged cache verify ~/.cache/mlx-paged/kv
    """
    from mlx_paged.offload.survey import survey

    found = survey(_checked(folder), verifies=True)
    if json:
        typer.echo(json_module.dumps([asdict(each) for each in found], indent=2, default=str))
    else:
        num_good = sum(each.num_segments for each in found)
        print_line(f"{num_good} files are intact, {_num_damaged(found)} damaged")
        _print_damaged(found)
    if _num_damaged(found):
        raise typer.Exit(ExitCode.FAILED)


@cache.command()
def clear(
    folder: _Folder,
    model: Annotated[
        str, typer.Option("--model", help="Only the model whose folder begins with this.")
    ] = "",
) -> None:
    """Delete all blocks, or those of one model. Servers that use the folder keep running.

    Examples:
      mlx-paged cache clear ~/.cache/mlx-paged/kv
      mlx-paged cache clear ~/.cache/mlx-paged/kv --model 9a107b
    """
    from mlx_paged.offload import survey

    path = _checked(folder)
    if model and not any(each.name.startswith(model) for each in survey.model_folders(path)):
        raise InvalidParameterError("model", f"the beginning of a folder in {folder}", model)
    print_line(f"deleted {format_size(survey.clear(path, model))}")


def _checked(folder: Path) -> Path:
    path = folder.expanduser()
    if not path.is_dir():
        raise InvalidParameterError("dir", "a folder", str(folder))
    return path


def _row(each: ModelFiles) -> tuple[str, ...]:
    about = each.about
    return (
        Path(str(about.get("model", "?"))).name,
        f"{about.get('kv_cache_dtype', '?')}, {about.get('block_size', '?')}",
        f"{each.num_tokens:,}",
        str(each.num_segments),
        format_size(each.num_bytes),
        format_age(each.used_at),
        each.name[:12],
    )


def _num_damaged(found: list[ModelFiles]) -> int:
    return sum(len(each.damaged) for each in found)


def _print_damaged(found: list[ModelFiles]) -> None:
    for each in found:
        for path, reason in each.damaged:
            print_line(f"{path}: {reason}")
