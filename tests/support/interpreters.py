"""PYTHONPATH and sitecustomize.py of interpreters that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*folders: Path | str) -> str:
    """Returns a PYTHONPATH with these folders first.

    What it has already follows: `support/child_site`, which makes their start cheaper.
    """
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, folders), *inherited])


def write_site(folder: Path, code: str) -> None:
    """Writes a sitecustomize.py: code for the start of every interpreter with this folder first."""
    (folder / "sitecustomize.py").write_text(f"import child_start\n{code}")
