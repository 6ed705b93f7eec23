"""The doctor's report on the calibration of a GPU's kernels."""

from __future__ import annotations

import json
import os

import jsonschema_rs
import pytest
from rich.console import Console
from support import doctor_machines as machines
from support.doctor_helpers import SOFTWARE, answers, runner

from mlx_paged.doctor import jobs, report, terminal
from mlx_paged.doctor.checks import Status
from mlx_paged.doctor.jobs import CALIBRATE, CALIBRATION, Outcome
from mlx_paged.doctor.report import Report, examine

TABLE = {
    "machine": {"chip": "Apple M5"},
    "kernels": [
        {"kernel": "greedy_tokens_float16", "verdict": "right"},
        {"kernel": "paged_decode_float16_64_64_q1", "verdict": "2.000 ms where another takes 1"},
        {"kernel": "product_rows_float16_m1", "verdict": "Crash: no answer within 5 s"},
    ],
    "timings": [{"shape": "7 products in float16, 1 rows", "way": "whole", "seconds": 0.001}],
    "step_rows": 8,
    "piece_tokens": 0,
    "products": ["product_rows_float16_affine_4_m1"],
}


def report_with(*, calibrates: bool = False, gpu: bool = True, **told: object) -> Report:
    made = {**answers(gpu=gpu, build={"backends": "cpu metal" if gpu else "cpu"}), **told}
    machine = machines.M3_MAX if gpu else machines.CONTAINER_V2
    return examine(
        calibrates=calibrates,
        capture=lambda: machine,
        installed=lambda: SOFTWARE,
        run=runner(made),
    )


@pytest.mark.parametrize("job", [CALIBRATION, CALIBRATE])
def test_faulty_kernels_are_a_warning_with_their_names(job: str) -> None:
    told = report_with(calibrates=job == CALIBRATE, **{job: TABLE})
    [found] = [f for f in told.findings if f.check == "calibration"]
    assert found.status is Status.WARNING and told.calibration == TABLE
    assert found.found == (
        "2 of 3 do; whole steps of up to 8 rows are used; "
        "product_rows_float16_m1: Crash: no answer within 5 s"
    )
    schema = jsonschema_rs.validator_for(report.schema())
    assert [str(error) for error in schema.iter_errors(json.loads(told.dumps()))] == []
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal.show(told, console)
    shown = console.export_text()
    assert "Kernels on this GPU" in shown and "whole 1.000 ms" in shown


def test_right_kernels_are_well() -> None:
    told = report_with(**{CALIBRATION: {**TABLE, "kernels": TABLE["kernels"][:2], "step_rows": 0}})
    [found] = [f for f in told.findings if f.check == "calibration"]
    assert found.status is Status.OK and found.found == "2 of 2 do; whole steps are not used"


def test_a_calibration_that_fails_is_broken() -> None:
    told = report_with(calibrates=True, **{CALIBRATE: Outcome(error="Crash: SIGABRT")})
    [found] = [f for f in told.findings if f.check == "calibration"]
    assert found.status is Status.BROKEN and told.calibration is None


def test_nothing_is_said_where_nothing_was_calibrated() -> None:
    for told in (report_with(), report_with(gpu=False, calibrates=True)):
        assert told.calibration is None
        assert not [f for f in told.findings if f.check == "calibration"]


def test_the_cpu_has_nothing_to_calibrate() -> None:
    assert jobs.run(CALIBRATE) is None and jobs.run(CALIBRATION) is None
