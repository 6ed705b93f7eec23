"""`mlx-paged doctor` as a command: its JSON, its exit status, and installations that are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest
from rich.console import Console
from support import doctor_machines as machines
from support.doctor_helpers import SOFTWARE, answers, examined, runner, with_software
from support.interpreters import python_path, write_site

from mlx_paged import _build
from mlx_paged.doctor import report, software, terminal
from mlx_paged.doctor.checks import Status
from mlx_paged.doctor.jobs import Outcome
from mlx_paged.doctor.report import examine

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = jsonschema_rs.validator_for(report.schema())


def doctor(*options: str, site: str | None = None, tmp: Path | None = None, **env: str):
    """Runs the command; `site` is Python that every interpreter runs when it starts."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLX_PAGED_")}
    if site is not None:
        assert tmp is not None
        write_site(tmp, site)
        inherited["PYTHONPATH"] = python_path(tmp, ROOT)
    return subprocess.run(
        [sys.executable, "-m", "mlx_paged.cli.main", "doctor", *options],
        env={**inherited, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def bad(run) -> dict[str, dict[str, str]]:
    """Findings with a fault, by check."""
    found = json.loads(run.stdout)["findings"]
    return {f["check"]: f for f in found if f["status"] in ("warning", "broken")}


# --- This installation ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy():
    return doctor("--json")


def test_this_installation_is_not_broken(healthy) -> None:
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    told = json.loads(healthy.stdout)
    assert told["verdict"] in ("ok", "warning") and told["exit_status"] == 0
    assert not [f for f in told["findings"] if f["status"] == "broken"]
    assert healthy.stderr == ""


def test_its_json_follows_the_schema(healthy) -> None:
    told = json.loads(healthy.stdout)
    assert [str(error) for error in SCHEMA.iter_errors(told)] == []
    assert told["self_test"] and all(case["error"] is None for case in told["self_test"])
    assert told["fits"][0]["model"] == "embedded model"
    assert told["mlx"]["version"] == _build.MLX_VERSION


def test_it_does_not_tell_the_home_folder(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    text = examined().dumps()
    assert "/home/ada" not in text and "~/.venv/bin/python" in text


def test_secrets_are_not_told() -> None:
    told = software.environment(
        {"MLX_PAGED_API_KEY": "hunter2", "MLX_PAGED_NUM_THREADS": "3", "PATH": "/bin"}
    )
    assert told == {"MLX_PAGED_API_KEY": "(set)", "MLX_PAGED_NUM_THREADS": "3"}


# --- The schema, over every machine and fault -----------------------------------------------------


@pytest.mark.parametrize("name", list(machines.ALL))
def test_every_machine_follows_the_schema(name) -> None:
    told = json.loads(examined(machines.ALL[name]).dumps())
    assert [str(error) for error in SCHEMA.iter_errors(told)] == []


@pytest.mark.parametrize(
    "examination",
    [
        examined(mlx=Outcome(error="ImportError: no"), extension=Outcome(error="ImportError: no")),
        examined(software=with_software(packages={})),
        examined(**{"test/cpu/rope/float32": Outcome(error="WrongResult: wrong")}),
        examined(memory=Outcome(error="OSError: no")),
        examined(machines.M3_MAX, told=answers(gpu=True, build={"backends": "cpu metal"})),
    ],
    ids=["no mlx", "no packages", "wrong kernel", "no memory", "mac"],
)
def test_every_fault_follows_the_schema_and_can_be_shown(examination) -> None:
    told = json.loads(examination.dumps())
    assert [str(error) for error in SCHEMA.iter_errors(told)] == []
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal.show(examination, console)
    shown = console.export_text()
    for finding in examination.findings:
        if finding.status in (Status.WARNING, Status.BROKEN):
            assert finding.check in shown and finding.remedy.split()[0] in shown


def test_the_schema_refuses_what_is_not_a_report() -> None:
    told = json.loads(examined().dumps())
    assert not SCHEMA.is_valid({**told, "verdict": "fine"})
    assert not SCHEMA.is_valid({k: v for k, v in told.items() if k != "findings"})
    assert not SCHEMA.is_valid({**told, "surplus": 1})


# --- Planted faults, in a process of their own ----------------------------------------------------

FAULTY_KERNELS = """
import sys
if any("doctor.jobs" in word for word in getattr(sys, "orig_argv", [])):
    import os
    import mlx_paged, mlx_paged.ops as ops
    right = ops.rms_norm
    ops.rms_norm = lambda *a, **k: right(*a, **k) * 1.5
    ops.layer_norm = lambda *a, **k: os.kill(os.getpid(), 11)
"""


def test_kernels_that_are_wrong_or_crash_fail_by_name(tmp_path) -> None:
    run = doctor("--json", site=FAULTY_KERNELS, tmp=tmp_path)
    assert run.returncode == 1
    broken = {name: f["found"] for name, f in bad(run).items() if f["status"] == "broken"}
    wrong = [f"rms_norm in {dtype}" for dtype in ("float32", "float16", "bfloat16")]
    crashed = "layer_norm in float32 and 2 more"
    assert broken.keys() == {f"self-test on the CPU: {name}" for name in (*wrong, crashed)}
    assert "is off by 5.0e-01 of its norm" in broken[f"self-test on the CPU: {wrong[0]}"]
    assert "SIGSEGV" in broken[f"self-test on the CPU: {crashed}"]
    # and what comes after it still ran
    assert json.loads(run.stdout)["self_test"][-1]["error"] is None


def test_a_build_for_another_mlx_fails_by_name(tmp_path) -> None:
    site = (
        "import sys, types\nbuild = types.ModuleType('mlx_paged._build')\n"
        "build.MLX_VERSION, build.NANOBIND_VERSION = '9.8.7', '3.1.0'\n"
        "sys.modules['mlx_paged._build'] = build\n"
    )
    run = doctor("--json", site=site, tmp=tmp_path)
    assert run.returncode == 1
    found = bad(run)["extension loads"]["found"]
    assert f"built with MLX 9.8.7 but found MLX {_build.MLX_VERSION}" in found


def test_a_machine_without_mlx(tmp_path) -> None:
    run = doctor("--json", site="import sys\nsys.modules['mlx.core'] = None\n", tmp=tmp_path)
    assert run.returncode == 1
    assert bad(run)["MLX imports"]["found"].startswith("ModuleNotFoundError: ")
    assert json.loads(run.stdout)["fits"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
def test_the_blas_switched_off() -> None:
    run = doctor("--json", MLX_PAGED_BLAS="off")
    assert run.returncode == 0
    assert bad(run)["BLAS"]["found"] == "MLX's own (MLX_PAGED_BLAS=off)"
    assert json.loads(run.stdout)["software"]["environment"]["MLX_PAGED_BLAS"] == "off"


def test_no_command_line_is_needed_and_mlx_may_be_imported_first(tmp_path) -> None:
    write_site(
        tmp_path,
        "import sys\nfor name in ('typer', 'rich', 'click'): sys.modules[name] = None\n"
        "import mlx.core\n",
    )
    run = subprocess.run(
        [sys.executable, "-m", "mlx_paged.doctor"],
        env={**os.environ, "PYTHONPATH": python_path(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert SCHEMA.is_valid(json.loads(run.stdout))
    assert "BLAS" not in bad(run)


# --- What is installed ----------------------------------------------------------------------------


def test_this_installation_is_read_without_importing_it() -> None:
    found = software.installed()
    assert found.packages["mlx"] == _build.MLX_VERSION
    assert {r.name for r in found.requirements} >= {"mlx", "mlx-lm", "numpy", "rich", "typer"}
    assert all(r.is_met for r in found.requirements)


def test_phases_are_told_in_order() -> None:
    phases: list[str] = []
    examine(
        phases.append,
        capture=lambda: machines.ARM,
        installed=lambda: SOFTWARE,
        run=runner(answers()),
    )
    assert phases == [
        *("the machine", "MLX and the extension", "memory", "whole steps", "every primitive"),
    ]


def test_the_bug_report_asks_for_it() -> None:
    template = (ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text()
    assert "mlx-paged doctor --json" in template
