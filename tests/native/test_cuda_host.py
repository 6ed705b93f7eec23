"""CUDA kernels of quantised products on the CPU: what their threads do, lane by lane, compiled by
the C++ compiler (`cuda_host/fibers.h`). It needs the headers of CUDA's 16-bit floats.

``MLX_PAGED_TEST_PRODUCTS=all`` has every number of bits: by default one that divides a byte, one
that does not, and whole bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.nvcc import needs_nvcc, toolkit_headers

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "csrc/cuda"
HOST = Path(__file__).parent / "cuda_host"
# Those that the others include; what is in `cuda_host/kernels` takes the place of the rest.
KERNELS = (
    *("linear_quantised.h", "linear_quantised_stream.h", "quantised_weights.h"),
    *("linear_finish.h", "linear_math.h"),
)


BITS = [2, 3, 4, 5, 6, 8] if os.environ.get("MLX_PAGED_TEST_PRODUCTS") == "all" else [3, 4, 8]


def compiled(folder: Path, bits: int, changes: dict[str, tuple[str, str]] | None = None) -> Path:
    """The program of `cuda_host/quantised.cpp`. With something changed in some files it is of one
    kind of weights only, which passes as a part of the others.

    (To compile its templates takes most of the time; -Og takes the least to compile and run them.)
    """
    shutil.copytree(HOST, folder, dirs_exist_ok=True)
    for header in ("linear_shape.h", "quantised_shape.h"):
        shutil.copy(CUDA / header, folder)
    for header in KERNELS:
        shutil.copy(CUDA / "kernels" / header, folder / "kernels")
    for name, (before, after) in (changes or {}).items():
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after))
    headers = toolkit_headers()
    program = folder / "quantised"
    subprocess.run(
        [
            *(shutil.which("c++") or "g++", "-std=c++20", "-Og", "-w", "-pthread"),
            *(f"-DCODE_BITS={bits}", *(["-DONE_KIND"] if changes is not None else [])),
            *("-isystem", headers, "-isystem", f"{headers}/cccl"),
            *(str(folder / "quantised.cpp"), "-o", str(program)),
        ],
        check=True,
        timeout=600,
    )
    return program


@needs_nvcc
@pytest.mark.parametrize("bits", BITS)
def test_quantised_products(tmp_path, bits: int) -> None:
    done = subprocess.run(
        [compiled(tmp_path, bits)], capture_output=True, text=True, check=False, timeout=600
    )
    compared = re.search(r"(\d+) compared, 0 failed", done.stdout)
    assert compared and int(compared[1]) > 10_000, done.stdout + done.stderr


ROWS, STREAM = "kernels/linear_quantised.h", "kernels/linear_quantised_stream.h"


@needs_nvcc
@pytest.mark.parametrize(
    ("bits", "changes"),
    [
        # A copy that is still under way when it is read, and one that comes while it is.
        (3, {ROWS: ("wait_for_copies<kStages - 2>", "wait_for_copies<kStages - 1>")}),
        (3, {ROWS: ("copy_weights(turn + kStages - 1)", "copy_weights(turn + kStages)")}),
        (3, {STREAM: ("ring.wait_until_full(turn)", "turn % kShape.stages")}),
        (4, {STREAM: ("ring.begin(kMultipliers)", "ring.begin(1)")}),
        (4, {"quantised_shape.h": ("slots = (stages - 1 + span - 1) / span + 1", "slots = 1")}),
        (4, {
            "kernels/linear_finish.h": ("bool is_up", "bool is_up_"),
            ROWS: ("at.is_up ? 1", "at.is_up_ ? 0"),
            STREAM: ("high.is_up ?", "high.is_up_ && false ?"),
        }),
    ],
    ids=[
        "too little is waited for", "too early", "nothing is waited for", "one warp releases",
        "too few scales", "gate twice",
    ],
)  # fmt: skip
def test_faults_are_seen(tmp_path, bits: int, changes: dict[str, tuple[str, str]]) -> None:
    done = subprocess.run(
        [compiled(tmp_path, bits, changes)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode != 0, done.stdout
