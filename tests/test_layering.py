"""Import rules. Imports go down only: `core` and `model` know nothing of each other, and the
engine joins them.

cli, server, doctor
    bench, drop_in
        engine
            calibration, multimodal, offload
                core    model
                            gguf
                            platform
                                ops, executables
                                    kernels
                                        extension
                                            blas, cgroups, linker, descriptors
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mlx_paged"

# Parts of the package that each part may import, in addition to itself and `errors`.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "formatting": (),
    "content": (),
    "addresses": (),
    "environment": (),
    "blas": ("linker",),
    "linker": (),
    "cgroups": (),
    "macos": (),
    "import_hooks": (),
    "private_folder": (),
    "interrupts": (),
    "reference": (),
    "descriptors": ("import_hooks",),
    "extension": ("blas", "cgroups", "linker", "_build", "_ext"),
    "child_jobs": (),
    "plain_ops": (),
    "kernels": ("extension",),
    "executables": ("extension",),
    "layer_ops": ("extension", "kernels", "plain_ops"),
    "ops": ("extension", "kernels", "layer_ops", "plain_ops"),
    "runtime": ("extension",),
    "platform": ("ops", "executables", "extension"),
    "model": (
        *("content", "platform", "ops", "kernels", "executables", "extension", "demo", "runtime"),
        *("descriptors", "gguf", "macos"),
    ),
    "gguf": ("extension",),
    "core": (),
    "checksum": ("extension",),
    "offload": ("checksum",),
    "transfer": ("checksum", "offload", "private_folder"),
    "calibration": (
        *("child_jobs", "wheels", "extension", "kernels", "executables", "ops", "plain_ops"),
        *("platform", "model", "reference"),
    ),
    "multimodal": ("addresses", "content", "core", "environment", "model", "platform"),
    "templates": (),
    "parsing": ("templates",),
    "engine": (
        "addresses",
        "calibration",
        "cgroups",
        "checksum",
        "content",
        "core",
        "environment",
        "formatting",
        "macos",
        "multimodal",
        "offload",
        "parsing",
        "private_folder",
        "templates",
        "transfer",
        "model",
        "platform",
        "ops",
        "kernels",
        "runtime",
        "extension",
    ),
    "drop_in": (
        *("engine", "model", "core", "platform", "ops", "extension", "import_hooks", "interrupts"),
    ),
    "demo": ("wheels",),
    "hub": (),
    "wheels": (),
    "evals": ("engine", "server", "wheels"),
    "mcp": ("addresses",),
    "doctor": (
        *("_build", "blas", "cgroups", "extension", "ops", "platform", "model", "engine"),
        *("demo", "reference", "calibration", "child_jobs", "macos"),
    ),
    "extras": (),
    "bench": (
        *("__init__", "extras", "engine", "model", "platform", "ops", "extension", "demo"),
        *("gguf", "reference"),
    ),
    "cli": (
        *("__init__", "engine", "model", "platform", "ops", "extension", "blas", "demo", "server"),
        *("doctor", "import_hooks", "mcp", "bench", "extras", "parsing", "templates"),
        *("content", "multimodal", "offload", "wheels", "evals", "hub", "private_folder"),
        "formatting",
    ),
    "server": (
        "__init__",
        "content",
        "engine",
        "core",
        "model",
        "extension",
        "descriptors",
        "gguf",
        "hub",
        "mcp",
        "addresses",
        "parsing",
        "private_folder",
        "templates",
    ),
    "__main__": ("cli",),
    "__init__": ("blas", "descriptors", "extension", "model", "engine", "drop_in"),
}
# Parts that import only Python's standard library: neither mlx, mlx_lm nor numpy.
STANDARD_LIBRARY_ONLY = (
    "errors",
    "formatting",
    "blas",
    "linker",
    "cgroups",
    "child_jobs",
    "content",
    "macos",
    "descriptors",
    "import_hooks",
    "private_folder",
    "core",
    "offload",
    "transfer",
    "wheels",
)
# Exceptions: OpenBLAS's wheel returns the path of its library.
EXCEPTIONS = {("blas", "scipy_openblas32")}

# Includes allowed in each folder; headers of the same folder are named without a path.
# The last one is Apple's, of device code too.
METAL_INCLUDE = re.compile(r"metal/[\w/]+\.h|metal_\w+|\w+\.h|MetalPerformancePrimitives/\w+\.h")
PYTHON_INCLUDE = re.compile(r"Python\.h|nanobind/.*|pybind11/.*")
# Compiled once per instruction set, so a shared inline function could spread AVX-512 everywhere.
PER_INSTRUCTION_SET = ROOT / "csrc/cpu/kernels_simd.cpp"
PLAIN_INCLUDE = re.compile(r"(stddef|stdint|immintrin|arm_neon)\.h|cstddef|cstdint")


def part_of(path: Path, package: Path = PACKAGE) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def modules(package: Path = PACKAGE) -> list[Path]:
    return sorted(
        p for p in package.rglob("*.py") if "__pycache__" not in p.parts and p.name != "_build.py"
    )


def imports(path: Path, package: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a module, at any depth."""
    here = ["mlx_paged", *path.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from mlx_paged import x` names a part of the package, or a name in its __init__.
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, n) for n in (names if base == "mlx_paged" else [base]))


def broken_rules(path: Path, package: Path = PACKAGE) -> list[str]:
    part = part_of(path, package)
    broken = []
    for line, name in imports(path, package):
        top, *rest = name.split(".")
        if top == "mlx_paged":
            is_part = bool(rest) and rest[0] in {*MAY_IMPORT, "_build", "_ext"}
            target = rest[0] if is_part else "__init__"  # a name of the package itself
            if target not in (part, "errors", *MAY_IMPORT.get(part, ())):
                broken.append(f"{path.name}:{line}: {part} must not import {name}")
        elif (
            part in STANDARD_LIBRARY_ONLY
            and top not in sys.stdlib_module_names
            and (part, top) not in EXCEPTIONS
        ):
            broken.append(f"{path.name}:{line}: {part} must not import {name}")
    return broken


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def sources(folder: str) -> list[Path]:
    suffixes = {".h", ".cpp", ".cu", ".cuh", ".mm", ".metal"}
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes)


# --- Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", sorted({part_of(path) for path in modules()}))
def test_imports_go_down_only(part) -> None:
    assert part in MAY_IMPORT, f"say in MAY_IMPORT what {part} may import"
    found = [broken for path in modules() if part_of(path) == part for broken in broken_rules(path)]
    assert not found, "\n".join(found)


def test_the_table_has_no_cycles_and_keeps_the_halves_apart() -> None:
    def below(part: str) -> set[str]:
        direct = set(MAY_IMPORT.get(part, ()))
        return direct.union(*(below(p) for p in direct))  # a cycle causes endless recursion

    for part in MAY_IMPORT:
        assert part not in below(part)
    state, device = {"core"}, {"model", "ops", "kernels", "executables", "extension"}
    for part in state:
        assert not below(part) & device
    for part in device:
        assert not below(part) & state


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("core/pool.py", "import mlx.core as mx"),
        ("core/pool.py", "import numpy"),
        ("core/pool.py", "from mlx_lm import load"),
        ("core/pool.py", "from mlx_paged.engine import Engine"),
        ("core/pool.py", "from ..engine import Engine"),
        ("core/pool.py", "from .. import engine"),
        ("core/pool.py", "def later():\n    from mlx_paged import ops"),
        ("core/scheduler.py", "from mlx_paged.engine.engine import Engine"),
        ("core/scheduler.py", "import mlx_paged.model.plan"),
        ("model/plan.py", "from mlx_paged.core import BlockPool"),
        ("model/loader.py", "from mlx_paged import LLM"),
        ("model/loader.py", "def later():\n    from mlx_paged.multimodal.loading import load"),
        ("multimodal/loader.py", "from mlx_paged.engine.media import MediaPrompts"),
        ("server/chat.py", "from mlx_paged.multimodal.decode import image_types"),
        ("ops.py", "from mlx_paged.model import plan"),
        ("blas.py", "import mlx_paged.extension"),
        ("engine/engine.py", "import mlx_paged.cli"),
        ("engine/engine.py", "from mlx_paged.doctor import fits"),
        ("doctor/fits.py", "from mlx_paged.server import app"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, where, line) -> None:
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    assert len(broken_rules(path, tmp_path)) == 1


ROUTER = "mlx_paged.cli.serve.run_several, mlx_paged.server.router.service, mlx_paged.server.run"


@pytest.mark.parametrize(
    ("part", "others"),
    [
        ("mlx_paged.core", {"mlx.core", "mlx_lm", "numpy", "mlx_paged._ext"}),
        # They take 200 MB where torch is installed, which transformers imports, and 2 s.
        (ROUTER, {"mlx_lm", "transformers", "mlx_paged.model.paged_model"}),
    ],
    ids=["state", "router"],
)
def test_a_part_runs_without_others(part: str, others: set[str]) -> None:
    code = f"import sys, {part}\nprint(*sorted({others} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


# --- Asking the device ----------------------------------------------------------------------------

ASKS_THE_DEVICE = re.compile(r"has_cuda\(\)|repeats_steps\(\)|default_device\(\) [!=]=")


def test_the_device_is_asked_in_three_files() -> None:
    """All other code receives a `Platform`, or asks these files."""
    found = {path.name for path in modules() if ASKS_THE_DEVICE.search(path.read_text())}
    assert found == {"kernels.py", "ops.py", "platform.py"}


def test_a_decode_step_asks_no_device(monkeypatch) -> None:
    """Every answer is in the platform, which is queried when the engine is made."""
    from support.models import embedded_twin

    from mlx_paged import LLM, SamplingParams, executables, ops

    engine = LLM(embedded_twin(), num_gpu_blocks_override=64, block_size=8).engine
    for i, temperature in enumerate((0.0, 0.7)):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True)
        engine.add_request(str(i), list(range(3 + i, 40)), params)
    for _ in range(4):
        engine.step()
    asked: list[str] = []

    def watch(module: ModuleType, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda: asked.append(name) or function())

    watch(ops, "has_cuda")
    watch(ops, "activations")
    watch(executables, "max_cpu_step_rows")
    watch(executables, "max_gpu_step_rows")
    for _ in range(8):
        engine.step()
    assert not asked
    ops.has_cuda()
    assert asked == ["has_cuda"], "the watch works"


# --- Media ----------------------------------------------------------------------------------------

#: The modules through which everything else reaches `mlx_paged.multimodal`.
MEDIA_HOOKS = {"engine/loading.py", "engine/media.py", "engine/build.py"}
#: Options, which are read without mlx, and a benchmark of mlx-vlm itself.
MEDIA_TOOLS = {"engine/config.py", "cli/bench/media.py"}
#: Modules of it that serving text imports: options, tests of configs, and plain values.
MEDIA_OF_TEXT = {"", ".options", ".packages", ".prepared"}

SERVES_TEXT = """
import sys

from starlette.testclient import TestClient

from mlx_paged import LLM, SamplingParams
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.server.app import create_app
from mlx_paged.server.config import ServerConfig

text, params = "Write a function.", SamplingParams(max_tokens=2)
llm = LLM(num_gpu_blocks_override=64)
llm.generate([text, {"prompt": text}], params)
llm.chat([{"role": "user", "content": text}], params)
app = create_app(AsyncEngine.from_model(num_gpu_blocks_override=64), ServerConfig())
with TestClient(app) as client:
    client.portal.call(app.state.context.models.default.started_or_failed)
    for content in (text, [{"type": "text", "text": text}]):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
print(*(name for name in sys.modules if name.startswith("mlx_paged.multimodal")))
print(*({"av", "soundfile", "mlx_vlm"} & set(sys.modules)))  # (transformers imports Pillow)
"""
#: Packages that only media need.
MEDIA_PACKAGES = {"PIL", "av", "soundfile", "httpcore2", "mlx_vlm"}


def test_media_are_reached_through_three_modules() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if part_of(path) != "multimodal"
        and any(f"{name}.".startswith("mlx_paged.multimodal.") for _, name in imports(path))
    }
    assert found == MEDIA_HOOKS | MEDIA_TOOLS


def test_packages_for_media_are_imported_with_the_first_item() -> None:
    """No module imports them when it is imported itself."""
    found = []
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            tops = {name.partition(".")[0] for name in names} & MEDIA_PACKAGES
            if path.name == "mcp.py":  # An extra of its own has it.
                tops -= {"httpcore2"}
            found += [f"{path.name}: {top}" for top in tops]
    assert found == []


def test_serving_text_imports_nothing_that_handles_media() -> None:
    command = [sys.executable, "-c", SERVES_TEXT]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    ours, others = run.stdout.split("\n")[-3:-1]
    assert set(ours.split()) == {f"mlx_paged.multimodal{name}" for name in MEDIA_OF_TEXT}
    assert not others.split()


# --- Module dependencies --------------------------------------------------------------------------


def module_imports(path: Path) -> set[Path]:
    """Modules of the package that a module's import loads."""

    def file_of(name: str) -> Path | None:
        base = PACKAGE.joinpath(*name.split(".")[1:])
        files = (base.with_suffix(".py"), base / "__init__.py")
        return next((file for file in files if file.is_file()), None)

    names: list[str] = []
    for node in ast.parse(path.read_text()).body:  # neither in functions nor for types only
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # A module of the package, or a name defined in one.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if file_of(name) else node.module for name in inside]
    found = {file_of(name) for name in names if name.split(".")[0] == "mlx_paged"}
    return {file for file in found if file not in (None, path)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {path: module_imports(path) for path in modules()}
    done: set[Path] = set()

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        assert path not in way, " -> ".join(p.name for p in (*way, path))
        if path not in done:
            for other in sorted(graph.get(path, ())):
                visit(other, (*way, path))
            done.add(path)

    for path in graph:
        visit(path, ())


# --- C++ and Metal --------------------------------------------------------------------------------


def test_metal_sources_know_no_host_framework() -> None:
    found = {str(p): i for p in sources("metal") for i in includes(p)
             if not METAL_INCLUDE.fullmatch(i)}  # fmt: skip
    assert not found


def test_only_the_bindings_know_python() -> None:
    """Operations are validated and their nodes made there; nodes and kernels do not know Python."""
    found = [p.name for p in sources("csrc") if any(map(PYTHON_INCLUDE.fullmatch, includes(p)))]
    assert found == ["bindings.h", "thread_end.cpp"]
    users = {
        p.name
        for p in sources("csrc")
        if any(n.rpartition("/")[2] == "bindings.h" for n in includes(p))
    }
    assert users == {
        "allocation.cpp",
        "bindings.cpp",
        "distributed.cpp",
        "graph_template_binding.cpp",
        "layer_ops.cpp",
        "module.cpp",
        "ops.cpp",
        "step.cpp",
    }


def test_code_built_for_each_instruction_set_shares_no_inline_function() -> None:
    pending, seen = [PER_INSTRUCTION_SET], set()
    while pending:
        path = pending.pop()
        seen.add(path)
        for name in includes(path):
            if (path.parent / name).is_file():
                pending += {path.parent / name} - seen
            else:
                assert PLAIN_INCLUDE.fullmatch(name), f"{path.name} includes {name}"
    assert len(seen) > 2
