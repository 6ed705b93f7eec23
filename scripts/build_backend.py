"""Build backend: decides whether to build for CUDA, then calls scikit-build-core.

pip calls the hooks in this file (pyproject.toml, build-system). They are scikit-build-core's, but
if a CUDA backend should be built and the machine has no nvcc, they also request NVIDIA's from pip.
CMake (csrc/cuda/cuda.cmake) runs `python scripts/build_backend.py SETTING COMPILER` for the
decision, and the Makefile runs `python scripts/build_backend.py requirements EXTRA` for build
requirements and `dependencies EXTRAS` for those of the package.

pip does not tell a build which extras were requested. So the CUDA backend is built if an NVIDIA
driver is loaded, or if the Python that builds has an MLX for CUDA; `MLX_PAGED_CUDA=ON` and `OFF`
(an environment variable, or `-Ccmake.define.MLX_PAGED_CUDA=ON`) override this. Needs only Python.
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

try:  # CMake may run this file without the hooks' package.
    from scikit_build_core import build as _skbuild
    from scikit_build_core.build import *  # noqa: F403
except ImportError:
    pass

# nvcc and its requirements, in the first CUDA 13: any CUDA 13 driver runs its output.
NVCC_WHEELS = tuple(
    f"nvidia-{name}==13.0.*"
    for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl", "cuda-culibos")
)
_OFF = "or set MLX_PAGED_CUDA=OFF to build for the CPU alone"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Facts from the NVIDIA driver.

    Attributes:
        cuda: The newest CUDA that it supports, as (13, 0); None without a driver.
        architectures: Compute capabilities of its GPUs, as "90".
    """

    cuda: tuple[int, int] | None = None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision for or against a CUDA backend.

    Attributes:
        nvcc: The compiler to use; None for no CUDA backend.
        problem: Why a wanted backend cannot be built, with a command that helps.
        reason: Why there is no CUDA backend.
        architectures: Architectures to compile for; empty for all.
    """

    nvcc: str | None = None
    problem: str = ""
    reason: str = ""
    architectures: tuple[str, ...] = ()


def find_gpu() -> Gpu:
    """Queries the driver in a separate process, because CUDA stays loaded in a process."""
    answer = subprocess.run(
        [sys.executable, __file__, "gpu"], capture_output=True, text=True, check=False
    )
    version, *architectures = answer.stdout.split() or ["0"]
    number = int(version)
    if not number:
        return Gpu()
    return Gpu((number // 1000, number % 1000 // 10), tuple(architectures))


def _print_gpu() -> None:
    """Prints the driver's version in CUDA's form (13000), then each distinct GPU capability."""
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
    """Finds nvcc: on CMake's search path, in NVIDIA's usual folder, or in its Python packages."""
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
    """Decides whether to build the CUDA backend.

    Args:
        setting: ``ON``, ``OFF`` or ``AUTO``, or a CMake synonym for the first two.
        nvcc: Path of a compiler, if any.
        gpu: Facts from the driver.
        cuda_mlx: True if the Python that builds has an MLX for CUDA.
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
    """True if NVIDIA's nvcc 13 wheels support this machine and its driver."""
    return gpu.cuda is None or gpu.cuda >= (13, 0)


def setting_of(config_settings: Mapping[str, str | list[str]] | None) -> str:
    """Value of MLX_PAGED_CUDA, from pip's -C or the environment."""
    given = (config_settings or {}).get("cmake.define.MLX_PAGED_CUDA")
    if isinstance(given, list):
        given = given[-1]
    return given or os.environ.get("MLX_PAGED_CUDA", "AUTO")


def cuda_requirements(config_settings: Mapping[str, str | list[str]] | None) -> list[str]:
    """Packages that pip must fetch for the CUDA backend."""
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
    """Lists the packages that pip must install before a build without isolation (Makefile).

    Args:
        extra: The extra with MLX's backend: ``cpu`` or ``cuda13``; empty on a Mac.
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


def dependencies(extras: str) -> list[str]:
    """Lists the packages that the package needs, which pip can install while it is compiled.

    Args:
        extras: Extras that need more packages, as ``dev,cpu``. Extras that they name are included.
    """
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

    def listed(extras: str) -> list[str]:
        found = []
        for extra in filter(None, extras.split(",")):
            for line in project["optional-dependencies"][extra]:
                own = re.fullmatch(r"mlx-paged\[(.+)\]", line)
                found += listed(own[1]) if own else [line]
        return found

    return list(dict.fromkeys([*project["dependencies"], *listed(extras)]))


def main() -> None:
    """Prints the decision and its details as a CMake list, for csrc/cuda/cuda.cmake."""
    if sys.argv[1:] == ["gpu"]:
        _print_gpu()
        return
    if sys.argv[1:2] == ["requirements"]:
        print(*build_requirements(*sys.argv[2:3] or [""]), sep="\n")
        return
    if sys.argv[1:2] == ["dependencies"]:
        print(*dependencies(*sys.argv[2:3] or [""]), sep="\n")
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
