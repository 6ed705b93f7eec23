"""The kernels as standard C++: held to strict C++14, and compiled for a GPU whose registers LLVM
allocates, to tell how many a thread needs.

The second is an estimate for Apple's GPUs, whose compiler cannot be run here. Like theirs, a
SIMD-group of AMD's gfx1030 has 32 lanes, registers are 32 bits wide and two values of 16 bits share
one, and what all threads of a launch have in common (params, addresses of buffers) is in registers
of its own. What has no counterpart (a product of 8 x 8 matrices, a shuffle) is a made-up
instruction of the same operands. The allocator gets a limit; what does not fit is spilled to
memory, and it is counted where that happens.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import toolchain

HERE = Path(__file__).parent
HEADERS = HERE / "cxx"
LANGUAGE = ["-x", "c++", f"-isystem{HEADERS}", "-Wno-unknown-attributes"]
STANDARD = [*LANGUAGE, "-std=c++14"]
METAL_4 = [*LANGUAGE, "-std=c++17", "-D__METAL_VERSION__=400", "-D__HAVE_TENSOR__"]
FILES = (
    "data.h", "draw.h", "experts.h", "greedy.h", "layer.h", "lora.h", "paged_decode.h",
    "paged_decode_matrix.h", "paged_prefill.h", "paged_merge.h", "products.h", "quantized_pool.h",
    "thresholds.h",
)  # fmt: skip
TENSOR_FILES = ("tensor_prefill.h", "tensor_product.h")
STRICT = ["-Wall", "-Wextra", "-pedantic-errors", "-Werror", "-Werror=c++17-extensions"]
GPU = ["--target=amdgcn-amd-amdhsa", "-mcpu=gfx1030", "-nogpulib", "-O2", "-w"]
TOGETHER = 8  # kernels of one call of the compiler

Kernel = tuple[str, str, str]  # host name, file of metal/, template-id


@dataclass(frozen=True)
class Registers:
    """32-bit registers of a thread."""

    used: int  # at most the limit
    spilled: int  # that did not fit
    spilled_in_loops: int  # reads and writes of those within loops of the kernel


def strict_errors(
    kernels: Iterable[Kernel], root: Path, source: str = "", *, metal_4: bool = False
) -> str:
    """Returns clang's messages for these instantiations, as C++14 without later extensions;
    `metal_4`: for tensor units, as C++17."""
    text = _includes(TENSOR_FILES if metal_4 else FILES) + source
    for _, _, instance in kernels:
        if instance:
            text += f"template decltype({instance}) {instance};\n"
    standard = METAL_4 if metal_4 else STANDARD
    command = [*_clang(), *standard, *STRICT, f"-I{root}", "-fsyntax-only", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False).stderr


def is_counted(kernel: Kernel) -> bool:
    """True for kernels of attention and products, whose registers can be counted."""
    return _function(kernel) in _BUFFERS


def registers(
    kernels: Iterable[Kernel],
    root: Path,
    limit: int,
    *,
    bounds: bool = False,
    alibi: bool = False,
) -> dict[str, Registers]:
    """Estimates the registers of each kernel if a thread has `limit` of them.

    `bounds`: in steps that have some; `alibi`: in layers with ALiBi.
    """
    kernels = list(kernels)
    groups = [kernels[i : i + TOGETHER] for i in range(0, len(kernels), TOGETHER)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(lambda group: _registers(group, root, limit, bounds, alibi), groups)
        return {name: count for part in parts for name, count in part.items()}


_ATTENTION_BUFFERS = (
    "device const {T}* queries, device const {T}* keys, device const {T}* values, "
    "device const int* positions, device const int* tables, "
    "device const paged::WorkItem* items, device const float* sinks, device {T}* out, "
    "device float* workspace, constant paged::AttentionParams& params, "
    "threadgroup {scratch}* memory"
)
_MERGE_BUFFERS = (
    "device const paged::MergeItem* items, device const float* workspace, "
    "device const float* sinks, device {T}* out, constant paged::MergeParams& params"
)
_WEIGHT_BUFFERS = (
    "device const {T}* x, device const uchar* weight, device const uchar* scales, "
    "device const uchar* biases, device const {T}* bias, "
)
_BUFFERS = {
    "paged_decode": _ATTENTION_BUFFERS,
    "paged_decode_matrix": _ATTENTION_BUFFERS,
    "paged_prefill": _ATTENTION_BUFFERS,
    "paged_merge": _MERGE_BUFFERS,
    "tensor_prefill": _ATTENTION_BUFFERS,
    "tensor_product": _WEIGHT_BUFFERS
    + "device {T}* out, constant paged::TensorProductParams& params, threadgroup uchar* memory",
    "product_rows": _WEIGHT_BUFFERS
    + "device const {T}* residual, device {T}* out, constant paged::ProductParams& params",
    "expert_rows": _WEIGHT_BUFFERS
    + "device const int* pairs, device const int* items, device {T}* out, "
    "constant paged::ExpertParams& params",
}
_SIMD_GROUPS = {
    "tensor_prefill": "4",
    "tensor_product": "8",
    "product_rows": "paged::PRODUCT_SIMD_GROUPS",
    "expert_rows": "paged::PRODUCT_SIMD_GROUPS",
    "paged_decode": "paged::DECODE_SIMD_GROUPS",
    "paged_decode_matrix": "paged::matrix_simd_groups({key_dim})",
    "paged_prefill": "paged::PREFILL_SIMD_GROUPS",
    "paged_merge": "paged::MERGE_SIMD_GROUPS",
}


def _function(kernel: Kernel) -> str:
    return kernel[2].partition("<")[0]


def _includes(files: Iterable[str] = FILES) -> str:
    return "#include <metal_stdlib>\n" + "".join(f'#include "{name}"\n' for name in files)


def _entry(kernel: Kernel, limit: int) -> str:
    """A kernel of that GPU. Places in the grid are values that only a thread itself knows."""
    name, _, instance = kernel
    function = _function(kernel)
    first, key_dim = re.match(r"\w+<(\w+), ([\w:]+)", instance).groups()  # type: ignore[union-attr]
    scratch = "float" if function == "paged_decode" else "uchar"
    buffers = _BUFFERS[function].format(T=first, scratch=scratch)
    given = [part.split()[-1] for part in buffers.replace("&", "").replace("*", " ").split(",")]
    groups = _SIMD_GROUPS[function].format(key_dim=key_dim)
    given.append("uint3{place(), place(), place()}")
    if function in ("paged_decode", "paged_prefill", "tensor_prefill", "tensor_product"):
        given.append(f"below(32 * {groups})")
    if function != "tensor_product":
        given += [f"below({groups})", "below(32)"]
    attributes = f"amdgpu_kernel, amdgpu_flat_work_group_size(128, 256), amdgpu_num_vgpr({limit})"
    return (
        f'extern "C" __attribute__(({attributes})) void {name}({buffers}) '
        f"{{ {instance}({', '.join(given)}); }}\n"
    )


def _registers(
    kernels: list[Kernel], root: Path, limit: int, bounds: bool, alibi: bool
) -> dict[str, Registers]:
    metal_4 = any(file in TENSOR_FILES for _, file, _ in kernels)
    text = _includes(TENSOR_FILES if metal_4 else FILES)
    text += "".join(_entry(kernel, limit) for kernel in kernels)
    values = (("BOUNDS", bounds), ("ALIBI", alibi))
    given = [f"-DPAGED_{name}={str(value).lower()}" for name, value in values]
    standard = METAL_4 if metal_4 else STANDARD
    command = [*_clang(), *GPU, *standard, *given, f"-I{root}", "-S", "-o", "-", "-"]
    digest = hashlib.sha256(repr(command).encode() + text.encode())
    headers = [path for path in HEADERS.iterdir() if path.is_file()]
    for path in sorted([*headers, *root.glob("*.h"), Path(__file__)]):
        digest.update(path.read_bytes())
    kept = toolchain.CACHE / f"registers-{digest.hexdigest()[:32]}.json"
    if not kept.exists():
        toolchain.make_cache()
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(_counts(toolchain.run(command, text))))
        os.replace(partial, kept)
    return {name: Registers(*counts) for name, counts in json.loads(kept.read_text()).items()}


def _counts(assembly: str) -> dict[str, tuple[int, int, int]]:
    """From the compiler's comments: which blocks are in loops, which accesses are of spills."""
    in_loops: dict[str, int] = {}
    name, in_loop = "", False
    for line in assembly.split("\n"):
        begin = re.match(r"(\w+):\s+; @\1$", line)
        if begin:
            name, in_loop = begin[1], False
            in_loops[name] = 0
        elif line.startswith((".LBB", "; %bb.")):
            in_loop = "Loop" in line
        elif line.lstrip().startswith(";") and "Loop" in line:
            in_loop = True
        elif in_loop and re.search("Folded (Spill|Reload)", line):
            in_loops[name] += 1
    found = re.findall(
        r"^    \.name: +(\w+)\n[\s\S]*?\.vgpr_count: +(\d+)\n +\.vgpr_spill_count: (\d+)",
        assembly,
        re.MULTILINE,
    )
    return {name: (int(used), int(spilled), in_loops[name]) for name, used, spilled in found}


def _clang() -> tuple[str, ...]:
    command = toolchain.clang()
    if command is None:
        raise toolchain.ToolError(toolchain.NO_CLANG)
    return command
