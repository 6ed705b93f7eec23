"""`mlx-paged pull`, `list`, `show` and `rm`: manage models of the Hugging Face hub."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged.cli.entry import ExitCode, print_line
from mlx_paged.errors import InvalidParameterError, MlxPagedError, ModelLoadError
from mlx_paged.formatting import format_age, format_size

if TYPE_CHECKING:
    from mlx_paged.hub import CachedModel

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face id.")],
    revision: Annotated[
        str | None, typer.Option("--revision", help="A branch, tag or commit.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Only files that match this pattern. Repeatable."),
    ] = None,
    fits: Annotated[
        bool,
        typer.Option(
            "--fits",
            help="Only weights that fit into the memory: of several GGUF files the largest one.",
        ),
    ] = False,
) -> None:
    """Fetch a model, or the files of it that are missing.

    The last line is the directory. `--model` takes it, too, which pins the revision.

    Examples:
      mlx-paged pull mlx-community/Qwen3-0.6B-4bit
      mlx-paged pull mlx-community/Qwen3-0.6B-4bit --revision 3b1b1f2
      mlx-paged pull bartowski/SmolLM2-135M-Instruct-GGUF --include "*Q4_K_M.gguf"
      mlx-paged pull bartowski/Qwen_Qwen3-8B-GGUF --fits
    """
    from mlx_paged import hub

    usable = _usable_memory() if fits else None
    if usable is not None and not include:
        include = hub.largest_gguf(model, usable, revision=revision)
    wanted = hub.plan(model, revision=revision, include=include or ())
    if usable is not None:
        hub.check_fits(model, wanted, usable)
    if wanted.missing:
        print_line(f"fetching {format_size(wanted.missing)} of {model}, {wanted.num_files} files")
    path = hub.pull(model, revision=wanted.revision if revision else None, include=include or ())
    typer.echo(path)


def list_models(
    fits: Annotated[
        bool, typer.Option("--fits", help="Only models whose weights fit into the memory.")
    ] = False,
    json: _Json = False,
) -> None:
    """List the models on this machine.

    Examples:
      mlx-paged list
      mlx-paged list --fits --json
    """
    from mlx_paged import hub

    found = hub.models()
    if fits:
        usable = _usable_memory()
        found = [each for each in found if each.is_complete and each.weight_bytes <= usable]
    if json:
        typer.echo(json_module.dumps([_as_json(each) for each in found], indent=2))
        return
    if not found:
        print_line(f"no models in {hub.cache_dir()}; `mlx-paged pull` fetches one")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("MODEL", "REVISION", "SIZE", "FETCHED"):
        table.add_column(name, no_wrap=name != "MODEL", overflow="fold")
    for each in found:
        name = each.name if each.is_complete else f"{each.name} (incomplete)"
        table.add_row(name, _revision(each), format_size(each.size), format_age(each.last_modified))
    Console(highlight=False).print(table)


def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="NAME, NAME@REVISION, or a path.")],
    json: _Json = False,
) -> None:
    """Describe a model on this machine: its family, and whether it is served and fits.

    Examples:
      mlx-paged show mlx-community/Qwen3-0.6B-4bit
    """
    about = _described(model)
    if json:
        typer.echo(json_module.dumps(about, indent=2))
        return
    for name, value in about.items():
        if value is not None:
            text = format_size(value) if name in _BYTES else value
            typer.echo(f"{name.replace('_', ' '):<16} {text}")


def remove(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="NAME or NAME@REVISION.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove models from this machine.

    Examples:
      mlx-paged rm mlx-community/Qwen3-0.6B-4bit
      mlx-paged rm --yes mlx-community/Qwen3-0.6B-4bit@3b1b1f2
    """
    from mlx_paged import hub

    chosen: dict[Path, CachedModel] = {}
    for given, found in hub.matching(models):
        if not found:
            raise InvalidParameterError("model", f"a model in {hub.cache_dir()}", given)
        chosen |= {each.path: each for each in found}
    what = ", ".join(f"{each.name} ({_revision(each)})" for each in chosen.values())
    if not yes:
        typer.confirm(f"Remove {what}?", abort=True)
    typer.echo(f"removed {what}: {format_size(hub.remove(list(chosen.values())))} freed")


_BYTES = ("size", "weights", "memory")


def _described(model: str) -> dict[str, Any]:
    from mlx_paged import hub

    found = next((each for _, each in hub.matching([model])), [])
    if not found:
        where = hub.cache_dir()
        raise ModelLoadError(model, f"it is not in {where}; `mlx-paged pull {model}` fetches it")
    newest = max(found, key=lambda each: each.last_modified)
    config = newest.config()
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    usable = _usable_memory()
    return {
        **_as_json(newest),
        "family": config.get("model_type"),
        "served": _served(newest.path, config),
        "bits": quantization.get("bits") if isinstance(quantization, dict) else None,
        "context": _context(config),
        "memory": usable,
        "fits": newest.weight_bytes <= usable,
    }


def _as_json(model: CachedModel) -> dict[str, Any]:
    return {
        "model": model.name,
        "revision": model.revision,
        "refs": ", ".join(model.refs),
        "path": str(model.path),
        "size": model.size,
        "weights": model.weight_bytes,
        "complete": model.is_complete,
    }


def _served(path: Path, config: dict[str, Any]) -> str:
    """Returns whether a model can be served: "yes", or why not."""
    if not config:
        return "yes, each GGUF file by its path" if any(path.glob("*.gguf")) else "no config.json"
    from mlx_paged.engine.loading import require_served

    try:
        require_served(path, config)
    except MlxPagedError as error:
        return f"no: {error}"
    return "yes"


def _context(config: dict[str, Any]) -> int | None:
    from mlx_paged.model.config_files import model_len

    return model_len(config)


def _usable_memory() -> int:
    """Returns the maximum bytes of weights that the engine would load on this machine."""
    from mlx_paged.doctor import jobs

    outcome = jobs.run_in_child([jobs.MEMORY])[jobs.MEMORY]
    if outcome.error is not None:
        print_line(f"the memory could not be measured: {outcome.error}")
        raise typer.Exit(ExitCode.FAILED)
    memory: jobs.Memory = outcome.value
    return int(memory["device_bytes"] * (memory["utilization"] if memory["on_gpu"] else 1.0))


def _revision(model: CachedModel) -> str:
    return " ".join([*model.refs, model.revision[:7] or "-"])
