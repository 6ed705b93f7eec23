"""The Metal binder against MLX's own headers and library for Apple GPUs, on a machine without one.

The wheel `mlx-metal` holds both. Its headers need a few of Apple's SDK's names, which
``tests/metal_host/stubs`` declares; nothing is run here. What fails when MLX's API moves: a
declaration (the compiler says which), or a symbol that libmlx.dylib does not export.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tests/metal_host/stubs"
SOURCES = sorted((ROOT / "csrc/metal").glob("*.cpp"))


def tool(*names: str) -> str:
    """The first of `names` that is installed."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs one of {', '.join(names)}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The unpacked wheel of the MLX version that is installed, kept between runs."""
    version = metadata.version("mlx")
    folder = ROOT / "build" / f"mlx-metal-{version}"
    if not (folder / "mlx/include").is_dir():
        download = tmp_path_factory.mktemp("wheel")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--platform=macosx_15_0_arm64", f"--dest={download}"]
        run = subprocess.run(
            [*command, f"mlx-metal=={version}"], capture_output=True, text=True, check=False
        )
        if run.returncode:
            pytest.skip(f"mlx-metal {version} cannot be downloaded: {run.stderr.strip()[-300:]}")
        with zipfile.ZipFile(next(download.glob("*.whl"))) as archive:
            archive.extractall(folder)
    return folder / "mlx"


def compile_command(wheel: Path) -> list[str]:
    includes = (STUBS, wheel / "include", wheel / "include/metal_cpp")
    return [
        tool("clang++", "clang++-14", "clang++-18", "clang++-19"),
        *("-std=c++20", "-fblocks", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        *(f"-isystem{path}" for path in includes),
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_binder_compiles_against_mlx_metal(wheel, source) -> None:
    command = [*compile_command(wheel), "-fsyntax-only", str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[:4000]


def test_a_call_that_mlx_does_not_have_is_found(wheel, tmp_path) -> None:
    binder = (ROOT / "csrc/metal/binder.cpp").read_text()
    moved = binder.replace("set_input_array(operand, index)", "set_input_array(index, operand)")
    assert moved != binder
    broken = tmp_path / "binder.cpp"
    broken.write_text(moved)
    command = [*compile_command(wheel), "-fsyntax-only", f"-I{ROOT}/csrc/metal", str(broken)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "set_input_array" in run.stderr


def symbols(path: Path, *options: str) -> set[str]:
    """Demangled names, spelled as if the standard library and 64-bit integers had one name."""
    nm = tool("llvm-nm", "llvm-nm-14", "/usr/lib/llvm-14/bin/llvm-nm", "llvm-nm-18", "llvm-nm-19")
    command = [nm, "--demangle", *options, str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {match[1] for match in re.finditer(r"^[0-9a-f ]*\b[A-Za-z] (.*)$", text, re.M)}
    return {re.sub(r"__cxx11::|__1::", "", n).replace("long long", "long") for n in names}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_libmlx_exports_what_the_binder_links_to(wheel, tmp_path, source) -> None:
    compiled = tmp_path / "binder.o"
    subprocess.run([*compile_command(wheel), "-c", str(source), "-o", str(compiled)], check=True)
    theirs = re.compile(r"mlx::core::|MTL::|NS::")
    needed = {name for name in symbols(compiled, "--undefined-only") if theirs.match(name)}
    assert len(needed) > 2
    missing = needed - symbols(wheel / "lib/libmlx.dylib", "--extern-only", "--defined-only")
    assert not missing
