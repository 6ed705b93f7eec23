"""Benchmark results as a table, as CSV, and as JSON with a description of the environment."""

from __future__ import annotations

import csv
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import mlx_paged
from mlx_paged.errors import InvalidParameterError

# Load average of the minute before the measurement.
_LOAD_AVERAGE = os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def environment() -> dict[str, Any]:
    """Returns the fields that every JSON file of results has.

    Returns:
        ``date`` (UTC), ``command``, ``commit`` and ``dirty`` (None if the package is not in its own
        checkout), ``machine`` (``processor``, ``cores``, ``memory_bytes``, ``load_average``,
        ``system``, ``python``, ``device``) and ``build`` (`build_info`).
    """
    from mlx_paged import extension

    commit, dirty = checkout()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "commit": commit,
        "dirty": dirty,
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_bytes": memory_bytes(),
            "load_average": _LOAD_AVERAGE,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "device": device_name(),
        },
        "build": extension.build_info(),
    }


@cache
def checkout() -> tuple[str | None, bool | None]:
    """Commit of the checkout that contains the package, and whether its files are modified.

    Both are None for an installed package, unless ``MLX_PAGED_COMMIT`` names the commit. The result
    is cached: call this before measuring, because the checkout may change during the run.
    """
    root = Path(mlx_paged.__file__).resolve().parent.parent
    # An environment may lie inside another project's checkout.
    if not (root / ".git").exists():
        # Set when the files were copied to a machine without their repository.
        return os.environ.get("MLX_PAGED_COMMIT"), None
    commit = _git(root, "rev-parse", "HEAD")
    return commit, None if commit is None else bool(_git(root, "status", "--porcelain"))


def command() -> str:
    """The command line, without the path of the program."""
    program, *arguments = sys.argv
    name = Path(program).name
    if Path(program).parts[-2:] == ("mlx_paged", "__main__.py"):
        words = ["python", "-m", "mlx_paged"]
    elif Path(program).parts[-3:] == ("mlx_paged", "cli", "main.py"):
        words = ["python", "-m", "mlx_paged.cli.main"]
    elif name.endswith(".py"):
        words = ["python", program]
    else:
        words = [name]
    return shlex.join([*words, *arguments])


def processor() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if sys.platform == "darwin" and (brand := _run("sysctl", "-n", "machdep.cpu.brand_string")):
        return brand
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Main memory of the machine; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def device_name() -> str:
    """Name of MLX's default GPU; ``cpu`` if there is none."""
    from mlx_paged.platform import is_cpu_default  # Sets up BLAS, so it precedes mlx.core.

    # isort: split
    import mlx.core as mx

    if is_cpu_default():
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))  # type: ignore[attr-defined]


def _git(root: Path, *arguments: str) -> str | None:
    return _run("git", "-C", str(root), *arguments)


def _run(*words: str) -> str | None:
    """Returns the output of a command; None if it does not exist or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --- Tables and files -----------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats rows with the first column left-aligned and the rest right-aligned."""
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
    """Reads an object that `write_json` wrote.

    Args:
        field: The option or argument that named the file, for the error.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise InvalidParameterError(field, f"a readable file ({error})", str(path)) from None
    except ValueError as error:
        raise InvalidParameterError(field, f"a JSON file ({error})", str(path)) from None
    if not isinstance(found, dict) or "environment" not in found:
        raise InvalidParameterError(field, "results of mlx-paged bench with environment", str(path))
    return found


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes one line per entry under a header of all keys, in order of first occurrence.

    Objects become columns ``key.inner``, lists become ``a/b``, and None is empty; ``samples`` are
    omitted.
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
        elif key != "samples":
            is_list = isinstance(value, list)
            flat[prefix + key] = "/".join(map(str, value)) if is_list else value
    return flat


def check_writable(field: str, path: Path | None) -> None:
    """Raises before any measurement if a file could not be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise InvalidParameterError(field, "a file in a directory that exists", str(path))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> InvalidParameterError:
    return InvalidParameterError("output", f"a file that can be written ({error})", str(path))
