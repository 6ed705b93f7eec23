"""The workflows are valid, and the one for Macs tells why a step failed (scripts/mac_steps.py)."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mac_steps
import pytest
import yaml

from mlx_paged.cli.entry import status_of
from mlx_paged.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
JOB = yaml.safe_load((ROOT / ".github/workflows/macos.yml").read_text())["jobs"]["apple-silicon"]
STEPS = [step for step in JOB["steps"] if "run" in step]


# --- The files ------------------------------------------------------------------------------------


@pytest.mark.skipif(
    find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed"
)
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_workflow_follows_githubs_schema(path: Path, tmp_path: Path) -> None:
    def check(file: Path) -> int:
        # Not by its name: the folder of an environment's programs need not be in PATH.
        command = [sys.executable, "-m", "check_jsonschema"]
        command += ["--builtin-schema", "vendor.github-workflows", str(file)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert check(path) == 0
    broken = tmp_path / path.name
    broken.write_text(path.read_text().replace("runs-on:", "run-on:"))
    assert check(broken) != 0


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_script_of_a_workflow_is_one(path: Path) -> None:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            source = re.sub(r"\$\{\{.*?\}\}", "x", step.get("run", ""))
            subprocess.run(["bash", "-n"], input=source, text=True, check=True)
            for name in re.findall(r"(?<![\w./-])(?:scripts|tests|bench)/[\w./-]+", source):
                assert (ROOT / name).exists(), f"{path.name} names {name}"


def recorded_commands() -> dict[str, tuple[float, list[str]]]:
    """name -> (minutes, command) of the steps that mac_steps.py runs."""
    found = {}
    for step in STEPS:
        words = shlex.split(step["run"].replace("\\\n", " "))
        if words[2] == "run":
            assert words[4] == "--minutes" and words[6] == "--"
            found[words[3]] = (float(words[5]), words[7:])
    return found


def test_every_step_runs_after_a_failure_and_has_a_limit() -> None:
    *steps, summary = STEPS
    assert len(steps) == len(recorded_commands()) + 1  # and the facts
    for step in steps:
        assert step["continue-on-error"] is True, step["name"]
        words = shlex.split(step["run"].replace("\\\n", " "))
        if words[2] == "run":
            # Time to sample the stacks of what hangs, before GitHub ends the step.
            assert step["timeout-minutes"] >= float(words[5]) + 2, step["name"]
    assert len(mac_steps.FACTS) * 45 < 60 * steps[0]["timeout-minutes"]
    limits = [step["timeout-minutes"] for step in STEPS]
    assert JOB["timeout-minutes"] >= sum(limits)
    assert summary["if"] == "always()" and "continue-on-error" not in summary
    (upload,) = (s for s in JOB["steps"] if "upload-artifact" in s.get("uses", ""))
    assert upload["if"] == "always()" and "build/mac-steps" in upload["with"]["path"]
    assert JOB["env"]["MAC_STEPS"].endswith("/build/mac-steps")


def test_the_summary_expects_every_step() -> None:
    words = shlex.split(STEPS[-1]["run"].replace("\\\n", " "))
    assert words[3:] == ["facts", *recorded_commands()]


def test_the_commands_of_the_steps_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (_, command) in recorded_commands().items():
        program, *arguments = command
        if program == "make":
            plan = ["make", "--dry-run", *arguments]
            subprocess.run(plan, cwd=ROOT, capture_output=True, check=True)
        elif program.endswith("/mlx-paged"):
            assert status_of(app, [arguments[0], "--help"]) == 0
            help_text = capsys.readouterr().out
            for option in arguments[1:]:
                assert not option.startswith("--") or option in help_text, f"{name}: {option}"
        else:
            assert program in (".venv/bin/python", "scripts/metal_pipelines.sh"), name
    assert "--calibrate" in recorded_commands()["calibration"][1]


# --- The steps ------------------------------------------------------------------------------------


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mac_steps, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(mac_steps, "REPORTS", (tmp_path / "reports", tmp_path / "none"))
    monkeypatch.setattr(mac_steps, "REPORT_DELAY_S", 0)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    return tmp_path / "logs"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def record_of(logs: Path, name: str) -> dict[str, Any]:
    return json.loads((logs / f"{name}.json").read_text())


def test_a_step_leaves_its_status_and_output(logs: Path) -> None:
    assert mac_steps.run_step("good", 1, python("print('fine')")) == 0
    assert mac_steps.run_step("bad", 1, python("raise SystemExit('it broke')")) == 1
    assert mac_steps.run_step("none", 1, ["/no/such/program"]) == 127
    assert (logs / "good.log").read_text() == "fine\n"
    assert "it broke" in (logs / "bad.log").read_text()
    assert "No such file" in (logs / "none.log").read_text()
    assert record_of(logs, "bad")["status"] == 1


def test_a_crash_is_named_and_its_python_stack_kept(logs: Path) -> None:
    code = "import os, signal\ndef kernel(): os.kill(os.getpid(), signal.SIGSEGV)\nkernel()"
    assert mac_steps.run_step("crash", 1, python(code)) == -signal.SIGSEGV
    assert "in kernel" in (logs / "crash.log").read_text()
    assert mac_steps.reason_of(-signal.SIGSEGV) == "SIGSEGV"
    assert mac_steps.reason_of(128 + signal.SIGABRT) == "SIGABRT"  # of a command of make or a shell
    assert mac_steps.reason_of(2) == "exit status 2"


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 300
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_running(pid: int) -> bool:
    """False for zombies, which wait for whoever adopted them."""
    told = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return told.stdout.strip()[:1] not in ("", "Z")


def test_a_step_that_hangs_is_ended_with_its_children(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = tmp_path / "sample"
    sample.write_text('#!/bin/sh\necho "stack of $1" > "$4"\n')
    sample.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    started = time.monotonic()
    assert mac_steps.run_step("hang", 0.05, python(code)) == mac_steps.TIMED_OUT
    assert time.monotonic() - started < 60
    child = int((logs / "hang.log").read_text())
    assert wait_for(lambda: not is_running(child))
    assert (logs / f"hang-{child}.sample.txt").read_text() == f"stack of {child}\n"
    assert len(list(logs.glob("hang-*.sample.txt"))) == 2
    assert mac_steps.reason_of(record_of(logs, "hang")["status"]) == "ended at its limit"


def test_the_summary_has_what_explains_a_failure(logs: Path, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "old.ips").write_text("of yesterday")
    os.utime(reports / "old.ips", (1, 1))
    mac_steps.run_step("good", 1, python("print('all is well')"))
    mac_steps.run_step(
        "bad", 1, python("print('```'); raise SystemExit('kernel write_kv is wrong')")
    )
    mac_steps.save("killed", {"name": "killed", "command": [], "started": time.time()})
    (reports / "python-2026.ips").write_text("EXC_BAD_ACCESS in libmlx.dylib")
    assert mac_steps.summary(["good", "bad", "killed", "never"]) == 1
    text = (tmp_path / "summary.md").read_text()
    assert "| good | passed |" in text and "all is well" not in text
    assert "| bad | exit status 1 |" in text and "kernel write_kv is wrong" in text
    assert "| killed | did not end: the runner stopped it |" in text
    assert "`never` has not run." in text
    assert "EXC_BAD_ACCESS" in text and "of yesterday" not in text
    assert text.count("```") % 2 == 0
    assert (logs / "crash-reports/python-2026.ips").is_file()
    assert not (logs / "crash-reports/old.ips").exists()


def test_the_job_passes_only_if_every_step_did(logs: Path) -> None:
    mac_steps.run_step("good", 1, python(""))
    assert mac_steps.summary(["good"]) == 0
    assert mac_steps.summary(["good", "other"]) == 1
    mac_steps.run_step("bad", 1, python("raise SystemExit(3)"))
    assert mac_steps.summary(["good"]) == 1


def test_a_missing_tool_is_a_fact(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mac_steps.facts() == 0
    told = (logs / "facts.log").read_text()
    for title, _ in mac_steps.FACTS:
        assert f"{title}\n  " in told
    assert ".".join(map(str, sys.version_info[:3])) in told
    assert record_of(logs, "facts")["status"] == 0
