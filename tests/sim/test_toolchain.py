"""The simulator can run wherever CI runs, and its C interface is the same in C++ and in Python."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys

import numpy as np
import pytest

from . import Buffer, SimLibrary, abi, launcher, missing, toolchain
from .toolchain import INTERFACE, cxx


def test_ci_has_the_compilers() -> None:
    if not os.environ.get("CI") or sys.platform != "linux":
        pytest.skip("for CI on Linux; elsewhere the simulator's tests skip themselves and say why")
    assert missing() is None


def test_ctypes_sees_the_structures_of_the_header(tmp_path) -> None:
    structures = {
        "MetalSimBuffer": abi.CBuffer,
        "MetalSimBytes": abi.CBytes,
        "MetalSimConstant": abi.CBytes,
        "MetalSimThreadgroup": abi.CThreadgroup,
        "MetalSimLaunch": abi.CLaunch,
        "MetalSimTraffic": abi.CTraffic,
        "MetalSimReport": abi.CReport,
    }
    lines = [f'#include "{INTERFACE}"', "#include <cstddef>", "#include <cstdio>", "int main() {"]
    expected = []
    for name, structure in structures.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {getattr(structure, field).offset}")
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run([str(cxx()), "-o", str(program), str(source)], check=True)
    run = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    assert run.stdout.split("\n")[:-1] == expected


def test_others_wait_for_what_one_process_makes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "CACHE", tmp_path)
    target = tmp_path / "kernels.so"
    with toolchain.makes(target) as is_missing, open(tmp_path / "kernels.so.lock") as other:
        assert is_missing
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        target.touch()
    with toolchain.makes(target) as is_missing:
        assert not is_missing


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_launcher_compiles_runs_and_reports_what_is_wrong() -> None:
    source = """#include <metal_stdlib>
    kernel void twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      x[i] = 2 * x[i];
    }"""
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(abi.CLaunch), ctypes.POINTER(abi.CReport))(
        launcher(SimLibrary(source=source))
    )
    x = np.arange(32, dtype=np.float32)
    buffers, report = abi.buffers_of({0: Buffer(x, "readwrite")}), abi.CReport()
    launch = abi.CLaunch(abi=abi.ABI, kernel=b"twice", buffers=buffers, num_buffers=1)
    launch.grid[:], launch.threads[:] = (1, 1, 1), (32, 1, 1)
    assert call(launch, report) == abi.OK and x[31] == 62 and report.traffic[0].bytes_read == 128
    launch.threads[0] = 33
    assert call(launch, report) == abi.FAULTS and b"out of bounds" in report.faults
    launch.kernel = b"thrice"
    assert call(launch, report) == abi.NOT_LAUNCHED and b"thrice" in report.faults
    launch.abi, launch.kernel = 7, b"twice"
    assert call(launch, report) == abi.NOT_LAUNCHED and b"abi must be 2" in report.faults
