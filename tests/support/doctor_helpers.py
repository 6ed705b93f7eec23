"""Reports on made-up facts: a healthy installation that each test modifies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_paged.doctor.checks import Finding, Status
from mlx_paged.doctor.jobs import Outcome
from mlx_paged.doctor.machine import Captures
from mlx_paged.doctor.report import Report, examine
from mlx_paged.doctor.software import Requirement, Software
from support import doctor_machines as machines

GIB = machines.GIB

SOFTWARE = Software(
    python="3.12.3 (CPython)",
    executable="/home/ada/.venv/bin/python",
    packages={"mlx-paged": "0.1.0", "mlx": "0.32.4", "mlx-cpu": "0.32.4", "mlx-lm": "0.32.2"},
    requirements=(
        Requirement("mlx-paged", "", "0.1.0", True),
        Requirement("mlx", "==0.32.4", "0.32.4", True),
        Requirement("mlx-lm", "==0.32.2", "0.32.2", True),
    ),
)
BUILD = {
    "mlx_version": "0.32.4",
    "nanobind_version": "3.1.0",
    "backends": "cpu",
    "compiler": "gcc 12.2.0",
    "simd": "avx512",
    "amx": "no",
    "num_threads": "1",
    "blas": "OpenBLAS (scipy-openblas32 0.3.34)",
}
CASE = "rope/float32"


def answers(
    *, gpu: bool = False, build: Mapping[str, str] | None = None, memory: int = 8 * GIB
) -> dict[str, Any]:
    """Answers of all jobs for a healthy installation."""
    devices = ("cpu", "gpu") if gpu else ("cpu",)
    made: dict[str, Any] = {
        "mlx": {
            "version": "0.32.4",
            "default_device": devices[-1],
            "gpu_info": {},
        },
        "extension": {
            "build_info": {**BUILD, **(build or {})},
            "missing": [],
        },
        "memory": {
            "on_gpu": gpu,
            "device_bytes": memory,
            "utilization": 0.9,
        },
        "steps": {"supported": True, "refused": None, "foreign": {}},
        "calibration/known": None,
    }
    for device in devices:
        made[f"cases/{device}"] = [f"test/{device}/{CASE}"]
        made[f"test/{device}/{CASE}"] = 0.01
    return made


def runner(told: Mapping[str, Any]) -> Callable[[Sequence[str]], dict[str, Outcome]]:
    """Returns answers from a table; an `Outcome` in it is returned as is."""

    def run(names: Sequence[str]) -> dict[str, Outcome]:
        return {n: a if isinstance(a := told[n], Outcome) else Outcome(a) for n in names}

    return run


def examined(
    captures: Captures = machines.CONTAINER_V2,
    software: Software = SOFTWARE,
    told: Mapping[str, Any] | None = None,
    **changed: Any,
) -> Report:
    """A report on made-up facts; `changed` overrides the answers of jobs."""
    table = {**(answers() if told is None else told), **changed}
    return examine(capture=lambda: captures, installed=lambda: software, run=runner(table))


def with_software(**changes: Any) -> Software:
    return dataclasses.replace(SOFTWARE, **changes)


def finding(report: Report, check: str) -> Finding:
    [found] = [f for f in report.findings if f.check == check]
    return found


def bad(report: Report) -> dict[str, Status]:
    """Findings that are not ok, by check."""
    return {f.check: f.status for f in report.findings if f.status is not Status.OK}
