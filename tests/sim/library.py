"""SimLibrary: Metal source, compiled when a kernel is first launched, and launches of it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mlx_paged.engine.gc_pause import gc_paused

from . import abi, toolchain
from .abi import Buffer, Report, SimFault, SimLaunchError
from .coverage import Coverage
from .instrument import instrument
from .lexer import MetalError
from .translate import Translation, translate

METAL = Path(__file__).resolve().parents[2] / "metal"
Dims = tuple[int, int, int] | tuple[int, int] | tuple[int] | int


_METALS_WORDS = {
    "__global_device": "device",
    "__global_host": "constant",
    "__local": "threadgroup",
    "__private": "thread",
    "__generic ": "",
    "__generic": "thread",
    "__attribute__((opencl_global_device))": "device",
    "__attribute__((opencl_global_host))": "constant",
    "__bfloat": "bfloat",
}


class SimCompileError(Exception):
    """The source is refused, as Metal's compiler would; the text names file and line."""


class _Unit:
    """Some kernels of a library, compiled."""

    def __init__(self, path: Path, tables: dict[str, Any]) -> None:
        self.native = ctypes.CDLL(str(path))
        self.run = self.native.metal_sim_launch
        self.tables = tables

    def executed(self) -> set[tuple[str, int]]:
        blocks = self.tables["blocks"]
        seen = (ctypes.c_ubyte * max(1, len(blocks))).in_dll(self.native, "sim_blocks")
        return {(f, n) for hit, lines in zip(seen, blocks) if hit for f, n in lines}


class SimLibrary:
    """Kernels of Metal source, executed on the CPU.

    Takes either `files` (.metal files, compiled as one text) or `source`, a text as MLX's
    just-in-time compiler gets it. Includes are looked up beside the files, in `include_dirs` and in
    `root`. `tensor_layout` chooses which lane holds which element of a cooperative tensor
    (msl/tensor.h).

    Raises:
        SimCompileError: the source is not Metal (some of it shows when a kernel is compiled).
    """

    def __init__(
        self,
        files: Iterable[Path | str] = (),
        source: str | None = None,
        name: str = "source.metal",
        include_dirs: Iterable[Path | str] = (),
        defines: dict[str, str] | None = None,
        root: Path | str = METAL,
        tensor_layout: int = 0,
    ) -> None:
        self.root = Path(root).resolve()
        paths = [Path(f).resolve() for f in files]
        if (source is None) == (not paths):
            raise ValueError("give either files or source")
        if source is None:
            source = "".join(f'#line 1 "{p}"\n{p.read_text()}\n' for p in paths)
            name = str(paths[0])
        include = [
            *{p.parent: None for p in paths},
            *map(Path, include_dirs),
            self.root,
            self.root.parent,
        ]
        try:
            text = toolchain.preprocess(source, name, include, defines or {})
            with gc_paused():  # a collection walks all tokens, and takes as long as reading them
                self.translation: Translation = translate(text, tensor_layout)
        except (toolchain.ToolError, MetalError) as error:
            raise SimCompileError(self._readable(str(error))) from error
        self._units: dict[str, _Unit] = {}
        self._has_built = False

    @property
    def kernels(self) -> list[str]:
        """Host names of all kernels, compiled or not."""
        return list(self.translation.entries)

    def compile(self, names: Iterable[str] | None = None) -> None:
        """Compiles kernels together, all by default: much cheaper than one by one."""
        wanted = sorted(set(self.kernels if names is None else names) - set(self._units))
        for name in wanted:
            if name not in self.translation.entries:
                known = ", ".join(self.kernels[:20])
                raise SimLaunchError(f"no kernel has the host name {name}; there are {known}")
        if wanted:
            unit = self._unit(wanted)
            self._units.update(dict.fromkeys(wanted, unit))

    def launch(
        self,
        kernel: str,
        buffers: dict[int, Buffer | np.ndarray],
        grid: Dims,
        threads: Dims,
        constants: dict[int, Any] | None = None,
        function_constants: dict[int | str, Any] | None = None,
        threadgroup_memory: dict[int, int] | None = None,
        seed: int = 0,
        check: bool = True,
    ) -> Report:
        """Runs a kernel and returns what it did.

        Args:
            kernel: host name.
            buffers: index -> array and access. Arrays are written in place.
            grid: in threadgroups; threads: in one threadgroup.
            constants: index -> bytes, ctypes structure, numpy value, int or float (32 bits).
            function_constants: index or name -> value.
            threadgroup_memory: [[threadgroup(i)]] -> bytes.
            seed: of the order in which lanes and threadgroups run.
            check: raise SimFault for faults; otherwise they are in the report.

        Raises:
            SimFault: the kernel raced, left its buffers, diverged, ...
            SimLaunchError: nothing was run.
        """
        self.compile([kernel])
        unit = self._units[kernel]
        c_buffers = abi.buffers_of(buffers)
        c_bytes, keep = abi.bytes_of({i: abi.raw(v) for i, v in (constants or {}).items()})
        c_constants, keep2 = abi.bytes_of(self._constants(unit, function_constants or {}))
        memory = list((threadgroup_memory or {}).items())
        c_memory = (abi.CThreadgroup * max(1, len(memory)))(*memory)
        launch = abi.CLaunch(
            *(abi.ABI, kernel.encode(), c_buffers, len(buffers), c_bytes, len(constants or {})),
            *(c_constants, len(function_constants or {}), c_memory, len(memory)),
            *(_dims(grid), _dims(threads), seed),
        )
        c_report = abi.CReport()
        status = unit.run(ctypes.byref(launch), ctypes.byref(c_report))
        del keep, keep2
        labels = {i: b.label for i, b in buffers.items() if isinstance(b, Buffer)}
        report = abi.report_of(c_report, labels)
        if status == abi.NOT_LAUNCHED:
            raise SimLaunchError(f"[{kernel}] {'; '.join(report.faults)}")
        if report.faults and check:
            raise SimFault(f"[{kernel}]\n" + "\n\n".join(report.faults))
        return report

    def coverage(self) -> Coverage:
        """Lines of the kernels compiled so far that have code, and that were executed."""
        executed: set[tuple[str, int]] = set()
        lines: set[tuple[str, int]] = set()
        for unit in set(self._units.values()):
            executed |= unit.executed()
            lines |= {(f, n) for f, n in unit.tables["lines"]}
        return Coverage(lines, executed, self.translation.functions)

    def _constants(self, unit: _Unit, given: dict[int | str, Any]) -> dict[int, bytes]:
        out = {}
        sizes = {int(i): size for i, size in unit.tables["constants"].items()}
        for key, value in given.items():
            index = self.translation.constants.get(key) if isinstance(key, str) else key
            if index is None:
                raise SimLaunchError(f"there is no function constant {key}")
            size = sizes.get(index)
            if size is None:  # declared, but no kernel compiled here uses it
                out[index] = abi.raw(value)
            elif isinstance(value, int | np.integer):  # bool too
                out[index] = int(value).to_bytes(size, "little", signed=value < 0)
            else:
                out[index] = abi.raw(value)
        return out

    # --- Compilation ------------------------------------------------------------------------------

    def _unit(self, names: list[str]) -> _Unit:
        text, entries = self.translation.text, self.translation.entry_points(names)
        digest = hashlib.sha256((toolchain.sources_hash() + text + entries + repr(names)).encode())
        key = digest.hexdigest()[:32]
        library, tables = toolchain.CACHE / f"{key}.so", toolchain.CACHE / f"{key}.json"
        with toolchain.makes(tables) as is_missing:  # which is written last
            if is_missing:
                self._build(entries, names, library, tables)
        return _Unit(library, json.loads(tables.read_text()))

    def _build(self, entries: str, names: list[str], library: Path, tables: Path) -> None:
        # Precompiling pays from the second unit on. A mutant's library often has one only.
        is_first, self._has_built = not self._has_built, True
        try:
            ir = toolchain.front_end(self.translation.text, entries, precompile=not is_first)
        except toolchain.ToolError as error:
            raise SimCompileError(self._readable(str(error))) from error
        with gc_paused():
            result = instrument(ir, self.translation.files)
        if result.refused:
            raise SimCompileError(self._readable("\n".join(result.refused)))
        toolchain.link(result.text, _tables(result, names, self._shown), library)
        partial = tables.with_suffix(f".{os.getpid()}")
        partial.write_text(
            json.dumps(
                {
                    "blocks": [sorted(lines) for lines in result.blocks],
                    "lines": sorted(result.lines),
                    "constants": {
                        c[0].removeprefix("__sim_constant_"): c[1] for c in result.constants
                    },
                }
            )
        )
        os.replace(partial, tables)

    def _shown(self, file: str) -> str:
        """Path as messages show it."""
        path = Path(file)
        return (
            str(path.relative_to(self.root.parent))
            if path.is_relative_to(self.root.parent)
            else file
        )

    def _readable(self, text: str) -> str:
        """Compiler output in Metal's words."""
        for ours, metals in _METALS_WORDS.items():
            text = text.replace(ours, metals)
        lines = text.replace(f"{self.root.parent}{os.sep}", "").split("\n")
        ours = {
            i + k for i, line in enumerate(lines) if " void __sim_entry" in line for k in (0, 1)
        }
        return "\n".join(line for i, line in enumerate(lines) if i not in ours)


def _dims(given: Dims) -> Any:
    sizes = (given,) if isinstance(given, int) else tuple(given)
    return (ctypes.c_uint32 * 3)(*sizes, *(1,) * (3 - len(sizes)))


def _tables(result: Any, names: list[str], shown: Callable[[str], str]) -> str:
    """C++ tables that the simulator reads beside the compiled kernels."""

    def quoted(text: str) -> str:
        return json.dumps(text)

    sites = ",\n".join(
        f"{{{quoted(shown(s.file))}, {s.line}, {s.column}, {s.align}, "
        f"{quoted(s.function)}, {quoted(s.operation)}}}"
        for s in result.sites
    )
    entries = "".join(f'extern "C" void __sim_entry_{i}();\n' for i in range(len(names)))
    kernels = ", ".join(f"{{{quoted(n)}, __sim_entry_{i}}}" for i, n in enumerate(names))
    symbols = [(s, f"sim_symbol_{i}", size) for i, (s, size) in enumerate(result.constants)]
    constants = ", ".join(f"{{{s.rsplit('_', 1)[1]}, {v}, {n}}}" for s, v, n in symbols)
    program = [(s, f"sim_global_{i}", size) for i, (s, size) in enumerate(result.globals)]
    global_list = ", ".join(f"{{{v}, {n}}}" for _, v, n in program)
    declared = "".join(f'extern char {v}[] asm("{s}");\n' for s, v, _ in [*symbols, *program])
    starts = "".join(f'extern "C" void {n}();\n' for n in result.initialisers)
    return f"""#include "tables.h"
{entries}{declared}{starts}
extern const SimSite sim_sites[] = {{ {sites or "{}"} }};
extern const SimKernel sim_kernels[] = {{ {kernels} }};
extern const uint32_t sim_num_kernels = {len(names)};
extern const SimConstant sim_constants[] = {{ {constants or "{}"} }};
extern const uint32_t sim_num_constants = {len(symbols)};
extern const SimGlobal sim_globals[] = {{ {global_list or "{}"} }};
extern const uint32_t sim_num_globals = {len(program)};
extern void (*const sim_initialisers[])() = {{ {", ".join(result.initialisers) or "nullptr"} }};
extern const uint32_t sim_num_initialisers = {len(result.initialisers)};
"""


_LAUNCHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(abi.CLaunch), ctypes.POINTER(abi.CReport))
_launchers: list[Any] = []


def launcher(library: SimLibrary) -> int:
    """Address of an `int (*)(const MetalSimLaunch*, MetalSimReport*)` that finds kernels in
    `library` and compiles them when first needed. It stays valid for the life of the process."""

    def run(launch: Any, report: Any) -> int:
        name = launch.contents.kernel.decode()
        try:
            library.compile([name])
        except (SimLaunchError, SimCompileError) as error:
            report.contents.faults = re.sub(r"\n\n+", "\n", str(error)).encode()[:32000]
            report.contents.num_faults = 1
            return abi.NOT_LAUNCHED
        return int(library._units[name].run(launch, report))

    _launchers.append(_LAUNCHER(run))
    return int(ctypes.cast(_launchers[-1], ctypes.c_void_p).value or 0)
