"""`mlx-paged bench memory`: KV memory of many users, dense, paged and with prefix sharing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged.bench.results import check_writable, checkout, write_csv, write_json
from mlx_paged.cli.bench.options import BLOCK_SIZES, ListOf, at_least, list_option, parse_list
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.kv_formats import format_named

if TYPE_CHECKING:
    from mlx_paged.bench.memory_runs import Load


def memory(
    users: Annotated[ListOf, list_option(None, "Concurrent users.", "1,8,32")] = None,
    system_len: Annotated[
        ListOf, list_option(None, "Tokens of the shared system prompt. 0: none.", "64,512")
    ] = None,
    user_len: Annotated[
        ListOf, list_option(None, "Mean tokens of each user's own prompt.", "64")
    ] = None,
    answer_len: Annotated[ListOf, list_option(None, "Mean tokens per answer.", "64")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block: 8, 16, 32 or 64.")] = 32,
    kv_cache_dtype: Annotated[
        ListOf, list_option(None, "KV cache formats to compare.", "int8,int8_k_int4_v")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model directory, GGUF file or Hugging Face id.", show_default="the embedded model"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use fewer users and shorter texts; takes seconds.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed for texts and lengths.")] = 0,
    json: Annotated[Path | None, typer.Option(help="JSON file for all results.")] = None,
    csv: Annotated[Path | None, typer.Option(help="CSV file for results.")] = None,
) -> None:
    """Measure the KV memory of N users, and test the claim that paging takes 2-4x less.

    Users share a system prompt and have answers in progress at once;
    lengths vary from half to one and a half times their mean. The same
    requests run on mlx-lm with a cache for each user, on its
    BatchGenerator, on the paged engine, and there with prefix sharing
    and with quantized keys and values.
    Nothing is computed from shapes: arrays, MLX's memory and blocks are
    read while it runs. Options with LIST may be repeated or take commas.

    Examples:
      mlx-paged bench memory --quick
      mlx-paged bench memory --users 1,8,32 --system-len 0,1024
      mlx-paged bench memory --user-len 16,256 --answer-len 32 --json memory.json
    """
    grid = {
        "users": parse_list("users", users, *at_least(1)),
        "system_len": parse_list("system_len", system_len, *at_least(0)),
        "user_len": parse_list("user_len", user_len, *at_least(1)),
        "answer_len": parse_list("answer_len", answer_len, *at_least(1)),
    }
    preset = {"users": [1, 8, 32], "system_len": [64, 512], "user_len": [64], "answer_len": [64]}
    if quick:
        preset |= {"users": [1, 4], "system_len": [128], "user_len": [16], "answer_len": [16]}
    formats = _formats(kv_cache_dtype) if kv_cache_dtype else ["int8", "int8_k_int4_v"]
    if block_size not in BLOCK_SIZES:
        raise InvalidParameterError("block_size", "8, 16, 32 or 64", block_size)
    for field, path in (("json", json), ("csv", csv)):
        check_writable(field, path)
    from mlx_paged import unpatch
    from mlx_paged.platform import use_supported_device

    unpatch()  # Dense caches must be those of unpatched mlx-lm.
    checkout()
    use_supported_device()
    from mlx_paged.bench import memory_runs
    from mlx_paged.engine.loading import load

    loaded = load(model)
    shapes = itertools.product(*(values or preset[name] for name, values in grid.items()))
    loads = [memory_runs.Load(*shape) for shape in shapes]
    _check_lengths(loads, loaded.config.get("max_position_embeddings"))
    rows: list[dict[str, Any]] = []
    for i, one in enumerate(loads):
        if sys.stderr.isatty():
            typer.echo(f"{i + 1} of {len(loads)}: {one.users} users", err=True)
        held = memory_runs.measure(loaded, one, block_size, seed, formats)
        found = {name: asdict(each) for name, each in held.items()}
        rows.append(memory_runs.row(vars(one), found))
    typer.echo(memory_runs.text(rows))
    if json is not None:
        write_json(
            json,
            {
                "benchmark": "memory",
                "model": model or "embedded",
                "block_size": block_size,
                "seed": seed,
                "claim": memory_runs.CLAIM,
                "verdict": memory_runs.verdict(rows),
                "results": rows,
            },
        )
    if csv is not None:
        write_csv(csv, rows)


def _formats(names: Sequence[str]) -> list[str]:
    """Returns the formats to compare, without "auto", which is always measured.

    Raises:
        InvalidParameterError: A name is unknown.
    """
    formats = (format_named(name.strip()) for one in names for name in one.split(","))
    return list(dict.fromkeys(f.name for f in formats if f is not None))


def _check_lengths(loads: Sequence[Load], limit: int | None) -> None:
    for load in loads:
        longest = load.system_len + 3 * (load.user_len + load.answer_len) // 2
        if limit is not None and longest > limit:
            raise InvalidParameterError(
                "system_len, user_len and answer_len",
                f"short enough for the model's {limit} tokens, at one and a half times the means",
                longest,
            )
