"""The compilers: clang for the kernels (its C++ for OpenCL is the dialect they are compiled in) and
the machine's C++ compiler for the simulator itself."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
# The C interface, which mlx_paged._sim is compiled with too.
INTERFACE = HERE / "runtime" / "metal_sim.h"
CACHE = Path(os.environ.get("MLX_PAGED_SIM_CACHE") or HERE / ".cache")
NO_CLANG = (
    "the Metal simulator needs clang 16 or newer: `pip install ziglang` brings one, "
    "`apt install clang` another; MLX_PAGED_SIM_CLANG names one"
)
FRONT_FLAGS = [
    *("-x", "clcpp", "-cl-std=clc++", "-cl-no-stdinc", "-cl-single-precision-constant", "-w"),
    *("-Xclang", "-ffake-address-space-map", "-fdeclspec", "-fPIC", "-fno-strict-aliasing"),
    *(
        "-gline-tables-only",
        "-fdebug-info-for-profiling",
        "-O0",
        "-Xclang",
        "-disable-O0-optnone",
        "-ferror-limit=8",
    ),
    "-fdebug-compilation-dir=/nowhere",  # so that paths stay whole
    # Locals begin as NaN; indices into them and divisors are checked.
    "-ftrivial-auto-var-init=pattern",
    *("-fsanitize=array-bounds,integer-divide-by-zero", "-fno-sanitize-recover=all"),
]
# Headers of the simulator may get other timestamps, but not another text (`sources_hash`).
PRECOMPILE_FLAGS = ["-c", "-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp"]
# -O2 takes more time than tests gain. Kernels that run once, like those of a mutant, are not
# worth the optimiser's time at all.
OPTIMISATION = os.environ.get("MLX_PAGED_SIM_OPTIMISATION", "-O1")
# -undef: of the predefined names only Metal's.
PREPROCESS_FLAGS = ["-E", "-x", "c++", "-std=c++17", "-undef", "-nostdinc", "-nostdinc++"]
METAL_NAMES = {"__METAL__": "1", "__METAL_VERSION__": "320", "__HAVE_BFLOAT__": "1"}


class ToolError(Exception):
    """A compiler refused its input; the text is what it said."""


@functools.cache
def clang() -> tuple[str, ...] | None:
    """Command of a usable clang, or None."""
    named = os.environ.get("MLX_PAGED_SIM_CLANG")
    candidates: list[tuple[str, ...]] = [tuple(named.split())] if named else []
    if not named:
        if (package := importlib.util.find_spec("ziglang")) and package.origin:
            # (What `python -m ziglang` runs, without the start of an interpreter each time.)
            zig = shutil.which("zig", path=str(Path(package.origin).parent))
            candidates += [(zig, "clang")] if zig else []
        names = ["clang", *(f"clang-{version}" for version in range(24, 15, -1))]
        candidates += [(found,) for name in names if (found := shutil.which(name))]
    probe = (
        "template <class T> void f(__private T* p) { *p = T(0); }\nvoid g() { float x; f(&x); }\n"
        "using u = __make_unsigned(int);\n"  # not known before clang 16
    )
    for command in candidates:
        run = _execute([*command, *FRONT_FLAGS, "-fsyntax-only", "-"], probe)
        if run.returncode == 0:
            return command
    return None


@functools.cache
def cxx() -> str | None:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def missing() -> str | None:
    """Why the simulator cannot run here, or None."""
    if sys.platform != "linux":
        return "the Metal simulator runs on Linux; a Mac has the real thing"
    if clang() is None:
        return NO_CLANG
    if cxx() is None:
        return "the Metal simulator needs a C++ compiler (c++, g++ or clang++)"
    return None


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Half precision and fused multiply-add in hardware where this machine has them."""
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").exists():
        return ()
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    return tuple(f"-m{name}" for name in ("avx2", "fma", "f16c") if name in flags)


def _execute(command: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def run(command: list[str], text: str | None = None) -> str:
    result = _execute(command, text)
    if result.returncode != 0:
        raise ToolError(result.stderr.strip() or f"{command[0]} failed ({result.returncode})")
    return result.stdout


def preprocess(source: str, name: str, include: list[Path], defines: dict[str, str]) -> str:
    """Text with line markers; the source itself is called `name` in them."""
    command = [*_clang(), *PREPROCESS_FLAGS, f"-I{HERE / 'msl' / 'include'}"]
    command += [f"-I{folder}" for folder in include]
    command += [f"-D{key}={value}" for key, value in {**METAL_NAMES, **defines}.items()]
    return run([*command, "-"], f'#line 1 "{name}"\n{source}')


def front_end(translated: str, entries: str, *, precompile: bool = False) -> str:
    """Unoptimised LLVM IR with address spaces, line tables, and library functions inlined.

    `precompile`: the text before the entry points is parsed once for all calls with the same.
    """
    command = [*_front_end(), "-S", "-emit-llvm", "-o", "-"]
    if not precompile:
        return run([*command, "-"], translated + entries)
    include = ["-Xclang", "-include-pch", "-Xclang", str(_precompiled(translated))]
    return run([*command, *include, "-"], entries)


def _front_end() -> list[str]:
    return [*_clang(), *FRONT_FLAGS, *cpu_flags(), f"-I{HERE / 'msl'}"]


def _precompiled(translated: str) -> Path:
    digest = hashlib.sha256((sources_hash() + translated).encode()).hexdigest()[:32]
    target = CACHE / f"{digest}.pch"
    with makes(target) as is_missing:
        if is_missing:
            partial = target.with_suffix(f".{os.getpid()}")
            run([*_front_end(), *PRECOMPILE_FLAGS, "-o", str(partial), "-"], translated)
            os.replace(partial, target)
    return target


def link(module: str, tables: str, target: Path) -> None:
    """Optimises the instrumented module and links it with the simulator."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        ir, object_file = Path(folder, "kernels.ll"), Path(folder, "kernels.o")
        table_file, library = Path(folder, "tables.cpp"), Path(folder, "kernels.so")
        ir.write_text(module)
        table_file.write_text(tables)
        optimise = [
            OPTIMISATION,
            "-fPIC",
            "-w",
            *cpu_flags(),
            "-c",
            str(ir),
            "-o",
            str(object_file),
        ]
        run([*_clang(), *optimise])
        run(
            [
                str(cxx()),
                *_cxx_flags(),
                *_linker(),
                "-shared",
                str(table_file),
                str(object_file),
                *_runtime(),
                "-lm",
                "-o",
                str(library),
            ]
        )
        os.replace(library, target)


def _linker() -> list[str]:
    """Gold, where it is installed, links in a third of the time."""
    return ["-fuse-ld=gold"] if shutil.which("ld.gold") else []


def _cxx_flags() -> list[str]:
    return ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{HERE / 'runtime'}"]


@functools.cache
def _runtime() -> list[str]:
    """Object files of the simulator, compiled when its sources changed."""
    sources = sorted((HERE / "runtime").iterdir())
    digest = hashlib.sha256(repr(_cxx_flags()).encode() + b"".join(p.read_bytes() for p in sources))
    folder = CACHE / f"runtime-{digest.hexdigest()[:16]}"
    with makes(folder) as is_missing:
        if is_missing:
            partial = folder.with_suffix(f".{os.getpid()}")
            partial.mkdir()
            for source in sources:
                if source.suffix == ".cpp":
                    target = partial / f"{source.stem}.o"
                    options = ("-Wall", "-Wextra", "-c", str(source), "-o", str(target))
                    run([str(cxx()), *_cxx_flags(), *options])
            os.replace(partial, folder)
    return sorted(map(str, folder.glob("*.o")))


@contextlib.contextmanager
def makes(target: Path) -> Iterator[bool]:
    """True if a file of the cache must be made. Processes that need it meanwhile wait for it:
    workers and their children run the same kernels at the same time."""
    if target.exists():
        yield False
        return
    make_cache()
    with open(CACHE / f"{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or this process ends
        yield not target.exists()


def make_cache() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")


@functools.cache
def sources_hash() -> str:
    """Hashes everything that a compiled library depends on besides the kernels."""
    digest = hashlib.sha256(repr((clang(), cxx(), FRONT_FLAGS, OPTIMISATION, cpu_flags())).encode())
    ours = sorted([*HERE.glob("*.py"), *HERE.glob("msl/*.h"), *HERE.glob("runtime/*")])
    for path in ours:
        if not path.name.startswith(("test_", "checks_")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _clang() -> tuple[str, ...]:
    command = clang()
    if command is None:
        raise ToolError(NO_CLANG)
    return command
