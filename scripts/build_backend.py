"""Builds the package: scikit-build-core, and before it the choice whether there is a CUDA backend.

pip calls the hooks of this file (pyproject.toml, build-system). They are scikit-build-core's, but
where a CUDA backend is to be built and the machine has no nvcc, they also ask pip for NVIDIA's.
CMake (csrc/cuda/cuda.cmake) runs `python scripts/build_backend.py SETTING COMPILER` for the choice,
and the Makefile `python scripts/build_backend.py requirements EXTRA` for what a build needs.

pip does not tell a build which extras were asked for. So the CUDA backend is built where an NVIDIA
driver is loaded or the Python that builds has an MLX for CUDA; `MLX_PAGED_CUDA=ON` and `OFF` (an
environment variable, or `-Ccmake.define.MLX_PAGED_CUDA=ON`) choose by hand. Needs Python alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

try:  # (CMake runs this file where the hooks' package may be missing)
    from scikit_build_core import build as _skbuild
    from scikit_build_core.build import *  # noqa: F403
except ImportError:
    pass

# nvcc and all that it needs, in CUDA's first version 13: any driver of 13 runs what it compiles.
NVCC_WHEELS = tuple(
    f"nvidia-{name}==13.0.*"
    for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl", "cuda-culibos")
)
_OFF = "or set MLX_PAGED_CUDA=OFF to build for the CPU alone"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the NVIDIA driver says.

    Attributes:
        cuda: the newest CUDA that it runs, as (13, 0); None without a driver.
        architectures: compute capabilities of its GPUs, as "90".
    """

    cuda: tuple[int, int] | None = None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """True if to build the CUDA backend.

    Attributes:
        nvcc: the compiler to build it with; None to leave it out.
        problem: why it cannot be built although it should be, with the command that helps.
        reason: why it is left out.
        architectures: to compile for; empty for all.
    """

    nvcc: str | None = None
    problem: str = ""
    reason: str = ""
    architectures: tuple[str, ...] = ()


def find_gpu() -> Gpu:
    """Asks the driver, in a process of its own: CUDA stays in a process that has started it."""
    answer = subprocess.run(
        [sys.executable, __file__, "gpu"], capture_output=True, text=True, check=False
    )
    version, *architectures = answer.stdout.split() or ["0"]
    number = int(version)
    if not number:
        return Gpu()
    return Gpu((number // 1000, number % 1000 // 10), tuple(architectures))


def _print_gpu() -> None:
    """The driver's version as CUDA writes it (13000), then the capability of each kind of GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        print(0)
        return
    version, count, major, minor = (ctypes.c_int() for _ in range(4))
    cuda.cuDriverGetVersion(ctypes.byref(version))
    found = set()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for device in range(count.value):
            cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
            cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
            found.add(10 * major.value + minor.value)
    print(version.value, *sorted(found))


def find_nvcc() -> str | None:
    """nvcc as CMake would find it, then of NVIDIA's usual folder, then of its Python packages."""
    folders = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders.append(Path("/usr/local/cuda"))
    spec = util.find_spec("nvidia")
    wheels = [Path(place) / "cu13" for place in (spec and spec.submodule_search_locations) or ()]
    candidates = [
        os.environ.get("CUDACXX"),
        "nvcc",
        *(str(folder / "bin/nvcc") for folder in [*folders, *wheels]),
    ]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def has_cuda_mlx() -> bool:
    names = (distribution.metadata["Name"] or "" for distribution in metadata.distributions())
    return any(name.startswith("mlx-cuda") for name in names)


def choose(setting: str, nvcc: str | None, gpu: Gpu, *, cuda_mlx: bool) -> Choice:
    """Decides.

    Args:
        setting: ``ON``, ``OFF`` or ``AUTO``, and what CMake takes for the first two.
        nvcc: a compiler, if there is one.
        gpu: what the driver says.
        cuda_mlx: whether the Python that builds has an MLX for CUDA.
    """
    setting = setting.upper() or "AUTO"
    if setting in ("OFF", "0", "NO", "FALSE", "N"):
        return Choice(reason="MLX_PAGED_CUDA is OFF")
    if setting not in ("ON", "1", "YES", "TRUE", "Y", "AUTO"):
        return Choice(problem=f"MLX_PAGED_CUDA must be ON, OFF or AUTO, not {setting}")
    if setting == "AUTO" and gpu.cuda is None and not cuda_mlx:
        return Choice(reason="no NVIDIA driver is here (MLX_PAGED_CUDA=ON builds it all the same)")
    if nvcc is not None:
        return Choice(nvcc=nvcc, architectures=gpu.architectures)
    if takes_wheels(gpu):
        how = "python -m pip install " + " ".join(f"'{wheel}'" for wheel in NVCC_WHEELS)
    else:
        major, minor = gpu.cuda or (13, 0)
        how = f"apt install cuda-toolkit-{major}-{minor} (from NVIDIA's repository)"
    return Choice(problem=f"the CUDA backend needs nvcc, which is not here. Run: {how}; {_OFF}")


def takes_wheels(gpu: Gpu) -> bool:
    """True if NVIDIA's wheels of nvcc 13 make what this machine's driver runs."""
    return gpu.cuda is None or gpu.cuda >= (13, 0)


def setting_of(config_settings: Mapping[str, str | list[str]] | None) -> str:
    """MLX_PAGED_CUDA, from pip's -C or the environment."""
    given = (config_settings or {}).get("cmake.define.MLX_PAGED_CUDA")
    if isinstance(given, list):
        given = given[-1]
    return given or os.environ.get("MLX_PAGED_CUDA", "AUTO")


def cuda_requirements(config_settings: Mapping[str, str | list[str]] | None) -> list[str]:
    """What pip is to fetch for the CUDA backend."""
    gpu, nvcc = find_gpu(), find_nvcc()
    choice = choose(setting_of(config_settings), nvcc, gpu, cuda_mlx=has_cuda_mlx())
    return list(NVCC_WHEELS) if choice.problem and nvcc is None and takes_wheels(gpu) else []


def get_requires_for_build_wheel(
    config_settings: Mapping[str, str | list[str]] | None = None,
) -> list[str]:
    return [
        *_skbuild.get_requires_for_build_wheel(config_settings),
        *cuda_requirements(config_settings),
    ]


def get_requires_for_build_editable(
    config_settings: Mapping[str, str | list[str]] | None = None,
) -> list[str]:
    return [
        *_skbuild.get_requires_for_build_editable(config_settings),
        *cuda_requirements(config_settings),
    ]


def build_requirements(extra: str) -> list[str]:
    """Lists what pip must install before a build without isolation (Makefile).

    Args:
        extra: the extra that names MLX's backend, as ``cpu`` or ``cuda13``; empty on a Mac.
    """
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    requirements: list[str] = project["build-system"]["requires"]
    if extra:
        of_backend = project["project"]["optional-dependencies"][extra]
        requirements = [line for line in requirements if not line.startswith("mlx")]
        requirements += [line for line in of_backend if line.startswith("mlx[")]
    if extra.startswith("cuda"):
        requirements += cuda_requirements({"cmake.define.MLX_PAGED_CUDA": "ON"})
    return [*requirements, "cmake>=3.25", "ninja>=1.10"]


def main() -> None:
    """Prints a word and what goes with it, as a list of CMake's: for csrc/cuda/cuda.cmake."""
    if sys.argv[1:] == ["gpu"]:
        _print_gpu()
        return
    if sys.argv[1:2] == ["requirements"]:
        print(*build_requirements(*sys.argv[2:3] or [""]), sep="\n")
        return
    setting, compiler = (*sys.argv[1:], "", "")[:2]
    nvcc = compiler or find_nvcc()
    choice = choose(setting, nvcc, find_gpu(), cuda_mlx=has_cuda_mlx())
    if choice.nvcc:
        print("build", choice.nvcc, *choice.architectures, sep=";")
    else:
        words = ("refuse", choice.problem) if choice.problem else ("skip", choice.reason)
        print(*(re.sub(";", ",", word) for word in words), sep=";")


if __name__ == "__main__":
    main()
