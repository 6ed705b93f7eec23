"""The Metal binder against MLX's own headers and library for Apple GPUs, on a machine without one.

The wheel `mlx-metal` holds both. Its headers need a few of Apple's SDK's names, which
``tests/native/metal_host/stubs`` declares; nothing is run here. What fails when MLX's API moves: a
declaration (the compiler says which), or a symbol that libmlx.dylib does not export.
"""

from __future__ import annotations

import math
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import mac_build
from support.mac_build import ROOT, STUBS, tool
from support.reference import make_batch
from support.simulated import launches, needs_simulator, sim_ext, simulated

from mlx_paged import ops

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="the real headers are used here")
SOURCES = mac_build.mac_only_sources()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return mac_build.unpacked_mlx_metal(tmp_path_factory.mktemp("wheel"))


def compile_command(wheel: Path) -> list[str]:
    includes = (STUBS, wheel / "include", wheel / "include/metal_cpp")
    return [
        tool("clang++", *(f"clang++-{version}" for version in range(14, 22))),
        *("-std=c++20", "-fblocks", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        *(f"-isystem{path}" for path in includes),
    ]


@pytest.fixture(scope="module")
def compiled(wheel, tmp_path_factory) -> Callable[[Path], Path]:
    """Compiles a source, once for all tests."""
    folder = tmp_path_factory.mktemp("compiled")

    @cache
    def compile_source(source: Path) -> tuple[Path, str]:
        target = folder / f"{source.stem}.o"
        command = [*compile_command(wheel), "-c", str(source), "-o", str(target)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        return target, "" if run.returncode == 0 else run.stderr or str(run.returncode)

    def object_of(source: Path) -> Path:
        target, error = compile_source(source)
        assert not error, error[:4000]
        return target

    return object_of


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_binder_compiles_against_mlx_metal(compiled, source) -> None:
    assert compiled(source).is_file()


def test_a_call_that_mlx_does_not_have_is_found(wheel, tmp_path) -> None:
    binder = (ROOT / "csrc/metal/binder.cpp").read_text()
    moved = binder.replace("set_input_array(location.array, index", "set_input_array(index, index")
    assert moved != binder
    broken = tmp_path / "binder.cpp"
    broken.write_text(moved)
    command = [*compile_command(wheel), "-fsyntax-only", f"-I{ROOT}/csrc/metal", str(broken)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "set_input_array" in run.stderr


def symbols(path: Path, *options: str) -> set[str]:
    """Demangled names, spelled as if the standard library and 64-bit integers had one name."""
    versions = range(14, 22)
    nm = tool("llvm-nm", *(f"/usr/lib/llvm-{version}/bin/llvm-nm" for version in versions))
    command = [nm, "--demangle", *options, str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {match[1] for match in re.finditer(r"^[0-9a-f ]*\b[A-Za-z] (.*)$", text, re.M)}
    return {re.sub(r"__cxx11::|__1::", "", n).replace("long long", "long") for n in names}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_libmlx_exports_what_the_binder_links_to(wheel, compiled, source) -> None:
    theirs = re.compile(r"mlx::core::|MTL::|NS::")
    names = symbols(compiled(source), "--undefined-only")
    needed = {name for name in names if theirs.match(name)}
    assert needed
    missing = needed - symbols(wheel / "lib/libmlx.dylib", "--extern-only", "--defined-only")
    assert not missing


# --- The binder, run ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(wheel, compiled, tmp_path_factory) -> Path:
    """The binder linked to a recorder in place of MLX's encoder, and to this machine's libmlx."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "metal").symlink_to(ROOT / "metal")
    names = ("launch", "launch_attention", "host_copies", "pool", "rejected_kernels")
    names += ("kernel_names", "kernel_source", "dtype", "validate")
    # This one needs the compiler of steps.
    sources = [compiled(source) for source in SOURCES if source.stem != "eval_step"]
    # One unit, as in CMake's build: MLX's headers take most of the time of each.
    unit = folder / "core.cpp"
    unit.write_text("".join(f'#include "{ROOT / "csrc" / name}.cpp"\n' for name in names))
    sources += [
        unit,
        *(ROOT / f"tests/native/metal_host/{name}.cpp" for name in ("recorder", "record")),
    ]
    library = Path(mx.__file__).parent / "lib"
    command = [*compile_command(wheel), *map(str, sources), "-o", str(folder / "record")]
    command += [f"-L{library}", "-lmlx", f"-Wl,-rpath,{library}", "-ldl"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[:4000]
    return folder / "record"


WORKSPACE = 9  # of attention with sinks: the operand after its inputs and its output


def line_of(launch: dict[str, Any]) -> str:
    """As record.cpp prints it: of a workspace, all of what is allocated for it."""

    def size_of(operand: int, size: int) -> int:
        is_workspace = launch["kernel"].startswith("paged_") and operand == WORKSPACE
        return 4 * math.prod(sim_ext.workspace_shape(size)) if is_workspace else size

    extents = [",".join(map(str, launch[name])) for name in ("grid", "threadgroup")]
    constants = [len(launch["buffers"]), launch["constants"].hex()]
    buffers = [
        f"{size_of(operand, n)}{'r' if access == 'read' else 'w'}"
        for operand, access, n in launch["buffers"]
    ]
    memory = launch["threadgroup_memory"]
    values = "".join(str(int(value)) for value in launch["function_constants"])
    names = [launch["kernel"], f"[{values}]", *["beside"] * launch["beside_previous"]]
    return " ".join(map(str, [*names, *extents, memory, *constants, *buffers]))


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the recorder's entry is x86-64 assembly"
)
@needs_simulator
def test_mlx_is_told_what_the_simulator_is_told(record, rng) -> None:
    batch = make_batch(
        rng, [50, 30, 33], [1, 5, 14], num_q_heads=6, key_dim=64, dtype=mx.float16, window=30
    )
    plan = batch.plan(split_tokens=32)
    keys, values = mx.zeros((2, 9, 16, 2, 64), mx.float16)
    rows = mx.zeros((7, 2, 64), mx.float16)
    attention = replace(plan, block_tables=mx.zeros((3, 4), mx.int32))
    with simulated():
        slots = mx.arange(7, dtype=mx.int32)
        mx.eval(ops.write_kv(keys, values, rows, rows, slots))
        mx.eval(ops.copy_blocks([keys, values], mx.array([[1, 2], [1, 3], [1, 4]])))
        mx.eval(ops.gather_kv(keys, values, mx.zeros((2, 4), mx.int32), mx.array([9, 3]), 50))
        masks, logits = mx.zeros((2, 2), mx.int32), mx.zeros((3, 50), mx.float16)
        mx.eval(logits)
        where = mx.arange(2, dtype=mx.int32)
        mx.eval(ops.apply_token_bitmask(logits, masks, where))
        mx.eval(ops.apply_token_bitmask(mx.zeros((3, 50)), masks, where))
        sinks = mx.zeros(6)
        out = ops.paged_attention(
            *(batch.queries, keys, values, attention), scale=0.125, window=30, sinks=sinks
        )
        mx.eval(out)
        simulator_told = [line_of(launch) + " source" for launch in launches()]
    plans = [",".join(map(str, a.flatten().tolist())) for a in (plan.work_items, plan.merge_items)]
    run = subprocess.run([str(record), *plans], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == simulator_told
    beside = [line.split("_float16")[0] for line in simulator_told if " beside " in line]
    assert beside == ["paged_decode_matrix", "paged_prefill"]
    kernels = [line.split("_float16")[0].split()[0] for line in simulator_told]
    assert {"write_kv", "copy_blocks", "gather_kv", "paged_decode"} <= set(kernels)
    assert "apply_token_bitmask_16" in kernels and "apply_token_bitmask_32" in kernels
    assert {"paged_decode_matrix", "paged_prefill", "paged_merge"} <= set(kernels)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the recorder's entry is x86-64 assembly"
)
def test_addresses_of_a_step_are_places_in_arrays(record) -> None:
    run = subprocess.run([str(record)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    buffers = [line.split(" source")[0].split()[7:] for line in run.stdout.splitlines()]
    memory = 4096 + 4096 // 8  # (or more: what grows is not made anew each time)
    places = [[tuple(map(int, re.findall(r"\d+", b))) for b in line] for line in buffers]
    (first, part), (again, second, whole) = places
    assert first == (400, 40) and second == (60,) and whole == (400,)
    assert part == again and part[1] == 256 and 4096 <= part[0] <= 4 * memory
    assert [b[-1] for line in buffers for b in line if "+" not in b] == ["r", "w"]
