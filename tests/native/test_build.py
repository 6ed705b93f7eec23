"""Tests the contents of an installation, and the error of a mismatched one."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import _build, extension

MLX_VERSION, NANOBIND_VERSION = _build.MLX_VERSION, _build.NANOBIND_VERSION


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "MLX_PAGED_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


# --- build_info -----------------------------------------------------------------------------------


def test_build_info_names_everything_that_a_bug_report_needs() -> None:
    info = extension.build_info()
    assert set(info) == {
        "version",
        "mlx_version",
        "mlx_lm_version",
        "nanobind_version",
        "compiler",
        "backends",
        "simd",
        "amx",
        "num_threads",
        "blas",
    }
    assert all(isinstance(value, str) and value for value in info.values())
    assert info["version"] == mlx_paged.__version__ == metadata.version("mlx-paged")
    assert info["mlx_version"] == mx.__version__ == MLX_VERSION
    assert info["mlx_lm_version"] == metadata.version("mlx-lm")
    assert info["nanobind_version"] == NANOBIND_VERSION
    assert "cpu" in info["backends"].split()
    x86 = ("amx", "amx_emulated", "avx512bf16", "avx512vnni", "avx512", "avx2", "baseline")
    assert info["simd"] in (*x86, "neon")
    assert re.match(r"(gcc|clang) \d+\.\d+", info["compiler"])
    assert int(info["num_threads"]) >= 1


def test_the_package_offers_build_info() -> None:
    assert mlx_paged.build_info is extension.build_info


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", "3"), ("1", "1"), ("0", "1"), ("-5", "1"), ("100000", "256")],
)
def test_num_threads_can_be_set(value, expected) -> None:
    code = "from mlx_paged.extension import build_info; print(build_info()['num_threads'])"
    assert python(code, MLX_PAGED_NUM_THREADS=value).stdout.strip() == expected


QUOTA = """
import os
from mlx_paged import cgroups
cgroups.current = lambda: cgroups.Limits(cpus={cpus})
from mlx_paged.extension import build_info
import mlx.core as mx
x = mx.random.normal((512, 512))
mx.eval(x)
before = len(os.listdir("/proc/self/task"))
mx.eval(x @ x)  # starts the threads of products
print(build_info()["num_threads"], len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("cpus", "variable", "expected"),
    [(0.5, {}, 1), (1.0, {}, 1), (None, {}, None), (0.5, {"MLX_PAGED_NUM_THREADS": "3"}, 3)],
)
def test_threads_keep_to_the_quota_of_cpu_time(cpus, variable, expected) -> None:
    expected = expected or len(os.sched_getaffinity(0))
    run = python(QUOTA.format(cpus=cpus), **variable)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(expected), str(expected - 1)]


def test_an_instruction_set_that_is_not_there_is_refused_by_name() -> None:
    run = python("from mlx_paged.extension import build_info; build_info()", MLX_PAGED_SIMD="mmx")
    assert run.returncode != 0
    refusal = r"ValueError: MLX_PAGED_SIMD must be one of (\w+, )*\w+ on this processor but got mmx"
    assert re.search(refusal, run.stderr)


# --- Installed files ------------------------------------------------------------------------------


def test_stubs_declare_everything_of_the_extension() -> None:
    stub = Path(mlx_paged.__file__).with_name("_ext.pyi")
    tree = ast.parse(stub.read_text())
    declared = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert declared == {name for name in dir(extension.ext) if not name.startswith("_")}


def test_the_extension_holds_nothing_of_the_simulator() -> None:
    assert not [name for name in dir(extension.ext) if "sim" in name.replace("simd", "")]
    assert b"imulat" not in Path(extension.ext.__file__).read_bytes()


def test_ci_has_the_simulated_extension() -> None:
    if not os.environ.get("CI"):
        pytest.skip("for CI; elsewhere tests that need mlx_paged._sim are skipped and say so")
    assert importlib.util.find_spec("mlx_paged._sim")


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(mlx_paged.__file__).parent / "py.typed").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
def test_the_blas_forwarder_is_found() -> None:
    from mlx_paged.blas import _forwarder

    forwarder = _forwarder()
    assert forwarder is not None and forwarder.is_file()


def test_importing_the_package_alone_does_not_import_mlx() -> None:
    run = python("import sys, mlx_paged; print('mlx.core' in sys.modules)")
    assert run.stdout.strip() == "False", run.stderr


def test_unknown_names_of_the_package_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'mlx_paged' has no attribute 'nonsense'"):
        mlx_paged.nonsense  # noqa: B018
    assert {"LLM", "build_info", "load"} <= set(dir(mlx_paged))


# --- Mismatches -----------------------------------------------------------------------------------

PRELUDE = "import sys, types, mlx_paged, mlx.core as mx\n"


def import_error(code: str) -> str:
    run = python(code + "\nimport mlx_paged.ops")
    assert run.returncode == 1, run.stdout
    last = run.stderr.strip().splitlines()[-1]
    assert re.match(r"(mlx_paged\.errors\.InstallationError|ImportError): ", last), last
    return last


def test_another_mlx_than_built_with_names_both_versions_and_the_remedy() -> None:
    error = import_error(PRELUDE + "mx.__version__ = '9.8.7'")
    assert f"built with MLX {MLX_VERSION}" in error
    assert "found MLX 9.8.7" in error
    assert f"pip install 'mlx=={MLX_VERSION}'" in error
    assert "pip install --force-reinstall --no-deps ." in error


def test_a_build_of_another_mlx_never_loads_its_extension() -> None:
    run = python(
        PRELUDE
        + "build = types.ModuleType('mlx_paged._build')\n"
        + "build.MLX_VERSION, build.NANOBIND_VERSION = '9.8.7', '3.1.0'\n"
        + "sys.modules['mlx_paged._build'] = build\n"
        + "try:\n    import mlx_paged.ops\n"
        + "except ImportError as error:\n    print(error)\n"
        + "print('mlx_paged._ext' in sys.modules)"
    )
    message, loaded = run.stdout.strip().splitlines()
    assert f"built with MLX 9.8.7 but found MLX {MLX_VERSION}" in message
    assert loaded == "False", "an extension of another ABI may crash while it loads"


def test_another_nanobind_than_mlx_has_names_it_and_the_remedy() -> None:
    error = import_error(
        PRELUDE
        + "from mlx_paged import _ext\n"
        + "def accepts(array):\n    raise TypeError('incompatible function arguments')\n"
        + "_ext.accepts = accepts"
    )
    assert f"built with nanobind {NANOBIND_VERSION}" in error
    assert f"MLX {MLX_VERSION} does not share" in error
    assert "pip install --force-reinstall --no-deps ." in error


@pytest.mark.parametrize("has_cuda", [True, False])
def test_the_extension_for_cuda_is_loaded_with_an_mlx_for_cuda(has_cuda: bool) -> None:
    """One build has both; that with CUDA calls what only such an MLX has."""
    run = python(
        PRELUDE
        + "from importlib.machinery import ModuleSpec\n"
        + "from mlx_paged import _ext\n"
        + "other = types.ModuleType('mlx_paged._ext_cuda')\n"
        + "other.__dict__.update({k: v for k, v in vars(_ext).items() if k[:2] != '__'})\n"
        + "other.__spec__ = ModuleSpec('mlx_paged._ext_cuda', None)\n"
        + "sys.modules['mlx_paged._ext_cuda'] = other\n"
        + f"mx.cuda.is_available = lambda: {has_cuda}\n"
        + "from mlx_paged import extension\n"
        + "print(extension.ext.__name__)"
    )
    assert run.stdout.strip() == ("mlx_paged._ext_cuda" if has_cuda else "mlx_paged._ext"), run


def test_a_build_that_is_older_than_the_python_code_says_so() -> None:
    error = import_error(PRELUDE + "from mlx_paged import _ext\ndel _ext.write_kv")
    assert "older than its Python code" in error and "'write_kv'" in error
    assert "pip install ." in error


def test_a_checkout_that_was_never_built_says_so() -> None:
    error = import_error(PRELUDE + "sys.modules['mlx_paged._build'] = None")
    assert "native extension is not built" in error
    assert "pip install ." in error
