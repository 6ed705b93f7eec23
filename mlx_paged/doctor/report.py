"""The report: runs all checks, and writes the results as JSON with a schema."""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from mlx_paged.calibration.table import Table
from mlx_paged.child_jobs import Outcome
from mlx_paged.doctor.checks import Finding, Status, check, verdict
from mlx_paged.doctor.fits import Fit, fits
from mlx_paged.doctor.jobs import (
    CALIBRATE,
    CALIBRATION,
    EXTENSION,
    MEMORY,
    MLX,
    STEPS,
    Extension,
    Memory,
    Mlx,
    run_in_child,
)
from mlx_paged.doctor.machine import Captures, Machine, read, take
from mlx_paged.doctor.software import Software, installed

# Incremented when a key is removed or changes its meaning, not when one is added.
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class KernelTest:
    """A case of the self-test. `error` is None if it passed."""

    device: str
    primitive: str
    dtype: str
    error: str | None


@dataclass(frozen=True)
class Report:
    """The whole report. Sizes are in bytes.

    Attributes:
        verdict: The worst finding's status: ok, warning or broken.
        exit_status: 1 if something is broken, else 0.
        memory: Memory for the engine; None if MLX or the extension does not load.
        fits: Empty if `memory` is None.
        calibration: What calibration found on this GPU; None if it never ran.
    """

    schema_version: int
    date: str
    verdict: Status
    exit_status: int
    machine: Machine
    software: Software
    mlx: Mlx | None
    extension: Extension | None
    self_test: tuple[KernelTest, ...]
    memory: Memory | None
    fits: tuple[Fit, ...]
    calibration: Table | None
    findings: tuple[Finding, ...]

    def dumps(self) -> str:
        """Returns JSON with ``~`` for the home directory, so that a report can be published."""
        return without_home(json.dumps(asdict(self), indent=2))


def examine(
    on_phase: Callable[[str], object] = lambda phase: None,
    *,
    calibrates: bool = False,
    capture: Callable[[], Captures] = take,
    installed: Callable[[], Software] = installed,
    run: Callable[[Sequence[str]], Mapping[str, Outcome]] = run_in_child,
) -> Report:
    """Checks this machine and installation. Takes a few seconds.

    Args:
        on_phase: Called with the name of the next check, for a progress line.
        calibrates: Checks and times the GPU's kernels again, see `mlx_paged.calibration`.
        capture, installed, run: Sources of facts, which tests replace.
    """
    on_phase("the machine")
    machine, software = read(capture()), installed()
    on_phase("MLX and the extension")
    outcomes = dict(run([MLX, EXTENSION]))
    if outcomes[MLX].error is None and outcomes[EXTENSION].error is None:
        backends = set(outcomes[EXTENSION].value["build_info"]["backends"].split())
        on_gpu = outcomes[MLX].value["default_device"] == "gpu" and backends & {"metal", "cuda"}
        devices = ["cpu", "gpu"] if on_gpu else ["cpu"]
        on_phase("memory")
        outcomes |= run([MEMORY, *(f"cases/{device}" for device in devices)])
        on_phase("whole steps")
        outcomes |= run([STEPS])
        if on_gpu:
            on_phase("calibration")
            outcomes |= run([CALIBRATE if calibrates else CALIBRATION])
        on_phase("every primitive")
        cases = [case for d in devices for case in outcomes[f"cases/{d}"].value or ()]
        outcomes |= run(cases)

    values = {name: outcome.value for name, outcome in outcomes.items()}
    memory = values.get(MEMORY)
    fitting = tuple(fits(memory)) if memory else ()
    findings = tuple(check(machine, software, outcomes, fitting))
    return Report(
        schema_version=SCHEMA_VERSION,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=verdict(findings),
        exit_status=int(verdict(findings) is Status.BROKEN),
        machine=machine,
        software=software,
        mlx=values[MLX],
        extension=values[EXTENSION],
        self_test=tuple(
            KernelTest(device, primitive, dtype, outcomes[job].error)
            for job in outcomes
            if job.startswith("test/")
            for _, device, primitive, dtype in [job.split("/")]
        ),
        memory=memory,
        fits=fitting,
        calibration=values.get(CALIBRATE) or values.get(CALIBRATION),
        findings=findings,
    )


def without_home(text: str) -> str:
    """Replaces the home directory with ``~`` in paths."""
    home = os.path.expanduser("~")
    return text.replace(home + "/", "~/") if len(home) > 1 else text


_SIMPLE = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def schema(of: Any = Report) -> dict[str, Any]:
    """Returns the JSON schema of a report, or of a type used in it."""
    origin, arguments = typing.get_origin(of), typing.get_args(of)
    if of in _SIMPLE:
        return {"type": _SIMPLE[of]}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [schema(argument) for argument in arguments]}
    if origin in (tuple, list):
        return {"type": "array", "items": schema(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema(arguments[1])}
    if isinstance(of, type) and issubclass(of, StrEnum):
        return {"enum": [member.value for member in of]}
    hints = typing.get_type_hints(of)
    names = [field.name for field in fields(of)] if is_dataclass(of) else list(hints)
    return {
        "type": "object",
        "properties": {name: schema(hints[name]) for name in names},
        "required": names,
        "additionalProperties": False,
    }
