"""Packages of npm for tests of clients, installed once into a folder of the user's cache.

MLX_PAGED_TEST_NPM names another folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def packages_of_npm(packages: Mapping[str, str]) -> Path:
    """Returns a folder with packages, by their names and versions. Skips the test without npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    default = Path.home() / ".cache" / "mlx-paged-tests" / "npm"
    root = Path(os.environ.get("MLX_PAGED_TEST_NPM", default))
    folder = root / "-".join(packages.values())
    if not (folder / "complete").exists():
        _install(packages, root, folder)
    return folder


def _install(packages: Mapping[str, str], root: Path, folder: Path) -> None:
    """Installs beside the folder, and renames: another process may do the same."""
    made = root / f"{os.getpid()}-{time.time_ns()}"
    made.mkdir(parents=True)
    (made / "package.json").write_text(json.dumps({"private": True, "dependencies": packages}))
    command = ["npm", "install", "--no-fund", "--no-audit", "--ignore-scripts"]
    done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=300)
    if done.returncode:
        shutil.rmtree(made)
        pytest.skip(f"npm could not install {', '.join(packages)}: {done.stderr.strip()[-300:]}")
    (made / "complete").touch()
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "complete").exists():
            raise
        shutil.rmtree(made)


def run_node(script: Path, folder: Path, *arguments: str) -> Any:
    """Runs a script in a folder of packages; returns the JSON that it prints."""
    command = ["node", str(script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
