"""The build's decisions: whether to build the CUDA backend, and which compilers it rejects."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import build_backend
import pytest
from build_backend import NVCC_WHEELS, Gpu, choose

ROOT = Path(__file__).resolve().parent.parent
H100 = Gpu((13, 0), ("90",))
NO_GPU = Gpu()


@pytest.mark.parametrize(
    ("setting", "gpu", "cuda_mlx", "builds"),
    [
        ("AUTO", H100, False, True),
        ("", H100, False, True),
        ("AUTO", NO_GPU, True, True),
        ("AUTO", NO_GPU, False, False),
        ("ON", NO_GPU, False, True),
        ("on", H100, False, True),
        ("OFF", H100, True, False),
    ],
)
def test_the_cuda_backend_is_built_where_a_driver_is_or_when_asked_for(
    setting: str, gpu: Gpu, cuda_mlx: bool, builds: bool
) -> None:
    choice = choose(setting, "/opt/nvcc", gpu, cuda_mlx=cuda_mlx)
    assert choice.problem == ""
    assert choice.nvcc == ("/opt/nvcc" if builds else None)
    assert bool(choice.reason) != builds
    assert choice.architectures == (gpu.architectures if builds else ())


def test_a_missing_nvcc_is_one_line_with_the_command_that_helps() -> None:
    problem = choose("AUTO", None, H100, cuda_mlx=False).problem
    assert "\n" not in problem and "nvcc" in problem
    assert f"pip install '{NVCC_WHEELS[0]}'" in problem and "MLX_PAGED_CUDA=OFF" in problem
    # A CUDA 12 driver does not run code from nvcc 13.
    older = choose("AUTO", None, Gpu((12, 8), ("80",)), cuda_mlx=False).problem
    assert "cuda-toolkit-12-8" in older and "pip install" not in older


def test_an_unknown_setting_is_refused() -> None:
    assert (
        "must be ON, OFF or AUTO, not MAYBE" in choose("maybe", None, H100, cuda_mlx=False).problem
    )


@pytest.mark.parametrize(
    ("gpu", "nvcc", "given", "fetched"),
    [
        (H100, None, None, True),
        (H100, "/opt/nvcc", None, False),
        (Gpu((12, 8), ("80",)), None, None, False),
        (NO_GPU, None, None, False),
        (NO_GPU, None, {"cmake.define.MLX_PAGED_CUDA": "ON"}, True),
        (H100, None, {"cmake.define.MLX_PAGED_CUDA": ["ON", "OFF"]}, False),
    ],
)
def test_pip_fetches_nvcc_for_the_build_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    nvcc: str | None,
    given: dict[str, str | list[str]] | None,
    fetched: bool,
) -> None:
    monkeypatch.delenv("MLX_PAGED_CUDA", raising=False)
    monkeypatch.setattr(build_backend, "find_gpu", lambda: gpu)
    monkeypatch.setattr(build_backend, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(build_backend, "has_cuda_mlx", lambda: False)
    assert build_backend.cuda_requirements(given) == (list(NVCC_WHEELS) if fetched else [])


def test_the_environment_chooses_where_pip_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PAGED_CUDA", "OFF")
    assert build_backend.setting_of(None) == "OFF"
    assert build_backend.setting_of({"cmake.define.MLX_PAGED_CUDA": "ON"}) == "ON"


def test_the_driver_is_asked_in_another_process() -> None:
    """Without a driver it says so: that is an answer, not an error."""
    gpu = build_backend.find_gpu()
    assert gpu == NO_GPU or gpu.cuda > (10, 0)


def test_cmake_gets_the_choice_as_a_list() -> None:
    command = [sys.executable, str(ROOT / "scripts/build_backend.py")]
    run = subprocess.run([*command, "OFF"], capture_output=True, text=True, check=True)
    assert run.stdout == "skip;MLX_PAGED_CUDA is OFF\n"
    run = subprocess.run([*command, "ON", "/opt/nvcc"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("build;/opt/nvcc")


needs_cmake = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cmake") is None or shutil.which("g++") is None,
    reason="needs Linux, cmake and g++",
)


def configure(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs only the compiler check, in a project of its own."""
    check = ROOT / "csrc/shared_libstdcxx.cmake"
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\ninclude({check})\n"
    )
    compiler = folder / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" {" ".join(flags)}\n')
    compiler.chmod(0o755)
    return subprocess.run(
        ["cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_CXX_COMPILER={compiler}"],
        capture_output=True,
        text=True,
        check=False,
    )


@needs_cmake
def test_a_compiler_that_links_libstdcxx_statically_is_refused(tmp_path: Path) -> None:
    run = configure(tmp_path, "-static-libstdc++")
    assert run.returncode != 0
    [said] = [line for line in run.stderr.splitlines() if "mlx_paged:" in line]
    assert "links libstdc++ statically" in said and "CXX=/usr/bin/g++ pip install" in said


@needs_cmake
def test_a_compiler_that_links_the_shared_libstdcxx_is_taken(tmp_path: Path) -> None:
    run = configure(tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("extra", "mlx"), [("cpu", "mlx[cpu]=="), ("cuda13", "mlx[cuda13]=="), ("", "mlx[cpu]==")]
)
def test_requirements_of_a_build_name_the_backend(monkeypatch, extra: str, mlx: str) -> None:
    monkeypatch.setattr(build_backend, "find_gpu", lambda: H100)
    monkeypatch.setattr(build_backend, "find_nvcc", lambda: None)
    requirements = build_backend.build_requirements(extra)
    assert next(line for line in requirements if line.startswith("mlx[")).startswith(mlx)
    assert any(line.startswith("nanobind==") for line in requirements)
    assert any(line.startswith("cmake") for line in requirements)
    assert (NVCC_WHEELS[0] in requirements) == (extra == "cuda13")


def test_dependencies_include_those_of_extras_that_extras_name() -> None:
    plain = build_backend.dependencies("")
    assert "mlx==0.32.4" in plain and not any(line.startswith("pytest") for line in plain)
    found = build_backend.dependencies("dev,cpu")
    assert found[: len(plain)] == plain and len(found) == len(set(found))
    # `dev` names `eval`, which names `server`.
    for name in ("pytest>", "lm_eval>", "starlette>", "mlx[cpu]=="):
        assert any(line.startswith(name) for line in found), name
    assert not any(line.startswith(("mlx-paged", "torch")) for line in found)


# --- Before a build -------------------------------------------------------------------------------


def check_tools(tmp_path: Path, *programs: str, python: str = sys.executable) -> str:
    """Runs scripts/check_tools.sh with only these programs on the path; returns its errors."""
    for program in ("sh", "uname", *programs):
        found = shutil.which(program)
        assert found is not None, program
        (tmp_path / program).symlink_to(found)
    environment = {"PATH": str(tmp_path)}
    command = [str(tmp_path / "sh"), str(ROOT / "scripts/check_tools.sh"), python]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode == 0) == (run.stderr == ""), run.stderr
    return run.stderr


def test_a_machine_without_compiler_is_told_so_in_one_line(tmp_path: Path) -> None:
    said = check_tools(tmp_path)
    assert said.count("\n") == 1 and "a C++20 compiler" in said and "Python" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="names the remedy of Debian and Ubuntu")
def test_debian_is_told_the_script_that_installs_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "apt-get").symlink_to(sys.executable)
    said = check_tools(tmp_path, python=str(tmp_path / "none"))
    assert "Python 3.11 or newer, a C++20 compiler" in said and "scripts/install_apt.sh" in said


def test_an_old_python_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert f"Python 3.11 or newer ({old} is older" in check_tools(tmp_path, python=str(old))


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_machine_that_can_build_passes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    command = ["sh", str(ROOT / "scripts/check_tools.sh"), sys.executable]
    subprocess.run(command, check=True)
