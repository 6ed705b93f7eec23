"""An examination as plain data, for ``--json``. `report.schema.json` beside this describes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx_paged.doctor.examine import Examination
from mlx_paged.doctor.isolation import Outcome
from mlx_paged.doctor.jobs import EXTENSION, MATMUL, MLX

# Raised when a key goes or changes its meaning, not when one comes.
SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")


def data(examination: Examination) -> dict[str, Any]:
    """Everything, in JSON's types: bytes, bytes a second, seconds."""
    e = examination
    return {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": e.verdict.value,
        "exit_status": e.exit_status,
        "machine": _machine(e),
        "software": _software(e),
        "mlx": e.value(MLX),
        "extension": e.value(EXTENSION),
        "matrix_product": e.value(MATMUL),
        "bandwidth": {
            device: e.value(f"bandwidth/{device}")
            for device in ("cpu", "gpu")
            if f"bandwidth/{device}" in e.outcomes
        },
        "self_test": [_case(n, o) for n, o in e.outcomes.items() if n.startswith("test/")],
        "memory": None if e.memory is None else asdict(e.memory),
        "fits": [asdict(fit) for fit in e.fits],
        "findings": [{**asdict(finding), "status": finding.status.value} for finding in e.findings],
    }


def dumps(examination: Examination) -> str:
    """As text; the home folder is written ``~``, so that a report can be published."""
    return without_home(json.dumps(data(examination), indent=2))


def without_home(text: str) -> str:
    """Paths below the home folder begin with ``~``."""
    home = os.path.expanduser("~")
    return text.replace(home + "/", "~/") if len(home) > 1 else text


def _machine(e: Examination) -> dict[str, Any]:
    machine = e.machine
    return {
        **asdict(machine),
        "physical_cores": machine.physical_cores,
        "usable_cpus": machine.usable_cpus,
        "usable_memory_bytes": machine.usable_memory,
    }


def _software(e: Examination) -> dict[str, Any]:
    software = asdict(e.software)
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in software.items()}


def _case(name: str, outcome: Outcome) -> dict[str, Any]:
    _, device, primitive, dtype = name.split("/")
    return {
        "device": device,
        "primitive": primitive,
        "dtype": dtype,
        "ok": outcome.error is None,
        "seconds": outcome.value,
        "error": outcome.error,
    }
