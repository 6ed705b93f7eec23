"""Installs the build requirements of a Linux wheel in its manylinux image: docs/dev/releasing.md.

    python scripts/wheel_requirements.py

These are pyproject.toml's build requirements. MLX's wheels target a newer glibc than the image has,
so pip installs them only with an explicit platform. The build uses their headers and library but
never loads them.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

# Platform tag of MLX's Linux wheels and of their requirements.
GLIBC = "manylinux_2_35"


def pip_install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=True)


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    requirements = [line.partition(";")[0] for line in project["build-system"]["requires"]]
    mlx = [line for line in requirements if line.startswith("mlx[cpu]==")]
    others = [line for line in requirements if not line.startswith("mlx")]
    # In an isolated build, scikit-build-core requests the first two itself.
    pip_install("cmake>=3.25", "ninja", *others)
    (version,) = (line.partition("==")[2] for line in mlx)
    pip_install(
        *("--no-deps", "--only-binary=:all:", "--upgrade"),
        *("--platform", f"{GLIBC}_{platform.machine()}"),
        *("--target", sysconfig.get_path("platlib")),
        *(f"mlx=={version}", f"mlx-cpu=={version}"),
    )


if __name__ == "__main__":
    main()
