"""Results of a benchmark as a table, as JSON with its environment, and as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_paged.cli.bench.environment import environment
from mlx_paged.errors import InvalidParameterError


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column left, the rest right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Writes ``{"environment": ..., **results}``."""
    text = json.dumps({"environment": environment(), **results}, indent=2)
    _write(path, text + "\n")


def read_json(path: Path, field: str) -> dict[str, Any]:
    """An object that `write_json` wrote.

    Args:
        field: the option or argument that named the file, for the error.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise InvalidParameterError(
            field, f"a file that can be read ({error})", str(path)
        ) from None
    except ValueError as error:
        raise InvalidParameterError(field, f"a JSON file ({error})", str(path)) from None
    if not isinstance(found, dict) or "environment" not in found:
        raise InvalidParameterError(field, "results of mlx-paged bench with environment", str(path))
    return found


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row under a header of all keys, in the order in which they first come.

    Values that are objects become columns ``key.inner``; None is empty.
    """
    flat = [flatten(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(flat)
    except OSError as error:
        raise _cannot_write(path, error) from None


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_writable(field: str, path: Path | None) -> None:
    """Refuses a file that could not be written, before minutes are spent on what goes there."""
    if path is not None and not path.absolute().parent.is_dir():
        raise InvalidParameterError(field, "a file in a directory that exists", str(path))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> InvalidParameterError:
    return InvalidParameterError("output", f"a file that can be written ({error})", str(path))
