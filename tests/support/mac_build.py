"""The extension's sources as a Mac compiles them: their list, and a compiler for macOS on Linux.

Zig's clang (the package `ziglang`) brings libc++ and the C headers of macOS. MLX's headers are
those of the wheel for Macs; tests/native/metal_host/stubs declares what they need of Apple's SDK
beyond that.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "tests/native/metal_host/stubs"
CMAKE = ROOT / "CMakeLists.txt"


# --- Sources --------------------------------------------------------------------------------------


def _sources_in(text: str) -> list[str]:
    return re.findall(r"csrc/[\w/]+\.(?:cpp|mm|m)\b", text)


def _argument_lists(pattern: str) -> list[str]:
    """Arguments of the CMake commands that begin with `pattern`."""
    found = re.findall(rf"^ *{pattern}([^()]*(?:\([^()]*\)[^()]*)*)\)", CMAKE.read_text(), re.M)
    assert found, f"CMakeLists.txt has no {pattern}"
    return found


def gpu_sources() -> tuple[list[str], list[str]]:
    """GPU_SOURCES elsewhere, and on a Mac."""
    elsewhere, mac = map(_sources_in, _argument_lists(r"set\(GPU_SOURCES "))
    return elsewhere, mac


def mac_only_sources() -> list[Path]:
    elsewhere, mac = gpu_sources()
    return [ROOT / name for name in mac if name not in elsewhere]


def mac_batches() -> dict[str, list[Path]]:
    """All sources of `_ext` as a Mac compiles them: name of a batch -> files, in CMake's order."""
    core = _sources_in(_argument_lists(r"set\(CORE_SOURCES")[0]) + gpu_sources()[1]
    cpu = _sources_in(_argument_lists(r"set\(CPU_SOURCES")[0])
    bindings = _sources_in(_argument_lists(r"add_library\(\$\{NAME\} OBJECT ")[0])
    pool = _sources_in(_argument_lists(r"set\(POOL_SOURCES ")[0])
    extension = _sources_in(_argument_lists(r"add_extension\(_ext ")[0])
    batches = {}
    for target, names in (("core", core), ("cpu", cpu), (r"\$\{NAME\}", bindings)):
        size = int(_argument_lists(rf"compile_together\({target} ")[0])
        for first in range(0, len(names), size):
            label = "bindings" if names is bindings else target
            batches[f"{label} {first // size}"] = names[first : first + size]
    for name in [*extension, *pool, "csrc/cpu/kernels_simd.cpp"]:
        batches[Path(name).stem] = [name]
    return {label: [ROOT / name for name in names] for label, names in batches.items()}


# --- Compilers ------------------------------------------------------------------------------------


def unpacked_mlx_metal(downloads: Path) -> Path:
    """The package `mlx` of the wheel for Macs, in the installed version; kept between runs."""
    version = metadata.version("mlx")
    folder = ROOT / "build" / f"mlx-metal-{version}"
    if not (folder / "mlx/include").is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--platform=macosx_15_0_arm64", f"--dest={downloads}"]
        run = subprocess.run(
            [*command, f"mlx-metal=={version}"], capture_output=True, text=True, check=False
        )
        if run.returncode:
            pytest.skip(f"mlx-metal {version} cannot be downloaded: {run.stderr.strip()[-300:]}")
        with zipfile.ZipFile(next(downloads.glob("*.whl"))) as archive:
            archive.extractall(folder)
    return folder / "mlx"


def tool(*names: str) -> str:
    """The first of `names` that is installed."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs one of {', '.join(names)}")
    return found


@functools.cache
def zig() -> str | None:
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        return None
    return shutil.which("zig", path=str(Path(package.origin).parent))


def python_headers(folder: Path) -> Path:
    """This Python's headers without Debian's pyconfig.h, which refuses other machines."""
    include = Path(sysconfig.get_path("include"))
    config = Path(sysconfig.get_config_h_filename())
    if "multiarch" in config.read_text():
        config = next(Path("/usr/include").glob(f"*/{include.name}/pyconfig.h"))
    if not (folder / "pyconfig.h").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for header in include.iterdir():
            if header.name != "pyconfig.h":
                (folder / header.name).symlink_to(header)
        (folder / "pyconfig.h").symlink_to(config)
    return folder


def macos_command(mlx: Path, python: Path) -> list[str]:
    """Compiles for the oldest macOS that wheels are for, with CI's warnings as errors."""
    compiler = zig()
    if compiler is None:
        pytest.skip("needs the package ziglang, which has the headers of macOS")
    nanobind = pytest.importorskip("nanobind")
    includes = (STUBS, mlx / "include", mlx / "include/metal_cpp", nanobind.include_dir(), python)
    definitions = (
        *("NB_DOMAIN=mlx", 'MLX_PAGED_NANOBIND_VERSION="0"', 'MLX_PAGED_BACKENDS="cpu metal"'),
        *("MLX_PAGED_ISA=baseline", "MLX_PAGED_KERNELS=kBaselineKernels"),
        'MLX_PAGED_SIMD_NAME="neon"',
    )
    return [
        *(compiler, "c++", "-target", "aarch64-macos.14.0", "-std=c++20", "-O0", "-c"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"),
        *(f"-isystem{path}" for path in includes),
        *(f"-D{definition}" for definition in definitions),
    ]
