"""The CUDA sources are compiled where there is a compiler for them, GPU or not; elsewhere the skip
says what is missing. The kernels: one dtype, one architecture, unoptimised and up to PTX, which is
what the front end checks. The host's side also needs the headers of MLX's CUDA backend."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.nvcc import NVCC, needs_nvcc, toolkit_headers

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "csrc/cuda/kernels").glob("*.cu"))
# Kernels of metal/ for CUDA, and kernels of CUDA alone; the others for `make test-long`.
QUICK = {"bounds", "linear_quantized_wgmma"}


def sources_of(file: Path, variable: str) -> list[str]:
    """Sources that CMake compiles under the name `variable`."""
    [listed] = re.findall(rf"set\({variable}\s([^)]*)\)", file.read_text())
    return [word for word in listed.split() if word.endswith(".cpp")]


# The sources of `core_cuda`.
HOST = [
    *sources_of(ROOT / "CMakeLists.txt", "CORE_SOURCES"),
    *sources_of(ROOT / "csrc/cuda/cuda.cmake", "CUDA_SOURCES"),
]


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return "" if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr}"


@needs_nvcc
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(k, id=k.stem, marks=() if k.stem in QUICK else pytest.mark.long)
        for k in KERNELS
    ],
)
def test_the_kernels_compile(tmp_path, source: Path) -> None:
    ptx = tmp_path / f"{source.stem}.ptx"
    errors = run([
        # (-O0 alone is for the host's code.)
        NVCC, "-std=c++17", "-arch=sm_90", "-O0", "-Xcicc", "-O0", "--expt-relaxed-constexpr",
        "-DPAGED_DTYPE_bfloat16", "-DPAGED_CODE_BITS=3",
        f"-I{ROOT / 'csrc/cuda/msl'}", f"-I{ROOT / 'metal'}",
        "-ptx", str(source), "-o", str(ptx),
    ])  # fmt: skip
    assert not errors, errors
    assert ".visible .entry" in ptx.read_text()


@pytest.mark.one_in(4)
@needs_nvcc
@pytest.mark.parametrize(
    ("source", "definition"),
    [
        (
            '#include "linear_stream.h"\n'
            "using namespace mlx_paged::cuda;\n"
            "auto kernel = linear_stream_entry<__nv_bfloat16, kWgmmaTiles, true>;\n",
            "PAGED_DTYPE_bfloat16",
        ),
        ('#include "linear_quantized_wgmma.cu"\n', "PAGED_CODE_BITS=4"),
        ('#include "prefill_wgmma.cu"\n', "PAGED_DTYPE_bfloat16"),
        ('#include "prefill_wgmma.cu"\n', "PAGED_DTYPE_float16"),
    ],
    ids=["products", "quantized-products", "prefill-bfloat16", "prefill-float16"],
)
def test_products_of_four_warps_are_not_serialised(tmp_path, source: str, definition: str) -> None:
    """The assembler says so where it has each of them end before the next one begins, and where
    warps keep the registers that they are told to leave."""
    program = tmp_path / "product.cu"
    program.write_text(source)
    done = subprocess.run(
        [
            *(NVCC, "-std=c++17", "-arch=sm_90a", "-O3", "--expt-relaxed-constexpr", "-cubin"),
            *(f"-D{definition}", "-Xptxas", "-v"),
            *(f"-I{ROOT / 'csrc/cuda/kernels'}", f"-I{ROOT / 'csrc/cuda/msl'}"),
            *(f"-I{ROOT / 'metal'}", str(program), "-o", str(tmp_path / "product.cubin")),
        ],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "serialized" not in said and "setmaxnreg" not in said, said
    if "prefill" in source:
        spills = re.findall(r"(\d+) bytes spill", said)
        assert spills and set(spills) == {"0"}, said


@needs_nvcc
def test_the_host_side_compiles(tmp_path) -> None:
    """All of it in one unit, as CMake compiles many of these files together: two of them must not
    define one name."""
    mlx = Path(importlib.util.find_spec("mlx.core").origin).parent / "include"
    if not (mlx / "mlx/backend/cuda/device.h").is_file():
        pytest.skip("this MLX has no headers of its CUDA backend")
    unit = tmp_path / "core_cuda.cpp"
    unit.write_text("".join(f'#include "{ROOT / source}"\n' for source in HOST))
    errors = run([
        *(shutil.which("c++") or "g++", "-std=c++20", "-DMLX_PAGED_CUDA"),
        *(f"-I{mlx}", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/cuda/fmt'}"),
        *("-isystem", toolkit_headers(), "-fsyntax-only", str(unit)),
    ])  # fmt: skip
    assert not errors, errors
