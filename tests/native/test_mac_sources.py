"""Every source of the Mac's extension compiles for macOS on arm64, on Linux.

tests/native/test_metal_host.py compiles what only a Mac compiles for this machine, to run it. Here
the target is macOS, with its C headers, libc++ and NEON, so objects name symbols as libmlx.dylib
exports them. Nothing is linked: Apple's frameworks are not here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support import mac_build
from support.mac_build import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a Mac compiles these itself")
MAC_ONLY = mac_build.mac_only_sources()
BATCHES = mac_build.mac_batches()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "csrc"))


# --- The list -------------------------------------------------------------------------------------


def test_every_file_for_metal_and_objective_c_is_compiled_here() -> None:
    """A new one has to be named by CMakeLists.txt, and then it is compiled below."""
    listed = subprocess.run(
        ["git", "ls-files", "*.m", "*.mm", "csrc/metal/*.cpp"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    files = {ROOT / name for name in listed.stdout.split()}
    assert ROOT / "csrc/metal/binder.cpp" in files
    assert files <= set(MAC_ONLY)


def test_the_lists_are_cmakes() -> None:
    """Sources in csrc are the Mac's, or for another system by name."""
    assert {name_of(path) for path in MAC_ONLY} >= {"gpu_eval.cpp", "metal/step_encoder.cpp"}
    files = [path for batch in BATCHES.values() for path in batch]
    assert len(files) == len(set(files)) and set(MAC_ONLY) < set(files)
    assert max(map(len, BATCHES.values())) > 1
    others = {
        name
        for path in (ROOT / "csrc").rglob("*.cpp")
        if path not in files and not (name := name_of(path)).startswith(("cuda/", "blas/"))
    }
    assert others == {"no_gpu.cpp", "cpu/rounded_simd.cpp"}


# --- The compiler ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mac_build.unpacked_mlx_metal(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def command(mlx: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    headers = mac_build.python_headers(tmp_path_factory.mktemp("python") / "include")
    return mac_build.macos_command(mlx, headers)


Compile = Callable[..., tuple[Path, str]]


@pytest.fixture(scope="module")
def compile_source(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """source, options -> (object, errors)."""
    folder = tmp_path_factory.mktemp("objects")

    @cache
    def compile_once(source: Path, *options: str) -> tuple[Path, str]:
        target = folder / f"{source.parent.name}-{source.stem}{len(options)}.o"
        run = subprocess.run(
            [*command, *options, str(source), "-o", str(target)],
            capture_output=True,
            text=True,
            check=False,
        )
        return target, "" if run.returncode == 0 else run.stderr or str(run.returncode)

    return compile_once


def unit_of(sources: list[Path], target: Path) -> Path:
    """Writes a file of sources that CMake's unity build compiles together."""
    target.write_text("".join(f'#include "{source}"\n' for source in sources))
    return target


@pytest.fixture(scope="module")
def mac_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unit_of(MAC_ONLY, tmp_path_factory.mktemp("unit") / "mac_only.cpp")


def test_what_only_a_mac_compiles(compile_source: Compile, mac_only: Path) -> None:
    target, errors = compile_source(mac_only)
    assert not errors, errors[:4000]
    assert target.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # Mach-O, 64 bits


def test_a_metallib_build_compiles(compile_source: Compile) -> None:
    _, errors = compile_source(ROOT / "csrc/metal/binder.cpp", "-DMLX_PAGED_METALLIB")
    assert not errors, errors[:4000]


@pytest.mark.one_in(66)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_whole_extension(compile_source: Compile, tmp_path: Path, batch: str) -> None:
    """In the batches of CMake's unity build."""
    _, errors = compile_source(unit_of(BATCHES[batch], tmp_path / f"{batch.replace(' ', '-')}.cpp"))
    assert not errors, errors[:4000]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("#include <linux/futex.h>", "linux/futex.h"),
        ("void planted() { sched_setaffinity(0, 0, nullptr); }", "sched_setaffinity"),
        ("#include <immintrin.h>", "x86"),
        ("long long planted(size_t n) { int unused = 0; return n; }", "unused"),
    ],
)
def test_code_that_only_linux_compiles_is_found(
    compile_source: Compile, tmp_path: Path, fault: str, told: str
) -> None:
    source = tmp_path / "planted.cpp"
    source.write_text(f"#include <cstddef>\n{fault}\n")
    _, errors = compile_source(source)
    assert told in errors


# --- Symbols --------------------------------------------------------------------------------------


def symbols(path: Path, *options: str) -> set[str]:
    versions = range(14, 24)
    nm = mac_build.tool("llvm-nm", *(f"/usr/lib/llvm-{v}/bin/llvm-nm" for v in versions))
    command = [nm, "--just-symbol-name", *options, str(path)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_libmlx_exports_what_a_mac_links_to(
    mlx: Path, compile_source: Compile, mac_only: Path
) -> None:
    """By mangled names, as the loader compares them."""
    target, errors = compile_source(mac_only)
    assert not errors, errors[:4000]
    theirs = re.compile(r"__Z(N|NK|TIN|TVN)(3mlx4core|3MTL|2NS)")
    needed = {name for name in symbols(target, "--undefined-only") if theirs.match(name)}
    assert needed
    exported = symbols(mlx / "lib/libmlx.dylib", "--extern-only", "--defined-only")
    assert not needed - exported
