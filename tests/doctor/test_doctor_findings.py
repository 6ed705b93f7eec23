"""Tests the findings of `doctor` on sound installations and on machines with a known fault."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support import doctor_machines as machines
from support.doctor_helpers import (
    BUILD,
    CASE,
    GIB,
    SOFTWARE,
    answers,
    bad,
    examined,
    finding,
    with_software,
)

from mlx_paged.doctor.checks import Finding, Status, verdict
from mlx_paged.doctor.jobs import Outcome
from mlx_paged.doctor.machine import Captures, Disk
from mlx_paged.doctor.software import Requirement

BROKEN, WARNING, SKIPPED = Status.BROKEN, Status.WARNING, Status.SKIPPED
MAC = with_software(packages={**SOFTWARE.packages, "mlx-metal": "0.32.4"})
METAL = answers(
    gpu=True,
    build={"backends": "cpu metal", "simd": "neon", "blas": "Accelerate (macOS)"},
    memory=96 * GIB,
)
CUDA = with_software(packages={**SOFTWARE.packages, "mlx-cuda-13": "0.32.4"})
CUDA.packages.pop("mlx-cpu")  # type: ignore[attr-defined]
ON_CUDA = answers(
    gpu=True,
    build={"backends": "cpu cuda", "blas": "MLX's own (this MLX runs on a GPU)"},
    memory=140 * GIB,
)

# --- Findings themselves --------------------------------------------------------------------------


def test_the_verdict_is_the_worst_of_what_matters() -> None:
    def one(status: Status) -> Finding:
        return Finding("x", status, "this", "that", "do something")

    assert verdict([]) is Status.OK
    assert verdict([one(SKIPPED), one(Status.OK)]) is Status.OK
    assert verdict([one(SKIPPED), one(WARNING)]) is WARNING
    assert verdict([one(BROKEN), one(WARNING)]) is BROKEN


@pytest.mark.parametrize("status", [WARNING, BROKEN])
def test_whatever_is_wrong_has_a_remedy_of_one_line(status) -> None:
    with pytest.raises(ValueError, match="must have a remedy"):
        Finding("x", status, "this", "that")
    with pytest.raises(ValueError, match="must be one line"):
        Finding("x", status, "this", "that", "do\nsomething")


# --- Nothing is wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captures", "software", "told"),
    [
        (machines.CONTAINER_V2, SOFTWARE, answers()),
        (machines.M3_MAX, MAC, METAL),
        (machines.H200, CUDA, ON_CUDA),
        (machines.ARM, SOFTWARE, answers(build={"simd": "neon", "num_threads": "4"})),
    ],
    ids=["container", "mac", "nvidia", "arm"],
)
def test_a_healthy_installation(captures, software, told) -> None:
    examination = examined(captures, software, told)
    assert bad(examination) == {}
    assert examination.verdict is Status.OK and examination.exit_status == 0


# --- Software -------------------------------------------------------------------------------------


def requirement(name: str, installed: str | None) -> tuple[Requirement, ...]:
    wanted = {"mlx": "==0.32.4", "mlx-lm": "==0.32.2"}[name]
    return (Requirement(name, wanted, installed, False),)


def test_another_mlx_is_named_with_both_versions_and_the_remedy() -> None:
    software = with_software(
        packages={**SOFTWARE.packages, "mlx": "0.33.0", "mlx-cpu": "0.33.0"},
        requirements=requirement("mlx", "0.33.0"),
    )
    error = Outcome(error="ImportError: mlx_paged was built with MLX 0.32.4 but found MLX 0.33.0")
    examination = examined(software=software, extension=error)
    assert examination.exit_status == 1
    assert bad(examination) == {
        "package mlx": BROKEN,
        "extension loads": BROKEN,
        "memory for models": SKIPPED,
    }
    found = finding(examination, "package mlx")
    assert "0.32.4" in found.expected and "0.33.0" in found.found
    assert "pip install 'mlx==0.32.4'" in found.remedy
    found = finding(examination, "extension loads")
    assert "with MLX 0.32.4 but found MLX 0.33.0" in found.found
    assert "pip install --force-reinstall --no-deps ." in found.remedy
    assert "'mlx-paged==0.1.0' instead of the dot" in found.remedy  # for an installed wheel
    assert examination.memory is None and examination.fits == ()


def test_another_mlx_lm_is_a_warning() -> None:
    examination = examined(software=with_software(requirements=requirement("mlx-lm", "0.40.0")))
    assert bad(examination) == {"package mlx-lm": WARNING}
    assert examination.exit_status == 0


def test_a_checkout_that_was_never_installed() -> None:
    software = with_software(requirements=(Requirement("mlx-paged", "", None, False),))
    found = finding(examined(software=software), "package mlx-paged")
    assert found.status is BROKEN and "pip install ." in found.remedy


def test_no_mlx_lm_is_broken() -> None:
    examination = examined(software=with_software(requirements=requirement("mlx-lm", None)))
    found = finding(examination, "package mlx-lm")
    assert found.status is BROKEN and found.found == "not installed"
    assert found.remedy == "pip install 'mlx-lm==0.32.2'"


@pytest.mark.parametrize(
    "error",
    [
        "ImportError: mlx_paged's native extension is not built. Run: pip install .",
        "ImportError: mlx_paged was built with nanobind 2.15.0, whose internals MLX does not share",
    ],
)
def test_an_extension_that_does_not_load(error) -> None:
    examination = examined(extension=Outcome(error=error))
    assert bad(examination) == {"extension loads": BROKEN, "memory for models": SKIPPED}
    assert finding(examination, "extension loads").found == error


@pytest.mark.parametrize(
    ("packages", "status", "found"),
    [
        ({"mlx": "0.32.4"}, BROKEN, "none"),
        ({"mlx": "0.32.4", "mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}, WARNING, "overwrite"),
        ({"mlx": "0.32.4", "mlx-cpu": "0.31.0"}, BROKEN, "mlx-cpu 0.31.0 beside mlx 0.32.4"),
    ],
)
def test_mlxs_compiled_half(packages, status, found) -> None:
    software = with_software(packages={"mlx-paged": "0.1.0", **packages})
    told = finding(examined(software=software), "MLX's backend")
    assert told.status is status and found in told.found


# --- What ran -------------------------------------------------------------------------------------


def test_no_mlx() -> None:
    examination = examined(
        mlx=Outcome(error="ModuleNotFoundError: No module named 'mlx'"),
        extension=Outcome(error="ModuleNotFoundError: No module named 'mlx'"),
    )
    assert bad(examination) == {
        "MLX imports": BROKEN,
        "extension loads": SKIPPED,
        "memory for models": SKIPPED,
    }
    remedy = finding(examination, "MLX imports").remedy
    assert remedy.startswith("pip install --force-reinstall 'mlx[cpu]")  # from PyPI in any case


def test_an_extension_that_crashes_when_it_loads() -> None:
    crash = Outcome(error="Crash: the process was killed by SIGSEGV")
    found = finding(examined(extension=crash), "extension loads")
    assert found.status is BROKEN and "SIGSEGV" in found.found


def test_a_build_that_is_older_than_its_sources_names_what_it_lacks() -> None:
    extension = {**answers()["extension"], "missing": ["new_primitive"]}
    examination = examined(extension=extension)
    assert bad(examination) == {"extension is up to date": BROKEN}
    assert "new_primitive" in finding(examination, "extension is up to date").found


def test_failures_that_are_alike_are_told_once() -> None:
    cases = [f"test/cpu/rope/{dtype}" for dtype in ("float32", "float16", "bfloat16")]
    failed = dict.fromkeys(cases, Outcome(error="RuntimeError: no such kernel"))
    examination = examined(**{"cases/cpu": cases}, **failed)
    assert bad(examination) == {"self-test on the CPU: rope in float32 and 2 more": BROKEN}


def test_a_wrong_kernel_is_named_with_device_and_dtype() -> None:
    wrong = Outcome(error="WrongResult: row 3 is off by 5.0e-01 of its norm")
    examination = examined(**{f"test/cpu/{CASE}": wrong})
    assert bad(examination) == {"self-test on the CPU: rope in float32": BROKEN}
    assert "row 3" in finding(examination, "self-test on the CPU: rope in float32").found
    assert examination.exit_status == 1


def test_a_self_test_that_does_not_even_load() -> None:
    examination = examined(**{"cases/cpu": Outcome(error="ImportError: no numpy")})
    assert bad(examination) == {"self-test on the CPU": BROKEN}


@pytest.mark.parametrize(
    ("blas", "remedy"),
    [
        ("MLX's own (mlx.core was imported before mlx_paged)", "put `import mlx_paged` above"),
        ("MLX's own (MLX_PAGED_BLAS=off)", "unset MLX_PAGED_BLAS"),
        ("MLX's own (scipy-openblas32 is not installed: ...)", "pip install 'mlx-paged[cpu]'"),
    ],
)
def test_the_slow_blas(blas, remedy) -> None:
    examination = examined(told=answers(build={"blas": blas}))
    assert bad(examination) == {"BLAS": WARNING}
    found = finding(examination, "BLAS")
    assert found.found == blas and remedy in found.remedy
    assert examination.exit_status == 0


def test_mlx_without_the_gpu_that_the_build_is_for() -> None:
    told = {**METAL, "mlx": {**METAL["mlx"], "default_device": "cpu"}}
    examination = examined(machines.M3_MAX, MAC, told)
    assert bad(examination) == {"GPU backend": WARNING}
    assert not any(test.device == "gpu" for test in examination.self_test)


# --- Machines -------------------------------------------------------------------------------------


def test_more_threads_than_the_quota_gives() -> None:
    examination = examined(told=answers(build={"num_threads": "32"}))
    assert bad(examination) == {"threads": WARNING}
    found = finding(examination, "threads")
    assert found.found == "32 threads on 1.5 CPUs (CPU quota of the control group)"
    assert found.remedy == "set MLX_PAGED_NUM_THREADS=2"


def test_amx_that_a_container_refuses() -> None:
    refusal = "arch_prctl(ARCH_REQ_XCOMP_PERM) failed with Operation not permitted"
    examination = examined(told=answers(build={"amx": refusal}))
    assert bad(examination) == {"AMX": WARNING}
    assert finding(examination, "AMX").found == refusal
    assert "seccomp" in finding(examination, "AMX").remedy
    used = examined(told=answers(build={"simd": "amx", "amx": "yes"}))
    assert (bad(used), finding(used, "AMX").found) == ({}, "yes")
    assert not any(found.check == "AMX" for found in examined(told=answers()).findings)


def test_rosetta() -> None:
    captures = machines.mac("Apple M2", 8, 8 * GIB, translated=True)
    found = finding(examined(captures, MAC, METAL), "native Python")
    assert (found.status, found.found) == (BROKEN, "x86_64 under Rosetta 2")


def test_an_intel_mac() -> None:
    captures = dataclasses.replace(machines.M1, architecture="x86_64")
    assert finding(examined(captures, MAC, METAL), "native Python").status is BROKEN


@pytest.mark.parametrize(
    ("version", "status"), [("13.6.1", BROKEN), ("14.0", Status.OK), ("26.1", Status.OK)]
)
def test_the_least_macos(version, status) -> None:
    captures = machines.mac("Apple M2", 8, 8 * GIB, version=version)
    assert finding(examined(captures, MAC, METAL), "macOS").status is status


@pytest.mark.parametrize(
    ("limit_mb", "status", "found"),
    [
        (0, Status.OK, "96.0 of 128.0 GiB (the default)"),
        (114688, Status.OK, "112.0 of 128.0 GiB (iogpu.wired_limit_mb=114688)"),
        (126976, Status.WARNING, "124.0 of 128.0 GiB (iogpu.wired_limit_mb=126976)"),
    ],
)
def test_the_limit_of_a_macs_gpu(limit_mb, status, found) -> None:
    captures = machines.mac("Apple M3 Max", 16, 128 * GIB, wired_limit_mb=limit_mb)
    told = finding(examined(captures, MAC, METAL), "GPU memory limit")
    assert told.status is status
    assert told.found == found
    assert told.expected.startswith("at most 112.0 GiB")
    assert not told.remedy or told.remedy.startswith("sudo sysctl iogpu.wired_limit_mb=114688")


def test_it_says_how_to_raise_the_limit_where_nothing_fits() -> None:
    captures = machines.mac("Apple M1", 8, 16 * GIB)
    little = {**METAL, "memory": {**METAL["memory"], "device_bytes": 1 << 20}}
    told = finding(examined(captures, MAC, little), "memory for models")
    assert told.status is Status.BROKEN and "iogpu.wired_limit_mb=12288" in told.remedy


def test_a_mac_of_unknown_version() -> None:
    assert finding(examined(Captures("darwin", "arm64"), MAC, METAL), "macOS").status is SKIPPED


@pytest.mark.parametrize(
    ("package", "driver", "status"),
    [
        ("mlx-cuda-13", "580.95.05", Status.OK),
        ("mlx-cuda-13", "570.133.20", BROKEN),
        ("mlx-cuda-12", "550.54.14", Status.OK),
        ("mlx-cuda-12", "550.40.07", BROKEN),
    ],
)
def test_the_least_driver(package, driver, status) -> None:
    output = f"NVIDIA H200, 143771, {driver}, 9.0\n"
    captures = dataclasses.replace(machines.H200, commands={"nvidia-smi": output})
    software = with_software(packages={"mlx-paged": "0.1.0", "mlx": "0.32.4", package: "0.32.4"})
    found = finding(examined(captures, software, ON_CUDA), "NVIDIA driver")
    assert found.status is status and driver in found.found


def test_a_gpu_that_is_too_old() -> None:
    output = "Tesla P100, 16384, 580.95.05, 6.0\n"
    captures = dataclasses.replace(machines.H200, commands={"nvidia-smi": output})
    assert bad(examined(captures, CUDA, ON_CUDA)) == {"NVIDIA GPU": WARNING}


def test_mlx_for_cuda_without_a_gpu() -> None:
    captures = dataclasses.replace(machines.H200, commands={})
    assert bad(examined(captures, CUDA)) == {"NVIDIA driver": WARNING}


def test_a_gpu_that_this_build_has_no_kernels_for() -> None:
    examination = examined(machines.H200, CUDA, {**ON_CUDA, "extension": answers()["extension"]})
    assert bad(examination) == {"GPU backend": WARNING}
    assert "docs/cuda.md" in finding(examination, "GPU backend").remedy
    assert BUILD["backends"] == "cpu"


def test_too_little_memory_for_anything() -> None:
    examination = examined(memory={**answers()["memory"], "device_bytes": 64 << 20})
    assert finding(examination, "memory for models").status is BROKEN


def test_a_disk_that_is_nearly_full() -> None:
    captures = dataclasses.replace(machines.M1, disk=Disk("/cache/hub", GIB))
    examination = examined(captures, MAC, METAL)
    assert bad(examination) == {"disk": WARNING}
    found = finding(examination, "disk")
    assert found.found == "1.0 GiB free for /cache/hub" and "HF_HOME" in found.remedy


# --- Whole steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "status", "found"),
    [
        ({}, "ok", "they do"),
        ({"refused": "the operation Sin"}, "warning", "the operation Sin"),
        ({"foreign": {"Sin": 4}}, "warning", "MLX runs Sin (4) itself"),
        ({"supported": False}, "skipped", "no whole steps"),
        (Outcome(error="Crash: it crashed"), "broken", "it crashed"),
    ],
)
def test_steps_that_are_not_compiled_as_a_whole_are_named(
    steps: Any, status: str, found: str
) -> None:
    if isinstance(steps, dict):
        steps = {**answers()["steps"], **steps}
    [finding] = [f for f in examined(steps=steps).findings if f.check == "whole steps"]
    assert finding.status == status and found in finding.found
