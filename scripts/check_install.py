"""Tests an installed package like a new user: imports it, runs doctor, generates text.

    VENV/bin/python scripts/check_install.py

For an environment with only the package, outside any checkout (`scripts/check_wheel.sh` and the
wheel builds make one). If something does not work, prints the reason and exits with status 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

SHIPPED = (
    "_ext.pyi",
    "py.typed",
    "demo/model/model.safetensors",
    "demo/model/README.md",
    "metal/README.md",
    "server/web/index.html",
)
NOT_SHIPPED = (
    "_sim",
    "_asan",
    "demo/classics",
    "demo/train",
    "tests",
)  # for tests and training only
COMMAND = Path(sysconfig.get_path("scripts")) / "mlx-paged"


def output_of(*command: str | Path) -> str:
    # UTF-8, because runners without a locale default to ASCII.
    env = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def check_files() -> None:
    files = [str(file) for file in metadata.files("mlx-paged") or []]
    for name in SHIPPED:
        if f"mlx_paged/{name}" not in files:
            sys.exit(f"the package lacks mlx_paged/{name}")
    for name in NOT_SHIPPED:
        if found := [file for file in files if file.startswith(f"mlx_paged/{name}")]:
            sys.exit(f"the package contains {found}")
    if not any(file.endswith("licenses/LICENSE") for file in files):
        sys.exit("the package lacks its licence")


def check_import() -> None:
    code = (
        "import json, mlx_paged as m\n"
        "print(json.dumps([m.__file__, m.__version__, m.build_info()]))"
    )
    file, version, build = json.loads(output_of(sys.executable, "-c", code))
    if not Path(file).is_relative_to(sysconfig.get_path("platlib")):
        sys.exit(f"mlx_paged was imported from {file}, not from the installed package")
    if not version == build["version"] == metadata.version("mlx-paged"):
        sys.exit(f"versions differ: {version}, {build['version']}")
    print(json.dumps(build, indent=2))


def main() -> None:
    check_files()
    check_import()
    print(output_of(COMMAND, "doctor"))
    text = output_of(COMMAND, "generate", "--prompt", "Return the n-th Fibonacci number",
                     "--temperature", "0", "--max-tokens", "64")  # fmt: skip
    if "def " not in text:
        sys.exit(f"the embedded model wrote no function:\n{text}")
    print(text)


if __name__ == "__main__":
    main()
