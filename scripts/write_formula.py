"""Writes the Homebrew formula, packaging/homebrew/mlx-paged.rb.

    python scripts/write_formula.py resources               # after a change of a pin; needs uv
    python scripts/write_formula.py release v1.2.3 DIST --output mlx-paged.rb

`resources` resolves the package with its extras `server` and `chat` for macOS 14 on arm64, and
writes one resource block per wheel into the formula of the repository. `release` fills in version,
URL and checksum of the wheel in DIST, for a tap. PyPI's URL of a file contains the file's BLAKE2b
digest, so it is known before the upload.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import check_release

ROOT = Path(__file__).resolve().parent.parent
FORMULA = ROOT / "packaging/homebrew/mlx-paged.rb"
EXTRAS = ("server", "chat")
PYTHON = "3.13"
MACOS = 14
BEGIN, END = "  # resources: begin\n", "  # resources: end\n"


class FormulaError(Exception):
    """The formula cannot be written; the text says why."""


# --- Resources ------------------------------------------------------------------------------------


def requirements() -> list[str]:
    """Returns the requirements of mlx-paged and its extras from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]


def resolve(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The packages of the lock file that uv writes for a Mac."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder, "requirements.in"), Path(folder, "pylock.toml")
        wanted.write_text("\n".join(lines) + "\n")
        command = ["uv", "pip", "compile", "--quiet", "--no-config", "--only-binary=:all:"]
        command += ["--python-platform=aarch64-apple-darwin", f"--python-version={PYTHON}"]
        command += ["--format=pylock.toml", "--output-file", str(lock), str(wanted)]
        env = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": f"{MACOS}.0"}
        try:
            subprocess.run(command, env=env, check=True)
        except FileNotFoundError:
            raise FormulaError("this needs uv: pip install uv") from None
        except subprocess.CalledProcessError as error:
            raise FormulaError(f"uv ended with status {error.returncode}") from None
        return tomllib.loads(lock.read_text())["packages"]


def rank(filename: str) -> tuple[int, int] | None:
    """Larger for wheels that fit better; None: it does not run with this Python on this macOS."""
    *_, python, abi, platform = filename.removesuffix(".whl").split("-")
    ours = "cp" + PYTHON.replace(".", "")
    stable = abi == "abi3" and python.startswith("cp3") and int(python[3:]) <= int(ours[3:])
    pure = abi == "none" and "py3" in python.split(".")
    if not (stable or pure or python == abi == ours):
        return None
    best = None
    for tag in platform.split("."):
        match = re.fullmatch(r"macosx_(\d+)_\d+_(arm64|universal2)", tag)
        if tag == "any":
            best = max(best or 0, 0)
        elif match and int(match[1]) <= MACOS:
            best = max(best or 0, int(match[1]))
    return None if best is None else (best, int(python == abi == ours))


def wheel_of(package: dict[str, Any]) -> tuple[str, str]:
    """(URL, SHA-256) of the best wheel of a package for the formula's Macs."""
    ranked = []
    for wheel in package.get("wheels", []):
        if (fit := rank(wheel["url"].rpartition("/")[2])) is not None:
            ranked.append((fit, wheel["url"], wheel["hashes"]["sha256"]))
    if not ranked:
        raise FormulaError(f"{package['name']} {package['version']} has no wheel for these Macs")
    return max(ranked)[1:]


def with_resources(formula: str, packages: Iterable[dict[str, Any]]) -> str:
    blocks = []
    for package in sorted(packages, key=lambda package: package["name"]):
        url, digest = wheel_of(package)
        blocks.append(
            f'  resource "{package["name"]}" do\n'
            f'    url "{url}", using: :nounzip\n'
            f'    sha256 "{digest}"\n'
            "  end\n"
        )
    before, begin, rest = formula.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise FormulaError(f"the formula lacks '{BEGIN.strip()}' or '{END.strip()}'")
    return before + begin + "\n".join(blocks) + end + after


# --- Release --------------------------------------------------------------------------------------


def wheel_url(wheel: Path) -> str:
    digest = hashlib.blake2b(wheel.read_bytes(), digest_size=32).hexdigest()
    folders = f"{digest[:2]}/{digest[2:4]}/{digest[4:]}"
    return f"https://files.pythonhosted.org/packages/{folders}/{wheel.name}"


def released(formula: str, tag: str, folder: Path) -> str:
    """The formula of a release, whose wheel is in `folder`."""
    version = check_release.version()
    if tag != f"v{version}":
        raise FormulaError(f"the tag must be v{version}, but is {tag}")
    name = f"mlx_paged-{version}-cp313-cp313-macosx_{MACOS}_0_arm64.whl"
    wheel = folder / name
    if not wheel.is_file():
        raise FormulaError(f"{folder} has no {name}")
    values = {
        r'^  url "[^"]*/00/00/00/[^"]*"': f'  url "{wheel_url(wheel)}"',
        r'^  version "0\.0\.0"$': f'  version "{version}"',
        r'^  sha256 "0{64}"$': f'  sha256 "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"',
    }
    for pattern, value in values.items():
        formula, count = re.subn(pattern, value, formula, flags=re.MULTILINE)
        if count != 1:
            raise FormulaError(f"the formula must have one line like {pattern}, but has {count}")
    return formula.replace(formula.partition("class ")[0], "", 1)  # the comment about placeholders


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the Homebrew formula.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("resources")
    release = verbs.add_parser("release")
    release.add_argument("tag")
    release.add_argument("folder", type=Path)
    release.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    formula = FORMULA.read_text()
    try:
        if options.verb == "resources":
            FORMULA.write_text(with_resources(formula, resolve(requirements())))
        else:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(released(formula, options.tag, options.folder))
    except FormulaError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
